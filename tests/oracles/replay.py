"""KVzip's second pass: the largest attention that a row receives while its chunk is read again; in float64."""

import numpy as np


def replay_ids(ids, chunk, first, following, closing, tail):
    """For each chunk of a prompt: its first position, and the token ids that are read on top of the full cache."""
    found = []
    for begin in range(0, len(ids), chunk):
        before = list(first) if begin == 0 else [*following, *ids[max(0, begin - tail) : begin]]
        found.append((begin, [*before, *closing, *ids[begin : begin + chunk]]))
    return found


def replay_peaks(q, k, length, begin, chunk, sinks, weights=None):
    """Largest attention on the rows of one chunk from the queries of the tokens that read it again.

    Args:
        q: [K, G, N, D] rotated queries of these tokens, at positions `length` and on.
        k: [K, length + N, D] rotated keys of the prompt and of these tokens.
        length: tokens of the prompt.
        begin: first position of the chunk.
        chunk: its size.
        sinks: first positions that compete with every chunk.
        weights: [K, G, N, length] factors of the attention on the prompt's rows; None for none.

    Returns:
        [K, length] float64: 0 outside the chunk, and for sinks.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    heads, group, tokens, dim = q.shape
    out = np.zeros((heads, length))
    end = min(begin + chunk, length)
    rows = sorted({*range(min(sinks, length)), *range(begin, end)})
    for head in range(heads):
        for g in range(group):
            for i in range(tokens):
                seen = [*rows, *range(length, length + i + 1)]
                logits = k[head, seen] @ q[head, g, i] / np.sqrt(dim)
                p = np.exp(logits - logits.max())
                p = p / p.sum()
                for row, share in zip(rows, p[: len(rows)], strict=True):
                    if row >= max(begin, sinks):
                        share = share if weights is None else share * weights[head, g, i, row]
                        out[head, row] = max(out[head, row], share)
    return out
