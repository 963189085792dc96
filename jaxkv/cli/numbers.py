"""Numbers as people write them on a command line. Each reader says in its ValueError what to write instead."""

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

# Positions and rows are int32 in every program.
LARGEST = 2**31 - 1
_DIGITS = re.compile(r"\s*[+-]?\d+(_\d+)*\s*")
_LONGEST_SHOWN = 60


def shown(text: str) -> str:
    """A value in an error message, cut where it is long.

    Args:
        text: as the user wrote it.

    Returns:
        The text, 60 characters of it at most.
    """
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def whole(text: str) -> int:
    """A whole number of 32 bits.

    Args:
        text: as the user wrote it.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    if _DIGITS.fullmatch(text) is None:
        raise ValueError("give a whole number")
    # Python reads no more than 4300 digits; what is longer than ours is too large as well.
    value = int(text) if len(text) < 100 else math.inf
    if abs(value) > LARGEST:
        raise ValueError(f"give at most {LARGEST}: no prompt is as long")
    return int(value)


def positive(text: str) -> int:
    """A whole number, at least 1.

    Args:
        text: as the user wrote it.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    value = whole(text)
    if value < 1:
        raise ValueError("give at least 1")
    return value


def real(text: str) -> float:
    """A finite number.

    Args:
        text: as the user wrote it.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    try:
        value = float(text)
    except ValueError:
        raise ValueError("give a number") from None
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
    if _DIGITS.fullmatch(text):
        return whole(text)
    try:
        float(text)
    except ValueError:
        raise ValueError("give a number, such as 256 or 0.2") from None
    return real(text)


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


def seed(text: str) -> int:
    """A whole number of 64 bits, with a sign or without.

    Args:
        text: as the user wrote it.

    Returns:
        The number.

    Raises:
        ValueError: for anything else.
    """
    if _DIGITS.fullmatch(text) is None:
        raise ValueError("give a whole number")
    value = int(text) if len(text) < 100 else 2**64
    if not -(2**63) <= value < 2**64:
        raise ValueError("give a number of 64 bits, such as 0 to 18446744073709551615")
    return value


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader as argparse wants it.

    Args:
        read: one of those above.

    Returns:
        The same, with the value before the remedy.
    """
    return partial(_argued, read)


def _argued(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)!r}: {error}") from None
