"""R-KV's scores by their definition, row by row: attention of the last queries and redundancy of keys; in float64."""

import math

import numpy as np

from oracles.scores import pool_columns


def _softmax(x):
    weights = np.exp(np.asarray(x) - max(x, default=0.0))
    return weights / weights.sum()


def rkv_scores(q, k, window=8, kernel=7, mix_lambda=0.1, threshold=0.5):
    """R-KV's scores of the columns before the window.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: rows of the observation window.
        kernel: odd width of the max pooling of attention.
        mix_lambda: weight of attention.
        threshold: cosine above which keys resemble each other.

    Returns:
        [K, n - min(window, n)] float64, and how near any cosine was to the threshold.
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    (heads, n, dim), group = k.shape, len(q) // len(k)
    before = n - min(window, n)
    out, gap = np.zeros((heads, before)), math.inf
    for h, keys in enumerate(k):
        attention = np.zeros(before)
        for i in range(before, n) if before else ():
            logits = [
                max(float(q[h * group + g, i] @ key) for g in range(group)) / math.sqrt(dim)
                for key in keys
            ]
            attention += _softmax(logits[:before]) / window
        charged = np.zeros(n)
        for i in range(n):
            cosines = [
                float(keys[i] @ key) / math.sqrt(float(keys[i] @ keys[i]) * float(key @ key))
                for key in keys
            ]
            cosines[i] = 0.0
            gap = min([gap, *(abs(cosine - threshold) for cosine in cosines)])
            alike = [j for j in range(n) if cosines[j] > threshold]
            if alike:
                cosines[alike[-1]] = 0.0
            charged += np.array(cosines) / n
        redundancy = _softmax(charged)[:before]
        out[h] = mix_lambda * pool_columns(attention, kernel, "max") - (1 - mix_lambda) * redundancy
    return out, gap
