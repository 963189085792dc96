"""Tokens of one sample's prompt, and how many kv heads hold each after prefill: `kept.json`, which the report shows."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv._values import is_whole, shortened
from jaxkv.cache import KVCache
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals.records import dumped, read_json
from jaxkv.text.pieces import pieces_of
from jaxkv.text.shown import Passage, joined
from jaxkv.text.tokenizer import Text

KEPT = "kept.json"
_FORMAT = 1
# Of a longer prompt, as many tokens are shown from either end.
_EITHER_END = 500
_REMEDY = "the file was changed: remove it, and the report has no picture of kept tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Tokens of one compressed prompt, and the number of kv heads over all layers that hold each after prefill.

    Attributes:
        ids: the n token ids.
        heads: number of kv heads over all layers.
        counts: for each token the number of kv heads that hold its row; None if the policy drops nothing.
        chooses: True if the policy chooses for each new token which of the rows it reads.
        later: True if the policy drops rows while it answers, too; counts are those before.
        merges: True if the policy merges dropped rows into kept ones.
    """

    ids: Sequence[int]
    heads: int
    counts: Sequence[int] | None
    chooses: bool = False
    later: bool = False
    merges: bool = False

    def __post_init__(self):
        require(len(self.ids) > 0, "ids", self.ids, "a prompt has at least one token")
        if self.counts is not None:
            fits = len(self.counts) == len(self.ids) and all(
                0 <= each <= self.heads for each in self.counts
            )
            remedy = f"give a number from 0 to {self.heads} for each of the {len(self.ids)} tokens"
            require(fits, "counts", shortened(repr(self.counts)), remedy)


class Watch:
    """Callable on a prefilled cache: for one prompt, stores in `held` how many kv heads hold each of its tokens."""

    def __init__(self, ids: Sequence[int]):
        self.ids = [*ids]
        self.held: Held | None = None

    def __call__(self, cache: KVCache, prompts: Sequence[Sequence[int]]) -> None:
        """Stores in `held` the number of kv heads that hold each token of the prompt in a cache of `prompts`."""
        parts, at = cache.policy.parts(), [[*each] for each in prompts].index(self.ids)
        drops = parts.scorer is not None
        self.held = Held(
            ids=self.ids,
            heads=len(cache.compressed_layers) * cache.config.kv_heads,
            counts=cache.counts()[at][: len(self.ids)].tolist() if drops else None,
            chooses=parts.read is not None,
            later=parts.ongoing is not None,
            merges=parts.merge is not None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Entry of `kept.json` for one policy: number of kv heads that hold each shown token, and flags of the policy.

    Attributes:
        counts: for each shown token the number of kv heads that hold its row; None if the policy drops nothing.
        between: sum of the numbers of the tokens that are left out.
        chooses, later, merges: as in `Held`.
    """

    counts: tuple[int, ...] | None
    between: int
    chooses: bool
    later: bool
    merges: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """Contents of `kept.json`: texts of one prompt's shown tokens, and how many kv heads keep each, by policy.

    Attributes:
        sample: id of the sample.
        heads: number of kv heads over all layers.
        tokens: number of tokens that were compressed.
        pieces: texts of the tokens that are shown: all, or of a long prompt the first and last ones, equally many.
        policies: an `Entry` for each row of the table that has run, by name.
    """

    sample: str
    heads: int
    tokens: int
    pieces: tuple[str, ...]
    policies: Mapping[str, Entry]

    @property
    def left_out(self) -> int:
        """Number of tokens in the middle of the prompt that the report does not show."""
        return self.tokens - len(self.pieces)

    def share(self, entry: Entry) -> float:
        """Share in [0, 1] of all (token, kv head) pairs whose row a policy keeps."""
        return (
            1.0
            if entry.counts is None
            else (sum(entry.counts) + entry.between) / (self.heads * self.tokens)
        )

    def tally(self, entry: Entry) -> tuple[int, int, int]:
        """Three ints: numbers of shown tokens that all kv heads hold, that some hold, and that none holds."""
        counts = np.asarray(
            [self.heads] * len(self.pieces) if entry.counts is None else entry.counts
        )
        every, none = int((counts == self.heads).sum()), int((counts == 0).sum())
        return every, len(counts) - every - none, none

    def passages(self, entry: Entry) -> list[list[Passage]]:
        """One policy's shown tokens as a list of lists of `Passage`: one list, or two if the middle is left out."""
        assert entry.counts is not None
        half = len(self.pieces) // 2
        parts = [slice(half), slice(half, None)] if self.left_out else [slice(None)]
        return [joined(self.pieces[part], entry.counts[part]) for part in parts]


def read_kept(folder: Path) -> Kept | None:
    """`Kept` from a folder's `kept.json`; None if there is no such file; ValueError if the file was changed."""
    path = folder / KEPT
    found = read_json(path, _REMEDY)
    if found is None:
        return None
    try:
        fits = isinstance(found, dict) and found.pop("format") == _FORMAT
        rows = {name: _entry(**each) for name, each in found.pop("policies").items()}
        kept = Kept(**{**found, "pieces": tuple(found["pieces"]), "policies": rows})
        fits = fits and all(isinstance(each, str) for each in (kept.sample, *kept.pieces))
        fits = fits and all(
            is_whole(each, 1) for each in (kept.heads, len(kept.pieces), kept.left_out + 1)
        )
        fits = fits and all(_fits(entry, kept) for entry in rows.values())
    except (KeyError, TypeError, AttributeError):
        fits = False
    require(fits, str(path), "changed", _REMEDY)
    return kept


def _entry(counts: Sequence[int] | None, **others: Any) -> Entry:
    """Makes an `Entry` from one policy's values in `kept.json`, with counts as a tuple."""
    return Entry(counts=None if counts is None else tuple(counts), **others)


def _fits(entry: Entry, kept: Kept) -> bool:
    """True if an entry of `kept.json` has a valid number of kv heads for each token that is shown."""
    if entry.counts is None:
        return True
    numbers = len(entry.counts) == len(kept.pieces) and all(
        is_whole(each) for each in (*entry.counts, entry.between)
    )
    return numbers and max(entry.counts) <= kept.heads


def add_kept(folder: Path, name: str, sample: str, held: Held, text: Text) -> None:
    """Adds one policy's entry to the folder's `kept.json`, or replaces the one of that name; returns None."""
    there, count = read_kept(folder), len(held.ids)
    ends = (
        [slice(count)]
        if count <= 2 * _EITHER_END
        else [slice(_EITHER_END), slice(count - _EITHER_END, count)]
    )
    counts = (
        None if held.counts is None else tuple(each for end in ends for each in held.counts[end])
    )
    between = 0 if held.counts is None or counts is None else sum(held.counts) - sum(counts)
    entry = Entry(
        counts=counts, between=between, chooses=held.chooses, later=held.later, merges=held.merges
    )
    if there is None:
        pieces = tuple(piece for end in ends for piece in pieces_of(held.ids[end], text).texts)
        there = Kept(sample=sample, heads=held.heads, tokens=count, pieces=pieces, policies={})
    write_kept(folder, dataclasses.replace(there, policies={**there.policies, name: entry}))


def write_kept(folder: Path, kept: Kept) -> None:
    """Writes a `Kept` to the folder's `kept.json`, atomically; returns None."""
    write_whole(
        folder / KEPT, (dumped({"format": _FORMAT, **dataclasses.asdict(kept)}) + "\n").encode()
    )
