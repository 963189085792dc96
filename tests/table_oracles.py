"""What each row of the policy table should keep, put together from the oracles' pieces."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracles as o

WINDOW = 8
# (q, k, budget) of all layers, without batch or padding, to (kept[L][K], gap).
Oracle = Callable[
    [list[np.ndarray], list[np.ndarray], int | float], tuple[list[list[list[int]]], float]
]


def each(select) -> Oracle:
    """Layers that do not know of each other: `select(layer, q, k, budget)` for each, and the smallest gap."""

    def oracle(qs, ks, budget):
        picked = [
            select(layer, q, k, budget) for layer, (q, k) in enumerate(zip(qs, ks, strict=True))
        ]
        return [kept for kept, _ in picked], min(gap for _, gap in picked)

    return oracle


def ada_knorm(layer, q, k, budget):
    n = k.shape[1]
    return o.ada_select(o.knorm_scores(k), o.resolve_budget(budget, n), [], n)


def random(layer, q, k, budget):
    # The samples are the library's promise: by key, layer, position and head; which of them win is worked out here.
    heads, n, _ = k.shape
    key = jax.random.fold_in(jax.random.key(0), layer)
    draws = np.stack(
        [jax.random.uniform(jax.random.fold_in(key, j), (heads,)) for j in range(n)], axis=1
    )
    rows = o.resolve_budget(budget, n)
    picked = [o.top_select(row, rows, [], n) for row in draws.astype(np.float64)]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def recent(rows, sinks, share):
    return max(1, int((rows - sinks) * share))


def heavy(sinks=0, share=0.5, mean=False, ada=False):
    """Cumulative attention, uniform layers: sinks, recent rows, and the best of the others."""

    def select(layer, q, k, budget):
        n = k.shape[1]
        rows = o.resolve_budget(budget, n)
        scores = o.cumulative_scores(q, k)
        if mean:
            scores = scores / (n - np.arange(n))
        always_kept = o.forced_positions(n, sinks, recent(rows, sinks, share), ())
        if ada:
            return o.ada_select(scores, rows, always_kept, n)
        picked = [o.top_select(row, rows, always_kept, n) for row in scores]
        return [kept for kept, _ in picked], min(gap for _, gap in picked)

    return each(select)


def d2o(kind):
    """Layers by variance of column sums, sinks and a quarter of the rest for recent rows."""

    def oracle(qs, ks, budget):
        n = ks[0].shape[1]
        stats = [o.layer_statistic(q, k, kind) for q, k in zip(qs, ks, strict=True)]
        rows, margin = o.variance_rows(stats, n, budget, kind, len(o.forced_positions(n, 4, 1, ())))
        kept, gap = [], margin / n
        for q, k, r in zip(qs, ks, rows, strict=True):
            always_kept = o.forced_positions(n, 4, recent(r, 4, 0.25), ())
            picked = [o.top_select(row, r, always_kept, n) for row in o.cumulative_scores(q, k)]
            kept.append([positions for positions, _ in picked])
            gap = min(gap, *(own for _, own in picked))
        return kept, gap

    return oracle


def ada_variance(qs, ks, budget):
    n = ks[0].shape[1]
    stats = [o.layer_statistic(q, k, "headnorm") for q, k in zip(qs, ks, strict=True)]
    always_kept = o.forced_positions(n, 0, WINDOW, ())
    rows, margin = o.variance_rows(stats, n, budget, "headnorm", len(always_kept))
    picked = [
        o.ada_select(
            o.window_scores(q, k, WINDOW, 7, "max", "mean", "mean_first"), r, always_kept, n
        )
        for q, k, r in zip(qs, ks, rows, strict=True)
    ]
    return [kept for kept, _ in picked], min(margin / n, *(gap for _, gap in picked))


def tova(layer, q, k, budget):
    n = k.shape[1]
    rows = o.resolve_budget(budget, n)
    scores = o.last_scores(q, k)
    picked = [o.top_select(row, rows, [n - 1], n) for row in scores]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def critical_norms(k):
    """What stands for the values' norms where there is no model: any positive numbers will do."""
    return 1 + np.abs(k).sum(axis=-1)


def critical(ada=False):
    def select(layer, q, k, budget):
        n = k.shape[1]
        rows, always_kept = o.resolve_budget(budget, n), o.forced_positions(n, 0, WINDOW, ())
        scores = o.window_scores(q, k, WINDOW, 7, "max", "mean", "mean_first")
        budgets, gap = [rows] * len(k), np.inf
        if ada:
            kept, gap = o.ada_select(scores, rows, always_kept, n)
            budgets = [len(head) for head in kept]
        kept, own = o.critical_select(scores, critical_norms(k), budgets, always_kept, n)
        return kept, min(gap, own)

    return each(select)


def _together(scores, norms, rows, always_kept, below):
    """CriticalKV where heads keep the same rows, all of them among `below`: each stage goes by the mean over heads."""
    first = [
        float(np.mean([head[j] for head in scores])) if j not in always_kept else 0.0 for j in below
    ]
    pairs = list(zip(scores, norms, strict=True))
    both = [
        float(np.mean([(head[j] + 1e-4) * norm[j] for head, norm in pairs]))
        if j not in always_kept
        else 0.0
        for j in below
    ]
    must = [at for at, j in enumerate(below) if j in always_kept]
    safe, gap = o.top_select(first, rows // 2, must, len(below))
    chosen, own = o.top_select(both, rows, safe, len(below))
    return [below[at] for at in chosen], min(gap, own)


def critical_tova(layer, q, k, budget):
    n, heads = k.shape[1], len(k)
    rows = o.resolve_budget(budget, n)
    scores = o.causal_probs(q, k, rows=[n - 1])[0][:, 0].reshape(heads, -1, n).mean(axis=1)
    kept, gap = _together(scores, critical_norms(k), rows, {n - 1}, list(range(n)))
    return [kept] * heads, gap


def critical_pyramid_infer(qs, ks, budget):
    n, heads = ks[0].shape[1], len(ks[0])
    if o.resolve_budget(budget, n) >= n:
        return [o.full(heads, n)[0] for _ in ks], np.inf
    always_kept = set(o.forced_positions(n, 0, WINDOW, ()))
    counts, _ = o.layer_rows("linear", n, budget, len(ks), len(always_kept), 20)
    below, kept, gap = list(range(n)), [], np.inf
    for q, k, rows in zip(qs, ks, counts, strict=True):
        scores = o.window_scores(q, k, WINDOW, pool=None)
        below, own = _together(scores, critical_norms(k), int(rows), always_kept, below)
        kept.append([below] * heads)
        gap = min(gap, own)
    return kept, gap


def critical_streaming(layer, q, k, budget):
    n, heads = k.shape[1], len(k)
    scores = np.broadcast_to(np.arange(n, dtype=np.float64), (heads, n))
    always_kept = o.forced_positions(n, 2, 1, ())
    return o.critical_select(
        scores, critical_norms(k), [o.resolve_budget(budget, n)] * heads, always_kept, n
    )


def keydiff(layer, q, k, budget):
    n = k.shape[1]
    picked = [o.top_select(row, o.resolve_budget(budget, n), [], n) for row in o.keydiff_scores(k)]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def threshold_keydiff(layer, q, k, budget):
    n = k.shape[1]
    rows, always_kept = o.resolve_budget(budget, n), o.forced_positions(n, 2, WINDOW, ())
    picked = [o.threshold_select([row], rows, -0.1, always_kept, n) for row in o.keydiff_scores(k)]
    return [kept for (kept,), _, _ in picked], min(gap for _, gap, _ in picked)


def _behind_sinks(scores, budget, n, gap=np.inf):
    """Each head's best rows by `scores`, behind four sinks that stay; the smaller of `gap` and that at the cuts."""
    always_kept = o.forced_positions(n, 4, 0, ())
    picked = [o.top_select(row, o.resolve_budget(budget, n), always_kept, n) for row in scores]
    return [kept for kept, _ in picked], min(gap, *(own for _, own in picked))


def lagkv(**options):
    """LagKV, whose values are the keys here."""

    def select(layer, q, k, budget):
        scores, gap = o.lag_scores(k, k, **options)
        return _behind_sinks(scores, budget, k.shape[1], gap)

    return each(select)


def curdkv(**options):
    """CurDKV, whose values are the keys here."""
    return each(
        lambda layer, q, k, budget: _behind_sinks(o.cur_scores(k, k, **options), budget, k.shape[1])
    )


def capkv(**options):
    """CAPKV, whose values are the keys here, with mean queries as a scorer is given them here."""

    def select(layer, q, k, budget):
        means = [mean for mean, _ in prompt_moments(q)]
        return _behind_sinks(o.cap_scores(means, k, k, **options), budget, k.shape[1])

    return each(select)


@each
def triattention(layer, q, k, budget):
    """TriAttention with the last queries' statistics, without RoPE: what a scorer is given here."""
    group, n, dim = len(q) // len(k), k.shape[1], k.shape[2]
    of_heads = [o.query_statistics(head[-WINDOW:]) for head in q]
    still = np.zeros(dim // 2), np.ones(dim // 2)
    scores = [
        o.tri_scores(of_heads[head * group : (head + 1) * group], keys, n, range(n), *still)
        for head, keys in enumerate(k)
    ]
    return _behind_sinks(scores, budget, n)


@each
def qfilters(layer, q, k, budget):
    """QFilters without a file, with queries as they come: what a scorer is given here."""
    group, n = len(q) // len(k), k.shape[1]
    filters = [o.prompt_filter(q[head * group : (head + 1) * group]) for head in range(len(k))]
    rows = o.resolve_budget(budget, n)
    picked = [o.top_select(row, rows, [], n) for row in o.qfilter_scores(filters, k)]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def prompt_moments(q, sinks=4):
    """Mean and covariance of each query head's queries `[H, n, D]`, as they come: what a scorer is given here."""
    return [o.mean_and_covariance(head[sinks:]) for head in q]


def expected(ada=False, **options):
    """ExpectedAttention, each head alone or competing with the layer's others."""

    def select(layer, q, k, budget):
        n = k.shape[1]
        rows, always_kept = o.resolve_budget(budget, n), o.forced_positions(n, 4, 0, ())
        scores = o.expected_scores(prompt_moments(q), k, k, **options)
        if ada:
            return o.ada_select(scores, rows, always_kept, n)
        picked = [o.top_select(row, rows, always_kept, n) for row in scores]
        return [kept for kept, _ in picked], min(gap for _, gap in picked)

    return each(select)


def defensive(over_layers=False, stage=None):
    """DefensiveKV: heads compete without a guaranteed share, within each layer or over all of them."""

    def oracle(qs, ks, budget):
        n = ks[0].shape[1]
        rows, always_kept = o.resolve_budget(budget, n), o.forced_positions(n, 0, WINDOW, ())
        scores = [
            o.defensive_scores(q, k, critical_norms(k), WINDOW) for q, k in zip(qs, ks, strict=True)
        ]
        gap = math.inf
        if stage is not None:
            for each, q, k in zip(scores, qs, ks, strict=True):
                marked, own = o.defensive_first(q, k, WINDOW, stage)
                gap = min(gap, own)
                for head, places in zip(each, marked, strict=True):
                    # All of them are kept: which comes first does not matter.
                    head[places[: max(rows - len(always_kept), 0)]] = 1e9
        if over_layers:
            kept, own = o.global_select(scores, rows, always_kept, n)
            return kept, min(gap, own)
        picked = [o.ada_select(each, rows, always_kept, n, 0.0) for each in scores]
        return [kept for kept, _ in picked], min(gap, *(own for _, own in picked))

    return oracle


def dropkv(layer, q, k, budget):
    n = k.shape[1]
    rows, always_kept = o.resolve_budget(budget, n), o.forced_positions(n, 0, WINDOW, ())
    picked = [o.top_select(row, rows, always_kept, n) for row in o.dropkv_scores(q, k, k, WINDOW)]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def rkv(layer, q, k, budget):
    n = k.shape[1]
    rows, always_kept = o.resolve_budget(budget, n), o.forced_positions(n, 0, WINDOW, ())
    scores, gap = o.rkv_scores(q, k, WINDOW)
    picked = [o.top_select(row, rows, always_kept, n) for row in scores]
    return [kept for kept, _ in picked], min(gap, *(own for _, own in picked))


def chunkkv(layer, q, k, budget):
    n = k.shape[1]
    always_kept = o.forced_positions(n, 2, WINDOW, ())
    return o.chunk_select(
        o.window_scores(q, k, WINDOW), o.resolve_budget(budget, n), always_kept, n, 5
    )


def chunkkv_entropy(layer, q, k, budget):
    n = k.shape[1]
    always_kept = o.forced_positions(n, 0, WINDOW, ())
    scores = o.window_scores(q, k, WINDOW, pool=None)
    return o.gated_chunk_select(scores, o.resolve_budget(budget, n), always_kept, n, 5, 2)


def compactor(layer, q, k, budget):
    (heads, n, dim), rows = k.shape, o.resolve_budget(budget, k.shape[1])
    # The projections are the library's promise, by key and layer.
    draws = np.asarray(
        jax.random.normal(jax.random.fold_in(jax.random.key(0), layer), (heads, dim, 6)), np.float64
    )
    blending = 1 - budget if isinstance(budget, float) else 0.35
    scores = o.compactor_scores(q, k, k, k, draws, size=16, first=2, last=4, blending=blending)
    padded = np.pad(scores, ((0, 0), (2, 4)))
    picked = [o.top_select(row, rows, o.forced_positions(n, 2, 4, ()), n) for row in padded]
    return [kept for kept, _ in picked], min(gap for _, gap in picked)


def global_keydiff(qs, ks, budget):
    n = ks[0].shape[1]
    return o.global_select(
        [o.keydiff_scores(k) for k in ks], o.resolve_budget(budget, n), [], n, alpha=0.3
    )


def replayed(k):
    """Numbers `[..., K, n]` in place of the attention of a second pass, for keys [..., K, n, D]."""
    return np.abs(k[..., 0]) + np.abs(k[..., 1])


def kvzip(qs, ks, budget):
    n = ks[0].shape[1]
    return o.global_select(
        [replayed(k) for k in ks], o.resolve_budget(budget, n), [0, 1], n, alpha=0
    )


def global_heavy(qs, ks, budget):
    n = ks[0].shape[1]
    rows = o.resolve_budget(budget, n)
    always_kept = o.forced_positions(n, 0, recent(rows, 0, 0.5), ())
    return o.global_select(
        [o.cumulative_scores(q, k) for q, k in zip(qs, ks, strict=True)], rows, always_kept, n
    )


def window(oracle=o.snapkv, **options: Any) -> Oracle:
    """An oracle of the SnapKV family with these options."""

    def select(qs, ks, budget):
        return oracle(qs, ks, budget, window=WINDOW, **options)

    return select
