"""LagKV's scores, in float64: ranks within partitions, each compared with the next one."""

import numpy as np


def lag_scores(k, v, *, sinks=4, lag=128, ranks=True):
    """LagKV's scores of one layer, by plain loops over partitions and rows.

    Args:
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        sinks: leading positions that belong to no partition.
        lag: rows of a partition.
        ranks: score by the rank within the partition.

    Returns:
        [K, n] float64, above 1 for the rows that no partition follows, and the smallest relative distance between two
        rows of a partition (inf where their order does not count).
    """
    heads, n = np.shape(k)[:2]
    out, gap = np.tile(1 + np.arange(n) / n, (heads, 1)), np.inf
    for head in range(heads):
        for first in range(sinks, n - 2 * lag + 1, lag):
            both = np.zeros(lag)
            for x in (k[head].astype(np.float64), v[head].astype(np.float64)):
                following = x[first + lag : first + 2 * lag]
                spread = np.empty(lag)
                for at in range(lag):
                    channels = [
                        (c - f.min()) / (f.max() - f.min()) if f.max() > f.min() else 0.0
                        for c, f in zip(x[first + at], following.T, strict=True)
                    ]
                    mean = sum(channels) / len(channels)
                    spread[at] = (sum((c - mean) ** 2 for c in channels) / (len(channels) - 1)) ** 0.5
                weights = np.exp(spread - spread.max())
                both += weights / weights.sum() / 2
            if not ranks:
                out[head, first : first + lag] = both
                continue
            out[head, first : first + lag] = [sum(other < mine for other in both) / lag for mine in both]
            ordered = np.sort(both)
            gap = min(gap, *((ordered[1:] - ordered[:-1]) / ordered[1:]))
    return out, gap
