"""Budgets and spans of positions as users write them, made plain Python values."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import plain

Span = tuple[int, int]


def as_budget(given: Any) -> int | float | None:
    """A budget as an int (rows), a float (a share: decimals and fractions are shares) or None.

    Args:
        given: what a user gave.

    Raises:
        ValueError: for anything else, and for numbers that are no budget.
    """
    budget = float(given) if isinstance(given, (Decimal, Fraction)) else plain(given)
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    require(budget is None or number, "budget", budget, "give rows per head (an int) or a share (a float)")
    if isinstance(budget, float):
        require(0 < budget <= 1, "budget", budget, "a ratio lies in (0, 1]; for a number of rows give an int")
    elif budget is not None:
        require(budget >= 1, "budget", budget, "keep at least 1 row, or give a ratio in (0, 1]")
    return budget


def as_spans(given: Any) -> tuple[Span, ...]:
    """Spans as pairs of ints."""
    remedy = "give spans of whole positions, first and last + 1, such as ((0, 4), (-9, -1))"
    pairs = given.tolist() if isinstance(given, np.ndarray) else given
    require(isinstance(pairs, (tuple, list)), "protect", given, remedy)
    spans = []
    for pair in pairs:
        edges = tuple(plain(edge) for edge in pair) if isinstance(pair, (tuple, list, np.ndarray)) else ()
        whole = len(edges) == 2 and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in edges)
        require(whole, "protect", given, remedy)
        spans.append((edges[0], edges[1]))
    return tuple(spans)
