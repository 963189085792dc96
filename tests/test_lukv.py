"""LU-KV, whose curves belong to one model: the oracle, shares at the budget, a mesh, saved caches, refusals."""

import meshes
import numpy as np
import oracles as o
import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_row import Row
from policy_table import BY_NAME, WINDOW
from test_oracle_agreement import (
    DIM,
    LAYERS,
    SHAPES,
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


@pytest.mark.parametrize("group", SHAPES)
@settings(max_examples=15)
@given(seeds, lengths_of_two, st.sampled_from((0.2, 0.254, 0.5, 0.995)))
def test_kept_rows_are_the_oracles(group, seed, lengths, budget):
    """Of the curve of the nearest per cent; an equal budget for all heads is the base's."""
    q, k = draw_layers(seed, group, lengths)
    curves = curves_of(LAYERS, SHAPES[group], seed)
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


def test_meshes(monkeypatch):
    curves = nested(curves_of(meshes.LAYERS, 4))
    made = Row(
        name="lukv",
        make=lambda budget, **kw: LUKV(curves=curves, base=SnapKV(budget=0.4, window=WINDOW)),
        oracle=lambda *of: None,
        window=WINDOW,
        uniform=False,
        level=False,
    )
    monkeypatch.setitem(BY_NAME, "lukv", made)
    meshes.run.cache_clear()
    assert meshes.run("lukv", 4, mesh=(2, 4)) == meshes.run("lukv", 4)
    meshes.run.cache_clear()


TABLE = curves_of(2, 2)
REFUSED = {
    "rows": (lambda: LUKV(curves=TABLE, budget=20), "budget=20: .*give a share"),
    "no file": (lambda: LUKV(curves="none.npy"), "curves='none.npy': it cannot be read"),
    "text": (lambda: LUKV(curves=__file__), "curves=.*no .npy file"),
    "98": (lambda: LUKV(curves=TABLE[:98]), "curves=.*give 99 tables"),
    "flat": (lambda: LUKV(curves=TABLE[:, 0]), "curves=.*give 99 tables"),
    "above 1": (lambda: LUKV(curves=TABLE + 1), "curves=.*from 0 to 1"),
    "nan": (lambda: LUKV(curves=TABLE * np.nan), "curves=.*from 0 to 1"),
    "all dropped": (lambda: LUKV(curves=np.ones_like(TABLE)), "curves=.*table 1 drops all rows"),
    "heads": (lambda: LUKV(base=AdaKV(budget=0.2)), "base=.*budgets of their own"),
    "rolling": (
        lambda: LUKV(base=StreamingLLM(budget=0.2, rolling_positions=True)),
        "base=.*rolling positions",
    ),
    "model": (
        lambda: jaxkv.Session(tiny.tiny(tiny.MODELS["gqa3"]), LUKV(curves=TABLE, budget=0.2)),
        "curves='2 layers': the model has 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(as_users_call, name):
    call, said = REFUSED[name]
    with pytest.raises(ValueError, match="(?s)" + said):
        call()


@pytest.mark.parametrize(
    "header", ["{'descr': '<f8',", "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2)}\n"]
)
def test_files_with_damaged_headers_are_refused_by_name(as_users_call, tmp_path, header):
    path = tmp_path / "curves.npy"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)
    )
    with pytest.raises(ValueError, match="(?s)curves=.*no .npy file"):
        LUKV(curves=str(path))
