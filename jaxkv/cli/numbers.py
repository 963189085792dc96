"""Numbers as people write them on a command line. Each reader says in its ValueError what to write instead."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from jaxkv._values import FARTHEST, shortened

_DIGITS = re.compile(r"\s*[+-]?\d+(_\d+)*\s*")


def _within(text: str, low: int, high: int, remedy: str) -> int:
    if _DIGITS.fullmatch(text) is None:
        raise ValueError("give a whole number")
    # Python reads no more than 4300 digits; what is longer than ours is too large as well.
    value = int(text) if len(text) < 100 else high + 1
    if not low <= value <= high:
        raise ValueError(remedy)
    return value


def whole(text: str, *, least: int | None = None) -> int:
    """A whole number of 32 bits: positions and rows are int32 in every program.

    Args:
        text: as the user wrote it.
        least: the smallest one that will do.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    value = _within(text, -FARTHEST, FARTHEST, f"give at most {FARTHEST}: no prompt is as long")
    if least is not None and value < least:
        raise ValueError(f"give at least {least}")
    return value


def seed(text: str) -> int:
    """A whole number of 64 bits, with a sign or without.

    Args:
        text: as the user wrote it.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    return _within(text, -(2**63), 2**64 - 1, "give a number of 64 bits, such as 0 to 18446744073709551615")


def real(text: str, *, example: str = "") -> float:
    """A finite number.

    Args:
        text: as the user wrote it.
        example: what follows "give a number" where it is none.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"give a number{example}") from None
    if not math.isfinite(value):
        raise ValueError("give a finite number")
    return value


def whole_or_real(text: str) -> int | float:
    """A whole number if it is written as one, else a finite number: 1 is a row and 1.0 all of them.

    Args:
        text: as the user wrote it.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    return whole(text) if _DIGITS.fullmatch(text) else real(text, example=", such as 256 or 0.2")


def span(text: str) -> tuple[int, int]:
    """First and last + 1, as a Python slice.

    Args:
        text: as the user wrote it, such as 100:200.

    Returns:
        Both.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"([+-]?\d+):([+-]?\d+)", text)
    if match is None:
        raise ValueError("give first and last + 1, such as 100:200")
    return whole(match[1]), whole(match[2])


def argument(read: Callable[..., Any], **bounds: Any) -> Callable[[str], Any]:
    """A reader as argparse wants it.

    Args:
        read: one of those above.
        **bounds: its options, such as the least number.

    Returns:
        The same, with the value before the remedy.
    """

    def argued(text: str) -> Any:
        try:
            return read(text, **bounds)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r}: {error}") from None

    return argued
