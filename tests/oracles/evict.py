"""Decoding of one layer with eviction at every step: H2O, its mean form, TOVA and D2O."""

import math

import numpy as np

from oracles.attention import causal_probs, softmax
from oracles.columns import cumulative_scores
from oracles.merging import merge_rows
from oracles.scores import _group
from oracles.select import relative_gap, top_select


def last_scores(q, k):
    """Attention of the last prompt query, averaged over all query heads, the same in every kv head: [K, n]."""
    n, kv_heads = np.shape(q)[1], np.shape(k)[0]
    return _everywhere(causal_probs(q, k, rows=[n - 1])[0][:, 0], kv_heads)


def _everywhere(probs, kv_heads):
    """The mean over all rows of [H, m], once for each kv head: [K, m]."""
    mean = sum(row for row in probs) / len(probs)
    return np.array([mean] * kv_heads)


def bulk_evict(
    k, v, positions, scores, rows, sinks, recent, seen, merge=None, tau=None, accumulate="sum"
):
    """Evict at once down to `rows`: the sinks, the recent rows and the best others stay.

    Args:
        k: [K, m, D], the rows held.
        v: [K, m, D].
        positions: K ascending lists of m positions.
        scores: [K, m]; for "mean" the sums, divided here by the number of queries that saw the row.
        rows: rows per head to come down to.
        sinks: positions below this stay.
        recent: positions from `seen - recent` on stay.
        seen: tokens so far, the queries included: the next token's position.
        merge: options of `merge_rows` for the evicted rows, or a function; None drops them.
        tau: the threshold of `merge_rows` so far.
        accumulate: "sum", "mean", "last", "norm" or a share.

    Returns:
        A dict: positions (K ascending lists), k, v and scores in that order, tau, gap and cut_gap, merge_gap, of which
        gap is the smaller.
    """
    k, v, scores = (np.asarray(x, np.float64) for x in (k, v, scores))
    kv_heads, m, _ = k.shape
    if m <= rows:
        kept = [list(range(m)) for _ in range(kv_heads)]
        cut = near = math.inf
    else:
        if sinks + recent > rows:
            raise ValueError("the sinks and the recent entries do not fit")
        kept, evicted, cut, near = [], [], math.inf, math.inf
        for g in range(kv_heads):
            always_kept = [r for r, p in enumerate(positions[g]) if p < sinks or p >= seen - recent]
            rank = [float(x) for x in scores[g]]
            if accumulate == "mean":
                rank = [x / (seen - p) for x, p in zip(rank, positions[g], strict=True)]
            chosen, own = top_select(rank, rows, always_kept, m)
            kept.append(chosen)
            evicted.append([r for r in range(m) if r not in set(chosen)])
            cut = min(cut, own)
        if callable(merge):
            k, v, near = merge(k, v, kept, evicted)
        elif merge is not None:
            k, v, tau, _, near = merge_rows(k, v, kept, evicted, tau, **merge)
    return {
        "positions": [[positions[g][r] for r in kept[g]] for g in range(kv_heads)],
        "k": np.array([k[g][kept[g]] for g in range(kv_heads)]),
        "v": np.array([v[g][kept[g]] for g in range(kv_heads)]),
        "scores": np.array([scores[g][kept[g]] for g in range(kv_heads)]),
        "tau": tau,
        "gap": min(cut, near),
        "cut_gap": cut,
        "merge_gap": near,
    }


def _attend(q, k, v):
    """One query per head over all rows held: q [H, D], k, v [K, m, D] to out [H, D] and probs [H, m]."""
    group = len(q) // len(k)
    out, probs = np.zeros((len(q), v.shape[2])), np.zeros((len(q), k.shape[1]))
    for h in range(len(q)):
        g = h // group
        probs[h] = softmax([float(np.dot(q[h], key)) / math.sqrt(q.shape[1]) for key in k[g]])[0]
        for p, value in zip(probs[h], v[g], strict=True):
            out[h] += p * value
    return out, probs


def halve_values(k, v, kept, evicted):
    """One evicted row per head: its value and that of the kept row with the most similar key become their mean.

    More at once, a prompt's, are dropped.

    Args:
        k: [K, m, D].
        v: [K, m, D].
        kept: K lists of rows.
        evicted: K lists of rows.

    Returns:
        `(k, v, gap)`: the rows, and how far the nearest row is from the second, relative.
    """
    v, gap = np.array(v), math.inf
    for g, gone in enumerate(evicted):
        if len(gone) != 1:
            continue
        own = k[g][gone[0]]
        cosines = [
            float(np.dot(own, k[g][r]) / np.linalg.norm(own) / np.linalg.norm(k[g][r]))
            for r in kept[g]
        ]
        best, second = sorted(cosines, reverse=True)[:2]
        at = kept[g][cosines.index(best)]
        v[g][at] = (v[g][at] + v[g][gone[0]]) / 2
        gap = min(gap, relative_gap(best, second))
    return k, v, gap


def simulate(
    q, k, v, q_new, k_new, v_new, *, rows, sinks, recent, accumulate, merge=None, group="mean"
):
    """Prefill, evict to `rows`, then decode token by token, evicting one row per head whenever there are more.

    Args:
        q: [H, n, D], the prompt, after RoPE.
        k: [K, n, D], after RoPE.
        v: [K, n, D].
        q_new: [H, T, D], the decoded tokens, of positions n + t.
        k_new: [K, T, D].
        v_new: [K, T, D].
        rows: rows per head after each eviction.
        sinks: leading positions that stay.
        recent: most recent positions that stay, the current token included.
        accumulate: "sum": the probabilities a row has received; "mean": the same per query that saw it; "last": of
            the last query only, averaged over all query heads (whatever `group`); a share: of what was received until
            then so much is left at each new token; "norm": minus the key's length, whatever is received.
        merge: options of `merge_rows` for evicted rows, or a function; None drops them.
        group: "mean" or "max" over the query heads of a kv head.

    Returns:
        `(prefill, steps, gap)`: a dict of `bulk_evict` after the prompt, T of them after the steps, each with the
        step's out [H, D] and probs [H, m] (over the rows held before it, then the token) besides, and the smallest
        gap. The scores are states, for "mean" the sums; each dict's k and v are those after its eviction.
    """
    k, v, q_new, k_new, v_new = (np.asarray(x, np.float64) for x in (k, v, q_new, k_new, v_new))
    fades = isinstance(accumulate, float)
    if not fades and accumulate not in ("sum", "mean", "last", "norm"):
        raise ValueError(accumulate)
    kv_heads, n, _ = k.shape
    if accumulate == "last":
        scores = last_scores(q, k)
    else:
        scores = (
            -np.linalg.norm(k, axis=-1) if accumulate == "norm" else cumulative_scores(q, k, group)
        )
    everything = [list(range(n)) for _ in range(kv_heads)]
    rule = (rows, sinks, recent)
    prefill = bulk_evict(k, v, everything, scores, *rule, n, merge, None, accumulate)
    state, steps = prefill, []
    for t in range(q_new.shape[1]):
        held_k = np.concatenate([state["k"], k_new[:, t : t + 1]], axis=1)
        held_v = np.concatenate([state["v"], v_new[:, t : t + 1]], axis=1)
        positions = [[*row, n + t] for row in state["positions"]]
        out, probs = _attend(q_new[:, t], held_k, held_v)
        if accumulate == "last":
            scores = _everywhere(probs, kv_heads)
        elif accumulate == "norm":
            own = -np.linalg.norm(k_new[:, t], axis=-1)
            scores = np.concatenate([state["scores"], own[:, None]], axis=1)
        else:
            left = accumulate if fades else 1.0
            scores = np.concatenate([left * state["scores"], np.zeros((kv_heads, 1))], axis=1)
            scores = scores + _group(probs, kv_heads, group)
        state = bulk_evict(
            held_k, held_v, positions, scores, *rule, n + t + 1, merge, state["tau"], accumulate
        )
        steps.append({**state, "out": out, "probs": probs})
    return prefill, steps, min([prefill["gap"]] + [step["gap"] for step in steps])
