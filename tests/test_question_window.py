"""Windows of the question: as long as what follows the last blank line of a prompt, found where it is tokenised."""

import pickle

import eval_models
import pytest

import jaxkv
from jaxkv import AdaKV, Policy, PyramidKV, SnapKV

DOCUMENT = "the red box is in the old house . " * 8
SHORT, LONG = (
    "where is it ?",
    "tell me now where the red box is and who has seen it in the old house ?",
)
ASKED = SnapKV(budget=140, window="question")


@pytest.fixture(scope="module")
def chatting():
    return eval_models.speaking(chat=True)


def window_of(model, prompt, policy: Policy = ASKED, **options):
    """The window that a call's cache was compressed with, and the answers' tokens."""
    out = jaxkv.generate(model, prompt, policy=policy, max_new_tokens=3, progress=False, **options)
    used = out.cache.policy
    return getattr(used, "base", used).window, [each.tokens.tolist() for each in out]


def least_power(model, question, closing=True):
    text = question + (model.text.turn_texts.closing if closing else "")
    count = len(model.text.encode(text, bos=False))
    return next(size for size in (8, 16, 32, 64, 128) if size >= count)


def test_the_window_is_the_last_paragraph_and_the_end_of_its_turn(chatting):
    """Of a text or of the last message; of the longest question in a batch; with what the number itself gives."""
    text, chat = f"{DOCUMENT}\n\n{SHORT}", [{"role": "user", "content": f"{DOCUMENT}\n\n{LONG}"}]
    turns = [
        {"role": "user", "content": DOCUMENT},
        {"role": "assistant", "content": "yes ."},
        {"role": "user", "content": SHORT},
    ]
    short, long = (least_power(chatting, each) for each in (SHORT, LONG))
    assert short < long
    assert window_of(chatting, text)[0] == window_of(chatting, turns)[0] == short
    # Lines that end as in a browser's form, and an end of blank lines.
    assert window_of(chatting, f"{DOCUMENT}\r\n\r\n{LONG}\n \n")[0] == long
    both = window_of(chatting, [text, chat])
    assert both == window_of(chatting, [text, chat], SnapKV(budget=140, window=long))
    assert both[0] == long
    assert window_of(chatting, text, raw=True)[0] == least_power(chatting, SHORT, closing=False)


def test_bases_have_windows_too(chatting):
    policy = AdaKV(base=PyramidKV(budget=140, window="question"))
    assert window_of(chatting, f"{DOCUMENT}\n\n{LONG}", policy)[0] == least_power(chatting, LONG)


def test_a_policy_without_its_window_is_a_value(as_users_call):
    again = SnapKV(budget=140, window="question")
    assert again == ASKED == pickle.loads(pickle.dumps(ASKED)) and hash(again) == hash(ASKED)
    assert ASKED != SnapKV(budget=140) and str(ASKED) == "SnapKV(budget=140, window='question')"
    with pytest.raises(ValueError, match="window='last'"):
        SnapKV(window="last")
    with pytest.raises(ValueError, match="sinks=-1"):
        SnapKV(sinks=-1, window="question")


@pytest.mark.parametrize("stands", [SnapKV, lambda **given: AdaKV(base=SnapKV(**given))])
def test_an_engine_observes_the_question_of_each_request(as_users_call, chatting, stands):
    """Two lengths of questions at the same time; budgets of their own; questions on documents are rejected."""
    policy = stands(budget=140, window="question")
    prompts = [f"{DOCUMENT}\n\n{each}" for each in (SHORT, LONG, SHORT)]
    limits = {"slots": 2, "max_prompt_tokens": 400, "max_new_tokens": 8}
    with jaxkv.Engine(chatting, policy=policy, max_question_tokens=16, **limits) as engine:
        assert "window='question'" in repr(engine)
        budgets = (None, None, 130)
        requests = [
            engine.submit(each, max_new_tokens=6, budget=budget)
            for each, budget in zip(prompts, budgets, strict=True)
        ]
        for prompt, request, budget in zip(prompts, requests, budgets, strict=True):
            own = stands(budget=budget or 140, window="question")
            alone = jaxkv.generate(chatting, prompt, policy=own, max_new_tokens=6)
            assert request.result().tokens.tolist() == alone.tokens.tolist()
            assert request.stats.kept == alone.stats.kept
        with pytest.raises(ValueError, match="window='question': a document has none"):
            engine.document(DOCUMENT)
        with pytest.raises(ValueError, match="window='question': token ids have no question"):
            engine.submit([1, 2, 3])
    with pytest.raises(ValueError, match="window='question': slots store queries"):
        jaxkv.Engine(chatting, policy=stands(budget=140, window="question", every=16), **limits)
    with pytest.raises(ValueError, match="window='question': layers' budgets depend"):
        jaxkv.Engine(chatting, policy=PyramidKV(budget=140, window="question"), **limits)


def test_it_is_rejected_where_no_question_is_known(as_users_call, chatting):
    where = "window='question': only generate"
    for call, given in ((jaxkv.prefill, (DOCUMENT,)), (jaxkv.Session, ())):
        with pytest.raises(ValueError, match=where):
            call(chatting, *given, policy=AdaKV(base=ASKED))
    cache = jaxkv.prefill(chatting, DOCUMENT, policy=jaxkv.KNorm(budget=140))
    told = "policy=SnapKV.*'question'.: the cache was compressed by KNorm.*, before this question"
    with pytest.raises(ValueError, match=told):
        jaxkv.generate(chatting, SHORT, policy=ASKED, cache=cache)
    with pytest.raises(ValueError, match="window='question': token ids have no question"):
        jaxkv.generate(chatting, [1, 2, 3], policy=ASKED)
