"""Budgets of layers by variance: exact whatever the variances, and what D2O's appendix proves about water-filling."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles as o
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.policies import (
    LayerBudgetInputs,
    OfficialVarianceLayers,
    ScorerInputs,
    VarianceLayers,
    VarianceWeighting,
)

KINDS = [each.value for each in VarianceWeighting]
LAYERS, LENGTH = 6, 400
# Zeros, the ordinary, and what squares of sums over many queries can reach.
variances = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1), st.floats(0, 1e4), st.floats(0, 1e37)),
    min_size=LAYERS,
    max_size=LAYERS,
)


def rows(kind, stats, budget, length=LENGTH, always_kept=5, dense=()):
    weights = np.asarray(stats, np.float64)[:, None]
    layers = VarianceLayers(statistic=kind, dense_layers=dense)
    one = np.asarray
    of = LayerBudgetInputs(one([budget]), one([length]), one([always_kept]), len(stats), 1, weights)
    return layers.compute_layer_entries(of)[:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(stats=variances, budget=st.integers(6, LENGTH + 20))
def test_the_sum_is_exact_for_any_variances(kind, stats, budget):
    kept = rows(kind, stats, min(budget, LENGTH))
    assert sum(kept) == LAYERS * min(budget, LENGTH)
    assert all(6 <= count <= LENGTH for count in kept)
    # The more uneven a layer, the fewer rows; equal ones differ by a rounding at most.
    for a, b in zip(
        np.argsort(stats, kind="stable"), np.argsort(stats, kind="stable")[1:], strict=False
    ):
        assert kept[a] >= kept[b] - 1


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    stats=st.lists(st.floats(0, 3), min_size=LAYERS, max_size=LAYERS), budget=st.integers(6, LENGTH)
)
def test_rows_agree_with_the_oracle(kind, stats, budget):
    expected, margin = o.variance_rows(stats, LENGTH, budget, kind, 5)
    if margin > 1e-6:
        assert rows(kind, stats, budget) == expected


def test_dense_layers_are_paid_for():
    stats = [0.1, 0.9, 0.3, 0.5, 0.2, 0.7]
    kept = rows("headnorm", stats, 200, dense=(0, -1))
    assert kept[0] == kept[-1] == LENGTH and sum(kept) == LAYERS * 200
    expected, _ = o.variance_rows(stats, LENGTH, 200, "headnorm", 5, dense=(0, 5))
    assert kept == expected
    with pytest.raises(ValueError, match="dense_layers.*name fewer"):
        rows("headnorm", stats, 60, dense=(0, 1))
    with pytest.raises(ValueError, match="dense_layers.*6 layers"):
        rows("headnorm", stats, 200, dense=(6,))


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        rows("headnorm", [0.1, np.nan, 0.2], 100)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.sampled_from((80, 160, 320)))
def test_the_published_sizes(stats, budget):
    layers, one = OfficialVarianceLayers(), np.asarray
    weights = np.asarray(stats)[:, None]
    kept = layers.compute_layer_entries(
        LayerBudgetInputs(one([budget]), one([LENGTH]), one([5]), 5, 1, weights)
    )[:, 0]
    expected, margin = o.official_variance_rows(
        stats, LENGTH, budget / LENGTH / 2, budget / LENGTH / 2
    )
    if margin > 1e-9:
        assert kept.tolist() == expected
    assert (
        kept.sum()
        <= layers.bound_total_entries(one([budget]), one([LENGTH]), one([5]), layers=5)[0]
    )


@settings(max_examples=40)
@given(st.lists(st.floats(0, 3), min_size=6, max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_the_published_sizes_stay_below_their_bound_whatever_is_forced(stats, share, of_it):
    """Rows that must stay can be nearly all of the budget: the pool that layers share has room for them."""
    layers, one = OfficialVarianceLayers(), np.asarray
    budget = max(1, int(share * LENGTH))
    always_kept = int(of_it * budget)
    weights = np.asarray(stats)[:, None]
    kept = layers.compute_layer_entries(
        LayerBudgetInputs(one([budget]), one([LENGTH]), one([always_kept]), 6, 1, weights)
    )[:, 0]
    assert (
        kept.sum()
        <= layers.bound_total_entries(one([budget]), one([LENGTH]), one([always_kept]), layers=6)[0]
    )


@pytest.mark.parametrize("kind", ("headnorm", "raw"))
def test_the_statistic_agrees_with_the_oracle(kind):
    rng = np.random.default_rng(2)
    q, k = 1.5 * rng.standard_normal((4, 30, 8)), rng.standard_normal((2, 30, 8))
    sums = np.pad(
        o.column_sums(q, k).reshape(1, 2, 2, 30), ((0, 0),) * 3 + ((0, 10),), constant_values=7.0
    )
    length = jnp.asarray([30], jnp.int32)
    nothing = jnp.zeros((1, 2, 40), jnp.float32), jnp.zeros((1, 1, 40), bool)
    keys = jnp.zeros((1, 2, 40, 8), jnp.float32)
    seen = ScorerInputs(
        q_positions=jnp.zeros((1, 0), jnp.int32),
        k=keys,
        v=keys,
        length=length,
        layer=jnp.int32(0),
        key=jax.random.key(0),
        extras={"sums": jnp.asarray(sums, jnp.float32)},
    )
    layers = VarianceLayers(statistic=kind)
    ours = layers.compute_layer_weight(layers.compute_head_statistic(*nothing, seen).reshape(1, -1))
    np.testing.assert_allclose(ours, [o.layer_statistic(q, k, kind)], rtol=1e-5)


def _quality(heights, rates, sizes):
    return sum(h * (1 - np.exp(-k * s)) for h, k, s in zip(heights, rates, sizes, strict=True))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.001, 0.1)), min_size=2, max_size=6),
    st.floats(1, 2000),
)
def test_water_filling_beats_an_even_split(layers, total):
    """D2O's appendix A.9: for information H (1 - exp(-k S)) the optimum under a total, cut at 0, is never worse than
    the same for all. That is a statement about this optimum; the softmax of variances is another split."""
    heights, rates = zip(*layers, strict=True)
    # Two layers of the highest rate take 2,000 only at logarithms far below.
    low, high = -1000.0, 60.0
    sizes = lambda log: [max(0.0, (np.log(h * k) - log) / k) for h, k in layers]  # noqa: E731
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(sizes(middle)) > total else (low, middle)
    best = sizes(high)
    assert sum(best) == pytest.approx(total, rel=1e-6)
    even = [total / len(layers)] * len(layers)
    assert _quality(heights, rates, best) >= _quality(heights, rates, even) - 1e-9
