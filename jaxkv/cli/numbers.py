"""Parsers of numbers on the command line: text to a Python number, or a ValueError that says what to give."""

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from jaxkv._checks import FARTHEST, shortened
from jaxkv.policies.checks import bytes_of

Read = TypeVar("Read")
_DIGITS = re.compile(r"\s*[+-]?\d+(_\d+)*\s*")


def whole(text: str) -> int:
    """Signed 32-bit integer parsed from text, as positions and rows are int32; ValueError for other text."""
    return _within(text, -FARTHEST, FARTHEST, f"give at most {FARTHEST}: no prompt is as long")


def natural(text: str) -> int:
    """Integer from 0 to 2^31 - 1 parsed from text; ValueError for other text."""
    return _at_least(text, 0)


def positive(text: str) -> int:
    """Integer from 1 to 2^31 - 1 parsed from text; ValueError for other text."""
    return _at_least(text, 1)


def seed(text: str) -> int:
    """Integer of 64 bits, signed or unsigned, parsed from text; ValueError for other text."""
    return _within(
        text, -(2**63), 2**64 - 1, "give a number of 64 bits, such as 0 to 18446744073709551615"
    )


def _at_least(text: str, least: int) -> int:
    """Integer from `least` to 2^31 - 1 parsed from text; ValueError for other text."""
    value = whole(text)
    if value < least:
        raise ValueError(f"give at least {least}")
    return value


def _within(text: str, low: int, high: int, remedy: str) -> int:
    """Integer in [low, high] parsed from text; ValueError for other text, with the text `remedy` if out of range."""
    if _DIGITS.fullmatch(text) is None:
        raise ValueError("give a whole number")
    # Python parses no more than 4300 digits; any number of 100 digits is out of range here.
    value = int(text) if len(text) < 100 else high + 1
    if not low <= value <= high:
        raise ValueError(remedy)
    return value


def real(text: str) -> float:
    """Finite float parsed from text; ValueError for other text."""
    return _finite(text, "give a number")


def whole_or_real(text: str) -> int | float:
    """Number parsed from text: an int if it is written as an integer, else a finite float; ValueError otherwise.

    As a budget, 1 is one row and 1.0 is all rows.
    """
    return (
        whole(text)
        if _DIGITS.fullmatch(text)
        else _finite(text, "give a number, such as 256 or 0.2")
    )


def _finite(text: str, remedy: str) -> float:
    """Finite float parsed from text; ValueError for other text, with the text `remedy` if it is no number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(remedy) from None
    if not math.isfinite(value):
        raise ValueError("give a finite number")
    return value


def span(text: str) -> tuple[int, int]:
    """Pair (first position, last + 1) of a span, parsed from text such as 100:200; ValueError for other text."""
    match = re.fullmatch(r"([+-]?\d+):([+-]?\d+)", text)
    if match is None:
        raise ValueError("give first and last + 1, such as 100:200")
    return whole(match[1]), whole(match[2])


def budget(text: str) -> int | float | str:
    """Budget parsed from text: rows (int), a share (float), or bytes such as "64MB" as they stand; else ValueError."""
    if bytes_of(text):
        return text
    try:
        return whole_or_real(text)
    except ValueError as error:
        raise ValueError(f"{error}, or bytes, such as 64MB") from None


def budgets(text: str) -> list[int | float | str]:
    """List of the budgets in `--budgets`, maybe empty: rows (int), shares (float) or bytes (text such as "64MB")."""
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            found.append(budget(word))
        except ValueError as error:
            raise ValueError(f"--budgets={word!r}: {error}") from None
    return found


def argument(read: Callable[[str], Read]) -> Callable[[str], Read]:
    """Wraps a text parser for argparse's `type`: returns a function that raises ArgumentTypeError for ValueError."""

    def argued(text: str) -> Read:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r}: {error}") from None

    return argued
