"""The adapter for lm-evaluation-harness; where that is not installed, over a stand-in of the class it derives from."""

import functools
import importlib.util
import math
import sys
import types

import eval_models
import numpy as np
import pytest
import running
import tiny

import jaxkv
from jaxkv.engine.session import Session
from jaxkv.evals.perplexity import measure_text_losses

POLICIES = {"h2o": {"budget": 12}, "snapkv": {"budget": 8, "window": 4, "every": 3}}
CONTEXT = "Ada kept the mill by the river"


class StandIn:
    """What is used of lm-eval 0.4.13's TemplateLM."""

    def __init__(self):
        self.cache_hook = types.SimpleNamespace(add_partial=lambda *args: None)

    def loglikelihood(self, requests, disable_tqdm=False):
        asked = []
        for context, continuation in [request.args for request in requests]:
            if context == "":
                behind = self.tok_encode(continuation, add_special_tokens=False)
                first = behind[0] == self.prefix_token_id
                before, behind = (
                    (behind[:1], behind[1:]) if first else ([self.prefix_token_id], behind)
                )
            else:
                cut = len(context.rstrip())
                before = self.tok_encode(context[:cut])
                behind = self.tok_encode(context + continuation)[len(before) :]
            asked.append(((context, continuation), before, behind))
        return self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)


def rolling(token_list, prefix_token, max_seq_len, context_len):
    """lm-eval's windows: the whole of a text's tokens to predict, each once, behind as many as fit."""
    assert context_len == 1
    ids = [prefix_token, *token_list]
    for first in range(0, len(token_list), max_seq_len):
        end = min(first + max_seq_len, len(token_list))
        yield ids[max(0, end - max_seq_len) : end], token_list[first:end]


def disjoint(pair):
    context, continuation = pair
    return context[: len(context) - len(continuation) + 1], continuation


def requests(*args):
    return [types.SimpleNamespace(args=each) for each in args]


@pytest.fixture(scope="module")
def lm_class():
    """JaxKVLM."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("lm_eval") is None:
            parts = {"lm_eval": {}, "lm_eval.api": {}, "lm_eval.api.model": {"TemplateLM": StandIn}}
            parts["lm_eval.api.registry"] = {"register_model": lambda *names: lambda cls: cls}
            parts["lm_eval.utils"] = {
                "get_rolling_token_windows": rolling,
                "make_disjoint_window": disjoint,
            }
            for name, held in parts.items():
                module = types.ModuleType(name)
                vars(module).update(held)
                patch.setitem(sys.modules, name, module)
        from jaxkv.evals.harness import JaxKVLM

        yield JaxKVLM


@pytest.fixture
def made(lm_class):
    return functools.partial(lm_class, eval_models.speaking())


def test_likelihoods_are_those_of_the_model(made):
    lm = made(batch_size=4)
    # Spaces between are the continuation's, and a text without context begins behind the first token.
    asked = [(CONTEXT, " yes"), (CONTEXT[:8] + "   ", "no"), ("", "river")]
    same = [(CONTEXT, " yes"), (CONTEXT[:8], "   no"), ("", "river")]
    found = lm.loglikelihood(requests(*asked), disable_tqdm=True)
    ids = [
        (lm.tok_encode(of) or [lm.prefix_token_id], lm.tok_encode(behind, add_special_tokens=False))
        for of, behind in same
    ]
    prefixes = [before + behind[:at] for before, behind in ids for at in range(len(behind))]
    # All in one batch.
    _, logits = running.prefill(lm.params, prefixes)
    logs = np.asarray(
        logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    )
    ends = np.cumsum([len(behind) for _, behind in ids])
    for (value, greedy), (_, behind), part in zip(
        found, ids, np.split(logs, ends[:-1]), strict=True
    ):
        assert value == pytest.approx(part[np.arange(len(behind)), behind].sum(), abs=1e-4)
        assert greedy == (part.argmax(axis=-1).tolist() == behind) and not greedy


@pytest.mark.parametrize("name", POLICIES)
def test_choices_share_the_prefill_of_their_context_and_are_what_they_are_alone(
    made, name, monkeypatch
):
    """They are read as answers are sampled: rows are dropped on the way, or chosen again."""
    lm = made(policy=name, **POLICIES[name], batch_size=2)
    ids, of = lm.tok_encode(CONTEXT), {"max_new_tokens": 6, "stop_at_eos": False}
    drawn = jaxkv.generate(lm.params, ids, policy=lm.policy, **of).tokens.tolist()
    other = [*drawn[:-1], (drawn[-1] + 1) % 256]
    prefilled, prefill = [], Session.prefill
    monkeypatch.setattr(
        Session, "prefill", lambda *of, **by: prefilled.append(len(of[1])) or prefill(*of, **by)
    )
    pairs = [(ids, drawn), (ids, other), (ids, drawn[:2]), (ids[:-3], drawn)]
    together = lm._score_pairs(pairs, True)
    assert prefilled == [1, 1] and [greedy for _, greedy in together][:3] == [True, False, True]
    assert together[2][0] > together[0][0] > together[1][0]
    np.testing.assert_allclose(together[1], lm._score_pairs(pairs[1:2], True)[0], atol=1e-4)
    losses, *_ = measure_text_losses(lm.params, lm.policy, [ids], np.asarray([drawn], np.int32))
    assert together[0][0] == pytest.approx(-losses.sum(), abs=1e-4)
    # What they are is the policy's own: rows are gone.
    full = made()._score_pairs(pairs[:2], True)
    assert not np.allclose(np.asarray(together)[:2, 0], np.asarray(full)[:, 0], atol=1e-2)


def test_whole_texts_are_read_on_one_cache(made):
    lm = made(policy="h2o", budget=12)
    texts = [CONTEXT, CONTEXT[::-1] + " again"]
    found = lm.loglikelihood_rolling(requests(*((text,) for text in texts)), disable_tqdm=True)
    for value, text in zip(found, texts, strict=True):
        first, *others = lm.tok_encode(text)
        losses, *_ = measure_text_losses(
            lm.params, lm.policy, [[first]], np.asarray([others], np.int32)
        )
        assert value == pytest.approx(-losses.sum(), abs=1e-3) and losses.shape[1] == len(text)


def test_long_texts_go_in_parts_of_the_models_length(lm_class):
    lm = lm_class(eval_models.speaking(positions=32))
    ids = list(range(70))
    parts = lm._split_into_windows(ids)
    assert [token for _, continuation in parts for token in continuation] == ids
    contexts = [context for context, _ in parts]
    assert contexts[0] == [lm.prefix_token_id] and contexts[1] == [31]
    # The last one is judged with what fits before it.
    assert contexts[2] == list(range(37, 64)) and len(contexts[2] + parts[2][1]) == 33
    assert lm._split_into_windows([]) == []


def test_answers_are_those_of_generate(made):
    lm = made(policy="snapkv", budget=8, window=4, batch_size=2)
    texts = [CONTEXT, CONTEXT[:9], CONTEXT[4:]]
    of = {"policy": lm.policy, "max_new_tokens": 12, "raw": True}
    whole = [jaxkv.generate(lm.params, text, **of).text for text in texts]
    stop = whole[0][3:5]
    # The harness gives one dictionary a task; these are of two.
    asked = [
        (text, {"until": [stop], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0})
        for text in texts
    ]
    asked.insert(1, (CONTEXT, {"until": None, "max_new_tokens": 5}))
    told = lm.generate_until(requests(*asked), disable_tqdm=True)
    assert [told[0], *told[2:]] == [text.split(stop)[0] for text in whole] and told[0] != whole[0]
    assert told[1] == jaxkv.generate(lm.params, CONTEXT, **{**of, "max_new_tokens": 5}).text
    # What is too long loses its beginning.
    long = lm.generate_until(requests((CONTEXT * 20, {"max_gen_toks": 4})), disable_tqdm=True)
    assert len(long) == 1 and lm.max_length == 512 < len(CONTEXT * 20)


def test_contexts_have_draws_of_their_own_whatever_the_batch(made):
    lm, alone = (made(policy="random", budget=8, batch_size=size) for size in (3, 1))
    asked = requests((CONTEXT, " yes"), (CONTEXT[::-1], " yes"), (CONTEXT, " no"))
    found, again = (
        lm.loglikelihood(asked, disable_tqdm=True),
        alone.loglikelihood(asked, disable_tqdm=True),
    )
    np.testing.assert_allclose(
        [value for value, _ in found], [value for value, _ in again], atol=1e-4
    )
    assert (
        lm._seed_for_context([1, 2]) != lm._seed_for_context([2, 1])
        and made(policy="full")._seed_for_context([1, 2]) == 0
    )


def test_a_request_that_is_repeated_draws_another_answer(made):
    given = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8}
    lm = made()
    told, again = (
        lm.generate_until(requests(*[(CONTEXT, given)] * 4), disable_tqdm=True) for _ in range(2)
    )
    assert len(set(told)) == 4 and again == told


def test_generation_arguments_are_honoured_or_refused(lm_class):
    from jaxkv.evals.harness.model import _parse_generation_arguments

    assert _parse_generation_arguments({}, 7) == (None, 7, jaxkv.Sampling(temperature=0))
    assert _parse_generation_arguments(
        {"until": "\n", "max_tokens": 3, "do_sample": False, "temperature": 1.0, "top_p": 0.5}, 7
    ) == (
        "\n",
        3,
        jaxkv.Sampling(temperature=0),
    )
    given = {"temperature": 0.5, "min_p": 0.1, "top_p": 1, "top_k": 0}
    assert _parse_generation_arguments(given, 7)[2] == jaxkv.Sampling(min_p=0.1, temperature=0.5)
    assert _parse_generation_arguments({"do_sample": True}, 7)[2] == jaxkv.Sampling(temperature=1.0)
    with pytest.raises(ValueError, match=r"generation_kwargs=\['num_beams'\]"):
        _parse_generation_arguments({"num_beams": 4}, 7)


def test_models_are_made_of_the_harness_arguments(lm_class):
    model = eval_models.speaking(chat=True)
    lm = lm_class(
        model,
        policy="snapkv",
        budget=0.5,
        window=8,
        batch_size="4",
        device=None,
        max_batch_size=None,
    )
    assert lm.policy == jaxkv.SnapKV(budget=0.5, window=8) and lm.batch_size == 4
    assert (
        lm.apply_chat_template([{"role": "user", "content": "Hi"}])
        == "<turn>user:Hi<end><turn>assistant:"
    )
    with pytest.raises(ValueError, match="^batch_size="):
        lm_class(model, batch_size="auto")
    with pytest.raises(TypeError, match="^budget"):
        lm_class(model, policy=jaxkv.SnapKV(), budget=3)
    with pytest.raises(ValueError, match="^params="):
        lm_class(tiny.tiny(tiny.TWO_LAYERS))
    with pytest.raises(ValueError, match="the model was made for"):
        lm.loglikelihood(requests(("a", "b" * 600)), disable_tqdm=True)
    with pytest.raises(ValueError, match="^continuation="):
        lm.loglikelihood(requests(("a", "")), disable_tqdm=True)
    assert math.isfinite(lm.loglikelihood(requests(("a" * 600, "b")), disable_tqdm=True)[0][0])


def test_without_the_harness_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jaxkv.evals.harness")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match=r"jaxkv\[harness\]"):
        importlib.import_module("jaxkv.evals.harness")
