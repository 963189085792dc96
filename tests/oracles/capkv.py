"""CAPKV's scores, in float64: ridge leverage of values, weighted by the fit of keys to the mean query."""

import numpy as np


def _unit(x):
    x = np.asarray(x, np.float64)
    return x / max(float(np.sqrt((x * x).sum())), 1e-12)


def cap_scores(means, k, v, *, sinks=4, tau=5.0, epsilon=1e-6):
    """CAPKV's scores of one layer.

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
    heads, n, dim = np.shape(k)
    group, out = len(means) // heads, np.zeros((heads, n))
    for head in range(heads if n > sinks else 0):
        for mean in means[head * group : (head + 1) * group]:
            logits = np.array([tau * float(_unit(mean) @ _unit(row)) for row in k[head, sinks:]])
            weights = np.exp(logits - logits.max())
            values = v[head, sinks:].astype(np.float64)
            matrix = np.eye(dim) + sum(
                (w + epsilon) * np.outer(row, row) for w, row in zip(weights, values, strict=True)
            )
            inverse = np.linalg.inv(matrix)
            for j, (w, row) in enumerate(zip(weights, values, strict=True)):
                out[head, sinks + j] += w * float(row @ inverse @ row) / group
    return out
