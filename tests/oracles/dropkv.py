"""DropKV's scores by their definition: the softmax over logits is taken anew without each row; in float64."""

import numpy as np


def _softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def dropkv_scores(q, k, v, window=32):
    """Squared change of the window's attention outputs if one row alone is dropped; columns before the window.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        window: rows of the observation window.

    Returns:
        [K, n - min(window, n)] float64: summed over the window's queries, mean over the group's query heads.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (heads, n, dim), before = k.shape, k.shape[1] - min(window, k.shape[1])
    out = np.zeros((len(q), before))
    for h, queries in enumerate(q):
        keys, values = k[h // (len(q) // heads)], v[h // (len(q) // heads)]
        for i in range(before, n):
            logits = keys[: i + 1] @ queries[i] / np.sqrt(dim)
            # Row j of this table: the logits without the j-th.
            without = np.where(np.eye(before, i + 1, dtype=bool), -np.inf, logits)
            change = (_softmax(without) - _softmax(logits)) @ values[: i + 1]
            out[h] += (change**2).sum(axis=1)
    return out.reshape(heads, len(q) // heads, before).mean(axis=1)
