"""Top rows of one head, the tie rule, and how near a cut was."""

import math

MIN_GAP = 1e-6


def relative_gap(a, b):
    """Distance of two scores relative to the larger magnitude; 0 for equal ones."""
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def cut_gap(kept, dropped):
    """The smallest relative gap between a kept score and a different dropped score; inf if there is no such pair.

    Args:
        kept: scores on one side of a cut.
        dropped: scores on the other side.

    Returns:
        A float above 0. Equal scores are left out: the tie rule decides them, not rounding (see the package).
    """
    if not len(kept) or not len(dropped):
        return math.inf
    # Kept scores are never below dropped ones, so only the values next to the cut matter.
    low, high = min(kept), max(dropped)
    pairs = [(low, b) for b in dropped if b != low] + [(a, high) for a in kept if a != high]
    return min((relative_gap(a, b) for a, b in pairs), default=math.inf)


def top_select(scores, rows, always_kept, n):
    """Keep the forced rows and fill up to `rows` with the best others; ties go to the lowest position.

    Args:
        scores: one head's scores, indexed by position (only non-forced positions are read).
        rows: rows to keep, forced ones included; never fewer than the forced ones are kept.
        always_kept: positions kept in any case.
        n: length of the sequence.

    Returns:
        The ascending list of kept positions and the gap at the cut.
    """
    held = set(always_kept)
    ranked = sorted((j for j in range(n) if j not in held), key=lambda j: (-float(scores[j]), j))
    take = min(max(rows - len(held), 0), len(ranked))
    chosen, rest = ranked[:take], ranked[take:]
    gap = cut_gap([float(scores[j]) for j in chosen], [float(scores[j]) for j in rest])
    return sorted(held | set(chosen)), gap
