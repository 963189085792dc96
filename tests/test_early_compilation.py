"""The token loop is compiled in a thread while the prompt is read, and the caller finds it compiled."""

import numpy as np
import pytest
import tiny
from compiled_programs import CompiledPrograms

import jaxkv

BUDGET = 21
# Sizes of some pools are set by scores: what their loop looks like is known after the prompt alone.
BY_SCORES = {"d2o": jaxkv.D2O(budget=BUDGET), "global": jaxkv.GlobalBudget(budget=BUDGET)}
BY_PLAN = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=BUDGET, window=4),
    "pyramidkv": jaxkv.PyramidKV(budget=BUDGET, window=4),
    "adakv": jaxkv.AdaKV(base=jaxkv.SnapKV(budget=BUDGET, window=4)),
    "h2o": jaxkv.H2O(budget=BUDGET),
    "quest": jaxkv.Quest(budget=64, dense_layers=1),
    "int8": jaxkv.SnapKV(budget=BUDGET, window=4, store="int8"),
    "every": jaxkv.SnapKV(budget=BUDGET, window=4, every=5),
    "streaming": jaxkv.StreamingLLM(budget=BUDGET, sinks=2),
}


def answers(policy, **options):
    """Tokens of two prompts of unequal lengths, and who compiled the loop for them."""
    model, prompts = tiny.tiny(tiny.TWO_LAYERS), tiny.prompts(3, (50, 37))
    with CompiledPrograms() as compiled:
        out = jaxkv.generate(model, prompts, policy=policy, max_new_tokens=6, **options)
    return model, prompts, [each.tokens.tolist() for each in out], compiled.threads("_loop")


@pytest.mark.parametrize("name", BY_PLAN)
def test_the_loop_is_compiled_once_and_by_the_thread(name):
    model, prompts, tokens, threads = answers(BY_PLAN[name], stop_at_eos=False)
    assert threads == ["jaxkv-compile"]
    session = jaxkv.Session(model, BY_PLAN[name])
    cache = session.prefill(prompts, new=6)
    assert np.asarray(session.sample(cache, 6)[1]).tolist() == tokens


@pytest.mark.parametrize("name", BY_SCORES)
def test_what_scores_decide_is_not_guessed(name):
    *_, threads = answers(BY_SCORES[name])
    assert threads == ["MainThread"]


def test_sampling_and_end_ids_are_those_of_the_loop():
    policy = BY_PLAN["snapkv"]
    *_, drawn, threads = answers(policy, sampling=jaxkv.Sampling(temperature=0.7), seed=1)
    assert threads == ["jaxkv-compile"]
    assert drawn == answers(policy, sampling=jaxkv.Sampling(temperature=0.7), seed=1)[2]


def test_errors_come_to_the_caller():
    with pytest.raises(TypeError, match="sampling="):
        answers(jaxkv.FullKV(), sampling=lambda logits, keys: logits, seed=0)
