"""CAKE (arXiv:2503.12491): scores by mean and variance of the window's attention; layers by entropy and variance."""

import math

import numpy as np

from oracles.budgets import forced_positions, layer_rows, resolve_budget
from oracles.policies import full
from oracles.select import top_select


def _logs(q, k, window):
    """Logarithms [H, w, n] of the last queries' probabilities over all visible keys; -inf for later ones."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    n, group = k.shape[1], len(q) // len(k)
    rows = np.arange(n - min(window, n), n)
    logits = np.einsum("hid,hjd->hij", q[:, rows], k.repeat(group, axis=0)) / np.sqrt(k.shape[2])
    logits = np.where(np.arange(n) <= rows[:, None], logits, -np.inf)
    return logits - np.logaddexp.reduce(logits, axis=2, keepdims=True)


def _variance(probs):
    """Unbiased variance over queries: of [H, w, m], the mean over pairs of half their squared difference, [H, m]."""
    w = probs.shape[1]
    pairs = [(probs[:, i] - probs[:, j]) ** 2 / 2 for i in range(w) for j in range(i)]
    return np.mean(pairs, axis=0) if pairs else np.zeros((len(probs), probs.shape[2]))


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
    probs = np.exp(_logs(q, k, window))
    before = probs.shape[2] - probs.shape[1]
    marks = (probs.mean(axis=1) + gamma * _variance(probs))[:, :before]
    marks = marks.reshape(len(k), len(q) // len(k), before).mean(axis=1)
    wide = np.pad(marks, ((0, 0), (kernel // 2, kernel // 2)))
    return sum(wide[:, at : at + before] for at in range(kernel)) / kernel


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
    logs = _logs(q, k, window)
    logs = logs[:, :, : logs.shape[2] - logs.shape[1]]
    return float(-(np.exp(logs) * logs).sum()) ** (1 / tau1) * float(
        _variance(np.exp(logs)).sum()
    ) ** (1 / tau2)


def cake(qs, ks, budget, window=32, tau1=1.0, tau2=1.0, gamma=200.0):
    """CAKE over all layers, without the cascade: rows in proportion to preferences, then the best of each head.

    Args:
        qs: L arrays [H, n, D], after RoPE.
        ks: L arrays [K, n, D], after RoPE.
        budget: an int or a ratio, rows per kv head and layer on average, the window included.
        window: rows of the observation window, all forced.
        tau1: temperature of the entropy.
        tau2: temperature of the variance.
        gamma: weight of the variance in the scores.

    Returns:
        kept, L lists of K ascending lists, and the gap: the smallest of all cuts and of the rounding of layers' rows.
    """
    n = ks[0].shape[1]
    if resolve_budget(budget, n) >= n:
        return [full(k.shape[0], n)[0] for k in ks], math.inf
    always_kept = forced_positions(n, 0, window)
    weights = [cake_preference(q, k, window, tau1, tau2) for q, k in zip(qs, ks, strict=True)]
    rows, margin = layer_rows("entropy", n, budget, len(ks), len(always_kept), weights=weights)
    kept, gap = [], margin / max(rows)
    for q, k, r in zip(qs, ks, rows, strict=True):
        picked = [
            top_select(row, r, always_kept, n) for row in cake_scores(q, k, window, gamma=gamma)
        ]
        kept.append([positions for positions, _ in picked])
        gap = min(gap, *(own for _, own in picked))
    return kept, gap
