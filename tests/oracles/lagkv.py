"""LagKV's scores, in float64: ranks within partitions, each compared with the next one."""

import numpy as np


def _shares(rows, following):
    """Softmax over a partition's rows `[lag, D]` of their deviation over channels, as the following partition scales
    them; channels that do not vary there count as 0."""
    low, span = following.min(axis=0), np.ptp(following, axis=0)
    scaled = np.divide(rows - low, span, out=np.zeros_like(rows), where=span > 0)
    weights = np.exp(np.std(scaled, axis=1, ddof=1))
    return weights / weights.sum()


def lag_scores(k, v, *, sinks=4, lag=128, ranks=True):
    """LagKV's scores of one layer.

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
    out, gap = np.ones((heads, n)) + np.arange(n) / n, np.inf
    pairs = np.stack([k, v]).astype(np.float64)
    for part in range((n - sinks) // lag - 1):
        at, after = (slice(sinks + p * lag, sinks + (p + 1) * lag) for p in (part, part + 1))
        for head in range(heads):
            score = np.mean([_shares(x[head, at], x[head, after]) for x in pairs], axis=0)
            out[head, at] = score.argsort().argsort() / lag if ranks else score
            if ranks and lag > 1:
                gap = min(gap, (1 - np.sort(score)[:-1] / np.sort(score)[1:]).min())
    return out, gap
