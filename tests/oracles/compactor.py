"""Compactor's scores: attention within blocks that sees later tokens, and leverage of keys; in float64."""

import numpy as np


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
    part = slice(first, max(np.shape(k)[1] - last, first))
    q, k = (np.asarray(x, np.float64)[:, part] for x in (q, k))
    heads, n, dim = k.shape
    grouped, out = q.reshape(heads, len(q) // heads, n, dim), np.zeros((heads, n))
    for begin in range(0, n, size):
        part = slice(begin, min(begin + size, n))
        logits = np.einsum("kgid,kjd->kgij", grouped[:, :, part], k[:, part])
        count = logits.shape[-1]
        if zeros:
            logits = np.pad(logits, ((0, 0), (0, 0), (0, size - count), (0, size - count)))
        else:
            logits = logits / np.sqrt(dim)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares = weights / weights.sum(axis=-1, keepdims=True)
        out[:, part] = shares.sum(axis=2).mean(axis=1)[:, :count]
    return out


def leverage_scores(k, projection, ridge=0.01):
    """Leverage of each centred, projected key of `[n, D]` by columns `[D, m]`: sum of u^2 s^2 / (s^2 + ridge), from the
    singular value decomposition instead of an inverse."""
    y = (np.asarray(k, np.float64) - np.mean(k, axis=0, dtype=np.float64)) @ np.asarray(
        projection, np.float64
    )
    u, s, _ = np.linalg.svd(y, full_matrices=False)
    return u**2 @ (s**2 / (s**2 + ridge))


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
    received = np.pad(
        received * np.linalg.norm(np.asarray(v, np.float64)[:, part], axis=-1), ((0, 0), (1, 1))
    )
    scores = normalised((received[:, :-2] + received[:, 1:-1] + received[:, 2:]) / 3)
    columns = projections.shape[2]
    leverage = [leverage_scores(raw[h, part], projections[h] / columns**0.5) for h in range(len(k))]
    return scores + blending * normalised(np.array(leverage))
