"""Merging of evicted rows into kept ones (D2O, arXiv:2406.13035): nearest neighbour, moving threshold, weights."""

import math

import numpy as np

FLOOR = 1e-6


def cosine(a, b):
    """Cosine of two vectors, norms under 1e-6 counted as 1e-6."""
    norms = [max(math.sqrt(sum(float(x) ** 2 for x in y)), FLOOR) for y in (a, b)]
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True)) / (norms[0] * norms[1])


def _mean(values):
    return sum(values) / len(values)


def nearest_rows(x, kept, evicted):
    """Of each evicted row, the kept row of the largest cosine; ties go to the first of `kept`.

    Args:
        x: [K, n, D].
        kept: K lists of row indices.
        evicted: K lists of row indices.

    Returns:
        targets and cosines, K lists each, and the smallest difference of the best and the next distinct cosine.
    """
    targets, cosines, gap = [], [], math.inf
    for g in range(len(x)):
        targets.append([])
        cosines.append([])
        for i in evicted[g]:
            row = [cosine(x[g][i], x[g][j]) for j in kept[g]]
            best = max(row)
            targets[g].append(kept[g][row.index(best)])
            cosines[g].append(best)
            gap = min([gap] + [best - u for u in row if u != best])
    return targets, cosines, gap


def move_thresholds(cosines, tau, beta, scope):
    """The new threshold of every head: the current mean cosine, or beta * mean + (1 - beta) * tau where tau is set.

    Args:
        cosines: K lists of floats.
        tau: [K] floats, None or -inf where never set; or None for all of them.
        beta: weight of the current mean.
        scope: "head", or "layer": one mean over all evicted rows of all heads.

    Returns:
        [K] floats; unchanged (-inf for None) where there is no cosine.
    """
    tau = [None] * len(cosines) if tau is None else tau
    old = [-math.inf if t is None else float(t) for t in tau]
    everything = [u for row in cosines for u in row]
    new = []
    for g, row in enumerate(cosines):
        source = {"head": row, "layer": everything}[scope]
        if not source:
            new.append(old[g])
        elif old[g] == -math.inf:
            new.append(_mean(source))
        else:
            new.append(beta * _mean(source) + (1 - beta) * old[g])
    return new


def _decide(cosines, limits, decision):
    """Which evicted rows merge, K lists of bools, and the smallest distance to the limit (exact ties left out)."""
    if decision == "shared":
        if len({len(row) for row in cosines}) != 1:
            raise ValueError("a shared decision needs as many evicted entries in every head")
        means = [_mean(column) for column in zip(*cosines, strict=True)]
        cosines = [means] * len(cosines)
    elif decision != "token":
        raise ValueError(decision)
    chosen = [[u >= limit for u in row] for row, limit in zip(cosines, limits, strict=True)]
    gaps = [
        abs(u - limit)
        for row, limit in zip(cosines, limits, strict=True)
        for u in row
        if u != limit
    ]
    return chosen, min(gaps, default=math.inf)


def _weigh(cosines, kind):
    """Weight of the kept row, and of each row merged into it."""
    share = 1.0 / (1 + len(cosines))
    if kind == "softmax":
        total = sum(math.exp(u) for u in cosines) + math.e
        return math.e / total, [math.exp(u) / total for u in cosines]
    if kind == "average":
        return share, [share for _ in cosines]
    if kind == "scatter_mean":
        return share, [share * u for u in cosines]
    raise ValueError(kind)


def _plan(x, kept, evicted, tau, beta, weights, tau_scope, decision, threshold):
    """From one tensor's cosines: per head {target: [(row, weight)]}, the weights, the new tau and the gap."""
    targets, cosines, near = nearest_rows(x, kept, evicted)
    tau = move_thresholds(cosines, tau, beta, tau_scope)
    limits = tau if threshold is None else [float(threshold)] * len(tau)
    chosen, edge = _decide(cosines, limits, decision)
    moves, used = [], []
    for g in range(len(x)):
        groups = {}
        for i, j, u, merges in zip(evicted[g], targets[g], cosines[g], chosen[g], strict=True):
            if merges:
                groups.setdefault(j, []).append((i, u))
        used.append({j: _weigh([u for _, u in groups[j]], weights) for j in sorted(groups)})
        moves.append(
            {j: list(zip([i for i, _ in groups[j]], used[g][j][1], strict=True)) for j in used[g]}
        )
    return moves, used, tau, min(near, edge)


def _apply(x, moves, used):
    """A copy of x [K, n, D] with the targets replaced by the weighted sums of the rows as they were."""
    x = np.asarray(x, np.float64)
    out = x.copy()
    for g in range(len(x)):
        for j, sources in moves[g].items():
            out[g, j] = used[g][j][0] * x[g, j]
            for i, weight in sources:
                out[g, j] += weight * x[g, i]
    return out


def merge_rows(
    k,
    v,
    kept,
    evicted,
    tau,
    *,
    beta=0.7,
    metric="key",
    weights="softmax",
    tau_scope="head",
    decision="token",
    threshold=None,
):
    """Merge the evicted rows of one layer into their nearest kept rows, where they are near enough.

    Args:
        k: [K, n, D].
        v: [K, n, D].
        kept: K lists of row indices, ascending position.
        evicted: K lists of row indices, ascending position.
        tau: [K] thresholds so far, None or -inf where never set, or None; for metric "both" a pair of those (or None).
        beta: weight of the current mean in the threshold.
        metric: "key" or "value" cosines decide for both tensors, or "both": each tensor by its own.
        weights: "softmax", "average" or "scatter_mean".
        tau_scope: "head" or "layer".
        decision: "token": by a row's own cosine, or "shared": by the mean over heads of the i-th evicted rows'.
        threshold: a number compared with in place of tau (which moves all the same).

    Returns:
        k, v, tau, the weights used (per head {target: (own weight, [weights of the merged rows])}) and the gap: the
        smallest distance to a threshold and between the two best distinct cosines. An exact tie with the threshold does
        not count: a single row is its own mean, and merges. With metric "both", tau and the weights are pairs.
    """
    options = (beta, weights, tau_scope, decision, threshold)
    if metric == "both":
        pair = (None, None) if tau is None else tau
        by_key = _plan(k, kept, evicted, pair[0], *options)
        by_value = _plan(v, kept, evicted, pair[1], *options)
        tau, used = (by_key[2], by_value[2]), (by_key[1], by_value[1])
    else:
        by_key = by_value = _plan({"key": k, "value": v}[metric], kept, evicted, tau, *options)
        tau, used = by_key[2], by_key[1]
    return _apply(k, *by_key[:2]), _apply(v, *by_value[:2]), tau, used, min(by_key[3], by_value[3])
