"""Figures of an analysis against float64 loops over the same queries, keys and values; on a mesh; and as pictures."""

import functools
import math

import jax
import numpy as np
import oracles as o
import pytest
import tiny
from looking import CONFIG, HEADS, TEXTS, shown, weights

import jaxkv
from jaxkv import (
    D2O,
    H2O,
    AdaKV,
    CriticalKV,
    FullKV,
    OmniKV,
    PyramidInfer,
    PyramidKV,
    Random,
    SnapKV,
)
from jaxkv.analysis.budgets import BudgetsMeasure
from jaxkv.analysis.choosing import grid
from jaxkv.analysis.density import DensityMeasure
from jaxkv.analysis.loss import LossMeasure
from jaxkv.analysis.measuring import measured
from jaxkv.analysis.recall import RecallMeasure
from jaxkv.analysis.retained import RetainedMeasure
from jaxkv.analysis.similarity import SimilarityMeasure
from jaxkv.policies.wrapper import with_budget

FOLLOWING, WINDOW, LEAST, BINS, QUERIES, SHARES = 5, 4, 0.05, 4, 6, (0.1, 0.5, 1.0)
# Layers with budgets of their own, heads that compete, choices that build on one another, sums over all queries.
POLICIES = (
    FullKV(),
    SnapKV(window=WINDOW),
    PyramidKV(window=WINDOW),
    AdaKV(base=SnapKV(window=WINDOW)),
    AdaKV(base=SnapKV(window=WINDOW), alpha=0.0),
    CriticalKV(base=AdaKV(base=PyramidKV(window=WINDOW))),
    H2O(),
    D2O(merge=None),
    PyramidInfer(window=WINDOW),
    Random(),
)
BUDGETS = (16, 0.5)
# Of those, what a mesh compiles for: one whose heads compete over devices, and one whose layers share a budget.
ON_A_MESH = [4, 7]


@functools.cache
def watched(mesh=None):
    """All figures by name, of all texts and policies."""
    model = tiny.tiny(CONFIG) if mesh is None else tiny.tiny(CONFIG).on(mesh)
    cells = grid(model, POLICIES if mesh is None else [POLICIES[at] for at in ON_A_MESH], BUDGETS)
    measures = (
        DensityMeasure(least=LEAST, bins=BINS),
        RetainedMeasure(shares=SHARES, queries=QUERIES),
        SimilarityMeasure(queries=QUERIES),
        BudgetsMeasure(cells),
        RecallMeasure(cells),
        LossMeasure(cells),
    )
    names = ("density", "retained", "similarity", "budgets", "recall", "loss")
    return dict(zip(names, measured(model, TEXTS, measures, following=FOLLOWING), strict=True))


@functools.cache
def kept(policy, budget, row):
    """Positions that a real cache holds behind a text's prompt, by layer and head."""
    cache, _, _ = tiny.run(
        tiny.tiny(CONFIG), [TEXTS[row][:-FOLLOWING]], with_budget(policy, budget)
    )
    return [layer[0] for layer in tiny.kept(cache)]


def test_policies_choose_what_their_caches_hold():
    model = tiny.tiny(CONFIG)
    cells = grid(model, POLICIES, (16,))
    found = watched()["budgets"]
    for at, policy in enumerate(POLICIES):
        lengths = [
            [[len(head) for head in layer] for layer in kept(policy, 16, row)] for row in range(2)
        ]
        np.testing.assert_array_equal(
            found.rows[at, 0], np.mean(lengths, axis=0), err_msg=cells.names[at]
        )


def test_budgets_sum_to_what_was_asked_for():
    found = watched()["budgets"]
    rows = np.asarray([[min(16, n), n // 2] for n in found.lengths]).T
    np.testing.assert_array_equal(
        found.totals[1:], np.broadcast_to(rows * 6, found.totals[1:].shape)
    )
    np.testing.assert_array_equal(
        found.totals[0], np.broadcast_to(np.asarray(found.lengths) * 6, (2, 2))
    )
    assert found.rows[2, 0, 0].mean() > found.rows[2, 0, -1].mean(), (
        "PyramidKV gives lower layers more"
    )


def test_density_is_the_oracles():
    found = watched()["density"]
    for layer in range(CONFIG.layers):
        variance, dense, maps = np.zeros(HEADS), np.zeros(HEADS), np.zeros((BINS, BINS))
        for row, ids in enumerate(TEXTS):
            count, mine = len(ids), weights(row, layer)
            variance += mine.sum(axis=1).var(axis=-1, ddof=1) / 2
            mass, pairs = np.zeros((BINS, BINS)), np.zeros((BINS, BINS))
            for i in range(count):
                for j in range(i + 1):
                    dense += (mine[:, i, j] >= LEAST * mine[:, i].max(axis=-1)) / (
                        count * (count + 1)
                    )
                    at = i * BINS // count, j * BINS // count
                    mass[at] += mine[:, i, j].mean()
                    pairs[at] += 1
            maps += mass / np.maximum(pairs, 1) / 2
        np.testing.assert_allclose(found.variance[layer], variance, rtol=1e-4)
        np.testing.assert_allclose(found.dense[layer], dense, atol=1e-6)
        np.testing.assert_allclose(found.maps[layer], maps, atol=1e-6)


def test_retained_attention_is_the_oracles():
    found = watched()["retained"]
    for layer, head in np.ndindex(CONFIG.layers, CONFIG.kv_heads):
        expected = np.zeros(len(SHARES))
        for row, ids in enumerate(TEXTS):
            mine = weights(row, layer).reshape(CONFIG.kv_heads, CONFIG.group, len(ids), -1)[
                head, :, -QUERIES:
            ]
            order = sorted(mine.mean(axis=(0, 1)), reverse=True)
            expected += [
                math.fsum(order[: max(1, math.floor(share * len(ids)))]) / 2 for share in SHARES
            ]
        np.testing.assert_allclose(found.mass[layer, head], expected, atol=1e-6)


@pytest.mark.parametrize("at", range(len(POLICIES)))
def test_recall_is_the_oracles_over_kept_positions(at):
    found = watched()["recall"]
    assert found.following == FOLLOWING and found.segments == 6
    for row, layer, head in np.ndindex(len(TEXTS), CONFIG.layers, HEADS):
        count = len(TEXTS[row])
        paid = weights(row, layer)[head, count - FOLLOWING :]
        prompt = paid[:, : count - FOLLOWING].sum()
        mine = paid[:, kept(POLICIES[at], 16, row)[layer][head // CONFIG.group]].sum()
        where = (at, 0, row, layer, head)
        assert found.recall[where] == pytest.approx(mine / prompt, abs=1e-5)
        assert found.visible[where] == pytest.approx(
            (mine + paid[:, count - FOLLOWING :].sum()) / FOLLOWING, abs=1e-5
        )


def test_recall_of_everything_is_all_and_more_rows_recall_more():
    found = watched()["recall"]
    np.testing.assert_allclose(found.recall[0], 1, atol=1e-6)
    np.testing.assert_allclose(found.visible[0], 1, atol=1e-6)
    assert (found.recall[1:] < 1 + 1e-6).all() and (
        found.by_text[1:, 1, 0] > found.by_text[1:, 0, 0]
    ).all()
    mean, spread = found.difference(found.policies[0], found.policies[1])
    apart = found.by_text[0] - found.by_text[1]
    np.testing.assert_allclose(mean, apart.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(spread, np.abs(apart[:, 0] - apart[:, 1]) / 2, rtol=1e-5)


@pytest.mark.parametrize("at", [1, 4])
def test_eviction_loss_and_its_bound_are_the_oracles(at):
    found = watched()["loss"]
    for row, layer, step in np.ndindex(len(TEXTS), CONFIG.layers, FOLLOWING):
        now = len(TEXTS[row]) - FOLLOWING + step
        q, k, v, w_o = shown(row)[layer]
        since = list(range(len(TEXTS[row]) - FOLLOWING, now + 1))
        rows = [head + since for head in kept(POLICIES[at], 16, row)[layer]]
        given = (q[:, now], k[:, : now + 1], v[:, : now + 1], w_o, rows)
        where = (at, 0, row, layer, step)
        assert found.loss[where] == pytest.approx(o.eviction_loss(*given), rel=1e-3, abs=1e-4)
        assert found.bound[where] == pytest.approx(o.eps_bound(*given), rel=1e-4, abs=1e-4)


def test_the_bound_holds_and_shares_are_counted():
    found = watched()["loss"]
    assert (found.loss <= found.bound + 1e-3).all() and (found.loss[1:, 0] > 1e-2).mean() > 0.9
    np.testing.assert_allclose(found.loss[0], 0, atol=1e-4)
    adaptive, uniform = found.loss[4, 0], found.loss[1, 0]
    queries, layers = found.at_most(found.policies[4], found.policies[1])
    assert queries[0] == np.mean(adaptive <= uniform)
    assert layers[0] == np.mean(adaptive.mean(axis=-1) <= uniform.mean(axis=-1))
    with pytest.raises(ValueError, match="policy='nobody'"):
        found.at_most("nobody", found.policies[1])


def test_figures_of_a_model_on_a_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    for name, alone in watched().items():
        split = watched(mesh)[name].arrays()
        for field, values in alone.arrays().items():
            values = (
                values[ON_A_MESH] if len(values.shape) and len(values) == len(POLICIES) else values
            )
            if values.dtype.kind == "f":
                np.testing.assert_allclose(
                    split[field], values, rtol=2e-4, atol=2e-4, err_msg=f"{name} {field}"
                )
            else:
                np.testing.assert_array_equal(split[field], values, err_msg=f"{name} {field}")


@pytest.mark.parametrize("name", ["density", "retained", "similarity", "budgets", "recall", "loss"])
def test_pictures_and_tables(name, tmp_path):
    figure = watched()[name]
    figure.picture(tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    figure.picture(tmp_path / "figure.svg")
    assert (
        text == (tmp_path / "figure.svg").read_text()
        and text.startswith("<?xml")
        and "Date" not in text
    )
    assert [path.name for path in tmp_path.iterdir()] == ["figure.svg"]
    records = figure.records()
    assert records and len({tuple(each) for each in records}) == 1
    numbers = [value for each in records for value in each.values() if isinstance(value, float)]
    assert numbers and np.isfinite(numbers).all()


def test_a_picture_is_of_many_pixels(tmp_path):
    watched()["retained"].picture(tmp_path / "figure.png")
    data = (tmp_path / "figure.png").read_bytes()
    assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20], "big") == 850
    assert watched()["retained"]._repr_png_() == data, "what Jupyter shows"


def test_a_curve_of_one_point_is_drawn(tmp_path):
    jaxkv.analysis.retained(tiny.tiny(CONFIG), TEXTS[:1], shares=(1.0,)).picture(
        tmp_path / "figure.svg"
    )


def test_budgets_go_to_bases_and_names():
    assert with_budget(AdaKV(base=PyramidKV(budget=64, window=8)), 32) == AdaKV(
        base=PyramidKV(budget=32, window=8)
    )
    assert with_budget(AdaKV(budget=64), 0.5) == with_budget(AdaKV(), 0.5) == AdaKV(budget=0.5)
    assert with_budget(FullKV(), 32) == FullKV()
    omni = OmniKV(base=SnapKV(budget=64), filter_layers=(1,))
    assert with_budget(omni, 48) == OmniKV(base=SnapKV(budget=48), filter_layers=(1,))
