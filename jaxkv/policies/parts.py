"""`Parts`, the plain value that is all the engine reads of a policy."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxkv._checks import field, flag, instance, namespace, share_of
from jaxkv._errors import require
from jaxkv.cache.layout import Layout
from jaxkv.cache.stores import Dense, Store
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import Kept, Share, Tokens, as_budget
from jaxkv.policies.heads import (
    HeadBudgets,
    UniformHeads,
    own_budgets,
    own_limits,
    shares_positions,
)
from jaxkv.policies.keep import Keep
from jaxkv.policies.layers import (
    Counts,
    FromScores,
    LayerBudgets,
    Table,
    UniformLayers,
    sets_rows,
)
from jaxkv.policies.merger import Merger, check_merger
from jaxkv.policies.rank import After, Again, Append, Evict, Rank
from jaxkv.policies.reading import Reading, Reads
from jaxkv.policies.scorer import (
    Needs,
    Scorer,
    check_scorer,
)
from jaxkv.policies.threshold import check_threshold, threshold_of
from jaxkv.policies.windowed_budgets import cut_to_whole
from jaxkv.policies.windowed_reads import reading_beside


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ongoing:
    """Static config of compression while decoding: eviction, rank, merger and kept rows; independent of budgets.

    Attributes:
        evicts: True if after each token segments above their limit lose the row of lowest rank.
        rank: how scores change, or None where they are computed anew.
        one_set: True if all kv heads of a layer hold the same positions, and drop the same row.
        keep: first positions and spans that are never dropped.
        merge: the merger of dropped rows; None drops them.
        queries: number of last queries to remember, for scorers that are asked again.
    """

    evicts: bool
    rank: Rank | None
    one_set: bool
    keep: Keep
    merge: Merger | None
    queries: int

    @property
    def scored(self) -> bool:
        """True if the cache stores a score for each row while decoding."""
        return self.rank is not None and self.rank.scored

    @property
    def attends(self) -> bool:
        """True if the attention that rows receive while decoding changes their scores."""
        return self.scored and self.rank is not None and self.rank.decay is not None


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
        field(self, "rolling", flag)
        field(self, "nested", flag)
        if not (isinstance(self.store, type) and issubclass(self.store, Store)):
            raise TypeError(
                f"store={self.store!r}: give a subclass of jaxkv.cache.Store, such as Dense"
            )
        self._check_together()

    def _check_together(self) -> None:
        """Raises ValueError for combinations of parts that exclude one another."""
        budget, scorer, after, merge = self.budget, self.scorer, self.after, self.merge
        fixed = sets_rows(self.layers)
        remedy = "give rows per head or a ratio; FullKV keeps everything"
        require(budget is not None or scorer is None or fixed, "budget", budget, remedy)
        remedy = f"how many rows stay follows from {self.layers}: leave it out"
        require(budget is None or not fixed, "budget", budget, remedy)
        remedy = "heads that say how many rows they keep say it of layers, too: give the same value as layers"
        require(
            own_limits(self.heads) is None or self.layers == self.heads, "heads", self.heads, remedy
        )
        remedy = "without a scorer everything is kept: give one, or choose a policy such as SnapKV"
        require(budget is None or scorer is not None, "budget", budget, remedy)
        if isinstance(budget, Tokens):
            first, last = self.keep.sinks, self.keep.window
            remedy = f"below sinks + window = {first} + {last}: give at least {first + last}, or a smaller window"
            require(budget.value >= first + last, "budget", budget, remedy)
        remedy = "heads and layers need segments of equal size: use UniformHeads() or SharedHeads(), and a schedule"
        require(not self.rolling or self.layout is Layout.EQUAL, "rolling", self.rolling, remedy)
        remedy = "layers that look at scores need a scorer: give one"
        require(scorer is not None or not self.layers.from_scores, "layers", self.layers, remedy)
        remedy = f"layers that look at last queries need a scorer that reads some, unlike {scorer}: give SnapKV's, say"
        needy = getattr(self.layers, "needs_queries", False)
        require(not needy or bool(scorer and scorer.queries), "layers", self.layers, remedy)
        remedy = "heads of all layers share one budget: use AdaptiveHeads(alpha=0), say"
        require(
            not self.layers.joint or own_budgets(self.heads) is not None,
            "layers",
            self.layers,
            remedy,
        )
        check_threshold(self.heads)
        some = self.threshold is not None
        remedy = "rows have no scores without a scorer: give one"
        require(not some or scorer is not None, "threshold", self.threshold, remedy)
        remedy = "rows that go one by one are compared with one another, not with a threshold: give every=64, say"
        require(not (some and isinstance(after, Evict)), "threshold", self.threshold, remedy)
        remedy = f"how many rows stay follows from {self.layers}: give UniformLayers(), or GlobalLayers()"
        require(not (some and self.claims), "threshold", self.threshold, remedy)
        one_set = shares_positions(self.heads)
        require(
            not self.nested or one_set,
            "nested",
            self.nested,
            "heads need one set of positions: use SharedHeads()",
        )
        read = self.read
        if read is not None and scorer is not None:
            remedy = "rows that wait in host memory, or come in chunks, are whole prompts: leave the scorer out"
            require(not read.whole_prompts, "read", read, remedy)
            require(
                isinstance(after, Append),
                "read",
                read,
                "tokens are chosen of a prompt that stays: use Append()",
            )
            require(
                not self.rolling,
                "read",
                read,
                "positions within the cache change: leave rolling positions out",
            )
        if read is not None and read.whole_prompts:
            remedy = "rows in host memory, or read in chunks, are held as the model computes them: leave it out"
            require(self.store is Dense, "store", self.store.__name__, remedy)
        keeps = "this policy keeps everything: leave it out"
        if isinstance(after, Again):
            require(scorer is not None, "every", after.every, keeps)
            remedy = "layers that build on one another are chosen once only"
            require(not self.nested, "every", after.every, remedy)
            anew = scorer if after.rank is None else None
            remedy = f"{scorer} reads of a prompt what no cache remembers: leave it out"
            whole = scorer is not None and scorer.blocks is not None
            asked = anew is not None and bool(anew.replay or anew.gate or anew.two_stages)
            require(not (whole or asked), "every", after.every, remedy)
            remedy = f"{scorer} reads the mean of queries, of which the cache remembers none: give remembered=256, say"
            asks = anew is not None and anew.future is not None and not anew.queries
            require(not asks, "every", after.every, remedy)
        if isinstance(after, Evict):
            require(scorer is not None, "after", after, keeps)
            require(
                not self.nested,
                "after",
                after,
                "layers that build on one another are chosen once only",
            )
            remedy = "rolling positions move in steps: give every=64, say"
            require(not self.rolling, "after", after, remedy)
            remedy = "heads that drop the same rows need segments that lie alike: give a schedule, or every=64, say"
            require(not (one_set and self.layers.from_scores), "after", after, remedy)
        if merge is not None:
            require(scorer is not None, "merge", merge, "this policy drops nothing: leave it out")
            fits = bool(merge.compares) or not isinstance(after, Evict)
            require(fits, "merge", merge, "it folds prompts only: give Merge(), or None")
            require(
                not self.rolling,
                "merge",
                merge,
                "keys before RoPE are not compared: leave rolling positions out",
            )
            remedy = "a decision shared by heads needs as many rows in each: use decision='token'"
            require(not merge.needs_equal_heads or self.heads.uniform, "merge", merge, remedy)

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if a part's method `require_fits(config)` does, as for a gate of another model."""
        for part in (self.scorer, self.layers, self.heads):
            getattr(part, "require_fits", lambda config: None)(config)
        if any(config.windows):
            self.require_fits_windows(config.windows)
        getattr(self.read, "require_fits", lambda config: None)(config)

    def require_fits_windows(self, windows: tuple[int | None, ...]) -> None:
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

    def among(self, windows: tuple[int | None, ...]) -> "Parts":
        """`Parts` as for a model of the layers without a window alone: tables by layer are cut; the same without any.

        `windows` are `ModelConfig.windows`. ValueError if a table names layers with windows, or nothing but these.
        """
        return cut_to_whole(self, windows) if any(windows) and None in windows else self

    def unlimited(self, windows: tuple[int | None, ...]) -> Bool[np.ndarray, " L"]:
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
        plainly = type(self.heads) is UniformHeads and not self.keep.recent
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
        appends = self.ongoing is None and self.read is None and not self.rolling
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
    def outgrows_prompts(self) -> bool:
        """True if decoding evicts and kv heads keep unequal rows: a segment may outgrow its size after prefill."""
        return self.evicts and not self.heads.uniform

    @property
    def every(self) -> int | None:
        """Number of new tokens between compressions of the cache; None if the cache is not compressed again."""
        return self.after.every if isinstance(self.after, Again) else None

    @property
    def ongoing(self) -> Ongoing | None:
        """Static config `Ongoing` of compression while decoding; None if new rows are only appended."""
        after, scorer = self.after, self.scorer
        if scorer is None or isinstance(after, Append):
            return None
        return Ongoing(
            evicts=self.evicts,
            rank=after.rank,
            one_set=shares_positions(self.heads),
            keep=Keep(sinks=self.keep.sinks, protect=self.keep.protect),
            merge=self.merge,
            queries=scorer.queries if after.rank is None else 0,
        )

    def reading(self, windows: tuple[int | None, ...], slots: int) -> Reading | None:
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
        return self.ongoing is not None and self.ongoing.scored

    @property
    def reach(self) -> int | None:
        """Rows (int) that short prompts' segments may grow to: the budget in rows, or the layers' `reach`; or None."""
        if isinstance(self.budget, Tokens):
            return self.budget.value
        return getattr(self.layers, "reach", None)

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
        if sets_rows(self.layers):
            return self.layers.average(lengths, forced)  # type: ignore[attr-defined]
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
        if not isinstance(self.budget, Share) or sets_rows(self.layers) or self.scorer is None:
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
        """Dict of texts for people by part name: scorer, layers, heads, kept rows, behaviour while decoding."""
        scorer = "everything" if self.scorer is None else repr(self.scorer)
        kept = f"sinks={self.keep.sinks}, window={self.keep.window}"
        parts = {
            "scorer": scorer,
            "layers": repr(self.layers),
            "heads": repr(self.heads),
            "always kept": kept,
        }
        if self.keep.recent:
            parts["recent"] = f"{self.keep.recent} of the rest"
        if self.merge is not None:
            parts["dropped rows"] = repr(self.merge)
        if self.evicts:
            parts["while decoding"] = "one row out for each row in"
        elif self.every is not None:
            parts["while decoding"] = f"again every {self.every} tokens"
        if self.read is not None:
            parts["read"] = self.read.described()
        return parts


_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("keep", Keep, "Keep(...)"),
    ("layers", LayerBudgets, "budgets over layers, UniformLayers() say"),
    ("heads", HeadBudgets, "budgets over heads, UniformHeads() say"),
    ("after", (Append, Evict, Again), "Append(), Evict(...) or Again(...)"),
    ("read", (Reads, type(None)), "what layers read, FilteredReads(...) say, or None"),
)
