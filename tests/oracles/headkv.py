"""HeadKV (arXiv:2410.19258): budgets of heads by given importances, SnapKV's scores within each head."""

import math
from fractions import Fraction

from oracles.budgets import forced_positions, largest_remainder, resolve_budget, water_fill
from oracles.policies import full
from oracles.scores import window_scores
from oracles.select import cut_gap, top_select

PARTS = 2**15


def headkv_rows(scores, kv_heads, n, budget, always_kept, beta=1.2):
    """Rows of every kv head, forced rows included, before what a head has no rows for goes to others.

    A head's share of all rows is (1 - 1/beta) / (L H) + score / sum / beta; a kv head has the sum of its query heads'
    shares. Layers get the sum of their heads' in whole rows per kv head, largest remainder; a layer's rows are split by
    its heads' shares, held to 1/32768, by largest remainder again.

    Args:
        scores: [L][H] numbers.
        kv_heads: K.
        n: length of the sequence.
        budget: an int or a ratio.
        always_kept: number of distinct forced positions.
        beta: 1 or more.

    Returns:
        [L][K] ints, and the margin of the layers' rounding.
    """
    layers, heads, beta = len(scores), len(scores[0]), Fraction(beta)
    total = sum(Fraction(x) for row in scores for x in row)
    share = [
        [(1 - 1 / beta) / (layers * heads) + Fraction(x) / total / beta for x in row]
        for row in scores
    ]
    base, group = max(resolve_budget(budget, n) - always_kept, 0), heads // kv_heads
    values = water_fill([sum(row) * layers * base for row in share], layers * base, n - always_kept)
    of_layers, margin = largest_remainder(values, layers * base, n - always_kept)
    rows = []
    for row, mine in zip(share, of_layers, strict=True):
        each = [sum(row[k * group : (k + 1) * group]) for k in range(kv_heads)]
        parts, _ = largest_remainder([x / sum(each) * PARTS for x in each], PARTS)
        split, _ = largest_remainder(
            [Fraction(kv_heads * mine * part, PARTS) for part in parts], kv_heads * mine
        )
        rows.append([always_kept + count for count in split])
    return rows, margin


def headkv(qs, ks, budget, scores, window=32, beta=1.2):
    """HeadKV over all layers: each head's best rows; rows that a head lacks go to the best others of the layer.

    Args:
        qs: L arrays [H, n, D], after RoPE.
        ks: L arrays [K, n, D], after RoPE.
        budget: an int or a ratio, rows per kv head and layer on average, the window included.
        scores: [L][H] numbers.
        window: rows of the observation window, all forced.
        beta: 1 or more.

    Returns:
        kept, L lists of K ascending lists, and the gap.
    """
    n, heads = ks[0].shape[1], ks[0].shape[0]
    if resolve_budget(budget, n) >= n:
        return [full(heads, n)[0] for _ in ks], math.inf
    always_kept = forced_positions(n, 0, window)
    rows, _ = headkv_rows(scores, heads, n, budget, len(always_kept), beta)
    kept, gap = [], math.inf
    for q, k, counts in zip(qs, ks, rows, strict=True):
        marks = window_scores(q, k, window)
        picked = [
            top_select(head, min(count, n), always_kept, n)
            for head, count in zip(marks, counts, strict=True)
        ]
        mine = [set(positions) for positions, _ in picked]
        rest = [
            (-float(marks[h][j]), h, j) for h in range(heads) for j in range(n) if j not in mine[h]
        ]
        missing = sum(counts) - sum(map(len, mine))
        for _, h, j in sorted(rest)[:missing]:
            mine[h].add(j)
        if missing:
            kept_marks, dropped = (
                [-mark for mark, *_ in part]
                for part in (sorted(rest)[:missing], sorted(rest)[missing:])
            )
            gap = min(gap, cut_gap(kept_marks, dropped))
        kept.append([sorted(head) for head in mine])
        gap = min(gap, *(own for _, own in picked))
    return kept, gap
