"""`Parts`, the plain value that is all the engine reads of a policy."""

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxkv._checks import brief, field, flag, instance, namespace, share_of
from jaxkv._errors import require
from jaxkv.cache.layout import Layout
from jaxkv.cache.stores import Dense, Store
from jaxkv.models.config import ModelConfig, Windows
from jaxkv.policies.checks import Kept, Share, Tokens, as_budget, as_store, store_class
from jaxkv.policies.heads import (
    HeadBudgets,
    Order,
    UniformHeads,
    inner_budgets,
    own_budgets,
    shares_positions,
    threshold_of,
)
from jaxkv.policies.keep import Keep
from jaxkv.policies.layers import (
    Counts,
    FromScores,
    LayerBudgets,
    Table,
    UniformLayers,
)
from jaxkv.policies.merger import Merger, check_merger
from jaxkv.policies.rank import After, Again, Anew, Append, Evict, Rank
from jaxkv.policies.reading import Reading, Reads, reading_beside
from jaxkv.policies.scorer import (
    Needs,
    Scorer,
    check_scorer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ongoing:
    """Static config of compression while decoding: eviction, rank, merger and kept rows; independent of budgets.

    Without arguments that of policies which only append new rows.

    Attributes:
        compresses: False if new rows are only appended; the other fields are then not read.
        evicts: True if after each token segments above their limit lose the row of lowest rank.
        rank: how scores change.
        one_set: True if all kv heads of a layer hold the same positions, and drop the same row.
        keep: first positions and spans that are never dropped.
        merge: the merger of dropped rows; None drops them.
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
        """True if the cache stores a score for each row while decoding."""
        return self.rank.scored

    @property
    def attends(self) -> bool:
        """True if the attention that rows receive while decoding changes their scores."""
        return self.scored and self.rank.decay is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """All that the engine reads of a policy: scorer, budgets of layers and heads, kept rows, merger, eviction, store.

    Attributes:
        budget: `Tokens`: rows kept per kv head and layer on average, sinks and window included. `Share`: of each
            sequence's own prompt. `Bytes` of a sequence's cache, which `policy_for` turns into rows. Numbers and
            text, as policies have them, become one of these. None: everything, or what `layers` say by themselves.
        min_budget: "raise" refuses a ratio that comes out below what must stay for some sequence; "clamp" raises it.
        scorer: which rows matter; None keeps everything.
        keep: which rows stay whatever their score.
        layers: how the budget spreads over layers.
        heads: how a layer's budget spreads over its kv heads.
        merge: the merger that folds dropped rows into kept ones; None drops them.
        after: what follows the prompt: `Append()`, `Evict(...)` or `Again(...)`.
        read: which layers read less than everything while tokens are drawn; None if none does.
        rolling: positions are those within the cache: keys are stored before RoPE and rotated on read.
        nested: a layer chooses among the positions that the layer below kept.
        store: how rows are held: a subclass of `jaxkv.cache.Store`.
    """

    budget: Kept | None = None
    min_budget: str = "raise"
    scorer: Scorer | None = None
    keep: Keep = Keep()
    layers: LayerBudgets = UniformLayers()
    heads: HeadBudgets = UniformHeads()
    merge: Merger | None = None
    after: After = Append()
    read: Reads | None = None
    rolling: bool = False
    nested: bool = False
    store: type[Store] = Dense

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", as_budget(self.budget))
        known = isinstance(self.min_budget, str) and self.min_budget in ("raise", "clamp")
        require(known, "min_budget", self.min_budget, "give 'raise' or 'clamp'")
        check_scorer("scorer", self.scorer)
        for name, kind, wanted in _KINDS:
            instance(name, getattr(self, name), kind, f"give {wanted}")
        check_merger("merge", self.merge)
        object.__setattr__(self, "store", store_class(as_store(self.store)))
        field(self, "rolling", flag)
        field(self, "nested", flag)
        self._check_together()

    def _check_together(self) -> None:
        """Raises ValueError for combinations of parts that exclude one another."""
        self._check_rows()
        going = (
            ("every", self.after.every) if isinstance(self.after, Again) else ("after", self.after)
        )
        appends = isinstance(self.after, Append)
        if self.scorer is None:
            remedy = "without a scorer everything is kept: leave it out, or choose a policy such as SnapKV"
            require(self.budget is None, "budget", self.budget, remedy)
            require(not self.layers.from_scores, "layers", self.layers, remedy)
            require(self.threshold is None, "threshold", self.threshold, remedy)
            require(appends, going[0], going[1], remedy)
            require(self.merge is None, "merge", self.merge, remedy)
        elif not appends:
            self._check_going(self.scorer, *going)
        if self.scorer is not None and self.read is not None:
            remedy = "rows that wait in host memory, or come in chunks, are whole prompts: leave the scorer out"
            require(not self.read.whole_prompts, "read", self.read, remedy)
            remedy = "tokens are chosen of rows that stay where they are: give a policy that then appends, and no "
            remedy += "rolling positions"
            require(appends and not self.rolling, "read", self.read, remedy)
        if self.read is not None and self.read.whole_prompts:
            remedy = "rows in host memory, or read in chunks, are held as the model computes them: leave it out"
            require(self.store is Dense, "store", self.store.__name__, remedy)
        if self.merge is not None:
            fits = bool(self.merge.compares) or not self.evicts
            require(fits, "merge", self.merge, "it folds prompts only: give Merge(), or None")
            remedy = "keys before RoPE are not compared: leave rolling positions out"
            require(not self.rolling, "merge", self.merge, remedy)
            remedy = "a decision shared by heads needs as many rows in each: use decision='token'"
            equal = not self.merge.needs_equal_heads or self.heads.uniform
            require(equal, "merge", self.merge, remedy)

    def _check_rows(self) -> None:
        """Raises ValueError unless budget, layers and heads say together, and once, how many rows stay."""
        budget, scorer, layers, heads = self.budget, self.scorer, self.layers, self.heads
        fixed = layers.sets_rows
        remedy = "give rows per head or a ratio; FullKV keeps everything"
        require(budget is not None or scorer is None or fixed, "budget", budget, remedy)
        remedy = f"how many rows stay follows from {layers}: leave it out"
        require(budget is None or not fixed, "budget", budget, remedy)
        remedy = "heads that say how many rows they keep say it of layers, too: give the same value as layers"
        require(heads.limits() is None or layers == heads, "heads", heads, remedy)
        if isinstance(budget, Tokens):
            first, last = self.keep.sinks, self.keep.window
            remedy = f"below sinks + window = {first} + {last}: give at least {first + last}, or a smaller window"
            require(budget.value >= first + last, "budget", budget, remedy)
        remedy = "heads and layers need segments of equal size: use UniformHeads() or SharedHeads(), and a schedule"
        require(not self.rolling or self.layout is Layout.EQUAL, "rolling", self.rolling, remedy)
        remedy = f"layers that look at last queries need a scorer that reads some, unlike {scorer}: give SnapKV's, say"
        require(
            not layers.needs_queries or bool(scorer and scorer.queries), "layers", layers, remedy
        )
        remedy = "heads of all layers share one budget: use AdaptiveHeads(alpha=0), say"
        require(not layers.joint or own_budgets(heads) is not None, "layers", layers, remedy)
        remedy = (
            f"how many rows stay follows from {layers}: give UniformLayers(), or GlobalLayers()"
        )
        require(self.threshold is None or not self.claims, "threshold", self.threshold, remedy)
        remedy = "heads need one set of positions: use SharedHeads()"
        require(not self.nested or shares_positions(heads), "nested", self.nested, remedy)

    def _check_going(self, scorer: Scorer, name: str, given: Any) -> None:
        """Raises ValueError unless these parts can go on compressing while tokens are drawn; `name` is what says so."""
        remedy = "layers that build on one another are chosen once only"
        require(not self.nested, name, given, remedy)
        if isinstance(self.after, Evict):
            remedy = "rows that go one by one are compared with one another, not with a threshold: give every=64, say"
            require(self.threshold is None, "threshold", self.threshold, remedy)
            remedy = "rolling positions move in steps: give every=64, say"
            require(not self.rolling, name, given, remedy)
            remedy = "heads that drop the same rows need segments that lie alike: give a schedule, or every=64, say"
            alike = not (shares_positions(self.heads) and self.layers.from_scores)
            require(alike, name, given, remedy)
        if isinstance(self.after, Again):
            anew = self.after.rank is None
            once = anew and bool(scorer.replay or scorer.gate or scorer.two_stages)
            remedy = f"{scorer} reads of a prompt what no cache remembers: leave it out"
            require(scorer.blocks is None and not once, name, given, remedy)
            forgets = anew and scorer.future is not None and not scorer.queries
            remedy = f"{scorer} reads the mean of queries, of which the cache remembers none: give remembered=256, say"
            require(not forgets, name, given, remedy)

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if a part's method `require_fits(config)` does, as for a gate of another model."""
        for part in (self.scorer, self.layers, inner_budgets(self.heads), self.read):
            if part is not None:
                part.require_fits(config)
        if any(config.windows):
            self.require_fits_windows(config.windows)

    def require_fits_windows(self, windows: Windows) -> None:
        """Raises ValueError if the policy rolls positions, has nothing to choose from, or its tables name windows."""
        whole = [layer for layer, width in enumerate(windows) if width is None]
        remedy = f"only layers {whole} of this model attend to the whole prompt: take FullKV"
        require(
            bool(whole) or (self.scorer or self.read) is None,
            "policy",
            self.scorer or self.read,
            remedy,
        )
        remedy = (
            "some layers of this model have windows, and this is not built for them: leave it out"
        )
        require(not self.rolling, "rolling", self.rolling, remedy)
        self.among(windows)

    def among(self, windows: Windows) -> "Parts":
        """`Parts` as for a model of the layers without a window alone: tables by layer are cut; the same without any.

        `windows` are `ModelConfig.windows`. ValueError if a table names layers with windows, or nothing but these.
        """
        return _cut_to_whole(self, windows) if any(windows) and None in windows else self

    def unlimited(self, windows: Windows) -> Bool[np.ndarray, " L"]:
        """Mask of layers that gain a row at each token without an end: the policy's, and those of `config.windows`."""
        mask = np.asarray([width is not None for width in windows])
        mask[~mask] = self.among(windows).layers.unlimited(windows.count(None))
        return mask

    @property
    def layout(self) -> Layout:
        """Cache layout of this policy's segments: EQUAL, RAGGED, or SHARED where all layers share one pool."""
        if self.layers.from_scores:
            return Layout.SHARED
        return Layout.EQUAL if self.heads.uniform else Layout.RAGGED

    @property
    def claims(self) -> bool:
        """True if rows per layer depend on weights computed from each layer's attention, not on lengths alone."""
        return self.layers.from_scores and not self.layers.joint

    @property
    def narrows(self) -> bool:
        """True if `layers` bounds a layer's rows by `at_most` before later layers run, and heads keep their best."""
        shares = isinstance(self.layers, FromScores) and type(self.layers).rows is FromScores.rows
        best = self.heads.order is Order.OWN and not self.heads.needs_norms
        plainly = best and not self.keep.recent
        return shares and plainly and self.scorer is not None and not self.scorer.two_stages

    @property
    def threshold(self) -> float | None:
        """Least score of a row that stays, if the head budgets are `ThresholdHeads`; else None."""
        return threshold_of(self.heads)

    @property
    def needs(self) -> Needs:
        """Config `Needs` of what prefill computes for these parts beyond keys and values, such as attention sums."""
        scorer, read = self.scorer, self.read
        asked = 0 if read is None else read.queries
        if scorer is None:
            return Needs(queries=asked)
        future, blocks = scorer.future, scorer.blocks
        return Needs(
            queries=max(scorer.queries, asked),
            sums=scorer.sums or self.layers.needs_sums,
            norms=self.heads.needs_norms or scorer.norms,
            future=() if future is None else (future,),
            replay=scorer.replay,
            unrotated=self.rolling or blocks is not None,
            blocks=() if blocks is None else (blocks,),
            hidden=scorer.gate is not None,
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
        """True if a GPU's kernels read rows of `dim` elements as stored in every step; False if steps decode them."""
        appends = not self.ongoing.compresses and self.read is None and not self.rolling
        return self.store.fused_eviction or (self.store.fused_at(dim) and appends)

    @property
    def draws(self) -> bool:
        """True if the scorer or the merger draws random numbers, so that results depend on the call's key."""
        return any(part is not None and part.draws for part in (self.scorer, self.merge))

    @property
    def evicts(self) -> bool:
        """True if decoding evicts a row for every new row beyond the budget: `after` is `Evict`."""
        return isinstance(self.after, Evict)

    @property
    def every(self) -> int | None:
        """Number of new tokens between compressions of the cache; None if the cache is not compressed again."""
        return self.after.every if isinstance(self.after, Again) else None

    @property
    def ongoing(self) -> Ongoing:
        """Static config `Ongoing` of compression while decoding."""
        after, scorer = self.after, self.scorer
        if scorer is None or isinstance(after, Append):
            return Ongoing()
        return Ongoing(
            compresses=True,
            evicts=self.evicts,
            rank=Anew() if after.rank is None else after.rank,
            one_set=shares_positions(self.heads),
            keep=Keep(sinks=self.keep.sinks, protect=self.keep.protect),
            merge=self.merge,
            queries=scorer.queries if after.rank is None else 0,
        )

    def reading(self, windows: Windows, slots: int) -> Reading | None:
        """Static config `Reading` of which rows each layer reads while decoding; None if all read every kept row."""
        every_row = self.scorer is None
        return (
            None
            if self.read is None
            else reading_beside(self.read, windows, slots, every_row=every_row)
        )

    @property
    def scored(self) -> bool:
        """True if rows of the cache have scores, which decoding compares or adds to."""
        return self.ongoing.scored

    @property
    def reach(self) -> int | None:
        """Rows (int) that short prompts' segments may grow to: the budget, or what the layers grow to; or None."""
        if isinstance(self.budget, Tokens):
            return self.budget.value
        return self.layers.grows_to

    def may_hold(self, budget: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Rows per kv head `[B]` that the cache may grow to: `budget`, or the policy's `reach` in rows if larger."""
        return budget if self.reach is None else np.maximum(budget, self.reach)

    def budgets(
        self, lengths: Int[np.ndarray, " B"], forced: Int[np.ndarray, " B"], *, strict: bool = True
    ) -> Int[np.ndarray, " B"]:
        """Average rows per kv head `[B]` to keep of each prompt; below the forced rows, raised to them or ValueError.

        `strict` refuses budgets below the forced rows, unless `min_budget` says to clamp; the refusal names the prompt.
        """
        lengths, budget = np.asarray(lengths, np.int64), self.budget
        if self.layers.sets_rows:
            return self.layers.average(lengths, forced)
        if budget is None or self.scorer is None:
            return lengths.copy()
        rows, share = budget.rows(lengths), isinstance(budget, Share)
        low = np.flatnonzero(rows < forced)
        if strict and low.size and (self.min_budget == "raise" or not share):
            row = int(low[0])
            remedy = f"prompt {row} ({lengths[row]} tokens) keeps {rows[row]} rows, but sinks, window and protected "
            remedy += f"spans take {forced[row]}: raise the budget"
            remedy += ", or give min_budget='clamp'" if share else ""
            require(False, "budget", budget, remedy)
        return np.maximum(rows, np.minimum(forced, lengths))

    def raised(self, lengths: Int[np.ndarray, " B"]) -> int:
        """Number of prompts for which a budget share gives fewer rows than must stay; 0 for a budget in rows."""
        if not isinstance(self.budget, Share) or self.layers.sets_rows or self.scorer is None:
            return 0
        lengths = np.asarray(lengths, np.int64)
        return int((self.budget.rows(lengths) < self.keep.counts(lengths)).sum())

    def recents(
        self,
        rows: Table,
        length: Counts,
        forced: Counts,
        weights: Any = None,
        budget: Counts | None = None,
    ) -> Table:
        """Number of most recent rows kept, `[L, B]`: the window or, if more, the share `recent` of rows not forced.

        At most what the other forced rows leave of `rows`; `weights` are the layers' claims and `budget` the average
        rows per kv head where budgets follow from claims. All arguments are on the host, or all traced.
        """
        xp, window = namespace(rows), self.keep.window
        left = xp.maximum(rows - (forced - window), 0)
        if weights is not None and budget is not None and self.keep.recent:
            own = self.layers.recents(budget, length, weights)
            if own is not None:
                return xp.clip(own, window, xp.maximum(left, window))
        return xp.maximum(window, share_of(left, self.keep.recent))

    def described(self) -> dict[str, str]:
        """Dict of texts for people, by name, of the parts that are not the usual ones."""
        usual = {each.name: each.default for each in dataclasses.fields(self)}
        mine = {name: getattr(self, name) for name in usual}
        return {name: brief(part) for name, part in mine.items() if part != usual[name]}


@lru_cache(maxsize=256)
def _cut_to_whole(parts: Parts, windows: Windows) -> Parts:
    """Copy of a policy's `Parts` whose layer and head budgets are those of the layers without a window; memoised.

    `windows` are `ModelConfig.windows`; ValueError if a table names layers with windows, or if head budgets that differ
    by layer cannot be cut.
    """
    layers, heads = parts.layers.among(windows), parts.heads.among(windows)
    inner, cut = inner_budgets(parts.heads), inner_budgets(heads)
    alike = not inner.needs_layer and inner.limits() is None
    remedy = "they differ by layer, and some layers of this model have windows: give them a method among(windows), "
    remedy += "which returns those of the other layers alone"
    require(alike or cut is not inner, "heads", inner, remedy)
    return dataclasses.replace(parts, layers=layers, heads=heads)


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("keep", Keep, "Keep(...)"),
    ("layers", LayerBudgets, "an instance of a subclass of LayerBudgets, UniformLayers() say"),
    ("heads", HeadBudgets, "an instance of a subclass of HeadBudgets, UniformHeads() say"),
    ("after", (Append, Evict, Again), "Append(), Evict(...) or Again(...)"),
    ("read", (Reads, type(None)), "what layers read, FilteredReads(...) say, or None"),
)
