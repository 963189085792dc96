"""Ada-KV (arXiv:2407.11550): budgets of the heads of one layer, and the selection under them."""

import math
from fractions import Fraction

from oracles.select import cut_gap, top_select


def _ranked(scores, always_kept, n):
    """All (score, head, position) outside the forced rows, best first; ties: lowest head, then lowest position."""
    held = set(always_kept)
    rows = [
        (float(scores[g][j]), g, j) for g in range(len(scores)) for j in range(n) if j not in held
    ]
    return sorted(rows, key=lambda row: (-row[0], row[1], row[2]))


def global_counts(scores, total, always_kept, n):
    """Algorithm 1: how many of the `total` best candidates of all heads together fall to each head.

    Args:
        scores: [K, n] (or [K, columns before the window]; forced positions are not read).
        total: rows to select in the layer.
        always_kept: positions that are no candidates.
        n: length of the sequence.

    Returns:
        [K] ints of sum `total`, and the gap at the global cut.
    """
    ranked = _ranked(scores, always_kept, n)
    counts = [0] * len(scores)
    for _, g, _ in ranked[:total]:
        counts[g] += 1
    return counts, cut_gap([row[0] for row in ranked[:total]], [row[0] for row in ranked[total:]])


def ada_targets(counts, base, alpha=0.2):
    """The safeguard (1 - alpha) f_g + alpha base, exactly.

    Algorithm 2, line 8 has alpha and 1 - alpha exchanged; the authors' code and table 4 (smaller alpha is more
    adaptive) have it as here.

    Args:
        counts: [K] ints f_g of Algorithm 1.
        base: selected rows per head on average.
        alpha: share of the uniform budget.

    Returns:
        [K] Fractions of sum K * base.
    """
    share = Fraction(alpha).limit_denominator(1000)
    return [(1 - share) * f + share * base for f in counts]


def round_targets(targets):
    """Largest-remainder rounding of exact Fractions whose sum is an int; ties go to the lowest head: [K] ints."""
    out = [math.floor(t) for t in targets]
    left = sum(targets) - sum(out)
    order = sorted(range(len(targets)), key=lambda g: (-(targets[g] - out[g]), g))
    for g in order[: int(left)]:
        out[g] += 1
    return out


def ada_select(scores, rows, always_kept, n, alpha=0.2):
    """Ada-KV of one layer: global counts, safeguard, rounding, best rows of each head.

    Args:
        scores: [K, n] (or [K, columns before the window]; forced positions are not read).
        rows: rows per kv head of the layer on average, forced ones included.
        always_kept: positions kept in every head.
        n: length of the sequence.
        alpha: share of the uniform budget.

    Returns:
        kept, K ascending lists of K * max(rows, forced) positions together, and the gap: the smallest of the global
        cut's and the heads' own.
    """
    base = max(min(rows, n) - len(always_kept), 0)
    counts, gap = global_counts(scores, len(scores) * base, always_kept, n)
    kept = []
    for g, target in enumerate(round_targets(ada_targets(counts, base, alpha))):
        positions, own = top_select(scores[g], len(always_kept) + target, always_kept, n)
        kept.append(positions)
        gap = min(gap, own)
    return kept, gap


def protect_select(scores, rows, always_kept, n, alpha=0.2):
    """kvpress's AdaKV: each head's best max(1, int(rows * alpha)) rows are safe, then the layer's lowest rows go.

    The forced rows are counted first among the safe ones, and are safe in any case.

    Args:
        scores: [K, n] (or [K, columns before the window]; forced positions are not read).
        rows: rows per kv head of the layer on average, forced ones included.
        always_kept: positions kept in every head.
        n: length of the sequence.
        alpha: share of the rows that is safe.

    Returns:
        kept, K ascending lists of K * max(rows, forced) positions together, and the gap: of the global cut, and of the
        safe cut in the heads where the first row that is not safe is dropped.
    """
    rows = max(min(rows, n), len(always_kept))
    safe_rows = max(1, int(rows * alpha))
    safe = [set(top_select(scores[g], safe_rows, always_kept, n)[0]) for g in range(len(scores))]
    exposed = [row for row in _ranked(scores, always_kept, n) if row[2] not in safe[row[1]]]
    stay = len(exposed) - len(scores) * (n - rows)
    gap = cut_gap([row[0] for row in exposed[:stay]], [row[0] for row in exposed[stay:]])
    kept = [set(rows_) for rows_ in safe]
    for _, g, j in exposed[:stay]:
        kept[g].add(j)
    for g in range(len(scores)):
        inside = [float(scores[g][j]) for j in safe[g] - set(always_kept)]
        outside = [float(scores[g][j]) for j in range(n) if j not in safe[g]]
        if kept[g] == safe[g]:
            # Only then could another safe row mean another kept row: a higher exposed row would be kept anyway.
            gap = min(gap, cut_gap(inside, outside))
    return [sorted(positions) for positions in kept], gap
