"""HeadKV, whose scores belong to one model: the oracle, meshes, recompressing, rejections."""

import json
import os

import jax
import meshes
import numpy as np
import oracles as o
import pytest
import tiny
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_row import Row
from policy_table import WINDOW
from test_invariants import check_alone, check_prefill
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
from jaxkv import CriticalKV, HeadKV, SnapKV
from jaxkv.policies import LinearLayers


def scores_of(layers, heads, seed=0):
    """Importances of which a few are large, as in published files."""
    return tuple(map(tuple, (np.random.default_rng(seed).random((layers, heads)) ** 4).tolist()))


def row_of(layers, heads):
    """A row of the policy table for models of so many layers and query heads."""
    scores = scores_of(layers, heads)
    return Row(
        name="headkv",
        make=lambda budget, **kw: HeadKV(budget=budget, window=WINDOW, scores=scores, **kw),
        oracle=lambda qs, ks, budget: o.headkv(qs, ks, budget, scores, WINDOW),
        window=WINDOW,
        uniform=False,
        level=False,
    )


@settings(max_examples=10)
@given(seeds, lengths_of_two, st.sampled_from((10, 13, 20, 0.5)), st.sampled_from((1.0, 1.2, 3)))
def test_kept_rows_are_the_oracles(seed, lengths, budget, beta):
    group = 4
    q, k = draw_layers(seed, group, lengths)
    scores, heads = scores_of(LAYERS, group * SHAPES[group], seed), SHAPES[group]
    policy = HeadKV(budget=budget, window=WINDOW, scores=scores, beta=beta, min_budget="clamp")
    kept = library_kept(policy, q, k, lengths)
    for row, n in enumerate(lengths):
        qs = [layer[row, :, :, :n].reshape(-1, n, DIM).astype(np.float64) for layer in q]
        ks = [layer[row, :, :n].astype(np.float64) for layer in k]
        expected, gap = o.headkv(qs, ks, budget, scores, WINDOW, beta)
        assume(gap > o.MIN_GAP)
        assert [layer[row] for layer in kept] == expected
        rows = max(o.resolve_budget(budget, n), min(WINDOW, n))
        assert sum(len(head) for layer in expected for head in layer) == LAYERS * heads * rows


@pytest.mark.parametrize("beta", (1.005, 1.2, 3))
def test_numbers_of_rows_are_the_formulas(beta):
    """The published numbers: score / sum * (b / beta) * L * H + b - b / beta; a kv head has its query heads' mean."""
    q, k = draw_layers(0, 4, (48, 40))
    marks, base = np.asarray(scores_of(LAYERS, 8, seed=4)), 14 - WINDOW
    policy = HeadKV(budget=14, window=WINDOW, scores=tuple(map(tuple, marks.tolist())), beta=beta)
    formula = marks / marks.sum() * (base / beta) * marks.size + base - base / beta
    formula = formula.reshape(LAYERS, 2, 4).mean(axis=-1)
    assert formula.max() < 40 - WINDOW
    for kept in (
        library_kept(policy, q, k, (48, 40)),
        library_kept(policy, q[:, ::-1], k[:, ::-1], (40, 48)),
    ):
        found = np.array(
            [[[len(head) - WINDOW for head in row] for row in layer] for layer in kept]
        )
        assert (np.abs(found - formula[:, None]) < 2).all()


def test_invariants():
    config = tiny.TWO_LAYERS
    model, row = tiny.tiny(config), row_of(config.layers, config.heads)
    check_prefill(row, model, 3, (61, 7, 30), 20)
    check_alone(row, model, 4, (45, 6), 20)


def test_meshes():
    meshes.check_row(row_of(meshes.LAYERS, 4), 2, every=3)


def test_all_alike_is_snapkv():
    q, k = draw_layers(5, 3, (40, 31))
    same = HeadKV(budget=12, window=WINDOW, scores=((2.0,) * 2,) * LAYERS)
    assert library_kept(same, q, k, (40, 31)) == library_kept(
        SnapKV(budget=12, window=WINDOW), q, k, (40, 31)
    )
    assert (
        HeadKV().build_policy_parts()
        == HeadKV(beta=2.0).build_policy_parts()
        == SnapKV().build_policy_parts()
    )


def test_two_stages_keep_each_heads_number():
    config = tiny.TWO_LAYERS
    base = row_of(config.layers, config.kv_heads).policy(20)
    caches = [
        jaxkv.Session(tiny.tiny(config), each).prefill([list(range(50))])
        for each in (base, CriticalKV(base=base))
    ]
    one, two = (np.asarray(jax.device_get(cache.length)) for cache in caches)
    assert one.tolist() == two.tolist() and len(set(one.reshape(-1).tolist())) > 1


def test_files(as_users_call, tmp_path):
    table, path = scores_of(2, 3), tmp_path / "scores.json"
    path.write_text(json.dumps(table))
    assert (
        HeadKV(scores=str(path))
        == HeadKV(scores=table)
        == HeadKV(scores=[list(row) for row in table])
    )
    named = {f"{layer}-{head}": [table[layer][head]] * 2 for head in range(3) for layer in range(2)}
    path.write_text(json.dumps(named))
    assert HeadKV(scores=str(path)) == HeadKV(scores=table)
    path.write_text("\ufeff" + json.dumps(table), "utf-8")
    assert HeadKV(scores=path) == HeadKV(scores=table)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="scores=.*no regular file"):
        HeadKV(scores=str(tmp_path / "pipe"))


NO_TABLES = [(), ((1.0,), (1.0, 2.0)), ((-1.0, 2.0),), ((0.0,),), ((float("inf"),),)]
NO_FILES = ["{}", "[" * 100_000, f"[[{10**400}]]", '{"0-0": []}']


@pytest.mark.parametrize(
    "bad", [*NO_TABLES, *NO_FILES, (("1",),), {1: 2}], ids=lambda bad: repr(bad)[:20]
)
def test_what_is_no_table_is_refused(as_users_call, tmp_path, bad):
    if isinstance(bad, str):
        (tmp_path / "bad.json").write_text(bad)
        bad = str(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="scores="):
        HeadKV(scores=bad)


def test_what_does_not_fit_is_refused(as_users_call):
    model = tiny.tiny(tiny.TWO_LAYERS)
    k, fits = np.zeros((1, 2, 50, 8), np.float32), scores_of(1, 7)
    arrays = {"queries": np.zeros((1, 4, 32, 8), np.float32), "layer": 0, "layers": 1}
    for call, name in (
        (lambda: HeadKV(scores=((1.0,),), beta=0.5), "beta="),
        (lambda: HeadKV(scores=((1.0,),), layers=LinearLayers()), "layers="),
        (lambda: jaxkv.Session(model, HeadKV(scores=scores_of(5, 2))), "scores='layers=5'"),
        # Scores of another model, of twice as many query heads for each kv head, say.
        (lambda: jaxkv.Session(model, HeadKV(scores=scores_of(2, 12))), "scores='12 heads'"),
        (lambda: jaxkv.compress(k, k, policy=HeadKV(scores=fits), **arrays), "scores='heads=7'"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
