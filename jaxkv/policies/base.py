"""What a policy is: frozen parts that say how many rows stay, which ones, and what scoring needs to see."""

import dataclasses
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv._errors import require
from jaxkv._values import Value, as_real, is_whole, normalise, plain
from jaxkv.attention.xla import Form
from jaxkv.policies.budgets import LayerBudgets, UniformLayers
from jaxkv.policies.hooks import check_parts
from jaxkv.policies.merging import Merger
from jaxkv.policies.protocol import Carry, Needs, Scorer, Settings, Span, Upkeep
from jaxkv.policies.reading import Reading
from jaxkv.policies.select import HeadBudgets, UniformHeads, together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(Value):
    """A KV-cache compression policy: a budget, and the parts a method of the literature is made of.

    Attributes:
        budget: int: rows kept per kv head and layer on average, sinks and window included. float in (0, 1]: that
            share of each sequence's own prompt. None: everything. numpy's numbers count as Python's of their kind.
        min_budget: "raise" refuses a ratio that comes out below sinks + window + protected rows for some sequence;
            "clamp" raises it to them.
        protect: spans `(start, stop)` of the prompt's positions that always stay, with Python's slice meaning on each
            sequence.
        every: compress again after so many more tokens, over prompt and answer in order of position: the cache never
            holds more than the budget and this many rows. None compresses the prompt only.
        merge: what becomes of dropped rows: None drops them, `Merge()` folds them into their nearest kept rows.
    """

    budget: int | float | None = None
    min_budget: str = "raise"
    protect: tuple[Span, ...] = ()
    every: int | None = None
    merge: Merger | None = None

    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        normalise(self)
        self._check_given()
        check_parts(self, Policy)
        self._check_settings()
        try:
            hash(self)
        except TypeError as error:
            remedy = "programs are kept by a policy's fields: give numbers, tuples and frozen dataclasses"
            raise TypeError(f"{type(self).__name__}: {error}; {remedy}") from None

    def _check_given(self) -> None:
        """Each field by itself."""
        self._check_budget()
        known = isinstance(self.min_budget, str) and self.min_budget in ("raise", "clamp")
        require(known, "min_budget", self.min_budget, "give 'raise' or 'clamp'")
        object.__setattr__(self, "protect", _spans(self.protect))
        every, merge = self.every, self.merge
        require(every is None or is_whole(every, 1), "every", every, "give a number of tokens, at least 1")
        merges = isinstance(merge, Merger) and not isinstance(merge, type)
        require(merge is None or merges, "merge", merge, "give Merge(...), or None")

    def _check_budget(self) -> None:
        """The budget by itself."""
        budget = self._plain_budget("give rows per head (an int) or a share (a float)")
        if isinstance(budget, float):
            require(0 < budget <= 1, "budget", budget, "a ratio lies in (0, 1]; for a number of rows give an int")
        elif budget is not None:
            require(budget >= 1, "budget", budget, "keep at least 1 row, or give a ratio in (0, 1]")

    def _plain_budget(self, remedy: str) -> int | float | None:
        """The budget as an int (rows) or a float (a share: decimals and fractions are shares)."""
        budget = self.budget
        if isinstance(budget, (Decimal, Fraction)):
            budget = float(budget)
            object.__setattr__(self, "budget", budget)
        number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        require(budget is None or number, "budget", budget, remedy)
        return budget

    def _check_settings(self) -> None:
        """What was asked for against what the parts can do."""
        settings, scorer = self.settings, self.scorer
        budget, every, merge = settings.budget, settings.every, settings.merge
        remedy = "give rows per head or a ratio; FullKV keeps everything"
        require(budget is not None or scorer is None, "budget", budget, remedy)
        name = type(self).__name__
        remedy = f"{name} has no scorer, and so keeps everything: override `scorer`, or choose a policy such as SnapKV"
        require(budget is None or scorer is not None, "budget", budget, remedy)
        if isinstance(budget, int):
            first, last = self.kept_first, self.kept_last
            remedy = f"below sinks + window = {first} + {last}: give at least {first + last}, or a smaller window"
            require(budget >= first + last, "budget", budget, remedy)
        if every is not None:
            require(scorer is not None, "every", every, "this policy keeps everything: leave it out")
            require(not self.evicts, "every", every, "this policy drops a row for every token already: leave it out")
            require(not self.carries_over, "every", every, "layers that build on one another are chosen once only")
        if merge is not None:
            require(scorer is not None, "merge", merge, "this policy drops nothing: leave it out")
            require(
                merge.while_decoding or not self.evicts, "merge", merge, "it folds prompts only: give Merge(), or None"
            )
            require(not self.rolling, "merge", merge, "keys before RoPE are not compared: leave rolling positions out")
            require(
                not merge.needs_equal_heads or self.heads.uniform,
                "merge",
                merge,
                "a decision shared by heads needs as many rows in each: use decision='token'",
            )

    # The parts. A method overrides the ones it has.

    @property
    def settings(self) -> Settings:
        """What was asked for, as the engine reads it; fields hold what was given, and nothing that follows from it."""
        return Settings(
            budget=self.budget,
            min_budget=self.min_budget,
            protect=self.protect,
            every=self.every,
            merge=self.merge,
        )

    @property
    def kept_first(self) -> int:
        """First positions (sinks) that always stay."""
        return 0

    @property
    def kept_last(self) -> int:
        """Last positions (the window) of the prompt that always stay."""
        return 0

    @property
    def scorer(self) -> Scorer | None:
        """Which rows matter; None keeps everything."""
        return None

    @property
    def layers(self) -> LayerBudgets:
        """How the budget spreads over layers."""
        return UniformLayers()

    @property
    def heads(self) -> HeadBudgets:
        """How a layer's budget spreads over its kv heads."""
        return UniformHeads()

    @property
    def rolling(self) -> bool:
        """Whether positions are those within the cache: keys are stored before RoPE and rotated on read."""
        return False

    @property
    def recent_share(self) -> float:
        """Share of a layer's rows, those that stay anyway left out, that goes to the most recent tokens."""
        return 0.0

    @property
    def evicts(self) -> bool:
        """Whether every new token beyond the budget costs a row."""
        return False

    @property
    def carries_over(self) -> bool:
        """Whether a layer chooses among the positions that the layer below kept."""
        return False

    def recents(
        self,
        rows: Int[np.ndarray, "L B"],
        length: Int[np.ndarray, " B"],
        forced: Int[np.ndarray, " B"],
        weights: Float[np.ndarray, "L B"] | None = None,
    ) -> Int[np.ndarray, "L B"]:
        """Most recent rows that stay in each layer.

        Args:
            rows: rows per kv head of each layer.
            length: tokens of each prompt.
            forced: rows that stay anyway.
            weights: the layers' claims, where budgets follow from them.

        Returns:
            At least the window, at most what the others that must stay leave.
        """
        share = Fraction(repr(as_real(self.recent_share)))
        left = np.maximum(np.asarray(rows) - (np.asarray(forced) - self.kept_last), 0)
        # Python's numbers: the decimals of 1 / 3 times a thousand rows are beyond 64 bits.
        recent = (left.astype(object) * share.numerator // share.denominator).astype(np.int64)
        return np.maximum(self.kept_last, recent)

    # What follows from the parts.

    @property
    def form(self) -> Form:
        """How this policy's segments lie in the pool."""
        if self.layers.from_scores:
            return Form.SHARED
        return Form.EQUAL if self.heads.uniform else Form.RAGGED

    @property
    def needs(self) -> Needs:
        """What prefill must compute for this policy."""
        scorer = self.scorer
        if scorer is None:
            return Needs()
        return Needs(
            queries=scorer.queries,
            sums=scorer.sums or self.layers.needs_sums,
            norms=self.heads.needs_norms,
            unrotated=self.rolling,
        )

    @property
    def upkeep(self) -> Upkeep | None:
        """What goes on after the prompt; None for policies that then only append."""
        scorer = self.scorer
        settings = self.settings
        if scorer is None or not (self.evicts or settings.every):
            return None
        return Upkeep(
            evicts=self.evicts,
            carry=scorer.carry,
            scored=scorer.carry not in (None, Carry.AGE),
            together=together(self.heads),
            sinks=int(self.kept_first),
            protect=settings.protect,
            merge=settings.merge,
            ring=scorer.queries if scorer.carry is None else 0,
        )

    @property
    def by_chunks(self) -> bool:
        """Whether prompts run through the model chunk by chunk."""
        return False

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "Policy":
        """This policy with what it takes from the model filled in.

        Args:
            layers: L.
            found: the model's filter layers, if they have been found.

        Returns:
            A policy that needs nothing more.

        Raises:
            ValueError: if the model cannot honour it.
        """
        return self

    def reading(self, layers: int, slots: int) -> Reading | None:
        """Which layers read what while tokens are drawn.

        Args:
            layers: L.
            slots: the prompts' bucket.

        Returns:
            None where every layer reads all that is kept.
        """
        return None

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Tokens of each prompt that a layer reads which does not read everything."""
        return np.asarray(lengths, np.int64)

    def nominal(self, lengths: Int[np.ndarray, " B"], budget: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Rows a cache may grow to: for prompts shorter than a budget in rows, that budget."""
        asked = self.settings.budget
        return np.maximum(budget, asked) if isinstance(asked, int) else budget

    def budgets(
        self, lengths: Int[np.ndarray, " B"], forced: Int[np.ndarray, " B"], *, strict: bool = True
    ) -> Int[np.ndarray, " B"]:
        """Rows per kv head, averaged over layers and heads, for prompts of these lengths.

        Args:
            lengths: tokens of each prompt.
            forced: rows that stay whatever their score.
            strict: refuse budgets below the forced rows, unless `min_budget` says to clamp.

        Returns:
            At most the length, at least the forced rows.

        Raises:
            ValueError: if the budget is below the forced rows, naming the prompt.
        """
        lengths = np.asarray(lengths, np.int64)
        settings = self.settings
        budget = settings.budget
        if budget is None or self.scorer is None:
            return lengths.copy()
        if isinstance(budget, float):
            share = Fraction(repr(budget))  # the decimal that was written: 0.1 of 600 is 60
            rows = np.asarray([max(1, n * share.numerator // share.denominator) for n in lengths.tolist()], np.int64)
        else:
            rows = np.minimum(budget, lengths)
        low = np.flatnonzero(rows < forced)
        if strict and low.size and (settings.min_budget == "raise" or not isinstance(budget, float)):
            row = int(low[0])
            remedy = f"prompt {row} ({lengths[row]} tokens) keeps {rows[row]} rows, but sinks, window and protected "
            remedy += f"spans take {forced[row]}: raise the budget"
            remedy += ", or give min_budget='clamp'" if isinstance(budget, float) else ""
            require(False, "budget", budget, remedy)
        return np.maximum(rows, np.minimum(forced, lengths))

    def forced(self, lengths: Int[np.ndarray, " B"], slots: int) -> Bool[np.ndarray, "B S"]:
        """Which rows stay whatever their score: sinks, window and protected spans.

        Args:
            lengths: tokens of each prompt.
            slots: S.

        Returns:
            A mask over the prompt's slots.
        """
        length = np.asarray(lengths)[:, None]
        position = np.arange(slots)
        mask = (position < self.kept_first) | (position >= length - self.kept_last)
        for start, stop in self.settings.protect:
            first, last = (np.where(np.asarray(edge) < 0, length + edge, edge) for edge in (start, stop))
            mask = mask | ((position >= first) & (position < last))
        return mask & (position < length)

    def parts(self) -> dict[str, str]:
        """The parts by name, for people to read."""
        scorer = "everything" if self.scorer is None else repr(self.scorer)
        kept = f"sinks={self.kept_first}, window={self.kept_last}"
        parts = {"scorer": scorer, "layers": repr(self.layers), "heads": repr(self.heads), "always kept": kept}
        if self.recent_share:
            parts["recent"] = f"{self.recent_share} of the rest"
        settings = self.settings
        if settings.merge is not None:
            parts["dropped rows"] = repr(settings.merge)
        if self.upkeep is not None:
            parts["while decoding"] = (
                "one row out for each row in" if self.evicts else f"again every {settings.every} tokens"
            )
        return parts


def _spans(given: Any) -> tuple[Span, ...]:
    """Spans as pairs of ints."""
    remedy = "give spans of whole positions, first and last + 1, such as ((0, 4), (-9, -1))"
    pairs = given.tolist() if isinstance(given, np.ndarray) else given
    require(isinstance(pairs, (tuple, list)), "protect", given, remedy)
    spans = []
    for pair in pairs:
        edges = tuple(plain(edge) for edge in pair) if isinstance(pair, (tuple, list, np.ndarray)) else ()
        whole = len(edges) == 2 and all(isinstance(edge, int) and not isinstance(edge, bool) for edge in edges)
        require(whole, "protect", given, remedy)
        spans.append((edges[0], edges[1]))
    return tuple(spans)
