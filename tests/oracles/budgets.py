"""Budgets: of a sequence, of each layer (PyramidKV and its relatives), and the rounding that keeps their sum."""

import math
from fractions import Fraction

TIED = Fraction(1, 10**9)


def resolve_budget(budget, n):
    """Rows kept per kv head and layer on average, forced rows included, for a sequence of n.

    Args:
        budget: an int of rows, or a float in (0, 1], the share of n kept: floor of the exact product of the decimal
            that the float prints as, at least 1 (so 0.29 of 100 is 29, where float arithmetic says 28).
        n: length of the sequence.

    Returns:
        An int, at most n.
    """
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ValueError("a ratio is in (0, 1]")
        return max(1, math.floor(Fraction(repr(float(budget))) * n))
    return min(int(budget), n)


def forced_positions(n, sinks=0, window=0, protect=()):
    """Positions kept in any case: the first `sinks`, the last `window`, and the spans of `protect`.

    Args:
        n: length of the sequence.
        sinks: leading positions.
        window: trailing positions.
        protect: (start, stop) pairs, read as python slices over n.

    Returns:
        The ascending list of distinct positions.
    """
    held = set()
    for j in range(n):
        if j < sinks or j >= n - window:
            held.add(j)
    for start, stop in protect:
        held.update(list(range(n))[start:stop])
    return sorted(held)


def water_fill(values, total, high):
    """Clamp to [0, high] with one additive shift that makes the sum `total`, exactly.

    Args:
        values: [L] numbers (floats are taken at their exact binary value).
        total: the sum wanted, 0 <= total <= L * high.
        high: upper bound.

    Returns:
        [L] Fractions: clip(values + shift, 0, high).
    """
    values, total, high = [Fraction(x) for x in values], Fraction(total), Fraction(high)

    def clipped(shift):
        return [min(max(x + shift, Fraction(0)), high) for x in values]

    if not 0 <= total <= len(values) * high:
        raise ValueError("the total does not fit between the bounds")
    # The sum is piecewise linear and never falls with the shift; it bends only where a value meets a bound.
    bends = sorted({-x for x in values} | {high - x for x in values})
    for left, right in zip(bends, bends[1:] or bends, strict=False):
        low, up = sum(clipped(left)), sum(clipped(right))
        if low <= total <= up:
            return clipped(
                left if up == low else left + (right - left) * (total - low) / (up - low)
            )
    raise AssertionError("the sum at the outermost bends is 0 and L * high")


def largest_remainder(values, total, high=None):
    """Round to integers of the given sum: floors, then one unit each to the largest fractional parts.

    Ties go to the lowest index; fractional parts within 1e-9 are tied, and a value within 1e-9 below an integer counts
    as that integer. No value is raised above `high`.

    Args:
        values: [L] numbers whose sum is `total`.
        total: an int.
        high: upper bound of a rounded value; none by default.

    Returns:
        [L] ints, and the margin: the smallest difference between a fractional part that got a unit and one (not tied
        with it) that did not; inf where that decides nothing.
    """
    values = [Fraction(x) for x in values]
    floors = [math.floor(x + TIED) for x in values]
    parts = [max(x - f, Fraction(0)) for x, f in zip(values, floors, strict=True)]
    left = total - sum(floors)
    pool = [i for i in range(len(values)) if high is None or floors[i] < high]
    if not 0 <= left <= len(pool):
        raise ValueError("the values do not add up to the total")
    given = []
    for _ in range(left):
        best = max(parts[i] for i in pool)
        pick = next(i for i in pool if parts[i] >= best - TIED)
        floors[pick] += 1
        given.append(parts[pick])
        pool.remove(pick)
    gaps = [abs(a - parts[i]) for a in given for i in pool]
    return floors, min((float(gap) for gap in gaps if gap > TIED), default=math.inf)


def shape_values(shape, layers, base, beta=20, weights=None):
    """Selected rows of each layer before clamping, as real numbers of sum layers * base.

    "linear" is PyramidKV's eq. 1: an arithmetic sequence from k_0 = 2 base - k_{L-1} to k_{L-1} = base / beta.
    "geometric" has the same ratio of last to first, "exponential" the same ends with a decay exp(-5 l / (L-1)) between
    them, both rescaled to the sum. "entropy" and "gini" are proportional to `weights`, uniform if those are all zero.

    Args:
        shape: "uniform", "linear", "geometric", "exponential", "entropy" or "gini".
        layers: L.
        base: selected rows per layer on average, an int.
        beta: PyramidKV's beta.
        weights: [L] floats, for "entropy" and "gini".

    Returns:
        [L] Fractions (exact for "uniform" and "linear", else of the float values).
    """
    total, last = Fraction(layers * base), layers - 1
    top = Fraction(base) / Fraction(str(beta))
    bottom = 2 * base - top
    if shape == "uniform" or layers == 1 or base == 0:
        return [Fraction(base)] * layers
    if shape == "linear":
        return [bottom - (bottom - top) / last * i for i in range(layers)]
    if shape == "geometric":
        raw = [float(top / bottom) ** (i / last) for i in range(layers)]
    elif shape == "exponential":
        raw = [float(top) + float(bottom - top) * math.exp(-5.0 * i / last) for i in range(layers)]
    elif shape in ("entropy", "gini"):
        raw = [float(x) for x in weights]
        if not any(raw):
            raw = [1.0] * layers
    else:
        raise ValueError(shape)
    raw = [Fraction(x) for x in raw]
    return [total * x / sum(raw) for x in raw]


def layer_rows(shape, n, budget, layers, always_kept, beta=20, weights=None):
    """Rows per kv head of every layer, forced rows included.

    Args:
        shape: one of `shape_values`, or "kvpress", or "official".
        n: length of the sequence.
        budget: an int or a ratio, see `resolve_budget`.
        layers: L.
        always_kept: number of distinct forced positions.
        beta: PyramidKV's beta.
        weights: [L] floats, for "entropy" and "gini".

    Returns:
        [L] ints and the rounding's margin. Except with "kvpress" and "official" the ints sum to
        L * max(resolved budget, forced).
    """
    b = resolve_budget(budget, n)
    if b >= n:
        return [n] * layers, math.inf
    if shape == "kvpress":
        rows, margin = kvpress_rows(n, b, layers, always_kept, beta)
        return [max(r, always_kept) for r in rows], margin
    if shape == "official":
        return official_rows(n, b, layers, always_kept, beta), math.inf
    base, high = max(b - always_kept, 0), n - always_kept
    values = water_fill(shape_values(shape, layers, base, beta, weights), layers * base, high)
    caps, margin = largest_remainder(values, layers * base, high)
    return [always_kept + cap for cap in caps], margin


def kvpress_rows(n, n_kept, layers, window, beta=20):
    """Rows of each layer as kvpress's PyramidKVPress gives them, the window included.

    Args:
        n: length of the sequence.
        n_kept: rows kept on average.
        layers: L.
        window: rows of the observation window.
        beta: PyramidKV's beta.

    Returns:
        [L] ints (each rounded half to even: their sum is not conserved), and the margin: how far the nearest unrounded
        value lies from a half, where float arithmetic may round the other way.
    """
    kept = Fraction(n_kept)
    low = kept / Fraction(str(beta))
    high = 2 * kept - low
    if high >= n - window:
        high = Fraction(n - window)
        low = 2 * kept - high
    if not n >= high >= low >= window or layers == 1:
        # Its smallest layer would be under the window: kvpress falls back to the same budget everywhere.
        return [n_kept] * layers, math.inf
    values = [high - (high - low) / (layers - 1) * i for i in range(layers)]
    halves = [abs(x - math.floor(x) - Fraction(1, 2)) for x in values]
    return [round(x) for x in values], float(min(halves))


def official_rows(n, capacity, layers, window, beta=20):
    """Rows of each layer as PyramidKV's released code gives them, window included; an integer `beta`.

    Every division floors, so that the sum overshoots L * capacity (71.5 instead of 64 rows with L = 32 and a window
    of 8), and the pyramid is switched off for short prompts.

    Args:
        n: length of the sequence.
        capacity: rows kept on average.
        layers: L.
        window: rows of the observation window.
        beta: PyramidKV's beta.

    Returns:
        [L] ints: all n where the prompt is shorter than the capacity.
    """
    base = max(capacity - window, 0)
    if n < capacity:
        return [n] * layers
    if n < 2 * base or layers == 1:
        return [base + window] * layers
    low = base // beta
    high = 2 * base - low
    if high >= n - window:
        high = n - window
        low = 2 * base - high
    step = (high - low) // (layers - 1)
    return [high - i * step + window for i in range(layers)]


def entropy(vector):
    """Shannon entropy in nats of a non-negative vector, normalised to sum one; 0 for a zero vector."""
    total = math.fsum(float(x) for x in vector)
    shares = [float(x) / total for x in vector] if total > 0 else []
    return -math.fsum(p * math.log(p) for p in shares if p > 0)


def gini(vector):
    """Gini coefficient of a non-negative vector: mean absolute difference over twice the mean; 0 for a zero vector."""
    vector = [float(x) for x in vector]
    total = math.fsum(vector)
    if not total > 0:
        return 0.0
    return math.fsum(abs(a - b) for a in vector for b in vector) / (2 * len(vector) * total)
