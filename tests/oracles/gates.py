"""Trained gates: KVzap (arXiv:2601.07891), scores of rows from hidden states, in float64."""

import math

import numpy as np

from oracles.select import cut_gap, relative_gap

__all__ = ["fastkvzip_scores", "kvzap_scores", "threshold_select"]


def threshold_select(scores, rows, threshold, always_kept, n):
    """KVzap's rule with a bound: the forced rows, and the best `rows` at most of those whose score reaches a threshold.

    Args:
        scores: heads that share the bound, [J, n] (only non-forced positions are read).
        rows: rows that these heads hold together at most, forced ones included.
        threshold: the least score of a row that stays without being forced.
        always_kept: positions kept in every head.
        n: length of the sequence.

    Returns:
        kept, J ascending lists; the gap, at the bound and at the threshold; [J] rows of such scores that had no room.
    """
    loose = [j for j in range(n) if j not in set(always_kept)]
    gap = min(
        (relative_gap(float(own[j]), threshold) for own in scores for j in loose), default=math.inf
    )
    high = [
        (float(own[j]), g, j)
        for g, own in enumerate(scores)
        for j in loose
        if float(own[j]) >= threshold
    ]
    high.sort(key=lambda row: (-row[0], row[1], row[2]))
    headroom = max(rows - len(scores) * len(always_kept), 0)
    stays, cut = high[:headroom], high[headroom:]
    kept = [
        sorted([*always_kept, *(j for _, g, j in stays if g == head)])
        for head in range(len(scores))
    ]
    gap = min(gap, cut_gap([row[0] for row in stays], [row[0] for row in cut]))
    return kept, gap, [sum(g == head for _, g, _ in cut) for head in range(len(scores))]


def kvzap_scores(tensors, layer, hidden):
    """Scores [K, n] of a layer's rows from its hidden states [n, E], by tensors of the published names."""
    at = f"layers.{layer}."
    mine = {
        name: np.asarray(array, np.float64)
        for name, array in tensors.items()
        if name.startswith(at)
    }
    of = {name.removeprefix(at): array for name, array in mine.items()}
    out = []
    for x in np.asarray(hidden, np.float64):
        if "weight" in of:
            out.append(of["weight"] @ x + of["bias"])
            continue
        inner = of["0.weight"] @ x + of["0.bias"]
        # GELU: x times the normal distribution function of x.
        out.append(
            of["2.weight"] @ np.array([z * 0.5 * (1 + math.erf(z / 2**0.5)) for z in inner])
            + of["2.bias"]
        )
    return np.array(out).T


def fastkvzip_scores(tensors, layer, hidden):
    """Scores [K, n]: 1 / (1 + sum_s exp(base_s - logit)), mean over the learned queries of a kv head."""
    at = f"{layer}."
    of = {
        name[len(at) :]: np.asarray(each, np.float64)
        for name, each in tensors.items()
        if name.startswith(at)
    }
    heads, _, bases, width = of["k_base"].shape
    queries = of["b"].shape[2]
    out = np.zeros((heads, len(hidden)))
    for j, x in enumerate(np.asarray(hidden, np.float64)):
        for h in range(heads):
            k = _normed(of["k_proj.weight"][h * width : (h + 1) * width] @ x) * of["k_norm.weight"]
            for g in range(queries):
                rows = slice((h * queries + g) * width, (h * queries + g + 1) * width)
                q = (
                    _normed(of["q_proj.weight"][rows] @ x + of["q_proj.bias"][rows])
                    * of["q_norm.weight"]
                )
                logit = q @ k / width**0.5 + of["b"][h, 0, g]
                base = [q @ of["k_base"][h, 0, s] / width**0.5 for s in range(bases)]
                out[h, j] += 1 / (1 + sum(math.exp(each - logit) for each in base)) / queries
    return out


def _normed(x):
    """A vector over the root of its mean square."""
    return x / np.sqrt(np.mean(x * x) + 1e-6)
