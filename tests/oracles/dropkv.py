"""DropKV's scores by its definition: attention outputs are computed anew without each row; in float64."""

import numpy as np

from oracles.scores import window_probs


def dropkv_scores(q, k, v, window=32):
    """Squared change of the window's attention outputs if one row alone is dropped; columns before the window.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        window: rows of the observation window.

    Returns:
        [K, n - min(window, n)] float64: summed over the window's queries, mean over the group's query heads.
    """
    v = np.asarray(v, np.float64)
    heads, n = np.shape(k)[:2]
    probs = window_probs(q, k, window)
    group, out = len(probs) // heads, np.zeros((heads, n - min(window, n)))
    for h, queries in enumerate(probs):
        for p in queries:
            whole = sum(p[j] * v[h // group, j] for j in range(n))
            for j in range(out.shape[1]):
                rest = [i for i in range(n) if i != j]
                without = sum(p[i] * v[h // group, i] for i in rest) / sum(p[i] for i in rest)
                out[h // group, j] += float(((without - whole) ** 2).sum()) / group
    return out
