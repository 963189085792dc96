"""Checks of what users give: numbers, flags, choices, instances, and arrays that users' parts return under a trace.

Public functions and frozen configs call these once for each argument; internal code does not check again. A wrong value
is a ValueError, something of a wrong kind a TypeError.
"""

import enum
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array

from jaxkv._support.errors import refusal, require
from jaxkv._support.values import FARTHEST, as_real, is_whole, plain

E = TypeVar("E", bound=enum.Enum)


def whole(name: str, value: Any, remedy: str = "", *, least: int = 1, most: int = FARTHEST) -> int:
    """Validates an integer of Python, numpy or JAX within [least, most] and returns it as an int.

    Args:
        name: the argument or field, for the error message.
        value: what was given; True and 2.0 are refused.
        remedy: what to give instead; by default the range.
        least: the smallest integer that is accepted.
        most: the largest one; by default the largest position, 2**31 - 1.

    Returns:
        The int.

    Raises:
        ValueError: for anything else.
    """
    given = plain(value)
    require(
        is_whole(given, least), name, given, remedy or f"give an integer from {least} to {most}"
    )
    require(given <= most, name, given, f"give at most {most}")
    return int(given)


def real(
    name: str,
    value: Any,
    remedy: str = "",
    *,
    low: int | float = 0.0,
    high: int | float = math.inf,
    open_low: bool = False,
) -> float:
    """Validates a number of Python, numpy or JAX within [low, high] and returns it as a float.

    Args:
        name: the argument or field, for the error message.
        value: what was given; bools, text and NaN are refused.
        remedy: what to give instead; by default the range.
        low: the smallest number that is accepted.
        high: the largest one.
        open_low: True refuses `low` itself.

    Returns:
        The float.

    Raises:
        ValueError: for anything else.
    """
    number = as_real(value)
    fits = number is not None and low <= number <= high and not (open_low and number == low)
    require(
        fits,
        name,
        value,
        remedy or f"give a number {'above' if open_low else 'from'} {low} to {high}",
    )
    return 0.0 if number is None else number


def flag(name: str, value: Any) -> bool:
    """Validates a bool of Python, numpy or JAX and returns it as a Python bool.

    Args:
        name: the argument or field, for the error message.
        value: what was given.

    Returns:
        The bool.

    Raises:
        ValueError: for anything else.
    """
    given = plain(value)
    require(isinstance(given, bool), name, given, "give True or False")
    return given


def choice(name: str, value: Any, kind: type[E]) -> E:
    """Validates an enum member, given as member or value, and returns the member.

    Args:
        name: the argument or field, for the error message.
        value: what was given.
        kind: the enum.

    Returns:
        The member.

    Raises:
        ValueError: for anything else; the message lists the values.
    """
    known = [each.value for each in kind]
    fits = isinstance(value, kind) or (isinstance(value, str) and value in known)
    require(fits, name, value, f"use one of {', '.join(known)}")
    return kind(value)


def several(name: str, value: Any, remedy: str) -> tuple[Any, ...]:
    """Validates a list, tuple, array or iterator and returns its elements as a tuple of at least one.

    Args:
        name: the argument or field, for the error message.
        value: what was given; text, bytes and classes are refused.
        remedy: what to give instead.

    Returns:
        The tuple.

    Raises:
        ValueError: for anything else, and for nothing.
    """
    # A 0-d array counts as Iterable by its type, but cannot be iterated.
    given = plain(value)
    iterable = isinstance(given, Iterable) and not isinstance(
        given, (str, bytes, bytearray, memoryview, type)
    )
    elements = tuple(given) if iterable else ()
    require(bool(elements), name, given, remedy)
    return elements


def index(name: str, value: Any, size: int) -> int:
    """Validates an index into `size` elements and returns it as an int from 0 on; negative ones count from the end.

    Args:
        name: the argument or field, for the error message.
        value: what was given.
        size: how many elements there are.

    Returns:
        The index, in [0, size).

    Raises:
        ValueError: for anything else.
    """
    given = plain(value)
    fits = is_whole(given, -size) and given < size
    require(fits, name, given, f"give an index from 0 to {size - 1}, or from -{size} to -1")
    return given % size


def instance(name: str, value: Any, kind: Any, remedy: str) -> Any:
    """Returns `value` if it is an instance of a class or protocol.

    Args:
        name: the argument or field, for the error message.
        value: what was given; classes are refused, which have a protocol's attributes themselves.
        kind: the class, protocol, or union of these.
        remedy: what to give instead.

    Returns:
        The value.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        raise TypeError(str(refusal(name, value, remedy)))
    return value


def static(name: str, value: Any) -> Any:
    """Returns `value` if it has a hash, by which compiled programs are kept; raises TypeError otherwise.

    Args:
        name: the argument or field, for the error message.
        value: what was given.

    Returns:
        The value.

    Raises:
        TypeError: for a value without a hash.
    """
    try:
        hash(value)
    except TypeError as error:
        remedy = f"{error}: make it a frozen dataclass of numbers and tuples"
        raise TypeError(str(refusal(name, value, remedy))) from None
    return value


def checked(
    part: Any, method: str, given: Any, shape: tuple[int, ...], about: str, dtype: Any = jnp.float32
) -> Array:
    """Returns the array that a user's part gave, if it has this shape and dtype.

    Args:
        part: the user's part, for the error message.
        method: its method that gave the array.
        given: the array.
        shape: the shape that it has to have.
        about: names of the axes, such as "row, [B, K, S]".
        dtype: the dtype that it has to have.

    Returns:
        The array.

    Raises:
        TypeError: for anything else.
    """
    mine, kind = getattr(given, "shape", None), getattr(given, "dtype", None)
    if mine != tuple(shape) or kind != dtype:
        gave = type(given).__name__ if mine is None else f"{kind}{list(mine)}"
        remedy = f"give one {jnp.dtype(dtype).name} for each {about} = {list(shape)}"
        raise TypeError(f"{type(part).__name__}.{method}={gave}: {remedy}")
    return given


def field(value: Any, name: str, check: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Validates one field of a frozen dataclass with `check`, during construction, and stores the checked value in it.

    Args:
        value: the dataclass, in its `__post_init__`.
        name: the field.
        check: one of the checks above.
        *args: what the check takes after name and value.
        **options: its options.

    Raises:
        ValueError: as the check does.
    """
    object.__setattr__(value, name, check(name, getattr(value, name), *args, **options))
