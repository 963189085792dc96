"""A document that is compressed by its end, before a question is there: warned of once, with the remedy."""

import dataclasses
import subprocess
import sys
import warnings

import eval_models
import jax.numpy as jnp
import pytest
from policy_table import BY_NAME

import jaxkv
from jaxkv import H2O, AdaKV, CustomPolicy, PyramidKV, SnapKV
from jaxkv.policies import KeyNorm, Needs, ObservationWindowAttention, Scorer, UnseenQuestionWarning

DOCUMENT = "the quick brown fox jumps over the lazy dog and over the cat"
SMALL = {"budget": 16, "window": 4}


@dataclasses.dataclass(frozen=True)
class WorstCase(Scorer):
    """Asks for the last queries, and says that its rows survive a later question."""

    follows_last_queries: bool = False

    @property
    def needs(self):
        return Needs(queries=4)

    def score_entries(self, seen):
        return seen.k.astype(jnp.float32)[..., 0]


@pytest.fixture(scope="module")
def chatting():
    return eval_models.speaking(chat=True)


def told(model, prompt=DOCUMENT, **options):
    """Messages of the warnings that a prefill gives."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        jaxkv.prefill(model, prompt, progress=False, **options)
    assert all(each.category is UnseenQuestionWarning for each in heard)
    return [str(each.message) for each in heard]


def test_policies_that_go_by_the_last_queries_look_at_the_end():
    scorers = {name: row.policy(24).build_policy_parts().scorer for name, row in BY_NAME.items()}
    looking = {name for name, scorer in scorers.items() if scorer and scorer.follows_last_queries}
    first = {name.partition("-")[0] for name in looking}
    methods = (
        "snapkv pyramidkv adakv tova cam cake criticalkv dropkv rkv chunkkv refit pyramidinfer "
        "rocketkv"
    )
    assert first == {*methods.split()}
    others = {name for name in scorers if name.partition("-")[0] in first} - looking
    assert others == {"adakv-knorm", "adakv-h2o", "adakv-expected", "criticalkv-rolling"}


def test_policies_that_look_at_the_end_warn_once(chatting):
    policy = AdaKV(base=PyramidKV(budget=0.5, window=4))
    (message,) = told(chatting, policy=policy)
    assert message.startswith("policy=AdaKV: ") and "document + '\\n\\n' + question" in message
    assert not told(chatting, policy=policy), "once a process"
    assert not told(chatting, policy=dataclasses.replace(policy)), "once a class"
    assert not told(chatting, policy=H2O(budget=16))
    assert told(chatting, policy=SnapKV(**SMALL)) and told(chatting, policy=PyramidKV(**SMALL))


def test_nothing_is_said_where_nothing_is_dropped(chatting):
    whole = len(chatting.text.encode("<turn>user:" + DOCUMENT, bos=False))
    assert not told(chatting, policy=SnapKV(budget=whole)) and not told(
        chatting, policy=SnapKV(budget=1.0)
    )
    assert not told(chatting, prompt=["short", "shorter"], policy=SnapKV(**SMALL))
    assert told(chatting, prompt=["x", DOCUMENT], policy=SnapKV(budget=whole - 1)), (
        "one entry of one of two prompts"
    )


def test_a_conversation_without_its_last_question_is_a_document(chatting):
    assert told(chatting, prompt=[{"role": "user", "content": DOCUMENT}], policy=SnapKV(**SMALL))


@pytest.mark.parametrize("chat", [True, False])
def test_plain_text_is_open_as_well(chat):
    assert told(eval_models.speaking(chat=chat), raw=chat, policy=SnapKV(**SMALL))


def test_of_ids_nothing_is_known(chatting):
    """They may hold the question, or its template: benchmarks and evaluations cut their prompts themselves."""
    ids = chatting.text.encode(DOCUMENT, bos=True)
    assert not told(chatting, prompt=[ids, ids[:30]], policy=SnapKV(**SMALL))
    assert told(chatting, prompt=["x", ids, DOCUMENT], policy=SnapKV(**SMALL))
    assert not told(chatting, prompt=["x", ids], policy=PyramidKV(**SMALL)), "the text is whole"


def test_a_prompt_with_its_question_is_no_such_document(chatting):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing = {"max_new_tokens": 2, "stop_at_eos": False, "progress": False}
        out = jaxkv.generate(chatting, DOCUMENT + " Who?", policy=SnapKV(**SMALL), **drawing)
        jaxkv.generate(chatting, "And why?", cache=out.cache, **drawing)


def test_a_scorer_says_itself_whether_it_looks_at_the_end(chatting):
    assert not told(chatting, policy=CustomPolicy(budget=16, scorer=WorstCase()))
    assert told(
        chatting, policy=CustomPolicy(budget=16, scorer=WorstCase(follows_last_queries=True))
    )
    assert ObservationWindowAttention().follows_last_queries and not KeyNorm().follows_last_queries


def test_where_warnings_are_errors_every_call_is_refused(chatting):
    for _ in range(2):
        with pytest.raises(UnseenQuestionWarning, match="a later question"):
            jaxkv.prefill(chatting, DOCUMENT, policy=SnapKV(**SMALL), progress=False)


_SCRIPT = """\
import jaxkv
from jaxkv import SnapKV

params = jaxkv.load("tiny-retrieval", progress=False)
document = "The grass is green. " * 20


def mine(policy):
    return jaxkv.prefill(params, document, policy=policy, progress=False)  # the user's line


for _ in range(3):
    mine(SnapKV(budget=40, window=8))
"""


def test_it_points_at_the_users_line(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(_SCRIPT)
    line = 1 + _SCRIPT.splitlines().index(
        next(each for each in _SCRIPT.splitlines() if "the user's line" in each)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UnseenQuestionWarning") == 1
    assert f"{script}:{line}: UnseenQuestionWarning: policy=SnapKV: it keeps" in done.stderr
