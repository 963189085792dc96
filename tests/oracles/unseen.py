"""Scores that do not follow the prompt's last queries: KeyDiff, ExpectedAttention, DefensiveKV; in float64."""

import math

import numpy as np

from oracles.ada import ada_select
from oracles.scores import pool_columns, window_probs


def keydiff_scores(k):
    """Minus the cosine of each key with the mean of the head's normalised keys: [K, n] from [K, n, D]."""
    out = []
    for head in np.asarray(k, np.float64):
        unit = [row / math.sqrt(sum(x * x for x in row)) for row in head]
        anchor = sum(unit) / len(unit)
        anchor = anchor / math.sqrt(sum(x * x for x in anchor))
        out.append([-float(row @ anchor) for row in unit])
    return np.array(out)


def mean_and_covariance(q):
    """Mean [D] and population covariance [D, D] of queries [n, D]; zeros for none."""
    q = np.asarray(q, np.float64)
    if not len(q):
        return np.zeros(q.shape[1]), np.zeros((q.shape[1],) * 2)
    mean = q.sum(axis=0) / len(q)
    return mean, sum(np.outer(row - mean, row - mean) for row in q) / len(q)


def mean_rotation(frequencies, first, positions, factor=1.0):
    """Mean of the rotation matrices [D, D] of `positions` positions from `first` on: pairs of channels (i, i + D/2)."""
    half = len(frequencies)
    matrix = np.zeros((2 * half, 2 * half))
    for position in range(first, first + positions):
        for i, frequency in enumerate(frequencies):
            c, s = math.cos(position * frequency) * factor, math.sin(position * frequency) * factor
            matrix[i, i] += c
            matrix[i, i + half] -= s
            matrix[i + half, i] += s
            matrix[i + half, i + half] += c
    return matrix / positions


def expected_scores(moments, k, v, *, sinks=4, epsilon=0.0, covariance=True, value_norms=True):
    """ExpectedAttention's scores of one layer.

    Args:
        moments: for each of H query heads the mean [D] and covariance [D, D] of its rotated queries.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        sinks: leading positions that take no part; their score is 0.
        epsilon: added to the expected attention.
        covariance: count the covariance.
        value_norms: multiply by the value's L2 norm.

    Returns:
        [K, n] float64.
    """
    heads, n, dim = np.shape(k)
    group, out = len(moments) // heads, np.zeros((heads, n))
    for head in range(heads):
        for mean, spread in moments[head * group : (head + 1) * group]:
            logits = [
                float(mean @ row) / math.sqrt(dim)
                + (float(row @ spread @ row) / (2 * dim) if covariance else 0.0)
                for row in k[head, sinks:].astype(np.float64)
            ]
            weights = np.exp(np.array(logits) - max(logits, default=0.0))
            out[head, sinks:] += weights / weights.sum() / group if len(weights) else 0.0
        for j in range(sinks, n):
            size = (
                math.sqrt(float((v[head, j].astype(np.float64) ** 2).sum())) if value_norms else 1.0
            )
            out[head, j] = (out[head, j] + epsilon) * size
    return out


def defensive_scores(q, k, norms, window=32, kernel=5):
    """DefensiveKV's scores of the columns before the window, without its first stage by mass.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        norms: [K, n] norms of the values at the layer's output.
        window: rows of the observation window.
        kernel: odd width of the average pooling that keeps each query's total.

    Returns:
        [K, n - min(window, n)] float64.
    """
    heads, n = np.shape(k)[:2]
    columns = n - min(window, n)
    probs = window_probs(q, k, window)[..., :columns]
    group, out = len(probs) // heads, np.zeros((heads, columns))
    for head in range(heads):
        for rows in probs[head * group : (head + 1) * group]:
            for row in rows:
                pooled = pool_columns(row, kernel, "avg")
                total = pooled.sum()
                out[head] = np.maximum(out[head], pooled * (row.sum() / total) if total else 0.0)
        if columns:
            out[head] = np.maximum(out[head], out[head].mean())
    return out * norms[:, :columns] / norms[:, :columns].sum(axis=0)


def defensive_first(q, k, window=32, stage="mass"):
    """Rows of DefensiveKV's first stage, most attended first, and how near any head was to another number of them.

    "mass": the fewest rows that with the window's own columns hold 0.9 of the window queries' mean attention.
    "published": rows before the one at which the shares of all columns before the window reach 0.9 minus the layer's
    mean attention to the w columns before the window's.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: rows of the observation window.
        stage: "mass" or "published".

    Returns:
        K lists of positions, and a gap.
    """
    heads, n = np.shape(k)[:2]
    columns = n - min(window, n)
    probs = window_probs(q, k, window)
    group = len(probs) // heads
    paid = [probs[h * group : (h + 1) * group].mean(axis=(0, 1)) for h in range(heads)]
    bias = float(np.mean([row[max(columns - window, 0) : columns].sum() for row in paid]))
    found, gap = [], math.inf
    for row in paid:
        order, total = (
            sorted(range(columns), key=lambda j: (-row[j], j)),
            float(row[:columns].sum()),
        )
        wanted = 0.9 - float(row[columns:].sum()) if stage == "mass" else 0.9 - bias
        taken, mass = [], 0.0
        for j in order if wanted > 0 else ():
            mass += float(row[j]) / (1.0 if stage == "mass" else total)
            gap = min(gap, abs(mass - wanted))
            if stage == "mass":
                taken.append(j)
            if mass >= wanted:
                break
            if stage == "published":
                taken.append(j)
        found.append(taken)
        gap = min(
            [gap, *((row[a] - row[b]) / row[a] for a, b in zip(order, order[1:], strict=False))]
        )
    return found, gap


def global_select(scores, rows, always_kept, n, alpha=0.0):
    """One budget for the heads of all layers: the best L * K * base rows of all of them together.

    Args:
        scores: L arrays [K, n] (or [K, columns before the window]).
        rows: rows per kv head and layer on average, forced ones included.
        always_kept: positions kept in every layer and head.
        n: length of the sequence.
        alpha: guaranteed share of each head's even part.

    Returns:
        kept, L lists of K ascending lists, and the gap at the cut.
    """
    layers, heads = len(scores), len(scores[0])
    # Ties go to the lowest head, then to the lowest layer.
    flat = [scores[layer][head] for head in range(heads) for layer in range(layers)]
    kept, gap = ada_select(flat, rows, always_kept, n, alpha)
    return [[kept[head * layers + layer] for head in range(heads)] for layer in range(layers)], gap
