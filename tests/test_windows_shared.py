"""Policies that merge, share a budget over layers or read prompts twice, where some layers have windows."""

import dataclasses

import numpy as np
import pytest
import tiny
from meshes import mesh_of
from policy_table import REPEATED
from test_windows import LENGTHS, NEW, SHAPE, WINDOW, prompts

import jaxkv
from jaxkv.cache import repack_cache
from jaxkv.engine.headroom import compute_prefill_headroom, fork_cache
from jaxkv.engine.plan import plan_prefill
from jaxkv.models.values import LayerSpec
from jaxkv.policies import GiniLayers

WHOLE = [layer for layer, width in enumerate(SHAPE.sliding_windows) if width is None]
POLICIES = {
    "d2o": lambda budget: jaxkv.D2O(budget=budget, sinks=2),
    "gini": lambda budget: jaxkv.PyramidKV(budget=budget, window=6, layers=GiniLayers()),
    "global": lambda budget: jaxkv.GlobalBudget(base=jaxkv.SnapKV(budget=budget, window=6)),
    "global, every": lambda budget: jaxkv.GlobalBudget(
        base=jaxkv.SnapKV(budget=budget, window=6, every=4)
    ),
    "kvzip": lambda budget: jaxkv.KVzip(budget=budget, sinks=2, **REPEATED),
    "pyramidinfer": lambda budget: jaxkv.PyramidInfer(budget=budget, window=6),
}
# Two layers that attend to everything, between windows that let everything through: as if all did.
AS_IF = dataclasses.replace(
    tiny.shape(layers=4, kv_heads=2, group=2, dim=16),
    kinds=(LayerSpec(sliding_window=4096), LayerSpec()),
)


def drawn(model, texts, policy, **options):
    """Tokens of each sequence."""
    made = jaxkv.generate(
        model, texts, policy=policy, max_new_tokens=12, stop_at_eos=False, **options
    )
    return [each.tokens.tolist() for each in made]


@pytest.mark.parametrize("name", ["d2o", "global, every"])
def test_rows_and_tokens(name):
    cache = check_rows_and_tokens(SHAPE, POLICIES[name])
    kept = np.asarray(cache.length)[WHOLE].sum(axis=(0, 2))
    assert (kept <= np.minimum(LENGTHS, 16) * len(WHOLE) * SHAPE.kv_heads).all() and kept.min() > 0


def check_rows_and_tokens(shape, policy_of):
    """Bytes as planned, windows whole; budgets of the prompt change nothing."""
    model, policy = tiny.tiny(shape), policy_of(16)
    session = jaxkv.Session(model, policy)
    made = cache = session.prefill(prompts(), new=NEW)
    headroom = compute_prefill_headroom(
        policy.build_policy_parts(), shape.sliding_windows, np.asarray(LENGTHS), NEW
    )
    assert cache.nbytes == plan_prefill(shape, policy, LENGTHS, headroom=headroom).cache_bytes
    tokens = drawn(model, prompts(), policy)
    assert drawn(model, prompts(), policy_of(64)) == drawn(model, prompts(), jaxkv.FullKV())
    # Window after window, with a question between: the last rows are there, in order and without a gap.
    cache, more = session.sample(cache, NEW)
    assert [each[:12] for each in more.tolist()] == tokens
    cache, _ = session.sample(session.extend(cache, [[5] * 11, [6], [7] * 4], new=NEW), NEW)
    for layer, row, _, _, _, positions in tiny.segments(cache):
        if shape.sliding_windows[layer] is not None:
            seen = int(np.asarray(cache.seen)[row])
            assert (
                positions.tolist() == list(range(seen - len(positions), seen))
                and len(positions) >= WINDOW
            )
    return made


def test_kernels_and_slots():
    model, policy = tiny.tiny(SHAPE), POLICIES["d2o"](16)
    want = drawn(model, prompts(), policy)
    assert drawn(model, prompts(), policy, implementation="pallas") == want
    with jaxkv.Engine(
        model, policy=policy, slots=2, max_prompt_tokens=32, max_new_tokens=16
    ) as engine:
        asked = [engine.submit(each, max_new_tokens=12, stop_at_eos=False) for each in prompts()]
        assert [each.result().tokens.tolist() for each in asked] == want


def test_meshes_and_saved_caches(tmp_path):
    model, policy = tiny.tiny(SHAPE), POLICIES["global, every"](16)
    want = drawn(model, prompts(), policy)
    assert drawn(model, prompts(), policy, mesh=mesh_of(2, 2)) == want
    assert drawn(model, prompts()[2:], policy) == want[2:]
    session = jaxkv.Session(model, policy)
    session.prefill(prompts(), new=12).save(tmp_path / "cache")
    _, again = session.sample(jaxkv.load_cache(tmp_path / "cache"), 12)
    assert again.tolist() == want


def test_a_question_finds_room_in_every_layer():
    """Where windows are out of rows and others are not: in a shared pool all of them move."""
    session = jaxkv.Session(tiny.tiny(SHAPE), POLICIES["gini"](16))
    cache, _ = session.sample(session.prefill(prompts(), new=3), 3)
    short = repack_cache(cache, headroom=np.asarray([0, 220]))
    assert short.compute_layer_headroom()[1] > 200 > short.compute_layer_headroom()[0]
    assert fork_cache(short, 3, 200, 9).compute_layer_headroom().min() >= 200


@pytest.mark.parametrize("name", ["gini", "global", "kvzip", "pyramidinfer"])
def test_layers_without_windows_share_what_they_would_alone(name):
    """Of a model whose windows hide nothing: rows of the others are as many, on the average, as the budget says."""
    cache = jaxkv.Session(tiny.tiny(AS_IF), POLICIES[name](12)).prefill(prompts())
    length = np.asarray(cache.length)
    assert (length[::2] == np.asarray(LENGTHS)[:, None]).all()
    kept = length[1::2].sum(axis=(0, 2))
    assert (kept == np.minimum(LENGTHS, 12) * 2 * AS_IF.kv_heads).all()


def test_a_budget_in_bytes_leaves_out_the_windows():
    """Rows of windows are taken off the budget first; what is left is rows of the other layers."""
    model, texts = tiny.tiny(SHAPE), prompts(lengths=(120, 90))
    row = SHAPE.kv_heads * (2 * 16 * 4 + 4)
    for budget, rows in ((8 * row + 20 * row, 20), (8 * row + 21 * row - 1, 20)):
        cache = jaxkv.Session(model, jaxkv.SnapKV(budget=f"{budget}B", window=6)).prefill(texts)
        assert (np.asarray(cache.length)[WHOLE] == rows).all() and cache.nbytes <= 2 * budget + 4096
    with pytest.raises(
        ValueError,
        match=f"takes {row} bytes besides {8 * row:,}",
    ):
        jaxkv.Session(model, jaxkv.SnapKV(budget=f"{8 * row}B", window=6))
