"""Checks of arguments and their conversion to plain Python; JAX settings of jaxkv's calls; one-time warnings.

Public functions and frozen configs call checks once per argument; internal code does not check again. A wrong value is
a ValueError, a wrong type a TypeError.
"""

import contextlib
import dataclasses
import enum
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv._errors import invalid, require

# Positions are int32. ENDLESS is half of the range, so that a sum with a limit does not overflow.
FARTHEST = 2**31 - 1
ENDLESS = 2**30


def plain(value: Any) -> Any:
    """Convert a numpy or JAX scalar to a Python bool, int, float or str; return any other value unchanged.

    A float32 becomes the decimal that it prints as: 0.2, not 0.20000000298.
    """
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0:
        value = np.asarray(value)[()]
    if not isinstance(value, np.generic):
        return value
    if isinstance(value, np.floating):
        return float(value) if isinstance(value, float) else float(str(value))
    if value.dtype.kind == "V":
        # bfloat16 and similar scalars convert to float.
        return (
            float(str(value))
            if hasattr(value, "__float__") and value.dtype.names is None
            else value
        )
    return value.item()


def normalise(value: Any) -> None:
    """Convert a dataclass's fields in place, also if frozen: numpy and JAX scalars to Python's, lists to tuples."""
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
    """Return the number as a float; None for bools, text, NaN and numbers too large for a float."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, Fraction)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # Too large, or a signalling NaN.
        return None
    return None if math.isnan(number) else number


def alike(one: Any, other: Any) -> bool:
    """True if two values are equal and of one type: 1 entry is not a share of 1.0."""
    return type(one) is type(other) and bool(one == other)


def brief(value: Any) -> str:
    """Return one line of text for a dataclass: its class and the fields that differ from defaults; else the `repr`."""
    plainly = not dataclasses.is_dataclass(value) or isinstance(value, type)
    if plainly or not value.__dataclass_params__.repr:
        return " ".join(repr(value).split())
    given = []
    for field in dataclasses.fields(value):
        if field.repr and not alike(mine := getattr(value, field.name), field.default):
            given.append(f"{field.name}={brief(mine)}")
    return f"{type(value).__name__}({', '.join(given)})"


def shortened(text: str, most: int = 60) -> str:
    """Cut text to at most `most` characters, with three dots at the end if it is longer."""
    return text if len(text) <= most else text[: most - 3] + "..."


def overrides(cls: type, declared: str) -> bool:
    """True if a class or a mixin of it overrides methods or classes of the class that declares `declared`."""
    ahead = list(itertools.takewhile(lambda each: declared not in vars(each), cls.__mro__))
    names = [each for of in ahead for each in vars(of) if each[:2] != "__"]
    known = [each for each in names if hasattr(cls.__mro__[len(ahead)], each)]
    return any(callable(getattr(cls, each)) for each in known)


def is_traced(value: Any) -> bool:
    """True if the value is a JAX tracer."""
    return isinstance(value, jax.core.Tracer)


def namespace(*values: Any) -> Any:
    """`jax.numpy` if one of the values is a JAX array, else `numpy`."""
    return jnp if any(isinstance(each, jax.Array) for each in values) else np


def halved(low: Any, high: Any, below: Callable[[Any], Any]) -> Any:
    """Return the smallest values between `low` and `high` for which `below` is False, by elementwise bisection.

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
    """Return the exact floor(entries * share) of each integer, for a share in [0, 1] as its printed decimal."""
    whole, _, digits = f"{Decimal(repr(share)):f}".partition(".")
    # Digit by digit from the last: floors of floors are exact, and no number exceeds 32 bits.
    part = rows * 0
    for digit in reversed(digits):
        part = (rows * int(digit) + part) // 10
    return rows * int(whole) + part


def amount(value: float) -> str:
    """Return a number as text with three significant digits, and commas between thousands."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 9)}f}"


E = TypeVar("E", bound=enum.Enum)


def whole(name: str, value: Any, remedy: str = "", *, least: int = 1, most: int = FARTHEST) -> int:
    """Validate an integer of Python, numpy or JAX within [least, most] and return it as an int.

    Args:
        name: the argument or field, for the error message.
        value: the value; True and 2.0 are rejected.
        remedy: remedy in the error message; by default the range.
        least: the smallest valid integer.
        most: the largest valid integer; by default the largest position, 2**31 - 1.

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
    """Validate a number of Python, numpy or JAX within [low, high] and return it as a float.

    Args:
        name: the argument or field, for the error message.
        value: the value; bools, text and NaN are rejected.
        remedy: remedy in the error message; by default the range.
        low: the smallest valid number.
        high: the largest valid number.
        open_low: True rejects `low` itself.

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
    """Validate a bool of Python, numpy or JAX and return it as a Python bool.

    Args:
        name: the argument or field, for the error message.
        value: the value.

    Returns:
        The bool.

    Raises:
        ValueError: for anything else.
    """
    given = plain(value)
    require(isinstance(given, bool), name, given, "give True or False")
    return given


def choice(name: str, value: Any, kind: type[E]) -> E:
    """Validate an enum member, given as member or value, and return the member.

    Args:
        name: the argument or field, for the error message.
        value: the value.
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
    """Validate a list, tuple, array or iterator and return its elements as a tuple of at least one.

    Args:
        name: the argument or field, for the error message.
        value: the value; text, bytes and classes are rejected.
        remedy: remedy in the error message.

    Returns:
        The tuple.

    Raises:
        ValueError: for anything else, and for no elements.
    """
    # The type of a 0-d array is Iterable, but it cannot be iterated.
    given = plain(value)
    iterable = isinstance(given, Iterable) and not isinstance(
        given, (str, bytes, bytearray, memoryview, type)
    )
    elements = tuple(given) if iterable else ()
    require(bool(elements), name, given, remedy)
    return elements


def index(name: str, value: Any, size: int) -> int:
    """Validate an index into `size` elements and return it as an int in [0, size); negative ones count from the end.

    Args:
        name: the argument or field, for the error message.
        value: the value.
        size: number of elements.

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
    """Return `value` if it is an instance of a class or protocol.

    Args:
        name: the argument or field, for the error message.
        value: the value. Classes are rejected because they have a protocol's attributes, too.
        kind: the class, protocol, or union of these.
        remedy: remedy in the error message.

    Returns:
        The value.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        raise TypeError(str(invalid(name, value, remedy)))
    return value


def static(name: str, value: Any) -> Any:
    """Return `value` if it has a hash, which compiled programs are cached by; raise TypeError otherwise.

    Args:
        name: the argument or field, for the error message.
        value: the value.

    Returns:
        The value.

    Raises:
        TypeError: for a value without a hash.
    """
    try:
        hash(value)
    except TypeError as error:
        remedy = f"not hashable ({error}): make it a frozen dataclass of numbers and tuples"
        raise TypeError(str(invalid(name, value, remedy))) from None
    return value


def checked(
    part: Any, method: str, given: Any, shape: tuple[int, ...], about: str, dtype: Any = jnp.float32
) -> Array:
    """Return the array of a user's part if it has this shape and dtype.

    Args:
        part: the user's part, for the error message.
        method: the method that returned the array.
        given: the array.
        shape: the required shape.
        about: names of the axes, such as "entry, [B, K, S]".
        dtype: the required dtype.

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
    """Validate one field of a frozen dataclass with `check` during construction, and store the checked value.

    Args:
        value: the dataclass, in its `__post_init__`.
        name: the field.
        check: one of the checks above.
        *args: arguments of the check after name and value.
        **options: options of the check.

    Raises:
        ValueError: as the check does.
    """
    object.__setattr__(value, name, check(name, getattr(value, name), *args, **options))


def optional(value: Any, name: str, check: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Validate a field of a frozen dataclass that may be None, as `field` does; None is valid."""
    if getattr(value, name) is not None:
        field(value, name, check, *args, **options)


@contextmanager
def own_settings() -> Iterator[None]:
    """Context manager and decorator that sets JAX to 32-bit numbers, allowed rank promotion and no current mesh.

    The settings hold for the calling thread until the block ends, including users' scorers and samplers.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), _no_mesh():
        yield


def _no_mesh() -> AbstractContextManager[Any]:
    """Unset JAX's current mesh in a context; do nothing while a user's function is traced on it."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # JAX rejects this while a program is traced.
        return nullcontext()


# Decorator of public functions, which run under jaxkv's own settings, entered at every call.
settled = own_settings()


# Source files of this package, and contextlib, whose decorator wraps the public functions.
_OURS = str(Path(__file__).parent), contextlib.__file__
_warned: set[tuple[type[Warning], str]] = set()


class UnseenQuestionWarning(UserWarning):
    """Warning that a document was compressed by its end's attention before any question about it was seen."""


def warn_once(category: type[Warning], subject: str, message: str) -> None:
    """Issue a warning at the user's line of code, once per process for each category and subject.

    `subject` is, for example, a policy class's name; the message should name the remedy.
    """
    if (category, subject) in _warned:
        return
    warnings.warn(message, category, stacklevel=_stacklevel())
    # Recorded after the warning, so that with warnings as errors every call raises, not only the first.
    _warned.add((category, subject))


def forget() -> None:
    """Clear the record of issued warnings, so that each is issued once more; for tests."""
    _warned.clear()


def _stacklevel() -> int:
    """Number of stack frames from `warn_once` to the user's code, for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level
