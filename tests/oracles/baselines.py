"""Baselines: CaM's value merging, CriticalKV's two stages, PyramidInfer's nested layers."""

import math
from fractions import Fraction

import numpy as np

from oracles.budgets import forced_positions, layer_rows, resolve_budget
from oracles.policies import full
from oracles.scores import window_probs, window_scores
from oracles.select import top_select


def _merge_share(own, base):
    """`own` of `base`, clipped to [0, 1]; 0 of 0 is 0, anything else of 0 is 1."""
    if base == 0:
        return 0.0 if own == 0 else 1.0
    return min(max(own / base, 0.0), 1.0)


def cam_values(q, k, v, window, start_ratio=0.1, numbers=None):
    """CaM over a whole prompt: every row from the start to the window adds a share of its value to the next `window`.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        window: rows of the observation window, and rows merged into.
        start_ratio: share of n that is left alone, rounded up.
        numbers: [K, n] numbers in [0, 1): a row is merged iff its number is below its probability; None multiplies by
            the probability instead (the expected form).

    Returns:
        The new v [K, n, D], float64.
    """
    probs = window_probs(q, k, window)
    heads, w, n = probs.shape
    out = np.array(v, np.float64)
    kv_heads = len(out)
    group = heads // kv_heads
    start = math.ceil(Fraction(str(start_ratio)) * n)
    for g in range(kv_heads):
        mass = [0.0] * n
        for j in range(n):
            for h in range(g * group, (g + 1) * group):
                mass[j] += sum(float(probs[h, i, j]) for i in range(w))
            mass[j] /= w * group
        head = max(mass[:start], default=0.0)
        for i in range(start, n - window):
            share = _merge_share(mass[i], max(head, max(mass[i : i + window], default=0.0)))
            factor = share if numbers is None else float(numbers[g][i] < share)
            source = out[g, i].copy()
            for j in range(i + 1, i + window + 1):
                out[g, j] += factor * source / window
    return out


def value_norms(v, w_o):
    """CriticalKV's norms: of each value after the output projection, L1, averaged over the group.

    Args:
        v: [K, n, D].
        w_o: [H, D, E].

    Returns:
        [K, n] float64.
    """
    v, w_o = np.asarray(v, np.float64), np.asarray(w_o, np.float64)
    group = len(w_o) // len(v)
    out = np.zeros(v.shape[:2])
    for g in range(len(v)):
        for j in range(v.shape[1]):
            for h in range(g * group, (g + 1) * group):
                out[g, j] += sum(abs(float(x)) for x in v[g, j] @ w_o[h]) / group
    return out


def critical_select(scores, norms, budgets, always_kept, n, first=0.5, epsilon=1e-4):
    """CriticalKV's selection: a first share by score, the rest by score times value norm.

    Args:
        scores: [K, n] (or [K, columns before the window]; forced positions are not read).
        norms: [K, n] of `value_norms`.
        budgets: [K] ints, rows of each head, forced ones included.
        always_kept: positions kept in every head.
        n: length of the sequence.
        first: share of a head's rows chosen by score, the forced ones counted first.
        epsilon: added to the score before it is multiplied.

    Returns:
        kept, K ascending lists of max(budget, forced) positions (at most n), and the gap: the smallest at both cuts.
    """
    held, kept, gap = set(always_kept), [], math.inf
    for g, rows in enumerate(budgets):
        safe, own = top_select(scores[g], int(Fraction(str(first)) * int(rows)), always_kept, n)
        both = [
            0.0 if j in held else (float(scores[g][j]) + epsilon) * float(norms[g][j])
            for j in range(n)
        ]
        positions, other = top_select(both, rows, safe, n)
        kept.append(positions)
        gap = min(gap, own, other)
    return kept, gap


def pyramid_infer(qs, ks, budget, window, beta=20):
    """PyramidInfer: PyramidKV's linear budgets, one set per layer, each chosen among the rows of the layer below.

    Args:
        qs: L arrays [H, n, D], after RoPE.
        ks: L arrays [K, n, D], after RoPE.
        budget: an int or a ratio, rows per kv head and layer on average, forced ones included.
        window: rows of the observation window, all forced.
        beta: PyramidKV's beta.

    Returns:
        kept, L lists of K equal ascending lists, and the gap: the smallest of all cuts.
    """
    n, layers = qs[0].shape[1], len(qs)
    if resolve_budget(budget, n) >= n:
        return [full(k.shape[0], n)[0] for k in ks], math.inf
    always_kept = forced_positions(n, 0, window)
    rows, _ = layer_rows("linear", n, budget, layers, len(always_kept), beta)
    below, kept, gap = list(range(n)), [], math.inf
    for q, k, r in zip(qs, ks, rows, strict=True):
        scores = window_scores(q, k, window, pool=None)
        mean = [sum(float(row[j]) for row in scores) / len(scores) for j in range(scores.shape[1])]
        # Indices into the rows of the layer below: the window comes last in every layer.
        own = [mean[j] if j < len(mean) else 0.0 for j in below]
        chosen, edge = top_select(
            own, r, [i for i, j in enumerate(below) if j in set(always_kept)], len(below)
        )
        below = [below[i] for i in chosen]
        kept.append([list(below) for _ in range(k.shape[0])])
        gap = min(gap, edge)
    return kept, gap
