"""CurDKV's scores, in float64: squared norms over their sum in a window of rows."""

import numpy as np


def cur_scores(k, v, *, local_window=16, leverage="kv_product"):
    """CurDKV's scores `[K, n]` of one layer's keys and values `[K, n, D]`."""
    heads, n = np.shape(k)[:2]
    out = np.zeros((heads, n))
    for head in range(heads):
        shares = {}
        for name, rows in (("key", k[head]), ("value", v[head])):
            norm = [float((row.astype(np.float64) ** 2).sum()) for row in rows]
            first = [local_window * (j // local_window) for j in range(n)]
            total = [sum(norm[at : at + local_window]) for at in first]
            shares[name] = np.array([x / y if y else 0.0 for x, y in zip(norm, total, strict=True)])
        shares["kv_avg"] = (shares["key"] + shares["value"]) / 2
        shares["kv_product"] = shares["key"] * shares["value"]
        out[head] = shares[leverage] / (shares[leverage].sum() or 1.0)
    return out
