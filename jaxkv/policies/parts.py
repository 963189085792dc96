"""`Parts`, the plain value that is all the engine reads of a policy."""

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxkv._checks import brief, field, instance, namespace, share_of
from jaxkv._errors import require
from jaxkv.cache.layout import Layout
from jaxkv.cache.stores import Dense, Store
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.checks import Kept, Share, Tokens, as_store, store_class
from jaxkv.policies.head_budgets import (
    HeadBudgets,
    Order,
    inner_budgets,
    shares_positions,
    threshold_of,
)
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import Counts, FromScores, LayerBudgets, Table
from jaxkv.policies.merger import Merger
from jaxkv.policies.phases import After, Append, Evict, KeepAll, Recompress, Select
from jaxkv.policies.rank import Anew, Rank
from jaxkv.policies.reads import ReadAll, Reading, Reads
from jaxkv.policies.scorer import Needs, Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ongoing:
    """Static config of compression while decoding: eviction, rank, merger and kept entries; independent of budgets.

    Without arguments that of policies which only append new entries.

    Attributes:
        compresses: False if new entries are only appended; the other fields are then not read.
        evicts: True if after each token segments above their limit lose the entry of lowest rank.
        rank: how scores change.
        one_set: True if all kv heads of a layer hold the same positions, and drop the same row.
        keep: first positions and spans that are never dropped.
        merge: the merger of dropped entries; None drops them.
        queries: number of last queries to remember, for scorers that are asked again.
    """

    compresses: bool = False
    evicts: bool = False
    rank: Rank = Anew()
    one_set: bool = False
    keep: Keep = Keep()
    merge: Merger | None = None
    queries: int = 0

    @property
    def scored(self) -> bool:
        """True if the cache stores a score for each entry while decoding."""
        return self.rank.scored

    @property
    def attends(self) -> bool:
        """True if the attention that entries receive while decoding changes their scores."""
        return self.scored and self.rank.decay is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """All that the engine reads of a policy, by phases: what is kept of a prompt, what follows, what is read; and how.

    Attributes:
        select: what is kept of a prompt: `KeepAll()` or `Select(...)`.
        after: what follows the prompt: `Append()`, `Evict(...)` or `Recompress(...)`.
        read: what layers read while tokens are sampled: `ReadAll()`, or less than everything.
        store: how entries are held: a subclass of `jaxkv.cache.Store`.
    """

    select: KeepAll | Select = KeepAll()
    after: After = Append()
    read: Reads = ReadAll()
    store: type[Store] = Dense

    def __post_init__(self) -> None:
        field(self, "select", instance, (KeepAll, Select), "give KeepAll(), or Select(...)")
        remedy = "give Append(), Evict(...) or Recompress(...)"
        field(self, "after", instance, (Append, Evict, Recompress), remedy)
        field(self, "read", instance, Reads, "give what layers read, ReadAll() say")
        object.__setattr__(self, "store", store_class(as_store(self.store)))
        self._check_together()

    def _check_together(self) -> None:
        """Raises ValueError for phases that exclude one another."""
        appends = isinstance(self.after, Append)
        name, given = ("every", self.every) if self.every else ("after", self.after)
        require(appends or self.drops, name, given, _KEPT)
        remedy = "layers that build on one another are chosen once only"
        require(appends or not self.nested, name, given, remedy)
        if isinstance(self.select, Select):
            self.read.check_over(self.select, self.after)
            self.after.check_over(self.select)
        remedy = "entries in host memory, or read in chunks, are held as the model computes them: leave it out"
        held = self.store is Dense or not self.read.whole_prompts
        require(held, "store", self.store.__name__, remedy)

    @classmethod
    def of(cls, *, scorer: Scorer | None, **parts: Any) -> "Parts":
        """Makes `Parts` of their fields, and of those of `Select`, by name.

        Args:
            scorer: which entries matter; None keeps everything.
            **parts: the fields; without a scorer those of `Select` may say nothing.

        Returns:
            The parts.

        Raises:
            ValueError: for parts that exclude one another.
            TypeError: for parts of a wrong type.
        """
        phases = {name: parts.pop(name) for name in _PHASES & parts.keys()}
        if scorer is not None:
            return cls(select=Select(scorer=scorer, **parts), **phases)
        for name, given in parts.items():
            plain = name in _KEPT_ANYWAY or given == getattr(KeepAll, name)
            require(plain, name, given, _KEPT)
        return cls(select=KeepAll(), **phases)

    def replace(self, **parts: Any) -> "Parts":
        """Copy with these fields in place of its own, or of those of its selection, `Select`."""
        phases = {name: parts.pop(name) for name in _PHASES & parts.keys()}
        select = dataclasses.replace(self.select, **parts) if parts else self.select
        return dataclasses.replace(self, **({"select": select} | phases))

    @property
    def drops(self) -> bool:
        """True if entries of prompts are chosen by a scorer; False if all are kept."""
        return isinstance(self.select, Select)

    @property
    def scorer(self) -> Scorer:
        """Scorer of entries; asks for nothing, and is not called, where all entries are kept."""
        return self.select.scorer

    @property
    def budget(self) -> Kept | None:
        """Entries to keep; None for everything, or what `layers` say by themselves."""
        return self.select.budget

    @property
    def keep(self) -> Keep:
        """Entries that are kept whatever their score, as `Keep`."""
        return self.select.keep

    @property
    def layers(self) -> LayerBudgets:
        """Division of the budget among layers."""
        return self.select.layers

    @property
    def heads(self) -> HeadBudgets:
        """Division of a layer's budget among its kv heads."""
        return self.select.heads

    @property
    def merge(self) -> Merger | None:
        """The merger that folds dropped entries into kept ones; None drops them."""
        return self.select.merge

    @property
    def nested(self) -> bool:
        """True if a layer chooses among the positions that the layer below kept."""
        return self.select.nested

    @property
    def rolling(self) -> bool:
        """True if positions are those within the cache: keys are stored before RoPE and rotated on read."""
        return self.read.rolling

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if a part's method `require_fits(config)` does, as for a gate of another model."""
        for part in (self.scorer, self.layers, inner_budgets(self.heads), self.read):
            part.require_fits(config)
        if any(config.sliding_windows):
            self.require_fits_windows(config.sliding_windows)

    def require_fits_windows(self, sliding_windows: SlidingWindows) -> None:
        """Raises ValueError if the policy rolls positions, has nothing to choose from, or its tables name windows."""
        whole = [layer for layer, width in enumerate(sliding_windows) if width is None]
        remedy = f"only layers {whole} of this model attend to the whole prompt: take FullKV"
        chooses = self.scorer if self.drops else self.read
        plain = not self.drops and self.read.everything
        require(bool(whole) or plain, "policy", chooses, remedy)
        remedy = "some layers of this model have windows, and this is not supported for them: leave it out"
        require(not self.rolling, "rolling", self.rolling, remedy)
        self.among(sliding_windows)

    def among(self, sliding_windows: SlidingWindows) -> "Parts":
        """`Parts` as for a model of the layers without a window alone: tables by layer are cut; the same without any.

        `sliding_windows` are `ModelConfig.sliding_windows`. ValueError if a table names layers with windows, or nothing but these.
        """
        return (
            _cut_to_whole(self, sliding_windows)
            if any(sliding_windows) and None in sliding_windows
            else self
        )

    def unlimited(self, sliding_windows: SlidingWindows) -> Bool[np.ndarray, " L"]:
        """Mask of layers that gain an entry at each token without an end: the policy's, and those of `config.sliding_windows`."""
        mask = np.asarray([width is not None for width in sliding_windows])
        mask[~mask] = self.among(sliding_windows).layers.unlimited(sliding_windows.count(None))
        return mask

    @property
    def layout(self) -> Layout:
        """Cache layout of this policy's segments: EQUAL, RAGGED, or SHARED where all layers share one pool."""
        if self.layers.from_scores:
            return Layout.SHARED
        return Layout.EQUAL if self.heads.uniform else Layout.RAGGED

    @property
    def layer_weights(self) -> bool:
        """True if entries per layer depend on weights computed from each layer's attention, not on lengths alone."""
        return self.layers.from_scores and not self.layers.joint

    @property
    def narrows(self) -> bool:
        """True if `layers` bounds a layer's entries by `at_most` before later layers run, and heads keep their best."""
        shares = isinstance(self.layers, FromScores) and type(self.layers).rows is FromScores.rows
        best = self.heads.order is Order.OWN and not self.heads.needs_norms
        plainly = best and not self.keep.recent
        return shares and plainly and not self.scorer.two_stages

    @property
    def threshold(self) -> float | None:
        """Least score of an entry that stays, if the head budgets are `ThresholdHeads`; else None."""
        return threshold_of(self.heads)

    @property
    def needs(self) -> Needs:
        """Config `Needs` of what prefill computes for these parts beyond keys and values, such as attention sums."""
        needs = self.scorer.needs
        return dataclasses.replace(
            needs,
            queries=max(needs.queries, self.read.queries),
            sums=needs.sums or self.layers.needs_sums,
            norms=needs.norms or self.heads.needs_norms,
            unrotated=needs.unrotated or self.rolling,
            # Weights are arrays of their own.
            gate=None,
        )

    def row_bytes(self, dim: int, itemsize: int) -> int:
        """Bytes of one cache row: key, value and position, and the score of policies that score while decoding.

        Args:
            dim: D.
            itemsize: bytes per element of the model's dtype.

        Returns:
            Bytes.
        """
        return self.store.row_bytes(dim, itemsize) + 4 + (4 if self.scored else 0)

    def read_as_stored(self, dim: int) -> bool:
        """True if a GPU's kernels read entries of `dim` elements as stored in every step; False if steps decode them."""
        appends = not self.ongoing.compresses and self.read == ReadAll()
        return self.store.kernels == Dense.kernels or (
            appends and self.store.read_by(set(self.store.kernels), dim)
        )

    @property
    def uses_key(self) -> bool:
        """True if the scorer or the merger uses random numbers, so that results depend on the call's key."""
        return self.scorer.uses_key or (self.merge is not None and self.merge.uses_key)

    @property
    def evicts(self) -> bool:
        """True if decoding evicts an entry for every new entry beyond the budget: `after` is `Evict`."""
        return isinstance(self.after, Evict)

    @property
    def every(self) -> int | None:
        """Number of new tokens between compressions of the cache; None if the cache is not recompressed."""
        return self.after.every if isinstance(self.after, Recompress) else None

    @property
    def ongoing(self) -> Ongoing:
        """Static config `Ongoing` of compression while decoding."""
        after = self.after
        if isinstance(after, Append):
            return Ongoing()
        return Ongoing(
            compresses=True,
            evicts=self.evicts,
            rank=after.rank,
            one_set=shares_positions(self.heads),
            keep=Keep(sinks=self.keep.sinks, protect=self.keep.protect),
            merge=self.merge,
            queries=self.scorer.needs.queries if isinstance(after.rank, Anew) else 0,
        )

    def reading(self, sliding_windows: SlidingWindows, padded_len: int) -> Reading:
        """Static config `Reading` of which entries each layer reads while decoding, for prompts padded to `padded_len`."""
        read = self.read.among(sliding_windows)
        mine = read.reading(sliding_windows.count(None), padded_len, every_entry=not self.drops)
        return mine.beside(sliding_windows)

    @property
    def scored(self) -> bool:
        """True if entries of the cache have scores, which decoding compares or adds to."""
        return self.ongoing.scored

    @property
    def reach(self) -> int | None:
        """Entries (int) that short prompts' segments may grow to: the budget, or what the layers grow to; or None."""
        if isinstance(self.budget, Tokens):
            return self.budget.value
        return self.layers.grows_to

    def may_hold(self, budget: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Entries per kv head `[B]` that the cache may grow to: `budget`, or the policy's `reach` in entries if larger."""
        return budget if self.reach is None else np.maximum(budget, self.reach)

    def budgets(
        self,
        lengths: Int[np.ndarray, " B"],
        always_kept: Int[np.ndarray, " B"],
        *,
        strict: bool = True,
    ) -> Int[np.ndarray, " B"]:
        """Average entries per kv head `[B]` to keep of each prompt; below the forced entries, raised to them or ValueError.

        `strict` rejects budgets below the forced entries, except shares that are clamped; the rejection names the prompt.
        """
        lengths, budget = np.asarray(lengths, np.int64), self.budget
        if self.layers.sets_rows:
            return self.layers.average(lengths, always_kept)
        if budget is None:
            return lengths.copy()
        rows, share = budget.rows(lengths), isinstance(budget, Share)
        low = np.flatnonzero(rows < always_kept)
        if strict and low.size and not (share and self.select.clamp):
            row = int(low[0])
            remedy = f"prompt {row} ({lengths[row]} tokens) keeps {rows[row]} entries, but sinks, window and protected "
            remedy += f"spans take {always_kept[row]}: raise the budget"
            remedy += ", or give min_budget='clamp'" if share else ""
            require(False, "budget", budget, remedy)
        return np.maximum(rows, np.minimum(always_kept, lengths))

    def raised(self, lengths: Int[np.ndarray, " B"]) -> int:
        """Number of prompts for which a budget share gives fewer entries than must stay; 0 for a budget in entries."""
        if not isinstance(self.budget, Share):
            return 0
        lengths = np.asarray(lengths, np.int64)
        return int((self.budget.rows(lengths) < self.keep.counts(lengths)).sum())

    def recents(
        self,
        rows: Table,
        length: Counts,
        always_kept: Counts,
        weights: Any = None,
        budget: Counts | None = None,
    ) -> Table:
        """Number of most recent entries kept, `[L, B]`: the window or, if more, the share `recent` of entries not forced.

        At most what the other forced entries leave of `rows`; `weights` are the layers' claims and `budget` the average
        entries per kv head where budgets follow from claims. All arguments are on the host, or all traced.
        """
        xp, window = namespace(rows), self.keep.window
        left = xp.maximum(rows - (always_kept - window), 0)
        if weights is not None and self.keep.recent:
            own = self.layers.recents(budget, length, weights)
            if own is not None:
                return xp.clip(own, window, xp.maximum(left, window))
        return xp.maximum(window, share_of(left, self.keep.recent))

    def described(self) -> dict[str, str]:
        """Dict of texts for people, by name, of the parts that are not the usual ones, and of `KeepAll()`."""
        found = {} if self.drops else {"select": brief(self.select)}
        for of in (self.select, self):
            for each in dataclasses.fields(of):
                part = getattr(of, each.name)
                if part != each.default and part is not self.select:
                    found[each.name] = brief(part)
        return found


@lru_cache(maxsize=256)
def _cut_to_whole(parts: Parts, sliding_windows: SlidingWindows) -> Parts:
    """Copy of a policy's `Parts` whose layer and head budgets are those of the layers without a window; memoised.

    `sliding_windows` are `ModelConfig.sliding_windows`; ValueError if a table names layers with windows, or if head budgets that differ
    by layer cannot be cut.
    """
    layers, heads = parts.layers.among(sliding_windows), parts.heads.among(sliding_windows)
    inner, cut = inner_budgets(parts.heads), inner_budgets(heads)
    alike = not inner.needs_layer and inner.limits() is None
    remedy = "they differ by layer, and some layers of this model have windows: give them a method among(windows), "
    remedy += "which returns those of the other layers alone"
    require(alike or cut is not inner, "heads", inner, remedy)
    return parts.replace(layers=layers, heads=heads) if parts.drops else parts


_PHASES = {each.name for each in dataclasses.fields(Parts)}
_KEPT = "without a scorer everything is kept: leave it out, or choose a policy such as SnapKV"
# What says what stays, and how a budget is met, holds where everything is kept.
_KEPT_ANYWAY = ("keep", "clamp")
