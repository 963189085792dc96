"""On a CPU, questions and short answers run one program per group of layers: with the tokens and caches of the loop."""

import dataclasses

import numpy as np
import pytest
import tiny
from compiled_programs import CompiledPrograms
from policy_table import TABLE

import jaxkv
from jaxkv.engine import grouped_decode, spec
from jaxkv.models.values import LayerSpec
from jaxkv.policies import CustomPolicy, EntropyLayers, LastAttention

TWO = tiny.shape(layers=2, kv_heads=2, group=2, dim=8)
THREE = dataclasses.replace(TWO, layers=3)
WINDOWS = dataclasses.replace(TWO, layers=4, kinds=(LayerSpec(sliding_window=8), LayerSpec()) * 2)
ANSWER, LONG, BUDGET = 7, 200, 17
# One policy of each kind of pool, of score, and of what happens after a token.
KINDS = ("streaming-rolling", "adakv-entropy", "h2o", "adakv-h2o")
ROWS = {row.name: row.make(BUDGET) for row in TABLE if row.name in KINDS}
MORE = {
    "every": jaxkv.SnapKV(budget=BUDGET, window=4, every=3),
    "omnikv": jaxkv.OmniKV(filter_layers=(0, 1), adjacent=0, budget=BUDGET),
    "quest": jaxkv.Quest(budget=48, dense_layers=1),
    # The scores of all layers decay in one pool: steps run the loop.
    "shared": CustomPolicy(budget=32, scorer=LastAttention(), layers=EntropyLayers(), every=3),
}


def answers(config, policy, new):
    """Tokens and cache of a prompt pair, a question pair and an answer, as one of up to `new` tokens."""
    model = tiny.tiny(config)
    session = jaxkv.Session(model, policy, key=0)
    cache = session.prefill(tiny.prompts(5, (41, 30)), new=LONG)
    cache = session.extend(cache, tiny.prompts(6, (3, 5)), new=LONG)
    cache, tokens = session.sample(cache, ANSWER, new=new)
    return cache, tokens


@pytest.fixture(params=[1])
def grouped(request, monkeypatch):
    """Models of any number of layers run in groups of this many, which compile faster than real ones."""
    monkeypatch.setattr(spec, "_GROUPED_LAYERS", 0)
    monkeypatch.setattr(grouped_decode, "_GROUP_SIZES", (request.param,))
    yield
    grouped_decode.split_into_equal_groups.cache_clear()


@pytest.mark.parametrize("grouped", [2], indirect=True)
@pytest.mark.parametrize("name", [*ROWS, *MORE])
def test_groups_of_layers_give_what_the_loop_gives(name, grouped, monkeypatch):
    policy = (ROWS | MORE)[name]
    cache, tokens = answers(THREE, policy, ANSWER)
    # Questions, too.
    monkeypatch.setattr(spec, "_GROUPED_LAYERS", 9)
    other, expected = answers(THREE, policy, ANSWER)
    np.testing.assert_array_equal(tokens, expected)
    assert tiny.kept(cache) == tiny.kept(other)
    np.testing.assert_allclose(cache.logits, other.logits, atol=1e-4)


def test_equal_groups_share_one_program(grouped):
    with CompiledPrograms() as compiled:
        answers(TWO, jaxkv.SnapKV(budget=BUDGET, window=4), ANSWER)
    # One of the question's tokens, one of the answer's.
    assert len(compiled.threads("run_grouped_layers")) == 2
    assert not compiled.threads("_loop")


@pytest.mark.parametrize("grouped", [2], indirect=True)
def test_groups_of_windows_share_one_program_and_agree_with_the_loop(grouped):
    policy = jaxkv.SnapKV(budget=BUDGET, window=4)
    with CompiledPrograms() as compiled:
        cache, tokens = answers(WINDOWS, policy, ANSWER)
    assert len(compiled.threads("run_grouped_layers")) == 2
    other, expected = answers(WINDOWS, policy, LONG)
    np.testing.assert_array_equal(tokens, expected)
    assert tiny.kept(cache) == tiny.kept(other)


def test_models_of_few_layers_run_the_loop():
    with CompiledPrograms() as compiled:
        answers(TWO, jaxkv.FullKV(), ANSWER)
    assert compiled.threads("_loop")


def test_no_thread_compiles_a_loop_for_a_short_answer(grouped):
    with CompiledPrograms() as compiled:
        jaxkv.generate(tiny.tiny(TWO), tiny.prompts(4, (52, 31)), max_new_tokens=6)
    assert compiled.threads("run_grouped_layers") == ["MainThread"]
