"""CAKE (arXiv:2503.12491): scores by mean and variance of the window's attention; layers by entropy and variance."""

import math

import numpy as np

from oracles.budgets import forced_positions, layer_rows, resolve_budget
from oracles.policies import full
from oracles.scores import pool_columns, window_probs
from oracles.select import top_select


def _sample_variance(values):
    """Unbiased variance; 0 for a single value."""
    values = [float(x) for x in values]
    if len(values) == 1:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1)


def cake_scores(q, k, window=32, kernel=5, gamma=200.0):
    """Scores of the columns before the window: avgpool(mean_i A + gamma Var_i A), mean over the group.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: rows of the observation window.
        kernel: odd pooling width.
        gamma: weight of the variance.

    Returns:
        [K, n - min(window, n)] float64.
    """
    probs = window_probs(q, k, window)
    heads, w, n = probs.shape
    kv_heads, columns = np.shape(k)[0], n - w
    each = np.zeros((heads, columns))
    for h in range(heads):
        for j in range(columns):
            column = [float(x) for x in probs[h, :, j]]
            each[h, j] = math.fsum(column) / w + gamma * _sample_variance(column)
        each[h] = pool_columns(each[h], kernel, "avg")
    return each.reshape(kv_heads, heads // kv_heads, columns).mean(axis=1)


def cake_preference(q, k, window=32, tau1=1.0, tau2=1.0):
    """A layer's preference: entropy^(1/tau1) * variance^(1/tau2) of the window's attention to the columns before it.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: rows of the observation window.
        tau1: temperature of the entropy, -sum A log A over heads, rows and columns, A over all keys.
        tau2: temperature of the variance over rows, summed over heads and columns.

    Returns:
        A float.
    """
    probs = window_probs(q, k, window)
    heads, w, n = probs.shape
    cells = [float(x) for x in probs[:, :, : n - w].reshape(-1)]
    entropy = -math.fsum(x * math.log(x) for x in cells if x > 0)
    variance = math.fsum(_sample_variance(probs[h, :, j]) for h in range(heads) for j in range(n - w))
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


def cake(qs, ks, budget, window=32, tau1=1.0, tau2=1.0):
    """CAKE over all layers, without the cascade: rows in proportion to preferences, then the best of each head.

    Args:
        qs: L arrays [H, n, D], after RoPE.
        ks: L arrays [K, n, D], after RoPE.
        budget: an int or a ratio, rows per kv head and layer on average, the window included.
        window: rows of the observation window, all forced.
        tau1: temperature of the entropy.
        tau2: temperature of the variance.

    Returns:
        kept, L lists of K ascending lists, and the gap: the smallest of all cuts and of the rounding of layers' rows.
    """
    n = ks[0].shape[1]
    if resolve_budget(budget, n) >= n:
        return [full(k.shape[0], n)[0] for k in ks], math.inf
    forced = forced_positions(n, 0, window)
    weights = [cake_preference(q, k, window, tau1, tau2) for q, k in zip(qs, ks, strict=True)]
    rows, margin = layer_rows("entropy", n, budget, len(ks), len(forced), weights=weights)
    kept, gap = [], margin / max(rows)
    for q, k, r in zip(qs, ks, rows, strict=True):
        picked = [top_select(row, r, forced, n) for row in cake_scores(q, k, window)]
        kept.append([positions for positions, _ in picked])
        gap = min(gap, *(own for _, own in picked))
    return kept, gap
