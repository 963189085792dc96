"""Compactor's scores: attention within blocks that sees later tokens, and leverage of keys; in float64."""

import numpy as np

from oracles.attention import softmax
from oracles.scores import pool_columns


def block_attention(q, k, size, first=0, last=0, zeros=False):
    """Attention that each key of [first, n - last) receives from all queries of its block, mean over the group.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        size: positions of a block; the last one may have fewer.
        first: leading positions that belong to no block.
        last: trailing positions that belong to no block.
        zeros: kvpress' arithmetic: logits are not scaled, and a block of fewer positions is filled with logits of 0.

    Returns:
        [K, n - first - last] float64.
    """
    heads, n, dim = np.shape(k)
    group, out = len(q) // heads, np.zeros((heads, n))
    for h, queries in enumerate(np.asarray(q, np.float64)):
        keys = np.asarray(k[h // group], np.float64)
        for begin in range(first, n - last, size):
            members = range(begin, min(begin + size, n - last))
            empty = size - len(members) if zeros else 0
            for i in members:
                logits = [float(queries[i] @ keys[j]) / (1.0 if zeros else dim**0.5) for j in members]
                out[h // group, begin : begin + len(members)] += softmax(logits + [0.0] * empty)[0][: len(members)]
            out[h // group, begin : begin + len(members)] += empty / size
    return out[:, first : n - last] / group


def leverage_scores(k, projection, ridge=0.01):
    """Leverage of each centred, projected key: y (Y'Y + ridge)^-1 y' for [n, D] keys and [D, m] columns."""
    y = (np.asarray(k, np.float64) - np.mean(k, axis=0, dtype=np.float64)) @ np.asarray(projection, np.float64)
    inverse = np.linalg.inv(y.T @ y + ridge * np.eye(y.shape[1]))
    return np.array([row @ inverse @ row for row in y])


def normalised(scores):
    """Scores of a layer minus their mean, over their (sample) standard deviation."""
    return (scores - scores.mean()) / max(scores.std(ddof=1), 1e-6)


def compactor_scores(q, k, v, raw, projections, *, size, first, last, blending, zeros=False):
    """Compactor's scores of the columns [first, n - last) of one layer.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        raw: [K, n, D], keys before RoPE.
        projections: [K, D, m] random columns, not divided yet by sqrt(m).
        size: positions of a block.
        first: leading positions that take no part.
        last: trailing positions that take no part.
        blending: weight of the leverage scores.
        zeros: as for `block_attention`.

    Returns:
        [K, n - first - last] float64.
    """
    part = slice(first, np.shape(k)[1] - last)
    received = block_attention(q, k, size, first, last, zeros)
    received = received * np.linalg.norm(np.asarray(v, np.float64)[:, part], axis=-1)
    scores = normalised(np.array([pool_columns(row, 3, "avg") for row in received]))
    columns = projections.shape[2]
    leverage = [leverage_scores(raw[h, part], projections[h] / columns**0.5) for h in range(len(k))]
    return scores + (blending * normalised(np.array(leverage)) if blending else 0.0)
