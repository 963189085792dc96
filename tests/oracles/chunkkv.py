"""ChunkKV's selection: whole chunks of positions, the same in every head; in float64."""

import math

from oracles.select import cut_gap


def chunk_select(scores, rows, forced, n, chunk):
    """Keep the forced rows; fill up to `rows` by whole chunks, and by the best rows of the first that does not fit.

    Chunks that hold forced rows come first, in order of position; then those of the highest mean over heads and rows,
    ties to the lowest position.

    Args:
        scores: [K, n] (or [K, columns before the window]).
        rows: rows per kv head, forced ones included; never fewer than the forced ones are kept.
        forced: positions kept in any case.
        n: length of the sequence.
        chunk: positions of a chunk.

    Returns:
        kept, K equal lists, and the smallest gap of the cuts among chunks and within one.
    """
    held = set(forced)
    mean = {j: math.fsum(float(head[j]) for head in scores) / len(scores) for j in range(n) if j not in held}
    queue = []
    for first in range(0, n, chunk):
        members = range(first, min(first + chunk, n))
        free = [j for j in members if j not in held]
        if free:
            worth = math.fsum(mean[j] for j in free) / len(free) if len(free) == len(members) else math.inf
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
                gap = min(gap, cut_gap(before, [worth, *after]), cut_gap([*before, worth], after) if chosen else gap)
            break
    return [sorted(held)] * len(scores), gap
