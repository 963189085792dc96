"""Typed budgets, protected spans and stores: validation of the fields that all policies share."""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxkv._checks import (
    ENDLESS,
    FARTHEST,
    compute_floor_share,
    is_int_at_least,
    select_array_module,
    to_python_scalar,
    validate_float,
    validate_int,
    validate_non_empty_tuple,
)
from jaxkv._errors import build_value_error, require
from jaxkv.cache.named_stores import STORES
from jaxkv.cache.stores import Store

Span = tuple[int, int]
# Entries per kv head and layer (int), share of the prompt (float), bytes of a sequence's cache (str), or every entry.
Budget = int | float | str | None

_BYTES = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_REMEDY = "give entries per head (an int), a share in (0, 1] (a float), or bytes such as '64MB'"


@dataclasses.dataclass(frozen=True, repr=False)
class _TypedBudget:
    """Base of budgets: a `value` whose unit is the class, so that 1 entry differs from a share of 1."""

    value: Any

    @property
    def field_value(self) -> Any:
        """Budget as written in a policy's field: an int of entries, a float share, or text with bytes."""
        return self.value

    def __repr__(self) -> str:
        return repr(self.field_value)


class EntryBudget(_TypedBudget):
    """Budget as a number of entries per kv head and layer on average, or of tokens that a layer attends to."""

    def count_entries(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return entries per kv head `[B]` of prompts: the budget, or the length of shorter prompts."""
        return np.minimum(self.value, lengths)


class ShareBudget(_TypedBudget):
    """Budget as a share, in (0, 1], of each sequence's prompt tokens: entries to keep, or tokens to attend to."""

    def count_entries(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return entries per kv head `[B]` of prompts: the share of each length rounded down, at least 1."""
        return select_array_module(lengths).maximum(compute_floor_share(lengths, self.value), 1)


class ByteBudget(_TypedBudget):
    """Budget in bytes of one sequence's cache over all layers; `resolve_policy_for_model` converts it to entries."""

    @property
    def field_value(self) -> str:
        """Budget as text in a policy's field: the number of bytes with the unit B, such as "64000000B"."""
        return f"{self.value}B"

    def count_entries(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Raise ValueError in all cases: the number of entries in these bytes depends on the model."""
        raise build_value_error(
            "budget", self, "bytes depend on the model: give entries, or a share"
        )


Kept = EntryBudget | ShareBudget | ByteBudget


def parse_byte_count(text: str) -> int | None:
    """Return the number of bytes in text such as "64MB" (10^6), "1.5 GB" or "64MiB" (2^20); None for other text."""
    match = _BYTES.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        return None
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    return int(Fraction(match[1]) * unit)


def parse_budget(given: Any) -> Kept | None:
    """Return an int as `EntryBudget`, a float as `ShareBudget`, text as `ByteBudget`; typed budgets, None unchanged."""
    given = to_python_scalar(given)
    if given is None or isinstance(given, Kept):
        return given
    if isinstance(given, str):
        count = parse_byte_count(given)
        require(bool(count), "budget", given, _REMEDY)
        return ByteBudget(count)
    if isinstance(given, int):
        return EntryBudget(validate_int("budget", min(given, ENDLESS), _REMEDY))
    return ShareBudget(validate_float("budget", given, _REMEDY, high=1.0, open_low=True))


def normalise_store(given: Any) -> str | type[Store]:
    """Return a built-in store's name, given by name or class; a `Store` subclass unchanged; ValueError otherwise."""
    for name, kind in STORES.items():
        if given is kind or (isinstance(given, str) and given == name):
            return name
    own = isinstance(given, type) and issubclass(given, Store)
    remedy = f"no store: give {', '.join(map(repr, STORES))}, or a subclass of jaxkv.cache.Store"
    require(own, "store", given, remedy)
    return given  # type: ignore[no-any-return]


def get_store_class(store: str | type[Store]) -> type[Store]:
    """Return the `Store` subclass of a built-in store's name, such as "dense"; a class unchanged."""
    return STORES[store] if isinstance(store, str) else store


def parse_spans(name: str, given: Any) -> tuple[Span, ...]:
    """Return spans as a tuple of `(start, stop)` int pairs, clipped to int32; ValueError for anything else."""
    remedy = "give spans of whole positions, first and last + 1, such as ((0, 4), (-9, -1))"
    spans = []
    require(np.iterable(given), name, given, remedy)
    for pair in given:
        edges = [*map(to_python_scalar, validate_non_empty_tuple(name, pair, remedy))]
        fits = len(edges) == 2 and all(is_int_at_least(edge, -math.inf) for edge in edges)
        require(fits, name, given, remedy)
        # Clipped to the range of positions, int32, for use on the device.
        start, stop = (max(-FARTHEST, min(edge, FARTHEST)) for edge in edges)
        spans.append((start, stop))
    return tuple(spans)
