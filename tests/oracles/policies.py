"""The policies, from queries and keys (or lengths) to kept positions."""

import math

from oracles.ada import ada_select, protect_select
from oracles.budgets import entropy, forced_positions, gini, layer_rows, resolve_budget
from oracles.scores import knorm_scores, position_scores, window_scores
from oracles.select import top_select


def full(kv_heads, n):
    """FullKV: every position of every head; K lists and an infinite gap."""
    return [list(range(n)) for _ in range(kv_heads)], math.inf


def streaming_llm(kv_heads, n, budget, sinks=4, protect=()):
    """StreamingLLM: the first `sinks` and the most recent others, `budget` in all.

    Args:
        kv_heads: K.
        n: length of the sequence.
        budget: an int or a ratio.
        sinks: leading positions, counted inside the budget.
        protect: (start, stop) spans kept in any case.

    Returns:
        kept (K equal lists) and an infinite gap: positions are never near one another.
    """
    rows = resolve_budget(budget, n)
    always_kept = forced_positions(n, sinks, 0, protect)
    return [
        top_select(row, rows, always_kept, n)[0] for row in position_scores(kv_heads, n)
    ], math.inf


def local_window(kv_heads, n, budget, protect=()):
    """LocalWindow: the last `budget` positions; K equal lists and an infinite gap."""
    return streaming_llm(kv_heads, n, budget, 0, protect)


def knorm(k, budget, sinks=0, window=0, protect=()):
    """KNorm: the keys of smallest L2 norm, without a window.

    Args:
        k: [K, n, D].
        budget: an int or a ratio.
        sinks: leading positions kept in any case.
        window: trailing positions kept in any case.
        protect: (start, stop) spans kept in any case.

    Returns:
        (kept, gap) of one layer.
    """
    n, scores = k.shape[1], knorm_scores(k)
    rows, always_kept = resolve_budget(budget, n), forced_positions(n, sinks, window, protect)
    return _heads(scores, rows, always_kept, n, None, 0.0)


def _heads(scores, rows, always_kept, n, ada, alpha):
    """Selection in one layer: each head alone (ada None), or Ada-KV's "mix" or "protect"."""
    if ada == "mix":
        return ada_select(scores, rows, always_kept, n, alpha)
    if ada == "protect":
        return protect_select(scores, rows, always_kept, n, alpha)
    picked = [top_select(row, rows, always_kept, n) for row in scores]
    return [positions for positions, _ in picked], min(gap for _, gap in picked)


def allocation_weights(qs, ks, metric, window=32, sinks=0, protect=(), group="mean"):
    """One weight per layer: the mean over kv heads of the entropy or Gini coefficient of the window scores.

    Args:
        qs: L arrays [H, n, D].
        ks: L arrays [K, n, D].
        metric: "entropy" or "gini".
        window: rows of the observation window.
        sinks: leading positions, no candidates.
        protect: (start, stop) spans, no candidates.
        group: "mean" or "max" over the query heads of a kv head.

    Returns:
        [L] floats, from the scores before pooling, of the columns that are not forced only.
    """
    measure = {"entropy": entropy, "gini": gini}[metric]
    n = qs[0].shape[1]
    held = set(forced_positions(n, sinks, window, protect))
    weights = []
    for q, k in zip(qs, ks, strict=True):
        raw = window_scores(q, k, window, pool=None, group=group)
        weights.append(
            math.fsum(measure([row[j] for j in range(n) if j not in held]) for row in raw)
            / len(raw)
        )
    return weights


def compress(
    qs,
    ks,
    budget,
    *,
    shape="uniform",
    ada=None,
    alpha=0.2,
    beta=20,
    window=32,
    kernel=7,
    pool="max",
    group="mean",
    order="mean_first",
    sinks=0,
    protect=(),
):
    """The SnapKV family over all layers: window scores, a layer allocation, a selection within each layer.

    Args:
        qs: L arrays [H, n, D], after RoPE.
        ks: L arrays [K, n, D], after RoPE.
        budget: an int or a ratio, rows per kv head and layer on average, forced ones included.
        shape: "uniform", "linear", "geometric", "exponential", "entropy", "gini", "kvpress" or "official".
        ada: None, "mix" (Ada-KV with the safeguard of its code) or "protect" (kvpress's).
        alpha: Ada-KV's safeguard.
        beta: PyramidKV's beta.
        window: rows of the observation window, all forced.
        kernel: odd pooling width.
        pool: "max", "avg" or None.
        group: "mean" or "max" over the query heads of a kv head.
        order: "mean_first" or "pool_first".
        sinks: leading positions kept in any case.
        protect: (start, stop) spans kept in any case.

    Returns:
        kept, L lists of K ascending lists, and the gap: the smallest of all cuts, and for "entropy" and "gini", where
        the layers' budgets depend on the scores, of their rounding's margin relative to the largest layer.
    """
    n, layers = qs[0].shape[1], len(qs)
    if resolve_budget(budget, n) >= n:
        return [full(k.shape[0], n)[0] for k in ks], math.inf
    always_kept = forced_positions(n, sinks, window, protect)
    weights = None
    if shape in ("entropy", "gini"):
        weights = allocation_weights(qs, ks, shape, window, sinks, protect, group)
    rows, margin = layer_rows(shape, n, budget, layers, len(always_kept), beta, weights)
    kept, gap = [], margin / max(rows) if weights else math.inf
    for q, k, r in zip(qs, ks, rows, strict=True):
        scores = window_scores(q, k, window, kernel, pool, group, order)
        positions, own = _heads(scores, r, always_kept, n, ada, alpha)
        kept.append(positions)
        gap = min(gap, own)
    return kept, gap


def snapkv(qs, ks, budget, **options):
    """SnapKV over all layers: `compress` with the same budget in every layer."""
    return compress(qs, ks, budget, **options)


def pyramidkv(qs, ks, budget, shape="linear", **options):
    """PyramidKV over all layers: `compress` with falling budgets."""
    return compress(qs, ks, budget, shape=shape, **options)


def adakv(qs, ks, budget, shape="uniform", ada="mix", **options):
    """Ada-SnapKV (or Ada-Pyramid, by `shape`) over all layers: `compress` with adaptive budgets of the heads."""
    return compress(qs, ks, budget, shape=shape, ada=ada, **options)
