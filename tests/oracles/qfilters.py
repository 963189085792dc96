"""Q-Filters' scores (arXiv:2503.02812), in float64."""

import numpy as np


def qfilter_scores(filters, k):
    """Minus the product of each key and its head's filter: [K, n] from [K, D] and [K, n, D]."""
    rows = zip(np.asarray(filters, np.float64), np.asarray(k, np.float64), strict=True)
    return np.array(
        [[-sum(a * b for a, b in zip(one, key, strict=True)) for key in keys] for one, keys in rows]
    )


def prompt_filter(q):
    """Filter [D] of a kv head: minus the first right singular vector of its queries [G, n, D], on their mean's side."""
    rows = np.asarray(q, np.float64).reshape(-1, np.shape(q)[-1])
    first = np.linalg.svd(rows, full_matrices=False)[2][0]
    return -first * np.sign(first @ rows.mean(axis=0))
