"""Typed budgets, protected spans and stores: validation of the fields that all policies share."""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxkv._checks import ENDLESS, FARTHEST, is_whole, plain, real, several, share_of, whole
from jaxkv._errors import invalid, require
from jaxkv.cache.named_stores import STORES
from jaxkv.cache.stores import Store

Span = tuple[int, int]
# Entries per kv head and layer (int), share of the prompt (float), bytes of a sequence's cache (str), or every entry.
Budget = int | float | str | None

_BYTES = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_REMEDY = "give entries per head (an int), a share in (0, 1] (a float), or bytes such as '64MB'"


@dataclasses.dataclass(frozen=True, repr=False)
class _Amount:
    """Base of budgets, whose unit is their class: equal numbers of different units are different budgets."""

    value: Any

    @property
    def given(self) -> Any:
        """The budget as in a policy's field: an int, a float, or text."""
        return self.value

    def __repr__(self) -> str:
        return repr(self.given)


class Tokens(_Amount):
    """Budget in entries per kv head and layer."""

    def rows(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return entries of prompts `[B]`: the budget, or all entries of shorter prompts."""
        return np.minimum(self.value, lengths)


class Share(_Amount):
    """Budget as a share, in (0, 1], of each sequence's own prompt."""

    def rows(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return entries of prompts `[B]`: the share rounded down, at least 1."""
        return np.maximum(share_of(lengths, self.value), 1)


class Bytes(_Amount):
    """Budget in bytes of a sequence's cache, over all layers; `policy_for` converts it to entries of a model."""

    @property
    def given(self) -> str:
        """The bytes as text."""
        return f"{self.value}B"

    def rows(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Raise ValueError: the number of entries depends on the model."""
        raise invalid("budget", self, "bytes depend on the model: give entries, or a share")


Kept = Tokens | Share | Bytes


def bytes_of(text: str) -> int | None:
    """Return the number of bytes in text such as "64MB" (10^6), "1.5 GB" or "64MiB" (2^20); None for other text."""
    match = _BYTES.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        return None
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    return int(Fraction(match[1]) * unit)


def as_budget(given: Any) -> Kept | None:
    """Return a budget with its unit: `Tokens` for an int, `Share` for other numbers, `Bytes` for text; or None."""
    given = plain(given)
    if given is None or isinstance(given, Kept):
        return given
    if isinstance(given, str):
        count = bytes_of(given)
        require(bool(count), "budget", given, _REMEDY)
        return Bytes(count)
    if isinstance(given, int):
        return Tokens(whole("budget", min(given, ENDLESS), _REMEDY))
    return Share(real("budget", given, _REMEDY, high=1.0, open_low=True))


def as_store(given: Any) -> str | type[Store]:
    """Return the name of a built-in store, such as "int8", or a user's `Store` subclass; else ValueError."""
    for name, kind in STORES.items():
        if given is kind or (isinstance(given, str) and given == name):
            return name
    own = isinstance(given, type) and issubclass(given, Store)
    remedy = f"no store: give {', '.join(map(repr, STORES))}, or a subclass of jaxkv.cache.Store"
    require(own, "store", given, remedy)
    return given  # type: ignore[no-any-return]


def store_class(store: str | type[Store]) -> type[Store]:
    """Return the `Store` subclass for a store's name, such as "dense", or for the class itself."""
    return STORES[store] if isinstance(store, str) else store


def as_spans(name: str, given: Any) -> tuple[Span, ...]:
    """Return spans of positions as `(start, stop)` pairs of ints; ValueError for anything else."""
    remedy = "give spans of whole positions, first and last + 1, such as ((0, 4), (-9, -1))"
    spans = []
    require(np.iterable(given), name, given, remedy)
    for pair in given:
        edges = [*map(plain, several(name, pair, remedy))]
        fits = len(edges) == 2 and all(is_whole(edge, -math.inf) for edge in edges)
        require(fits, name, given, remedy)
        # Clipped to the range of positions, int32, for use on the device.
        start, stop = (max(-FARTHEST, min(edge, FARTHEST)) for edge in edges)
        spans.append((start, stop))
    return tuple(spans)
