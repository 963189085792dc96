"""Scores of prompt positions per kv head: SnapKV's window score, key norms, recency."""

import math

import numpy as np

from oracles.attention import causal_probs


def window_probs(q, k, window):
    """Probabilities of the last min(window, n) queries over all visible keys, the window's own included.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: rows of the observation window.

    Returns:
        [H, min(window, n), n] float64.
    """
    n = np.shape(q)[1]
    w = min(window, n)
    return causal_probs(q, k, rows=range(n - w, n))[0]


def pool_columns(row, kernel, pool):
    """Pool one row of candidate columns, stride 1, same length.

    Max pooling pads with -inf. Average pooling pads with zeros and always divides by the kernel, so that the edges are
    biased low, as torch's avg_pool1d does.

    Args:
        row: [m] floats.
        kernel: odd width.
        pool: "max", "avg" or None (no pooling).

    Returns:
        [m] float64.
    """
    if kernel % 2 != 1:
        raise ValueError("the kernel must be odd")
    row = [float(x) for x in row]
    if pool is None:
        return np.array(row, np.float64)
    half, out = kernel // 2, []
    for j in range(len(row)):
        inside = [row[i] for i in range(j - half, j + half + 1) if 0 <= i < len(row)]
        out.append(max(inside) if pool == "max" else math.fsum(inside) / kernel)
    return np.array(out, np.float64)


def _group(per_head, kv_heads, how):
    """Reduce [H, m] over the query heads of each kv head to [K, m] by "mean" or "max"."""
    heads, columns = per_head.shape
    group = heads // kv_heads
    out = np.zeros((kv_heads, columns))
    for g in range(kv_heads):
        for j in range(columns):
            members = [float(per_head[g * group + r, j]) for r in range(group)]
            out[g, j] = max(members) if how == "max" else math.fsum(members) / group
    return out


def window_scores(q, k, window, kernel=7, pool="max", group="mean", order="mean_first"):
    """SnapKV's score of the candidate columns, those before the window.

    "mean_first": mean over the window's rows, then over the group, then pool (the released code of SnapKV and Ada-KV).
    "pool_first": pool each query row, then mean over the rows, then over the group (Ada-KV's Algorithm 2, line 4).

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: rows of the observation window.
        kernel: odd pooling width.
        pool: "max", "avg" or None.
        group: "mean" or "max" over the query heads of a kv head.
        order: "mean_first" or "pool_first".

    Returns:
        [K, n - min(window, n)] float64.
    """
    probs = window_probs(q, k, window)
    heads, w, n = probs.shape
    kv_heads, columns = np.shape(k)[0], n - w
    mean = np.zeros((heads, columns))
    for h in range(heads):
        rows = [probs[h, i, :columns] for i in range(w)]
        if order == "pool_first":
            rows = [pool_columns(row, kernel, pool) for row in rows]
        for j in range(columns):
            mean[h, j] = math.fsum(float(row[j]) for row in rows) / w
    grouped = _group(mean, kv_heads, group)
    if order == "pool_first":
        return grouped
    for g in range(kv_heads):
        grouped[g] = pool_columns(grouped[g], kernel, pool)
    return grouped


def knorm_scores(k):
    """Minus the L2 norm of each key: [K, n, D] to [K, n] (rotation does not change it)."""
    k = np.asarray(k, np.float64)
    out = np.zeros(k.shape[:2])
    for g in range(k.shape[0]):
        for j in range(k.shape[1]):
            out[g, j] = -math.sqrt(math.fsum(float(x) ** 2 for x in k[g, j]))
    return out


def position_scores(kv_heads, n):
    """Recency as a score, [K, n]: the last positions win."""
    return np.array([[float(j) for j in range(n)] for _ in range(kv_heads)]).reshape(kv_heads, n)
