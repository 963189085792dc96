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
# Entries per kv head and layer (int), share of the prompt (float), bytes of a sequence's cache (str), or everything.
Budget = int | float | str | None

_BYTES = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_REMEDY = "give entries per head (an int), a share in (0, 1] (a float), or bytes such as '64MB'"


@dataclasses.dataclass(frozen=True, repr=False)
class _Amount:
    """Base of budgets whose unit is their class: equal numbers of different units are different budgets."""

    value: Any

    @property
    def given(self) -> Any:
        """The budget as a policy's field has it: an int, a float, or text."""
        return self.value

    def __repr__(self) -> str:
        return repr(self.given)


class Tokens(_Amount):
    """Budget of so many entries per kv head and layer."""

    def rows(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Entries of prompts: the budget, or all of shorter ones."""
        return np.minimum(self.value, lengths)


class Share(_Amount):
    """Budget of a share, in (0, 1], of each sequence's own prompt."""

    def rows(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Entries of prompts: the share's whole number, at least 1."""
        return np.maximum(share_of(lengths, self.value), 1)


class Bytes(_Amount):
    """Budget of so many bytes of a sequence's cache, over all layers; `policy_for` makes it entries of a model."""

    @property
    def given(self) -> str:
        """The bytes as text."""
        return f"{self.value}B"

    def rows(self, lengths: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Raises ValueError: bytes are entries of one model."""
        raise invalid("budget", self, "bytes are entries of one model: give entries, or a share")


Kept = Tokens | Share | Bytes


def bytes_of(text: str) -> int | None:
    """Number of bytes that text such as "64MB" (10^6), "1.5 GB" or "64MiB" (2^20) says; None for other text."""
    match = _BYTES.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        return None
    unit = (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    return int(Fraction(match[1]) * unit)


def as_budget(given: Any) -> Kept | None:
    """Returns a budget with its unit: `Tokens` for an int, `Share` for other numbers, `Bytes` for text; or None."""
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
    """Store name ("int8", say) for a built-in store's name or class, or a user's `Store` subclass; else ValueError."""
    for name, kind in STORES.items():
        if given is kind or (isinstance(given, str) and given == name):
            return name
    own = isinstance(given, type) and issubclass(given, Store)
    remedy = f"give one of {', '.join(map(repr, STORES))}, or a subclass of jaxkv.cache.Store"
    require(own, "store", given, remedy)
    return given  # type: ignore[no-any-return]


def store_class(store: str | type[Store]) -> type[Store]:
    """`Store` subclass that holds a policy's entries, for a store's name ("dense", say) or for the class itself."""
    return STORES[store] if isinstance(store, str) else store


def as_spans(name: str, given: Any) -> tuple[Span, ...]:
    """Returns spans of positions as a tuple of `(start, stop)` pairs of ints; raises ValueError for anything else."""
    remedy = "give spans of whole positions, first and last + 1, such as ((0, 4), (-9, -1))"
    spans = []
    require(np.iterable(given), name, given, remedy)
    for pair in given:
        edges = [*map(plain, several(name, pair, remedy))]
        fits = len(edges) == 2 and all(is_whole(edge, -math.inf) for edge in edges)
        require(fits, name, given, remedy)
        # Cut to the range of positions, int32, so that the device can hold them.
        start, stop = (max(-FARTHEST, min(edge, FARTHEST)) for edge in edges)
        spans.append((start, stop))
    return tuple(spans)
