"""Accumulated attention of prompt positions: H2O's column sums."""

import numpy as np

from oracles.attention import causal_probs
from oracles.scores import _group


def column_sums(q, k):
    """The sum over all causal queries of the attention probability on each key.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.

    Returns:
        [H, n] float64; each row sums to n.
    """
    probs = causal_probs(q, k)[0]
    heads, n, _ = probs.shape
    out = np.zeros((heads, n))
    for h in range(heads):
        for i in range(n):
            out[h] += probs[h, i]
    return out


def cumulative_scores(q, k, group="mean"):
    """The column sums of each kv head, by "mean" or "max" over its group: [K, n] float64."""
    return _group(column_sums(q, k), np.shape(k)[0], group)
