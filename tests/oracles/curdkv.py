"""CurDKV's scores, in float64: squared norms over their sum in a window of rows."""

import numpy as np


def _shares(rows, local_window):
    """Squared norms `[K, n]` of rows `[K, n, D]`, each over the sum of its window; 0 in a window of zeros."""
    square = np.einsum("knd,knd->kn", rows, rows)
    starts = range(0, square.shape[1], local_window)
    total = np.add.reduceat(square, starts, axis=1).repeat(local_window, axis=1)[
        :, : square.shape[1]
    ]
    return np.divide(square, total, out=np.zeros_like(square), where=total > 0)


def cur_scores(k, v, *, local_window=16, leverage="kv_product"):
    """CurDKV's scores `[K, n]` of one layer's keys and values `[K, n, D]`, of sum 1 in each head."""
    keys, values = (_shares(np.asarray(x, np.float64), local_window) for x in (k, v))
    kinds = {
        "key": keys,
        "value": values,
        "kv_avg": (keys + values) / 2,
        "kv_product": keys * values,
    }
    total = kinds[leverage].sum(axis=1, keepdims=True)
    return kinds[leverage] / np.where(total > 0, total, 1.0)
