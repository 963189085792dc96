"""ChunkKV's selection: whole chunks of positions, the same in every head; in float64."""

import math

from oracles.select import cut_gap


def chunk_entropy(values):
    """Entropy of one chunk's scores over the logarithm of their number, in [0, 1]; negative scores are lifted to 0."""
    if len(values) < 2:
        return 0.0
    lift = min(0.0, *values)
    lifted = [value - lift for value in values]
    total = math.fsum(lifted) + 1e-8
    entropy = -math.fsum(x / total * math.log(x / total + 1e-8) for x in lifted)
    return min(max(entropy / math.log(len(values)), 0.0), 1.0)


def gated_chunk_select(scores, rows, always_kept, n, chunk, peaks):
    """EntropyGatedChunkKV: as `chunk_select`, but important chunks of uneven scores keep only their `peaks` best rows.

    Such chunks hold no forced rows, their mean is at least the chunks' lower median, their entropy below it. What this
    leaves of `rows` goes to the best of all other rows.

    Returns:
        kept, K equal lists, and the smallest gap: at the medians, among chunks, within chunks, and of the rest.
    """
    held = set(always_kept)
    mean = {
        j: math.fsum(float(head[j]) for head in scores) / len(scores)
        for j in range(n)
        if j not in held
    }
    found = []
    for first in range(0, n, chunk):
        members = range(first, min(first + chunk, n))
        free = [j for j in members if j not in held]
        if free:
            worth = math.fsum(mean[j] for j in free) / len(free)
            found.append(
                (worth, chunk_entropy([mean[j] for j in free]), len(free) < len(members), free)
            )
    worths, entropies = sorted(f[0] for f in found), sorted(f[1] for f in found)
    middle = (len(found) - 1) // 2
    gap = math.inf
    for ordered in (worths, entropies):
        if middle:
            gap = min(gap, cut_gap(ordered[middle:], ordered[:middle]))
    queue = sorted(found, key=lambda f: (not f[2], f[3][0] if f[2] else -f[0], f[3][0]))
    own = [f[0] for f in queue if not f[2]]
    gap = min([gap, *(cut_gap([one], [other]) for one, other in zip(own, own[1:], strict=False))])
    left = max(rows - len(held), 0)
    for worth, entropy, stays, free in queue:
        cut = not stays and worth >= worths[middle] and entropy < entropies[middle]
        most = min(left, peaks if cut else len(free))
        ranked = sorted(free, key=lambda j: (-mean[j], j))
        if most and ranked[most:]:
            gap = min(
                gap, cut_gap([mean[j] for j in ranked[:most]], [mean[j] for j in ranked[most:]])
            )
        held |= set(ranked[:most])
        left -= min(most, len(free))
    ranked = sorted((j for j in range(n) if j not in held), key=lambda j: (-mean[j], j))
    if left and ranked[left:]:
        gap = min(gap, cut_gap([mean[j] for j in ranked[:left]], [mean[j] for j in ranked[left:]]))
    return [sorted(held | set(ranked[:left]))] * len(scores), gap


def chunk_select(scores, rows, always_kept, n, chunk):
    """Keep the forced rows; fill up to `rows` by whole chunks, and by the best rows of the first that does not fit.

    Chunks that hold forced rows come first, in order of position; then those of the highest mean over heads and rows,
    ties to the lowest position.

    Args:
        scores: [K, n] (or [K, columns before the window]).
        rows: rows per kv head, forced ones included; never fewer than the forced ones are kept.
        always_kept: positions kept in any case.
        n: length of the sequence.
        chunk: positions of a chunk.

    Returns:
        kept, K equal lists, and the smallest gap of the cuts among chunks and within one.
    """
    held = set(always_kept)
    mean = {
        j: math.fsum(float(head[j]) for head in scores) / len(scores)
        for j in range(n)
        if j not in held
    }
    queue = []
    for first in range(0, n, chunk):
        members = range(first, min(first + chunk, n))
        free = [j for j in members if j not in held]
        if free:
            worth = (
                math.fsum(mean[j] for j in free) / len(free)
                if len(free) == len(members)
                else math.inf
            )
            queue.append((worth, free))
    queue.sort(key=lambda pair: (-pair[0], pair[1][0]))
    left, gap = max(rows - len(held), 0), math.inf
    for at, (worth, free) in enumerate(queue):
        ranked = sorted(free, key=lambda j: (-mean[j], j))
        chosen, rest = ranked[:left], ranked[left:]
        held |= set(chosen)
        left -= len(chosen)
        if rest:
            # What is cut: this chunk, and among the chunks the one before it, if it came by its worth, and the next.
            after = [other for other, _ in queue[at + 1 :]]
            before = [other for other, _ in queue[:at] if other < math.inf]
            gap = cut_gap([mean[j] for j in chosen], [mean[j] for j in rest])
            if worth < math.inf:
                gap = min(
                    gap,
                    cut_gap(before, [worth, *after]),
                    cut_gap([*before, worth], after) if chosen else gap,
                )
            break
    return [sorted(held)] * len(scores), gap
