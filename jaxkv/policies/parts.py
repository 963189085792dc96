"""`Parts`, the plain value through which the engine sees a policy."""

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
    """Static config of compression while decoding, independent of budgets: eviction, rank, merger, protected entries.

    The defaults are those of policies that only append new entries.

    Attributes:
        compresses: False if new entries are only appended; the other fields are then unused.
        evicts: True if, after each token, segments above their limit evict the entry of lowest rank.
        rank: how scores change.
        one_set: True if all kv heads of a layer hold the same positions, and evict the same position.
        keep: sinks and spans that are never evicted.
        merge: the merger of evicted entries; None discards them.
        queries: size of the query buffer, for scorers that score again.
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
        """True if attention while decoding changes entries' scores."""
        return self.scored and self.rank.decay is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """All that the engine reads of a policy, by phases: selection of a prompt's entries, decoding, reads, store.

    Attributes:
        select: entries of a prompt to keep: `KeepAll()` or `Select(...)`.
        after: what happens to entries after the prompt: `Append()`, `Evict(...)` or `Recompress(...)`.
        read: entries that layers attend to while decoding: `ReadAll()`, or fewer.
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
        field(self, "read", instance, Reads, "give what layers attend to, such as ReadAll()")
        object.__setattr__(self, "store", store_class(as_store(self.store)))
        self._check_together()

    def _check_together(self) -> None:
        """Raise ValueError for phases that exclude one another."""
        appends = isinstance(self.after, Append)
        name, given = ("every", self.every) if self.every else ("after", self.after)
        require(appends or self.drops, name, given, _KEPT)
        remedy = "nested layers are chosen once only, for the prompt: leave it out"
        require(appends or not self.nested, name, given, remedy)
        if isinstance(self.select, Select):
            self.read.check_over(self.select, self.after)
            self.after.check_over(self.select)
        remedy = "offloading and chunked prefill need dense entries: leave it out"
        held = self.store is Dense or not self.read.whole_prompts
        require(held, "store", self.store.__name__, remedy)

    @classmethod
    def of(cls, *, scorer: Scorer | None, **parts: Any) -> "Parts":
        """Build `Parts` from their fields and those of `Select`, by name.

        Args:
            scorer: scorer of entries; None keeps every entry.
            **parts: the fields; without a scorer, fields of `Select` must have their defaults.

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
        """Return a copy with these fields of `Parts`, or of its selection `Select`, replaced."""
        phases = {name: parts.pop(name) for name in _PHASES & parts.keys()}
        select = dataclasses.replace(self.select, **parts) if parts else self.select
        return dataclasses.replace(self, **({"select": select} | phases))

    @property
    def drops(self) -> bool:
        """True if a scorer chooses entries of prompts; False if all are kept."""
        return isinstance(self.select, Select)

    @property
    def scorer(self) -> Scorer:
        """Scorer of entries; without needs, and not called, if all entries are kept."""
        return self.select.scorer

    @property
    def budget(self) -> Kept | None:
        """Budget of entries; None for every entry, or where `layers` set the number of entries."""
        return self.select.budget

    @property
    def keep(self) -> Keep:
        """Always-kept entries, as `Keep`."""
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
        """Merger of evicted entries into kept ones; None discards them."""
        return self.select.merge

    @property
    def nested(self) -> bool:
        """True if a layer chooses among the positions that the layer below kept."""
        return self.select.nested

    @property
    def rolling(self) -> bool:
        """True if positions count within the cache: keys are stored before RoPE and rotated on each read."""
        return self.read.rolling

    def require_fits(self, config: ModelConfig) -> None:
        """Raise ValueError if a part does not fit the model, such as the gate of another model."""
        for part in (self.scorer, self.layers, inner_budgets(self.heads), self.read):
            part.require_fits(config)
        if any(config.sliding_windows):
            self.require_fits_windows(config.sliding_windows)

    def require_fits_windows(self, sliding_windows: SlidingWindows) -> None:
        """Raise ValueError for rolling positions, no layer to compress, or tables that name sliding-window layers."""
        whole = [layer for layer, width in enumerate(sliding_windows) if width is None]
        remedy = f"only layers {whole} of this model attend to the whole prompt: use FullKV"
        chooses = self.scorer if self.drops else self.read
        plain = not self.drops and self.read.everything
        require(bool(whole) or plain, "policy", chooses, remedy)
        remedy = "not supported for models with sliding windows: leave it out"
        require(not self.rolling, "rolling", self.rolling, remedy)
        self.among(sliding_windows)

    def among(self, sliding_windows: SlidingWindows) -> "Parts":
        """Return the `Parts` for the layers without a sliding window: tables by layer have only these layers.

        `sliding_windows` are `ModelConfig.sliding_windows`; without any, the parts are unchanged. ValueError if a
        table names sliding-window layers, or nothing but these.
        """
        return (
            _of_full_layers(self, sliding_windows)
            if any(sliding_windows) and None in sliding_windows
            else self
        )

    def unlimited(self, sliding_windows: SlidingWindows) -> Bool[np.ndarray, " L"]:
        """Return the mask of layers that keep all new entries: the policy's unlimited and the sliding-window layers."""
        mask = np.asarray([width is not None for width in sliding_windows])
        mask[~mask] = self.among(sliding_windows).layers.unlimited(sliding_windows.count(None))
        return mask

    @property
    def layout(self) -> Layout:
        """Cache layout of this policy's segments: EQUAL, RAGGED, or SHARED if all layers share one pool."""
        if self.layers.from_scores:
            return Layout.SHARED
        return Layout.EQUAL if self.heads.uniform else Layout.RAGGED

    @property
    def layer_weights(self) -> bool:
        """True if layer budgets depend on weights computed from each layer's attention, not on lengths alone."""
        return self.layers.from_scores and not self.layers.joint

    @property
    def narrows(self) -> bool:
        """True if `at_most` bounds a layer's entries before later layers run, and heads keep their own best."""
        shares = isinstance(self.layers, FromScores) and type(self.layers).rows is FromScores.rows
        best = self.heads.order is Order.OWN and not self.heads.needs_norms
        plainly = best and not self.keep.recent
        return shares and plainly and not self.scorer.two_stages

    @property
    def threshold(self) -> float | None:
        """Lowest score of a kept entry if the head budgets are `ThresholdHeads`; else None."""
        return threshold_of(self.heads)

    @property
    def needs(self) -> Needs:
        """`Needs` of these parts: what prefill computes in addition to keys and values, such as attention sums."""
        needs = self.scorer.needs
        return dataclasses.replace(
            needs,
            queries=max(needs.queries, self.read.queries),
            sums=needs.sums or self.layers.needs_sums,
            norms=needs.norms or self.heads.needs_norms,
            unrotated=needs.unrotated or self.rolling,
            # A gate's weights are arrays, and an argument of their own.
            gate=None,
        )

    def row_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes of one cache row: key, value and position, and the score of policies that score in decoding.

        Args:
            dim: D.
            itemsize: bytes per element of the model's dtype.

        Returns:
            Bytes.
        """
        return self.store.row_bytes(dim, itemsize) + 4 + (4 if self.scored else 0)

    def read_as_stored(self, dim: int) -> bool:
        """Return True if GPU kernels read entries of `dim` elements as stored; False if each step decodes them."""
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
        """Number of new tokens between compressions of the cache; None without recompression."""
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
        """Return `Reading`, the static config of the entries each layer attends to, for prompts of `padded_len`."""
        read = self.read.among(sliding_windows)
        mine = read.reading(sliding_windows.count(None), padded_len, every_entry=not self.drops)
        return mine.beside(sliding_windows)

    @property
    def scored(self) -> bool:
        """True if entries of the cache have scores, which decoding compares or changes."""
        return self.ongoing.scored

    @property
    def reach(self) -> int | None:
        """Entries to which short prompts' segments may grow: the budget, the layer budgets' limit, or None."""
        if isinstance(self.budget, Tokens):
            return self.budget.value
        return self.layers.grows_to

    def may_hold(self, budget: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return entries per kv head `[B]` to which the cache may grow: `budget`, or the policy's `reach` if larger."""
        return budget if self.reach is None else np.maximum(budget, self.reach)

    def budgets(
        self,
        lengths: Int[np.ndarray, " B"],
        always_kept: Int[np.ndarray, " B"],
        *,
        strict: bool = True,
    ) -> Int[np.ndarray, " B"]:
        """Return the average entries per kv head `[B]` to keep of each prompt, at least its always-kept entries.

        `strict` rejects budgets below the always-kept entries, except shares under `clamp`; the error names the prompt.
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
        """Return the number of prompts whose share is below their always-kept entries; 0 for a budget in entries."""
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
        """Return how many recent entries to keep, `[L, B]`: the window or, if more, `recent` of those not always kept.

        The share is of the entries that are not always kept. The result is at most what other always-kept entries
        leave of `rows`. `weights` are the layers' weights, and `budget` the average entries per kv head, where budgets
        follow from weights. All arguments are on the host, or all are traced.
        """
        xp, window = namespace(rows), self.keep.window
        left = xp.maximum(rows - (always_kept - window), 0)
        if weights is not None and self.keep.recent:
            own = self.layers.recents(budget, length, weights)
            if own is not None:
                return xp.clip(own, window, xp.maximum(left, window))
        return xp.maximum(window, share_of(left, self.keep.recent))

    def described(self) -> dict[str, str]:
        """Return short texts, by name, of the parts that differ from their defaults, and of `KeepAll()`."""
        found = {} if self.drops else {"select": brief(self.select)}
        for of in (self.select, self):
            for each in dataclasses.fields(of):
                part = getattr(of, each.name)
                if part != each.default and part is not self.select:
                    found[each.name] = brief(part)
        return found


@lru_cache(maxsize=256)
def _of_full_layers(parts: Parts, sliding_windows: SlidingWindows) -> Parts:
    """Return a copy of `parts` with layer and head budgets of the layers without a sliding window; memoised.

    `sliding_windows` are `ModelConfig.sliding_windows`. ValueError if a table names sliding-window layers, or if head
    budgets that differ by layer do not override `among`.
    """
    layers, heads = parts.layers.among(sliding_windows), parts.heads.among(sliding_windows)
    inner, cut = inner_budgets(parts.heads), inner_budgets(heads)
    alike = not inner.needs_layer and inner.limits() is None
    remedy = "they differ by layer, and some layers have sliding windows: write a method "
    remedy += "among(sliding_windows) that returns the budgets of the other layers"
    require(alike or cut is not inner, "heads", inner, remedy)
    return parts.replace(layers=layers, heads=heads) if parts.drops else parts


_PHASES = {each.name for each in dataclasses.fields(Parts)}
_KEPT = "without a scorer every entry is kept: leave it out, or choose a policy such as SnapKV"
# Fields of `Select` that have no effect, and are accepted, where every entry is kept.
_KEPT_ANYWAY = ("keep", "clamp")
