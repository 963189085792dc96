"""What people give to an analysis: lists and numbers, checked before a model is run."""

from collections.abc import Iterable
from typing import Any

from jaxkv._errors import require
from jaxkv._values import as_real, is_whole, plain


def several(name: str, given: Any, remedy: str) -> tuple[Any, ...]:
    """A list of something, whatever holds it.

    Args:
        name: the argument.
        given: anything that can be gone through, once.
        remedy: what to give.

    Returns:
        Its parts, one or more.

    Raises:
        ValueError: for a text, for nothing, and for what is no list.
    """
    # An array without axes is iterable by its type alone.
    given = plain(given)
    some = isinstance(given, Iterable) and not isinstance(given, (str, bytes, type))
    parts = tuple(given) if some else ()
    require(bool(parts), name, given, remedy)
    return parts


def whole(name: str, given: Any, remedy: str, *, least: int = 1) -> int:
    """A number of something, as a plain int.

    Args:
        name: the argument.
        given: an int of Python's, numpy's or JAX's.
        remedy: what to give.
        least: the smallest that will do.

    Returns:
        The int.

    Raises:
        ValueError: for anything else.
    """
    number = plain(given)
    require(is_whole(number, least), name, number, remedy)
    return number


def share(name: str, given: Any, remedy: str, *, all_of: bool = False) -> float:
    """A share, as a plain float.

    Args:
        name: the argument.
        given: a number above 0 and below 1.
        remedy: what to give.
        all_of: 1 will do.

    Returns:
        The float.

    Raises:
        ValueError: for anything else.
    """
    number = as_real(given)
    require(number is not None and (0 < number < 1 or (all_of and number == 1)), name, given, remedy)
    return float(number or 0)


def place_of(name: str, given: Any, many: int) -> int:
    """The place of one of so many, from the end if it is below 0.

    Args:
        name: the argument.
        given: an int.
        many: how many there are.

    Returns:
        The place, 0 or more.

    Raises:
        ValueError: for a place that is none of theirs.
    """
    at = plain(given)
    remedy = f"give a place, 0 to {many - 1}"
    require(isinstance(at, int) and not isinstance(at, bool) and -many <= at < many, name, at, remedy)
    return at % many
