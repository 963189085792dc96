"""Conversion of what users give to plain Python values, texts of dataclasses, and exact arithmetic on the host."""

import dataclasses
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Positions are int32. ENDLESS is half of the range, so that adding to a limit does not overflow.
FARTHEST = 2**31 - 1
ENDLESS = 2**30


def plain(value: Any) -> Any:
    """Converts a numpy or JAX scalar to a Python bool, int, float or str; returns any other value unchanged.

    A float32 becomes the decimal that it prints as: 0.2, not 0.20000000298.
    """
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0:
        value = np.asarray(value)[()]
    if not isinstance(value, np.generic):
        return value
    if isinstance(value, np.floating):
        return float(value) if isinstance(value, float) else float(str(value))
    if value.dtype.kind == "V":
        # bfloat16 and similar scalars can be converted to a float.
        return (
            float(str(value))
            if hasattr(value, "__float__") and value.dtype.names is None
            else value
        )
    return value.item()


def normalise(value: Any) -> None:
    """Converts a dataclass's fields in place, also if frozen: numpy and JAX scalars to Python's, lists to tuples."""
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        given = getattr(value, field.name)
        made = tuple(plain(each) for each in given) if isinstance(given, list) else plain(given)
        if made is not given:
            object.__setattr__(value, field.name, made)


def is_whole(value: Any, least: int | float = 0) -> bool:
    """True if the value is an int of at least `least`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def as_real(value: Any) -> float | None:
    """The number as a float; None for bools, text, NaN and numbers too large for a float."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, Fraction)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # too large, or a signalling NaN
        return None
    return None if math.isnan(number) else number


def alike(one: Any, other: Any) -> bool:
    """True if two values are equal and of one type: 1 row is not a share of 1.0."""
    return type(one) is type(other) and bool(one == other)


def brief(value: Any) -> str:
    """One-line text of a dataclass: its class and the fields that differ from their defaults; else its `repr`."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return " ".join(repr(value).split())
    given = []
    for field in dataclasses.fields(value):
        if field.repr and not alike(mine := getattr(value, field.name), field.default):
            given.append(f"{field.name}={brief(mine)}")
    return f"{type(value).__name__}({', '.join(given)})"


def shortened(text: str, most: int = 60) -> str:
    """The text cut to at most `most` characters, with three dots at the end if it was longer."""
    return text if len(text) <= most else text[: most - 3] + "..."


def is_traced(value: Any) -> bool:
    """True if the value is a JAX tracer."""
    return isinstance(value, jax.core.Tracer)


def namespace(*values: Any) -> Any:
    """`jax.numpy` if one of the values is a JAX array, else `numpy`."""
    return jnp if any(isinstance(each, jax.Array) for each in values) else np


def halved(low: Any, high: Any, below: Callable[[Any], Any]) -> Any:
    """Elementwise bisection between `low` and `high`: the smallest values for which `below` is False.

    `below` is True at `low` and False at `high`.
    """
    xp = namespace(low, high)

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        middle = (ends[0] + ends[1]) / 2
        under = below(middle)
        return xp.where(under, middle, ends[0]), xp.where(under, ends[1], middle)

    if is_traced(low) or is_traced(high):
        return jax.lax.fori_loop(0, 200, halve, (low, high))[1]
    ends = (low, high)
    for at in range(200):
        ends = halve(at, ends)
    return ends[1]


def share_of(rows: Any, share: float) -> Any:
    """Exact floor(rows * share) of each integer in `rows`, for a share in [0, 1] taken as the decimal it prints as."""
    whole, _, digits = f"{Decimal(repr(share)):f}".partition(".")
    # Digit by digit from the last: floors of floors are exact, and no number leaves 32 bits.
    part = rows * 0
    for digit in reversed(digits):
        part = (rows * int(digit) + part) // 10
    return rows * int(whole) + part


def amount(value: float) -> str:
    """Number as text with three significant digits, and commas between thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 9)}f}"
