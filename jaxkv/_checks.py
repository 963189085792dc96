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

from jaxkv._errors import build_value_error, require

# Positions are int32. ENDLESS is half of the range, so that a sum with a limit does not overflow.
FARTHEST = 2**31 - 1
ENDLESS = 2**30


def to_python_scalar(value: Any) -> Any:
    """Convert a numpy or JAX scalar or 0-d array to a Python bool, int, float or str; return other values unchanged.

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


def normalise_fields(value: Any) -> None:
    """Convert a dataclass's init fields in place, also if frozen: numpy and JAX scalars to Python, lists to tuples."""
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        given = getattr(value, field.name)
        made = (
            tuple(to_python_scalar(each) for each in given)
            if isinstance(given, list)
            else to_python_scalar(given)
        )
        if made is not given:
            object.__setattr__(value, field.name, made)


def is_int_at_least(value: Any, least: int | float = 0) -> bool:
    """Return True if the value is a Python int of at least `least`, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def to_float_or_none(value: Any) -> float | None:
    """Convert a number of Python, numpy or JAX to a float; None for bools, text, complex, NaN and float overflow."""
    value = to_python_scalar(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, Fraction)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # Too large, or a signalling NaN.
        return None
    return None if math.isnan(number) else number


def is_strictly_equal(one: Any, other: Any) -> bool:
    """Return True if two values have the same type and are equal: 1 (an entry) differs from 1.0 (a share)."""
    return type(one) is type(other) and bool(one == other)


def format_non_default_fields(value: Any) -> str:
    """Return a dataclass instance as one line: class and fields unlike their defaults; a class's name; else `repr`."""
    if isinstance(value, type):
        return value.__name__
    plainly = not dataclasses.is_dataclass(value)
    if plainly or not value.__dataclass_params__.repr:
        return " ".join(repr(value).split())
    given = []
    for field in dataclasses.fields(value):
        if field.repr and not is_strictly_equal(mine := getattr(value, field.name), field.default):
            given.append(f"{field.name}={format_non_default_fields(mine)}")
    return f"{type(value).__name__}({', '.join(given)})"


def shorten_text(text: str, most: int = 60) -> str:
    """Return the text, cut to at most `most` characters with three dots at the end if it is longer."""
    return text if len(text) <= most else text[: most - 3] + "..."


def has_overridden_methods(cls: type, declared: str) -> bool:
    """True if a class without its own `declared` overrides non-dunder methods of the base that defines it."""
    ahead = list(itertools.takewhile(lambda each: declared not in vars(each), cls.__mro__))
    names = [each for of in ahead for each in vars(of) if each[:2] != "__"]
    known = [each for each in names if hasattr(cls.__mro__[len(ahead)], each)]
    return any(callable(getattr(cls, each)) for each in known)


def is_traced(value: Any) -> bool:
    """Return True if the value is a JAX tracer, an array inside a function that JAX is tracing."""
    return isinstance(value, jax.core.Tracer)


def select_array_module(*values: Any) -> Any:
    """Return the module `jax.numpy` if one of the values is a JAX array, else `numpy`."""
    return jnp if any(isinstance(each, jax.Array) for each in values) else np


def bisect_elementwise(low: Any, high: Any, below: Callable[[Any], Any]) -> Any:
    """Bisect elementwise between `low` and `high`; return the smallest values for which `below` is False.

    `below` is True at `low` and False at `high`.
    """
    xp = select_array_module(low, high)

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


def compute_floor_share(rows: Any, share: float) -> Any:
    """Return floor(rows * share) of integers `rows`, exact for the decimal digits of a share in [0, 1]."""
    whole, _, digits = f"{Decimal(repr(share)):f}".partition(".")
    # Digit by digit from the last: floors of floors are exact, and no number exceeds 32 bits.
    part = rows * 0
    for digit in reversed(digits):
        part = (rows * int(digit) + part) // 10
    return rows * int(whole) + part


def format_number(value: float) -> str:
    """Format a number with commas, to three significant digits; all integer digits are shown, at most 9 decimals."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 9)}f}"


E = TypeVar("E", bound=enum.Enum)


def validate_int(
    name: str, value: Any, remedy: str = "", *, least: int = 1, most: int = FARTHEST
) -> int:
    """Validate an integer of Python, numpy or JAX in [least, most]; return it as an int, else raise ValueError.

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
    given = to_python_scalar(value)
    require(
        is_int_at_least(given, least),
        name,
        given,
        remedy or f"give an integer from {least} to {most}",
    )
    require(given <= most, name, given, f"give at most {most}")
    return int(given)


def validate_float(
    name: str,
    value: Any,
    remedy: str = "",
    *,
    low: int | float = 0.0,
    high: int | float = math.inf,
    open_low: bool = False,
) -> float:
    """Validate a number of Python, numpy or JAX in [low, high], or (low, high]; return a float, else raise ValueError.

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
    number = to_float_or_none(value)
    fits = number is not None and low <= number <= high and not (open_low and number == low)
    require(
        fits,
        name,
        value,
        remedy or f"give a number {'above' if open_low else 'from'} {low} to {high}",
    )
    return 0.0 if number is None else number


def validate_bool(name: str, value: Any) -> bool:
    """Validate a bool of Python, numpy or JAX; return it as a Python bool, else raise ValueError.

    Args:
        name: the argument or field, for the error message.
        value: the value.

    Returns:
        The bool.

    Raises:
        ValueError: for anything else.
    """
    given = to_python_scalar(value)
    require(isinstance(given, bool), name, given, "give True or False")
    return given


def validate_enum(name: str, value: Any, kind: type[E]) -> E:
    """Validate an enum member, given as the member or its string value; return the member, else raise ValueError.

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


def validate_non_empty_tuple(name: str, value: Any, remedy: str) -> tuple[Any, ...]:
    """Validate a non-empty list, tuple, array or iterator; return its elements as a tuple, else raise ValueError.

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
    given = to_python_scalar(value)
    iterable = isinstance(given, Iterable) and not isinstance(
        given, (str, bytes, bytearray, memoryview, type)
    )
    elements = tuple(given) if iterable else ()
    require(bool(elements), name, given, remedy)
    return elements


def validate_index(name: str, value: Any, size: int) -> int:
    """Validate an index, also negative, into `size` elements; return it as an int in [0, size), else raise ValueError.

    Args:
        name: the argument or field, for the error message.
        value: the value.
        size: number of elements.

    Returns:
        The index, in [0, size).

    Raises:
        ValueError: for anything else.
    """
    given = to_python_scalar(value)
    fits = is_int_at_least(given, -size) and given < size
    require(fits, name, given, f"give an index from 0 to {size - 1}, or from -{size} to -1")
    return given % size


def require_instance(name: str, value: Any, kind: Any, remedy: str) -> Any:
    """Return `value` if it is an instance of `kind`, a class or protocol; raise TypeError otherwise, also for classes.

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
        raise TypeError(str(build_value_error(name, value, remedy)))
    return value


def require_hashable(name: str, value: Any) -> Any:
    """Return `value` if it has a hash, by which compiled programs are cached; raise TypeError otherwise.

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
        raise TypeError(str(build_value_error(name, value, remedy))) from None
    return value


def require_shape_and_dtype(
    part: Any, method: str, given: Any, shape: tuple[int, ...], about: str, dtype: Any = jnp.float32
) -> Array:
    """Return an array from a user's scorer or other part if shape and dtype are as required; else raise TypeError.

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
    mine = getattr(given, "shape", None)
    kind = getattr(given, "dtype", None)
    if mine != tuple(shape) or kind != dtype:
        gave = type(given).__name__ if mine is None else f"{kind}{list(mine)}"
        remedy = f"give one {jnp.dtype(dtype).name} for each {about} = {list(shape)}"
        raise TypeError(f"{type(part).__name__}.{method}={gave}: {remedy}")
    return given


def validate_field(
    value: Any, name: str, check: Callable[..., Any], *args: Any, **options: Any
) -> None:
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


def validate_optional_field(
    value: Any, name: str, check: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Validate one field of a frozen dataclass with `check` and store the checked value; None is valid and kept."""
    if getattr(value, name) is not None:
        validate_field(value, name, check, *args, **options)


@contextmanager
def use_package_jax_settings() -> Iterator[None]:
    """Context manager and decorator: 32-bit JAX numbers, rank promotion allowed, no current mesh, in this thread.

    The settings hold for the calling thread until the block ends, including users' scorers and samplers.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), _unset_current_mesh():
        yield


def _unset_current_mesh() -> AbstractContextManager[Any]:
    """Return a context manager that unsets JAX's current mesh; it does nothing without one or while tracing."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # JAX rejects this while a program is traced.
        return nullcontext()


# Decorator of public functions, which run under jaxkv's own settings, entered at every call.
settled = use_package_jax_settings()


# Source files of this package, and contextlib, whose decorator wraps the public functions.
_OURS = str(Path(__file__).parent), contextlib.__file__
_warned: set[tuple[type[Warning], str]] = set()


class UnseenQuestionWarning(UserWarning):
    """Warning that a document's entries were evicted, by its end's attention, before a question about it was seen."""


def warn_once(category: type[Warning], subject: str, message: str) -> None:
    """Issue a warning at the user's line of code, once per process for each category and subject.

    `subject` is, for example, a policy class's name; the message should name the remedy.
    """
    if (category, subject) in _warned:
        return
    warnings.warn(message, category, stacklevel=_count_frames_to_user())
    # Recorded after the warning, so that with warnings as errors every call raises, not only the first.
    _warned.add((category, subject))


def clear_issued_warnings() -> None:
    """Clear the record of warnings that `warn_once` issued, so that each is issued once more; for tests."""
    _warned.clear()


def _count_frames_to_user() -> int:
    """Return the number of stack frames up to the user's code, as `stacklevel` of `warnings.warn` in `warn_once`."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
        level = level + 1
    return level
