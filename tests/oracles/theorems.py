"""Ada-KV's theory (arXiv:2407.11550, section 3): eviction loss, its bound, and allocations by enumeration.

One decode step of one layer: H query heads, each with attention weights A_i over the n rows (eq. 2).
"""

import itertools
import math

import numpy as np

from oracles.attention import attend_rows, softmax


def decode_weights(q, k, scale=None):
    """Attention weights of the last token over all rows: q [H, D], k [K, n, D] to [H, n] (eq. 2)."""
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    group = q.shape[0] // k.shape[0]
    scale = 1.0 / math.sqrt(q.shape[1]) if scale is None else scale
    rows = []
    for h in range(q.shape[0]):
        rows.append(softmax([float(np.dot(q[h], key)) * scale for key in k[h // group]])[0])
    return np.array(rows)


def _output(q, k, v, w_o, kept, scale):
    """The layer's output sum_i A_i V_i W_i^O over the kept rows: [E] (eq. 2 and 4)."""
    heads = attend_rows(np.asarray(q)[:, None, :], k, v, kept, scale=scale)[0]
    out = np.zeros(w_o.shape[2])
    for h in range(len(w_o)):
        out += heads[h, 0] @ np.asarray(w_o[h], np.float64)
    return out


def eviction_loss(q, k, v, w_o, kept, scale=None):
    """The L1 eviction loss ||y - y_hat||_1 (eq. 5).

    Args:
        q: [H, D].
        k: [K, n, D].
        v: [K, n, Dv].
        w_o: [H, Dv, E], the output projection of each query head.
        kept: K lists of rows.
        scale: 1 / sqrt(D) by default.

    Returns:
        A float.
    """
    everything = [list(range(k.shape[1])) for _ in range(k.shape[0])]
    before, after = (_output(q, k, v, w_o, rows, scale) for rows in (everything, kept))
    return math.fsum(abs(float(a) - float(b)) for a, b in zip(before, after, strict=True))


def output_row_norm(v, w_o):
    """C of theorem 3.1: over the query heads, the largest L1 norm of a row of V_i W_i^O (the matrix's inf-norm).

    Args:
        v: [K, n, Dv].
        w_o: [H, Dv, E].

    Returns:
        A float.
    """
    group = len(w_o) // len(v)
    best = 0.0
    for h in range(len(w_o)):
        for row in np.asarray(v[h // group], np.float64):
            best = max(best, math.fsum(abs(float(x)) for x in row @ np.asarray(w_o[h], np.float64)))
    return best


def retained_mass(weights, kept):
    """The sum of the attention weights on kept rows: weights [H, n], kept K lists, to a float of at most H."""
    group = len(weights) // len(kept)
    return math.fsum(float(weights[h][j]) for h in range(len(weights)) for j in kept[h // group])


def eps_bound(q, k, v, w_o, kept, scale=None):
    """The bound eps = 2 h C - 2 C sum_i sum_j I_i^j A_i^j of theorem 3.1 (eq. 6), h counting query heads.

    Args:
        q: [H, D].
        k: [K, n, D].
        v: [K, n, Dv].
        w_o: [H, Dv, E].
        kept: K lists of rows.
        scale: 1 / sqrt(D) by default.

    Returns:
        A float, at least the eviction loss of the same arguments.
    """
    norm = output_row_norm(v, w_o)
    return 2 * norm * (len(q) - retained_mass(decode_weights(q, k, scale), kept))


def allocation_rows(weights, counts):
    """The top-B_i rows of each head (eq. 7); ties go to the lowest position: [h, n] and [h] to h ascending lists."""
    return [
        sorted(sorted(range(len(row)), key=lambda j, row=row: (-float(row[j]), j))[:count])
        for row, count in zip(weights, counts, strict=True)
    ]


def allocation_mass(weights, counts):
    """Mass kept by the top-B_i rows of each head; fractional counts take a share of the next row.

    The share makes the mass concave in the counts, so that uniform <= mixed <= adaptive holds before rounding.

    Args:
        weights: [h, n].
        counts: [h] ints or Fractions.

    Returns:
        A float.
    """
    mass = []
    for row, count in zip(weights, counts, strict=True):
        whole = math.floor(count)
        order = sorted((float(x) for x in row), reverse=True)
        mass += order[:whole]
        if count > whole:
            mass.append(float(count - whole) * order[whole])
    return math.fsum(mass)


def all_allocations(heads, total, high):
    """Every split of `total` rows over the heads with at most `high` each, as tuples, in lexicographic order."""
    return [
        split for split in itertools.product(range(high + 1), repeat=heads) if sum(split) == total
    ]


def best_allocation(weights, total):
    """The largest retained mass over all splits, by enumeration: weights [h, n] to (split, mass); for small h."""
    splits = all_allocations(len(weights), total, len(weights[0]))
    return max(
        ((split, allocation_mass(weights, split)) for split in splits), key=lambda pair: pair[1]
    )


def adaptive_allocation(weights, total):
    """Algorithm 1: the split given by the `total` largest weights of all heads; ties: lowest head, then position."""
    rows = [
        (-float(weights[g][j]), g, j) for g in range(len(weights)) for j in range(len(weights[g]))
    ]
    split = [0] * len(weights)
    for _, g, _ in sorted(rows)[:total]:
        split[g] += 1
    return tuple(split)
