"""SimLayerKV (arXiv:2410.13846): whole layers while the budget lasts, the least lazy first."""

import numpy as np

from oracles.budgets import forced_positions, resolve_budget
from oracles.policies import full


def far_attention(q, k, window, sinks, recent):
    """Attention of the last queries on rows between the first and the most recent: mean over query heads and queries.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        window: number of last queries.
        sinks: number of first rows.
        recent: number of most recent rows.

    Returns:
        A float in [0, 1].
    """
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    n, found = k.shape[1], []
    for head, row in np.ndindex(len(q), min(window, n)):
        at = n - 1 - row
        logits = k[head * len(k) // len(q), : at + 1] @ q[head, at] / np.sqrt(k.shape[2])
        p = np.exp(logits - logits.max())
        found.append((p / p.sum())[sinks : max(sinks, n - recent)].sum())
    return float(np.mean(found))


def simlayerkv(qs, ks, budget, window, sinks, recent):
    """Rows kept by layer and kv head, and the smallest relative distance between two layers' attention.

    Args:
        qs: L arrays [H, n, D], after RoPE.
        ks: L arrays [K, n, D], after RoPE.
        budget: an int or a ratio, rows per kv head and layer on average.
        window: number of last queries.
        sinks: first rows, which every layer keeps.
        recent: most recent rows, as well.

    Returns:
        kept, L lists of K ascending lists, and the gap.
    """
    n, heads = ks[0].shape[1], ks[0].shape[0]
    always_kept = len(forced_positions(n, sinks, recent))
    far = [far_attention(q, k, window, sinks, recent) for q, k in zip(qs, ks, strict=True)]
    left, kept = (
        len(ks) * (max(min(resolve_budget(budget, n), n), always_kept) - always_kept),
        [None] * len(ks),
    )
    for layer in sorted(range(len(ks)), key=lambda at: (-far[at], at)):
        rows = always_kept + min(left, n - always_kept)
        left -= rows - always_kept
        latest = range(n - (rows - min(sinks, n)), n)
        kept[layer] = full(heads, n)[0] if rows == n else [[*range(sinks), *latest]] * heads
    ordered = sorted(far)
    apart = [(b - a) / b for a, b in zip(ordered, ordered[1:], strict=False) if b > a]
    return kept, min(apart, default=np.inf)
