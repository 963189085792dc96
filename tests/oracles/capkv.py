"""CAPKV's scores, in float64: ridge leverage of values, weighted by the fit of keys to the mean query."""

import numpy as np


def cap_scores(means, k, v, *, sinks=4, tau=5.0, epsilon=1e-6):
    """CAPKV's scores of one layer: `w_j v_j^T (I + sum_i w_i v_i v_i^T)^-1 v_j`, mean over the group's query heads.

    Weights are exp(tau * cosine) over the query head's largest, as in kvpress. Instead of the matrix over channels,
    that of the rows' inner products G is inverted: the j-th leverage of weighted values is 1 - ((1 + G)^-1)_jj.

    Args:
        means: mean query [D] of each of H query heads, as if rotated after the text.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        sinks: leading positions that take no part; their score is 0.
        tau: sharpness of the weights.
        epsilon: added to the weights in the matrix.

    Returns:
        [K, n] float64.
    """
    heads, n = np.shape(k)[:2]
    group, out = len(means) // heads, np.zeros((heads, n))
    k, v = (np.asarray(x, np.float64)[:, sinks:] for x in (k, v))
    for h, mean in enumerate(np.asarray(means, np.float64) if n > sinks else ()):
        keys, values = k[h // group], v[h // group]
        lengths = np.maximum(np.linalg.norm(keys, axis=1) * np.linalg.norm(mean), 1e-30)
        fit = tau * (keys @ mean) / lengths
        weights = np.exp(fit - fit.max())
        gram = np.sqrt(np.outer(weights + epsilon, weights + epsilon)) * (values @ values.T)
        leverage = 1 - np.diag(np.linalg.inv(np.eye(len(gram)) + gram))
        out[h // group, sinks:] += weights / (weights + epsilon) * leverage / group
    return out
