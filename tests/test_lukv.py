"""LU-KV, whose curves belong to one model: the oracle, shares at the budget, a mesh, saved caches, rejections."""

import numpy as np
import oracles as o
import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_table import WINDOW
from test_oracle_agreement import (
    DIM,
    LAYERS,
    draw_layers,
    lengths_of_two,
    library_kept,
    seeds,
)

import jaxkv
from jaxkv import LUKV, AdaKV, CriticalKV, ExpectedAttention, SnapKV, StreamingLLM


def curves_of(layers, heads, seed=0):
    """Shares that heads drop at 1 % to 99 % in all, some of them twice as much as others."""
    share = np.arange(1, 100)[:, None, None] / 100
    return share ** np.random.default_rng(seed).uniform(0.6, 1.4, (99, layers, heads))


def nested(curves):
    """The same as tuples, which annotations ask for."""
    return tuple(tuple(map(tuple, each)) for each in curves.tolist())


@settings(max_examples=15)
@given(seeds, lengths_of_two, st.sampled_from((0.2, 0.254, 0.5, 0.995)))
def test_kept_rows_are_the_oracles(seed, lengths, budget):
    """Of the curve of the nearest per cent; an equal budget for all heads is the base's."""
    q, k = draw_layers(seed, 3, lengths)
    curves = curves_of(LAYERS, k.shape[2], seed)
    base = SnapKV(budget=budget, window=WINDOW, min_budget="clamp")
    kept = library_kept(LUKV(base=base, curves=nested(curves)), q, k, lengths)
    near = 1 - curves[{0.2: 79, 0.254: 74, 0.5: 49, 0.995: 0}[budget]]
    for row, n in enumerate(lengths):
        qs = [layer[row, :, :, :n].reshape(-1, n, DIM).astype(np.float64) for layer in q]
        ks = [layer[row, :, :n].astype(np.float64) for layer in k]
        expected, gap = o.headkv(qs, ks, budget, near.tolist(), WINDOW, 1)
        assume(gap > o.MIN_GAP)
        assert [layer[row] for layer in kept] == expected
    alike = LUKV(base=base, curves=nested(np.full_like(curves, 0.5)))
    assert library_kept(alike, q, k, lengths) == library_kept(base, q, k, lengths)


def test_a_head_keeps_the_share_that_its_curve_leaves(tmp_path):
    """From a file; curves whose mean is the budget's need no scaling."""
    config, curves = tiny.TWO_LAYERS, curves_of(2, 2)
    curves[69] = [[0.9, 0.8], [0.6, 0.5]]
    np.save(tmp_path / "curves.npy", curves)
    policy = LUKV(curves=str(tmp_path / "curves.npy"), base=ExpectedAttention(budget=0.3, sinks=0))
    assert policy == LUKV(curves=nested(curves), base=ExpectedAttention(budget=0.3, sinks=0))
    cache = jaxkv.Session(tiny.tiny(config), policy).prefill(tiny.prompts(3, (60, 40)))
    assert np.asarray(cache.length).tolist() == [[[6, 12], [4, 8]], [[24, 30], [16, 20]]]
    cache.save(tmp_path / "cache")
    assert jaxkv.load_cache(tmp_path / "cache").policy == policy
    two = jaxkv.Session(tiny.tiny(config), CriticalKV(base=policy)).prefill(
        tiny.prompts(3, (60, 40))
    )
    np.testing.assert_array_equal(two.length, cache.length)


TABLE = curves_of(2, 2)
DAMAGED = b"\x93NUMPY\x01\x00\x0f\x00{'descr': '<f8'," + bytes(64)


def test_refusals(as_users_call, tmp_path):
    (tmp_path / "damaged.npy").write_bytes(DAMAGED)
    model = tiny.tiny(tiny.MODELS["gqa3"])
    for call, name in (
        (lambda: LUKV(curves=TABLE, budget=20), "budget="),
        (lambda: LUKV(curves="none.npy"), "curves="),
        (lambda: LUKV(curves=str(tmp_path / "damaged.npy")), "curves="),
        (lambda: LUKV(curves=TABLE[:, 0]), "curves="),
        (lambda: LUKV(curves=TABLE * np.nan), "curves="),
        (lambda: LUKV(curves=np.ones_like(TABLE)), "curves=.*not 1 alone"),
        (lambda: LUKV(base=AdaKV(budget=0.2)), "base="),
        (lambda: LUKV(curves=TABLE, base=StreamingLLM(budget=0.2, rolling_positions=True)), "roll"),
        (lambda: jaxkv.Session(model, LUKV(curves=TABLE, budget=0.2)), "curves='layers=2'"),
    ):
        with pytest.raises(ValueError, match="(?s)" + name):
            call()
