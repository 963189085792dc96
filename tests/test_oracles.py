"""The oracles against numbers worked out by hand, the papers' claims, and the recorded decisions of kvpress."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import oracles as o
import pytest

PARITY = Path(__file__).parent / "golden" / "parity" / "p600.npz"


def _layers(seed, layers=3, heads=4, kv_heads=2, n=40, dim=8):
    """L arrays q [H, n, D] and L arrays k [K, n, D]."""
    rng = np.random.default_rng(seed)
    qs = [2 * rng.standard_normal((heads, n, dim)) for _ in range(layers)]
    return qs, [rng.standard_normal((kv_heads, n, dim)) for _ in range(layers)]


# --- attention ---------------------------------------------------------------------------------------------------


def test_softmax_by_hand():
    probs, lse = o.softmax([0.0, math.log(3.0), -math.inf])
    np.testing.assert_allclose(probs, [0.25, 0.75, 0.0], rtol=1e-15)
    assert lse == pytest.approx(math.log(4.0))
    assert o.softmax([-math.inf])[1] == -math.inf


def test_causal_attention_by_hand():
    # D = 1; query 1 sees logits 0 and ln 3, so it mixes the values 4 and 8 as 1 : 3.
    q, k, v = np.ones((1, 2, 1)), np.array([[[0.0], [math.log(3.0)]]]), np.array([[[4.0], [8.0]]])
    out, lse = o.causal_attention(q, k, v)
    np.testing.assert_allclose(out[0, :, 0], [4.0, 7.0])
    np.testing.assert_allclose(lse[0], [0.0, math.log(4.0)], atol=1e-15)


def test_attention_matches_dense_algebra_and_group_order():
    (q,), (k,) = _layers(0, layers=1, n=9)
    v = np.random.default_rng(1).standard_normal((2, 9, 5))
    out, lse = o.causal_attention(q, k, v)
    for h, g in ((0, 0), (1, 0), (2, 1), (3, 1)):
        logits = np.where(np.tri(9, dtype=bool), q[h] @ k[g].T / math.sqrt(8), -np.inf)
        np.testing.assert_allclose(lse[h], np.log(np.exp(logits).sum(-1)), rtol=1e-12)
        np.testing.assert_allclose(out[h], np.exp(logits - lse[h][:, None]) @ v[g], rtol=1e-12)
    rows, row_lse = o.attend_rows(q, k, v, [list(range(9))] * 2, positions=range(9))
    np.testing.assert_allclose(rows, out, rtol=1e-13)
    np.testing.assert_allclose(row_lse, lse, rtol=1e-13)


def test_attend_rows_sees_only_the_kept():
    (q,), (k,) = _layers(2, layers=1, n=6)
    v = np.arange(12.0).reshape(2, 6, 1)
    out, lse = o.attend_rows(q[:, :1], k, v, [[3], []])
    np.testing.assert_allclose(out[:, 0, 0], [3.0, 3.0, 0.0, 0.0])
    assert (
        lse[0, 0] == pytest.approx(float(q[0, 0] @ k[0, 3]) / math.sqrt(8))
        and lse[2, 0] == -math.inf
    )
    assert o.attend_rows(q[:, :1], k, v, [[3], [3]], positions=[2])[1].max() == -math.inf


# --- scores ------------------------------------------------------------------------------------------------------


def test_pooling_by_hand():
    np.testing.assert_allclose(o.pool_columns([3, 0, 6], 3, "max"), [3, 6, 6])
    np.testing.assert_allclose(o.pool_columns([3, 0, 6], 3, "avg"), [1, 3, 2])
    # Max pooling pads with -inf, not with 0.
    np.testing.assert_allclose(o.pool_columns([-3, -1, -6], 3, "max"), [-1, -1, -1])
    np.testing.assert_allclose(o.pool_columns([3, 0, 6], 3, None), [3, 0, 6])
    with pytest.raises(ValueError, match="odd"):
        o.pool_columns([1, 2], 2, "max")


def test_window_scores_by_hand():
    # All logits 0: of n = 4, row 2 spreads over 3 keys and row 3 over 4; their mean is 7/24 in each candidate column.
    q, k = np.zeros((2, 4, 1)), np.ones((1, 4, 1))
    np.testing.assert_allclose(o.window_scores(q, k, 2, pool=None), [[7 / 24, 7 / 24]])
    np.testing.assert_allclose(o.window_scores(q, k, 2, 3, "avg"), [[7 / 36, 7 / 36]])
    assert o.window_scores(q, k, 9).shape == (1, 0)
    np.testing.assert_allclose(o.window_probs(q, k, 2)[0], [[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4])


def test_window_scores_options_differ_as_they_should():
    (q,), (k,) = _layers(3, layers=1, n=20)
    mean, first = (
        o.window_scores(q, k, 4, 5, "max", order=order) for order in ("mean_first", "pool_first")
    )
    # The mean of maxima is never below the maximum of means; averages commute.
    assert (first >= mean - 1e-15).all() and (first > mean + 1e-6).any()
    np.testing.assert_allclose(
        o.window_scores(q, k, 4, 5, "avg"),
        o.window_scores(q, k, 4, 5, "avg", order="pool_first"),
        rtol=1e-12,
    )
    assert (o.window_scores(q, k, 4, group="max") >= mean.min()).all()
    raw = o.window_scores(q, k, 4, pool=None)
    probs = o.window_probs(q, k, 4)
    np.testing.assert_allclose(raw[1], probs[2:, :, :16].mean((0, 1)), rtol=1e-12)


# --- budgets -----------------------------------------------------------------------------------------------------


def test_ratio_budgets_are_exact():
    assert 0.29 * 100 < 29 and o.resolve_budget(0.29, 100) == 29
    assert [o.resolve_budget(0.1, n) for n in (5, 600, 1500, 3000)] == [1, 60, 150, 300]
    assert (
        o.resolve_budget(1.0, 7) == 7
        and o.resolve_budget(9, 7) == 7
        and o.resolve_budget(1, 7) == 1
    )


def test_forced_positions():
    assert o.forced_positions(10, 2, 3) == [0, 1, 7, 8, 9]
    assert o.forced_positions(10, 1, 1, [(3, 5), (-3, -1), (8, 99)]) == [0, 3, 4, 7, 8, 9]
    assert o.forced_positions(3, 5, 5) == [0, 1, 2]


def test_water_fill_by_hand():
    assert o.water_fill([4, 2, 0], 6, 4) == [4, 2, 0]
    assert o.water_fill([6, 3, 0], 9, 4) == [4, 4, 1]
    assert o.water_fill([5, 1, -3], 3, 4) == [Fraction(3), 0, 0]
    assert o.water_fill([1, 2], 0, 4) == [0, 0] and o.water_fill([1, 2], 8, 4) == [4, 4]


def test_largest_remainder_by_hand():
    assert o.largest_remainder([1.5, 1.5], 3) == ([2, 1], math.inf)
    assert o.largest_remainder([1.5, 1.5, 2], 5) == ([2, 1, 2], 0.5)
    assert o.largest_remainder([2.9, 0.1], 3, high=3)[0] == [3, 0]
    rows, margin = o.largest_remainder([1.25, 1.75, 2], 5)
    assert rows == [1, 2, 2] and margin == 0.5
    assert o.largest_remainder([0.99999999999, 1.00000000001], 2)[0] == [1, 1]
    assert o.largest_remainder([Fraction(1, 3)] * 3, 1)[0] == [1, 0, 0]
    assert o.largest_remainder([Fraction(1, 2) - Fraction(1, 10**10), Fraction(1, 2)], 1)[0] == [
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("layers", "capacity", "average"),
    [
        (32, 64, 71.5),
        (32, 96, 102.5),
        (32, 128, 133.5),
        (32, 512, 526),
        (80, 64, 78.5),
        (80, 128, 163),
    ],
)
def test_the_released_pyramid_overshoots(layers, capacity, average):
    assert sum(o.official_rows(8192, capacity, layers, 8)) / layers == average


def test_official_branches():
    assert o.official_rows(50, 64, 4, 8) == [50] * 4
    assert o.official_rows(64, 64, 4, 8) == [64] * 4 and o.official_rows(111, 64, 4, 8) == [64] * 4
    # base 56, N - W = 104 clamps max 110 and lifts min to 8; step = 96 // 3.
    assert o.official_rows(112, 64, 4, 8) == [112, 80, 48, 16]


def test_pyramid_by_hand():
    # base 20, beta 20: 39 down to 1 in steps of 38 / 3: 39, 26.33, 13.67, 1.
    assert o.layer_rows("linear", 1000, 28, 4, 8)[0] == [47, 34, 22, 9]
    # At most 30 candidates: the shift x with 30 + (26.33 + x) + (13.67 + x) + (1 + x) = 80 is 3, which leaves
    # 29.33, 16.67 and 4.
    assert o.layer_rows("linear", 38, 28, 4, 8)[0] == [38, 37, 25, 12]
    assert o.layer_rows("linear", 28, 28, 4, 8)[0] == [28] * 4


@pytest.mark.parametrize(
    "shape", ["uniform", "linear", "geometric", "exponential", "entropy", "gini"]
)
@pytest.mark.parametrize("layers", [1, 2, 5, 32])
def test_budgets_are_conserved(shape, layers):
    rng = np.random.default_rng(layers)
    for n, budget, always_kept in itertools.product((24, 65, 1000), (9, 24, 64, 0.5), (0, 8)):
        rows, _ = o.layer_rows(
            shape, n, budget, layers, always_kept, weights=list(rng.random(layers))
        )
        assert sum(rows) == layers * o.resolve_budget(budget, n)
        assert all(always_kept <= r <= n for r in rows)
        if shape in ("linear", "geometric", "exponential"):
            assert sorted(rows, reverse=True) == rows
    assert o.layer_rows(shape, 30, 4, 3, 8, weights=[1.0, 0.5, 2.0])[0] == [8, 8, 8]


def test_shapes_by_hand():
    # base 10, beta 4: 17.5 down to 2.5, a ratio of 1 / 7.
    assert o.shape_values("linear", 3, 10, 4) == [Fraction(35, 2), 10, Fraction(5, 2)]
    geometric = [float(x) for x in o.shape_values("geometric", 3, 10, 4)]
    assert sum(geometric) == pytest.approx(30) and geometric[2] / geometric[0] == pytest.approx(
        1 / 7
    )
    assert geometric[1] ** 2 == pytest.approx(geometric[0] * geometric[2])
    raw = [17.5, 2.5 + 15 * math.exp(-2.5), 2.5 + 15 * math.exp(-5)]
    exponential = [float(x) for x in o.shape_values("exponential", 3, 10, 4)]
    np.testing.assert_allclose(exponential, [30 * x / sum(raw) for x in raw])
    assert o.shape_values("gini", 2, 10, weights=[1.0, 3.0]) == [5, 15]
    assert o.shape_values("gini", 2, 10, weights=[0.0, 0.0]) == [10, 10]


def test_entropy_and_gini_by_hand():
    assert o.entropy([2, 2, 2, 2]) == pytest.approx(math.log(4)) and o.entropy([5, 0]) == 0
    assert (
        o.gini([1, 1, 1]) == 0
        and o.gini([0, 0, 0, 1]) == pytest.approx(0.75)
        and o.gini([0, 0]) == 0
    )
    assert o.gini([1, 3]) == pytest.approx(0.25)


# --- selection ---------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_position():
    assert o.top_select([1, 2, 2, 2, 0, 9], 3, [5], 6) == ([1, 2, 5], 0.5)
    assert o.top_select([1, 1, 1, 1], 2, [], 4) == ([0, 1], math.inf)
    assert o.top_select([4, 3, 1, 0], 2, [], 4) == ([0, 1], pytest.approx(2 / 3))
    assert o.top_select([4, 3, 1, 0], 1, [0, 3], 4) == ([0, 3], math.inf)


def test_gap_leaves_ties_out_but_not_their_neighbours():
    assert o.cut_gap([5, 4, 4], [4, 3]) == pytest.approx(0.2)
    assert o.cut_gap([5, 4], [4]) == pytest.approx(0.2) and o.cut_gap([4], [4]) == math.inf
    assert o.cut_gap([1.0], [1.0 - 1e-9]) < o.MIN_GAP and o.cut_gap([], [1]) == math.inf


def test_streaming_local_knorm_full():
    assert o.streaming_llm(2, 10, 6)[0] == [[0, 1, 2, 3, 8, 9]] * 2
    assert o.streaming_llm(1, 10, 4, sinks=1, protect=[(3, 5)])[0] == [[0, 3, 4, 9]]
    assert o.streaming_llm(1, 5, 6)[0] == [[0, 1, 2, 3, 4]]
    assert o.local_window(1, 10, 0.3)[0] == [[7, 8, 9]]
    k = np.array([[[3.0], [-1.0], [2.0], [1.0]]])
    assert o.knorm(k, 2) == ([[1, 3]], pytest.approx(0.5))
    assert o.knorm(k, 1)[0] == [[1]] and o.knorm(k, 2, protect=[(0, 1)])[0] == [[0, 1]]
    assert o.full(2, 3)[0] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("ada", [None, "mix", "protect"])
@pytest.mark.parametrize("shape", ["uniform", "linear", "entropy", "gini"])
def test_compress_keeps_the_budget_and_the_forced(shape, ada):
    qs, ks = _layers(5)
    options = dict(window=4, kernel=3, sinks=2, protect=[(10, 12)])
    kept, gap = o.compress(qs, ks, 14, shape=shape, ada=ada, beta=5, **options)
    assert gap > 0 and sum(len(rows) for layer in kept for rows in layer) == 3 * 2 * 14
    for rows in itertools.chain(*kept):
        assert rows == sorted(set(rows)) and set(o.forced_positions(40, 2, 4, [(10, 12)])) <= set(
            rows
        )
    assert o.compress(qs, ks, 40, shape=shape, ada=ada, **options)[0] == [[list(range(40))] * 2] * 3
    assert all(
        layer == [o.forced_positions(40, 2, 4, [(10, 12)])] * 2
        for layer in o.compress(qs, ks, 3, shape=shape, ada=ada, **options)[0]
    )


def test_named_policies_are_compress():
    qs, ks = _layers(6)
    assert o.snapkv(qs, ks, 12, window=4) == o.compress(qs, ks, 12, window=4)
    assert o.pyramidkv(qs, ks, 12, window=4) == o.compress(qs, ks, 12, shape="linear", window=4)
    assert o.adakv(qs, ks, 12, window=4) == o.compress(qs, ks, 12, ada="mix", window=4)


# --- Ada-KV ------------------------------------------------------------------------------------------------------


def test_ada_by_hand():
    scores = [[9, 8, 7, 6, 0], [5, 1, 1, 1, 0]]
    # The best 4 all are in head 0: f = (4, 0). alpha .2, base 2: targets 3.6 and .4, which round to 4 and 0.
    assert o.global_counts(scores, 4, [4], 5) == ([4, 0], pytest.approx(1 / 6))
    assert o.ada_targets([4, 0], 2) == [Fraction(18, 5), Fraction(2, 5)]
    assert o.ada_select(scores, 3, [4], 5)[0] == [[0, 1, 2, 3, 4], [4]]
    # alpha .5: targets 3 and 1; alpha 1 is uniform.
    assert o.ada_select(scores, 3, [4], 5, 0.5)[0] == [[0, 1, 2, 4], [0, 4]]
    assert o.ada_select(scores, 3, [4], 5, 1.0)[0] == [[0, 1, 4], [0, 1, 4]]


def test_ada_ties():
    # Equal everywhere: the lowest head takes all it can, then the rounding's tie goes to the lowest head too.
    assert o.global_counts([[1, 1, 1], [1, 1, 1]], 4, [], 3) == ([3, 1], math.inf)
    assert o.round_targets([Fraction(5, 2), Fraction(3, 2)]) == [3, 1]
    assert o.round_targets([Fraction(4, 3)] * 3) == [2, 1, 1]


def test_protect_by_hand():
    scores = [[9, 8, 7, 6, 0], [5, 1, 1, 1, 0]]
    # int(3 * .2) = 0, so one row is safe: the forced one. The 4 lowest of the other 8 go.
    assert o.protect_select(scores, 3, [4], 5) == ([[0, 1, 2, 3, 4], [4]], pytest.approx(1 / 6))
    # int(3 * .7) = 2: the forced row and each head's best are safe; of the other 6, the two best stay.
    assert o.protect_select(scores, 3, [4], 5, 0.7)[0] == [[0, 1, 2, 4], [0, 4]]


@pytest.mark.parametrize("seed", range(8))
def test_ada_conserves_and_never_lowers_the_mass(seed):
    rng = np.random.default_rng(seed)
    scores = rng.dirichlet(np.full(12, 0.3), size=4)
    mass = {}
    for alpha in (0.0, 0.2, 0.5, 1.0):
        kept, _ = o.ada_select(scores, 5, [11], 12, alpha)
        assert sum(map(len, kept)) == 20
        mass[alpha] = sum(scores[g][j] for g in range(4) for j in kept[g])
    assert all(mass[0.0] >= m - 1e-12 for m in mass.values())
    counts, _ = o.global_counts(scores, 20, [], 12)
    ladder = [
        o.allocation_mass(scores, o.ada_targets(counts, 5, alpha)) for alpha in (1.0, 0.7, 0.2, 0.0)
    ]
    assert all(a <= b + 1e-12 for a, b in zip(ladder, ladder[1:], strict=False))


@pytest.mark.parametrize("seed", range(8))
def test_noise_under_half_the_gap_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    scores = rng.random((3, 15))
    for select in (o.ada_select, o.protect_select):
        for alpha in (0.0, 0.2, 0.6):
            kept, gap = select(scores, 6, [0, 14], 15, alpha)
            noise = 1 + 0.49 * min(gap, 1.0) * rng.uniform(-1, 1, (10, 3, 15))
            assert all(
                select(scores * factor, 6, [0, 14], 15, alpha)[0] == kept for factor in noise
            )


# --- theorems of Ada-KV ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_theorems(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (
        2 * rng.standard_normal((3, 4)),
        rng.standard_normal((3, 6, 4)),
        rng.standard_normal((3, 6, 4)),
    )
    w_o = rng.standard_normal((3, 4, 5))
    weights = o.decode_weights(q, k)
    split = o.adaptive_allocation(weights, 7)
    best = o.eps_bound(q, k, v, w_o, o.allocation_rows(weights, split))
    # Theorem 3.3: no split has a smaller bound.
    assert o.best_allocation(weights, 7)[1] == pytest.approx(
        o.allocation_mass(weights, split), rel=1e-12
    )
    for counts in o.all_allocations(3, 7, 6)[::3]:
        top = o.allocation_rows(weights, counts)
        assert best <= o.eps_bound(q, k, v, w_o, top) + 1e-12
        assert o.retained_mass(weights, top) == pytest.approx(o.allocation_mass(weights, counts))
        drawn = [sorted(int(j) for j in rng.choice(6, c, replace=False)) for c in counts]
        # Theorem 3.1 holds for any rows, theorem 3.2 says that the top ones have the smallest bound.
        assert o.retained_mass(weights, drawn) <= o.retained_mass(weights, top) + 1e-12
        for rows in (top, drawn):
            if all(rows):
                assert (
                    o.eviction_loss(q, k, v, w_o, rows) <= o.eps_bound(q, k, v, w_o, rows) + 1e-12
                )


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_with_shared_kv_heads(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((4, 4)),
        rng.standard_normal((2, 7, 4)),
        rng.standard_normal((2, 7, 4)),
    )
    w_o = rng.standard_normal((4, 4, 6))
    kept = [[0, 3, 6], [2, 6]]
    assert 0 < o.eviction_loss(q, k, v, w_o, kept) <= o.eps_bound(q, k, v, w_o, kept)
    assert o.eviction_loss(q, k, v, w_o, [list(range(7))] * 2) == 0


def test_theorem_objects_by_hand():
    # One head, two rows of weight 1/2, outputs 2 and -2: y = 0, and keeping row 0 alone gives 2.
    q, k, v, w_o = (
        np.zeros((1, 1)),
        np.ones((1, 2, 1)),
        np.array([[[1.0], [-1.0]]]),
        np.array([[[2.0]]]),
    )
    assert o.eviction_loss(q, k, v, w_o, [[0]]) == 2 and o.output_row_norm(v, w_o) == 2
    assert o.eps_bound(q, k, v, w_o, [[0]]) == 2
    assert o.all_allocations(2, 2, 2) == [(0, 2), (1, 1), (2, 0)]
    assert o.adaptive_allocation([[0.5, 0.5], [0.9, 0.1]], 3) == (2, 1)
    assert o.allocation_mass([[0.5, 0.3, 0.2]], [Fraction(3, 2)]) == pytest.approx(0.65)


# --- the peer's recorded decisions -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "rows"), [("r0.75", 150), ("r0.9", 60)])
def test_recorded_pyramid_budgets(ratio, rows):
    with np.load(PARITY) as data:
        for name, window, beta in (
            ("pyr_w8_k5_b5", 8, 5),
            ("pyr_w8_k5_b20", 8, 20),
            ("pyr_w32_k5_b20", 32, 20),
        ):
            recorded = data[f"{name}_{ratio}__n_kept"]
            expected, _ = o.kvpress_rows(600, rows, 30, window, beta)
            np.testing.assert_array_equal(recorded, np.repeat(np.array(expected)[:, None], 3, 1))


@pytest.mark.parametrize("ratio", ["r0.75", "r0.9"])
def test_recorded_selections(ratio):
    always_kept = o.forced_positions(600, 0, 32)
    with np.load(PARITY) as data:
        for name in ("snap_w32_k5", "snap_w32_k7", "ada_snap_w32_k5_a0.2"):
            scores, kept = data[f"{name}_{ratio}__scores"], data[f"{name}_{ratio}__kept"]
            total = int(data[f"{name}_{ratio}__n_kept"][0].sum())
            for i, layer in enumerate((0, 10, 20, 29)):
                if name.startswith("ada"):
                    mine = o.protect_select(scores[i], total // 3, always_kept, 600, 0.2)[0]
                else:
                    mine = [o.top_select(row, total // 3, always_kept, 600)[0] for row in scores[i]]
                assert [list(np.flatnonzero(row)) for row in kept[layer]] == mine, (name, layer)
