"""Attention in float64: full causal, and over any set of kept rows per kv head."""

import math

import numpy as np


def softmax(logits):
    """Softmax and log-sum-exp of a list of floats; -inf entries get weight zero.

    Args:
        logits: [n] floats.

    Returns:
        probs [n] float64 and the log-sum-exp, a float: all zeros and -inf where nothing is visible.
    """
    logits = np.asarray(logits, np.float64)
    probs = np.zeros(len(logits))
    top = max((float(x) for x in logits), default=-math.inf)
    if top == -math.inf:
        return probs, -math.inf
    for j, x in enumerate(logits):
        probs[j] = math.exp(x - top)
    total = math.fsum(probs)
    return probs / total, top + math.log(total)


def causal_probs(q, k, rows=None, scale=None):
    """Attention probabilities of some query rows: key j is visible to query i iff j <= i.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        rows: the query positions wanted; all n by default.
        scale: 1 / sqrt(D) by default.

    Returns:
        probs [H, len(rows), n] float64 and lse [H, len(rows)].
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    heads, n, dim = q.shape
    group = heads // k.shape[0]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    rows = list(range(n)) if rows is None else list(rows)
    probs, lse = np.zeros((heads, len(rows), n)), np.zeros((heads, len(rows)))
    for h in range(heads):
        for r, i in enumerate(rows):
            logits = np.full(n, -math.inf)
            for j in range(i + 1):
                logits[j] = float(np.dot(q[h, i], k[h // group, j])) * scale
            probs[h, r], lse[h, r] = softmax(logits)
    return probs, lse


def causal_attention(q, k, v, scale=None):
    """Full causal attention with grouped heads.

    Args:
        q: [H, n, D].
        k: [K, n, D].
        v: [K, n, Dv].
        scale: 1 / sqrt(D) by default.

    Returns:
        out [H, n, Dv] and lse [H, n], float64.
    """
    v = np.asarray(v, np.float64)
    probs, lse = causal_probs(q, k, scale=scale)
    heads, n, _ = probs.shape
    group = heads // v.shape[0]
    out = np.zeros((heads, n, v.shape[2]))
    for h in range(heads):
        for i in range(n):
            for j in range(i + 1):
                out[h, i] += probs[h, i, j] * v[h // group, j]
    return out, lse


def attend_rows(q, k, v, kept, positions=None, scale=None):
    """Attention of queries over the kept rows of each kv head only.

    Rows generated after the prompt are given by appending them to k, v and their indices to every head's `kept`.

    Args:
        q: [H, T, D], queries that need not belong to the n rows.
        k: [K, n, D].
        v: [K, n, Dv].
        kept: K lists of row indices into n.
        positions: [T] the queries' positions, row j being visible iff j <= position; all kept rows by default.
        scale: 1 / sqrt(D) by default.

    Returns:
        out [H, T, Dv] and lse [H, T], float64: zeros and -inf where no row is visible.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, steps, dim = q.shape
    group = heads // k.shape[0]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    out, lse = np.zeros((heads, steps, v.shape[2])), np.zeros((heads, steps))
    for h in range(heads):
        g = h // group
        for t in range(steps):
            rows = [j for j in kept[g] if positions is None or j <= positions[t]]
            probs, lse[h, t] = softmax([float(np.dot(q[h, t], k[g, j])) * scale for j in rows])
            for p, j in zip(probs, rows, strict=True):
                out[h, t] += p * v[g, j]
    return out, lse
