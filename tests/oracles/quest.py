"""Quest's pages and what is attended to, in float64: the bound of a page, query head by query head, key by key."""

import math

import numpy as np

from oracles.select import cut_gap


def page_bound(query, keys):
    """The most that one query `[D]` can have as inner product with a key between the least and greatest of `[n, D]`."""
    least, greatest = (
        np.min(keys, axis=0).astype(np.float64),
        np.max(keys, axis=0).astype(np.float64),
    )
    return sum(
        max(float(q) * low, float(q) * high)
        for q, low, high in zip(query, least, greatest, strict=True)
    )


def page_shares(asked, pages, channels):
    """RocketKV's estimate of the attention of one kv head's queries `[G, D]` to pages of keys, one number each."""
    asked = np.asarray(asked, np.float64)
    largest = sorted(range(asked.shape[1]), key=lambda at: (-np.abs(asked[:, at]).mean(), at))
    largest = largest[:channels]
    upward = asked.sum(axis=0) > 0
    total = np.zeros(len(pages))
    for query in asked:
        logits = [
            sum(
                query[at] * (page[:, at].max() if upward[at] else page[:, at].min())
                for at in largest
            )
            for page in pages
        ]
        part = np.abs(query[largest]).sum() / np.abs(query).sum()
        weights = np.asarray(logits) / math.sqrt(asked.shape[1] * part)
        weights = np.exp(weights - weights.max())
        total += weights / weights.sum()
    return total


def quest_rows(q, k, *, budget, page=16, channels=None):
    """Rows that each kv head reads for one token.

    Args:
        q: [H, D] the token's queries, after RoPE.
        k: [K, n, D] keys, after RoPE, the token's own last.
        budget: rows.
        page: rows of a page.
        channels: those of RocketKV's estimate; None for Quest's bound.

    Returns:
        The K ascending lists of rows, and the smallest gap at a cut (inf where all pages are read).
    """
    heads, n = np.shape(k)[:2]
    group, kept, gap = len(q) // heads, [], math.inf
    *older, newest = [range(first, min(first + page, n)) for first in range(0, n, page)]
    count = (budget - len(newest)) // page
    for head in range(heads):
        asked = q[head * group : (head + 1) * group]
        keys = [k[head, list(rows)] for rows in older]
        if channels is None:
            bounds = [max(page_bound(query, each) for query in asked) for each in keys]
        else:
            bounds = page_shares(asked, keys, channels) if keys else []
        ranked = sorted(range(len(older)), key=lambda index, of=bounds: (-of[index], index))
        gap = min(
            gap,
            cut_gap([bounds[at] for at in ranked[:count]], [bounds[at] for at in ranked[count:]]),
        )
        kept.append(
            sorted(row for rows in [newest, *(older[at] for at in ranked[:count])] for row in rows)
        )
    return kept, gap


def attention_over(q, k, v, rows):
    """Attention output `[H, D]` of one token's queries `[H, D]` over the given rows of each kv head's `[K, n, D]`."""
    group, out = len(q) // len(k), []
    for head, query in enumerate(np.asarray(q, np.float64)):
        mine = rows[head // group]
        logits = k[head // group, mine].astype(np.float64) @ query / math.sqrt(query.size)
        weights = np.exp(logits - logits.max())
        out.append(weights @ v[head // group, mine].astype(np.float64) / weights.sum())
    return np.stack(out)
