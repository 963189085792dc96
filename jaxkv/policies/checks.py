"""Checks of what users give a policy: budgets, spans and parts at construction, and parts' results under a trace."""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkv._errors import require
from jaxkv._values import plain
from jaxkv.cache.quantised import STORES
from jaxkv.cache.stores import Store

Span = tuple[int, int]
# Rows per kv head and layer (int), share of the prompt (float), bytes of a sequence's cache (str), or everything.
Budget = int | float | str | None

_BYTES = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_UNITS = ("B", "KB", "MB", "GB", "TB")


def bytes_of(text: str) -> int | None:
    """Number of bytes that text such as "64MB" (10^6), "1.5 GB" or "64MiB" (2^20) says; None for other text."""
    match = _BYTES.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        return None
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    return int(Fraction(match[1]) * unit)


def _in_units(count: int) -> str:
    """Number of bytes as text in the largest decimal unit of which it is a whole number, such as "64MB"."""
    power = max(at for at in range(len(_UNITS)) if count % 1000**at == 0)
    return f"{count // 1000**power}{_UNITS[power]}"


def as_policy_budget(given: Any) -> Budget:
    """Returns a budget as `as_budget` does, or bytes such as "64MB" in one spelling; ValueError for anything else."""
    if not isinstance(given, str):
        return as_budget(given)
    count = bytes_of(given)
    remedy = "give rows per head (an int), a share (a float), or bytes of a sequence's cache, such as '64MB'"
    require(bool(count), "budget", given, f"{_meant(given)}{remedy}")
    return _in_units(count or 0)


def _meant(given: str) -> str:
    """Beginning of a remedy, such as "write 0.1; ", for a budget that is a number in quotes, or per cent; else ""."""
    try:
        number = float(given.strip().removesuffix("%")) / (
            100 if given.strip().endswith("%") else 1
        )
    except ValueError:
        return ""
    sound = 0 < number <= 1 or 1 < number < 1e9 and number.is_integer()
    return f"write {number:.9g}; " if sound else ""


def as_budget(given: Any) -> int | float | None:
    """Returns a budget as an int (rows), a float in (0, 1] (share of the prompt) or None; ValueError for anything else.

    A Decimal or Fraction is a share.
    """
    budget = float(given) if isinstance(given, (Decimal, Fraction)) else plain(given)
    number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    require(
        budget is None or number,
        "budget",
        budget,
        "give rows per head (an int) or a share (a float)",
    )
    if isinstance(budget, float):
        require(
            0 < budget <= 1,
            "budget",
            budget,
            "a ratio lies in (0, 1]; for a number of rows give an int",
        )
    elif budget is not None:
        require(budget >= 1, "budget", budget, "keep at least 1 row, or give a ratio in (0, 1]")
    return budget


def as_store(given: Any) -> str | type[Store]:
    """Store name ("int8", say) for a built-in store's name or class, or a user's `Store` subclass; else ValueError."""
    for name, kind in STORES.items():
        if given is kind or (isinstance(given, str) and given == name):
            return name
    own = isinstance(given, type) and issubclass(given, Store)
    remedy = f"give one of {', '.join(map(repr, STORES))}, or a subclass of jaxkv.cache.Store"
    require(own, "store", given, remedy)
    return given  # type: ignore[no-any-return]


def store_class(store: str | type[Store]) -> type[Store]:
    """`Store` subclass that holds a policy's rows, for a store's name ("dense", say) or for the class itself."""
    return STORES[store] if isinstance(store, str) else store


def as_spans(given: Any) -> tuple[Span, ...]:
    """Returns spans of positions as a tuple of `(start, stop)` pairs of ints; raises ValueError for anything else."""
    remedy = "give spans of whole positions, first and last + 1, such as ((0, 4), (-9, -1))"
    pairs = given.tolist() if isinstance(given, np.ndarray) else given
    require(isinstance(pairs, (tuple, list)), "protect", given, remedy)
    spans = []
    for pair in pairs:
        edges = (
            tuple(plain(edge) for edge in pair)
            if isinstance(pair, (tuple, list, np.ndarray))
            else ()
        )
        whole = len(edges) == 2 and all(
            isinstance(edge, int) and not isinstance(edge, bool) for edge in edges
        )
        require(whole, "protect", given, remedy)
        spans.append((edges[0], edges[1]))
    return tuple(spans)


def instance(name: str, value: Any, kind: Any, remedy: str) -> Any:
    """Returns `value` if it is an instance of the class or protocol `kind`; ValueError otherwise, or for a class."""
    require(isinstance(value, kind) and not isinstance(value, type), name, value, remedy)
    return value


def checked(
    part: Any, method: str, given: Any, shape: tuple[int, ...], about: str, dtype: Any = jnp.float32
) -> Array:
    """Returns the array `given` if it has this shape and dtype; else raises a TypeError naming the part's method.

    `about` names the axes for the message, such as "row, [B, K, S]".
    """
    mine, kind = getattr(given, "shape", None), getattr(given, "dtype", None)
    if mine != tuple(shape) or kind != dtype:
        gave = type(given).__name__ if mine is None else f"{kind}{list(mine)}"
        remedy = f"give one {jnp.dtype(dtype).name} for each {about} = {list(shape)}"
        raise TypeError(f"{type(part).__name__}.{method}={gave}: {remedy}")
    return given


def checked_tuple(part: Any, method: str, given: Any, kind: type) -> Any:
    """Returns `given` if it is of the NamedTuple class `kind`; else raises a TypeError naming the merger's method."""
    if not isinstance(given, kind):
        fields = ", ".join(kind._fields)  # type: ignore[attr-defined]
        raise TypeError(
            f"{type(part).__name__}.{method}={type(given).__name__}: return {kind.__name__}({fields})"
        )
    return given
