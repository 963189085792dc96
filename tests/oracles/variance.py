"""D2O's allocation of the layers (arXiv:2406.13035): by the variance of the attention that the positions receive."""

import math
from fractions import Fraction

from oracles.attention import softmax
from oracles.budgets import resolve_budget, water_fill
from oracles.columns import column_sums

UNDERFLOW = 1e-300


def _mean(values):
    return sum(values) / len(values)


def _variance(row):
    """Unbiased variance; 0 for a single value."""
    row = [float(x) for x in row]
    if len(row) == 1:
        return 0.0
    mean = _mean(row)
    return sum((x - mean) ** 2 for x in row) / (len(row) - 1)


def layer_statistic(q, k, kind):
    """One layer's F: the mean over query heads of the variance over positions of the column sums.

    Args:
        q: [H, n, D], after RoPE.
        k: [K, n, D], after RoPE.
        kind: a kind of `variance_rows`; for "headnorm" the heads' variances are first scaled to [0, 1].

    Returns:
        A float.
    """
    spread = [_variance(row) for row in column_sums(q, k)]
    if kind == "headnorm":
        low, high = min(spread), max(spread)
        spread = [(x - low) / (high - low + 1e-6) for x in spread]
    return _mean(spread)


def layer_weights(stats, kind):
    """The weight of each layer: [L] floats, for every kind of `variance_rows` but "exp_decay".

    Equal statistics count as a standard deviation of zero, whatever their mean rounds to.
    """
    stats = [float(x) for x in stats]
    low = min(stats)
    if kind in ("headnorm", "raw"):
        return [math.exp(-(x - low)) for x in stats]
    if kind == "layer_zscore":
        mean = _mean(stats)
        deviation = math.sqrt(_mean([(x - mean) ** 2 for x in stats]))
        if low == max(stats) or deviation == 0:
            return [1.0] * len(stats)
        return [math.exp(-(x - mean) / deviation) for x in stats]
    if kind == "reciprocal":
        return [1.0 / max(x, 1e-12) for x in stats]
    if kind == "uniform":
        return [1.0] * len(stats)
    raise ValueError(kind)


def scale_fill(weights, total, low, high):
    """Clip c * weights to [low, high] with the one factor c that makes the sum `total`, exactly.

    Where all weights above zero are at `high` and the sum is still short, the rest share what is missing equally.
    Weights under 1e-300 of the largest count as zero.

    Args:
        weights: [L] floats, not all zero.
        total: the sum wanted, L * low <= total <= L * high.
        low: lower bound.
        high: upper bound.

    Returns:
        [L] Fractions.
    """
    top = max(weights)
    weights = [Fraction(w) if w / top >= UNDERFLOW else Fraction(0) for w in weights]
    total, low, high = Fraction(total), Fraction(low), Fraction(high)

    def clipped(c):
        return [min(max(c * w, low), high) for w in weights]

    if not len(weights) * low <= total <= len(weights) * high:
        raise ValueError("the total does not fit between the bounds")
    # As in water_fill: the sum is piecewise linear in c and bends only where a row meets a bound.
    bends = sorted({Fraction(0)} | {bound / w for w in weights if w for bound in (low, high)})
    for left, right in zip(bends, bends[1:], strict=False):
        below, above = sum(clipped(left)), sum(clipped(right))
        if below <= total <= above:
            return clipped(
                left
                if above == below
                else left + (right - left) * (total - below) / (above - below)
            )
    out = clipped(bends[-1])
    idle = [i for i, w in enumerate(weights) if not w]
    missing = total - sum(out)
    for i in idle:
        out[i] += missing / len(idle)
    return out


def _round_rows(values, total, high):
    """Largest remainder, the remainders compared at 9 decimals; ties to the lowest layer, none raised above `high`.

    Returns:
        [L] ints and the margin: the smallest difference of a remainder that got a unit and one (not tied) that did not.
    """
    rows = [math.floor(x) for x in values]
    parts = [round(x - r, 9) for x, r in zip(values, rows, strict=True)]
    order = sorted((i for i in range(len(rows)) if rows[i] < high), key=lambda i: (-parts[i], i))
    left = total - sum(rows)
    for i in order[:left]:
        rows[i] += 1
    gaps = [parts[i] - parts[j] for i in order[:left] for j in order[left:]]
    return rows, min((float(gap) for gap in gaps if gap > 0), default=math.inf)


def variance_rows(stats, n, budget, kind, always_kept, dense=()):
    """Rows per kv head of every layer, forced rows included; a larger statistic means fewer rows.

    Args:
        stats: [L] floats of `layer_statistic`.
        n: length of the sequence.
        budget: an int or a ratio, see `resolve_budget`.
        kind: "headnorm", "raw", "layer_zscore", "reciprocal", "uniform" (all: a common factor on the weights) or
            "exp_decay" (a common shift of n * exp(-F)).
        always_kept: number of distinct forced positions.
        dense: layers that keep all n rows out of the same sum; the others' statistics alone count.

    Returns:
        [L] ints that sum to L * resolved budget, each at least min(budget, max(forced + 1, ceil(n / 100))), and the
        rounding's margin.
    """
    layers, b = len(stats), resolve_budget(budget, n)
    if b >= n:
        return [n] * layers, math.inf
    least = min(b, max(always_kept + 1, math.ceil(Fraction(n, 100))))
    free = [i for i in range(layers) if i not in set(dense)]
    total = layers * b - (layers - len(free)) * n
    if total < len(free) * least:
        raise ValueError("the dense layers leave too few entries")
    own = [float(stats[i]) for i in free]
    if kind == "exp_decay":
        raw = [n * math.exp(-x) for x in own]
        shifted = water_fill(
            [Fraction(x) - least for x in raw], total - len(free) * least, n - least
        )
        values = [x + least for x in shifted]
    else:
        values = scale_fill(layer_weights(own, kind), total, least, n)
    rounded, margin = _round_rows(values, total, n)
    rows = [n] * layers
    for i, r in zip(free, rounded, strict=True):
        rows[i] = r
    return rows, margin


def official_variance_rows(stats, n, heavy, recent):
    """Rows of every layer as D2O's released code gives them, in plain float arithmetic.

    Args:
        stats: [L] floats.
        n: length of the sequence.
        heavy: share of n kept by score.
        recent: share of n kept as the most recent rows.

    Returns:
        [L] ints (their sum is not conserved; layers 0, 1 and L - 1 keep n), and the margin: how far the nearest
        product that is cut to an integer lies from one.
    """
    layers, rho = len(stats), heavy + recent
    weights = softmax([-float(x) for x in stats])[0]
    rows, margin = [], math.inf
    for i in range(layers):
        if i in (0, 1, layers - 1):
            rows.append(n)
            continue
        ratio = min(max(float(weights[i]) * layers * rho, 0.01), 1.0)
        parts = [(n + 1) * ratio * share / rho for share in (heavy, recent)]
        rows.append(min(n, sum(int(x) for x in parts)))
        margin = min(margin, min(abs(x - round(x)) for x in parts if x > 0))
    return rows, margin
