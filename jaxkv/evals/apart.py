"""Values at which coinciding lines of a plot are drawn, so that each of them is seen."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

# Points of 1/72 inch: lines whose values are this close hide one another.
_HIDES = 0.6
# Share of the plot's width within which markers hide one another.
_MARKER = 0.02
# So far apart they are drawn, and so far at most from their own values.
_STEP, _FARTHEST = 3.0, 9.0


class Line(NamedTuple):
    """One line of a plot: x (ascending) and y of its points, and True if it is horizontal across the whole plot."""

    x: Float[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    horizontal: bool = False

    def at(self, x: Float[np.ndarray, " n"], reach: float) -> Float[np.ndarray, " n"]:
        """Array of the line's interpolated y at `x`; NaN farther than `reach` from its ends, unless horizontal."""
        inside = (x >= self.x[0] - reach) & (x <= self.x[-1] + reach)
        return np.where(inside | self.horizontal, np.interp(x, self.x, self.y), np.nan)


def apart(lines: Sequence[Line], unit: float) -> list[Float[np.ndarray, " n"]]:
    """List of arrays of y at which to draw lines: their own values, shifted a little where lines coincide.

    Horizontal lines stay horizontal, and make way for one another only.

    Args:
        lines: the lines.
        unit: length in the plot, in points of 1/72 inch, of a difference of 1 in y.
    """
    slots: dict[int, int] = {}
    for at, line in enumerate(lines):
        if line.horizontal:
            slots[at] = _free(
                [slots[n] for n in slots if abs(lines[n].y[0] - line.y[0]) * unit < _HIDES], 1
            )[0]
    ends = [end for line in lines if not line.horizontal for end in (line.x[0], line.x[-1])]
    reach = _MARKER * (max(ends, default=0.0) - min(ends, default=0.0))
    found = []
    for at, line in enumerate(lines):
        near = abs(np.stack([each.at(line.x, reach) for each in lines]) - line.y) * unit < _HIDES
        near[at] = True  # of two points of one x, interpolation knows one
        places = (
            [slots[at]] * len(line.x)
            if line.horizontal
            else [_place(at, each, slots) for each in near.T]
        )
        found.append(np.asarray(places))
    step = min(_STEP, _FARTHEST / max(1, *(abs(places).max() for places in found)))
    return [line.y + places * step / unit for line, places in zip(lines, found, strict=True)]


def _place(at: int, near: Bool[np.ndarray, " lines"], slots: Mapping[int, int]) -> int:
    """Offset, in whole steps, at which to draw line `at` at one point, given the mask of lines that coincide there."""
    there = [int(n) for n in np.flatnonzero(near)]
    others = [n for n in there if n not in slots]
    return _free([slots[n] for n in there if n in slots], len(others))[others.index(at)]


def _free(taken: Sequence[int], count: int) -> list[int]:
    """Descending list of the `count` integers nearest to 0 that are not in `taken`."""
    nearest = (
        sign * distance
        for distance in itertools.count()
        for sign in ((-1, 1) if distance else (1,))
    )
    return sorted(
        itertools.islice((each for each in nearest if each not in taken), count), reverse=True
    )
