"""What a policy is: frozen parts that say how many rows stay, which ones, and what scoring needs to see."""

import dataclasses
from fractions import Fraction
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxkv._errors import require
from jaxkv.attention.xla import Form
from jaxkv.policies.budgets import LayerBudgets, UniformLayers
from jaxkv.policies.merging import Merger
from jaxkv.policies.protocol import Carry, Needs, Scorer, Span, Upkeep
from jaxkv.policies.reading import Reading
from jaxkv.policies.select import HeadBudgets, SharedHeads, UniformHeads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A KV-cache compression policy: a budget, and the parts a method of the literature is made of.

    Attributes:
        budget: int: rows kept per kv head and layer on average, sinks and window included. float in (0, 1]: that
            share of each sequence's own prompt. None: everything.
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
        budget = self.budget
        number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
        require(
            budget is not None or self.scorer is None,
            "budget",
            budget,
            "give rows per head or a ratio; FullKV keeps everything",
        )
        require(budget is None or number, "budget", budget, "give rows per head (an int) or a share (a float)")
        if isinstance(budget, float):
            require(0 < budget <= 1, "budget", budget, "a ratio lies in (0, 1]; for a number of rows give an int")
        elif budget is not None:
            require(budget >= 1, "budget", budget, "keep at least 1 row, or give a ratio in (0, 1]")
            floor = self.kept_first + self.kept_last
            require(
                budget >= floor,
                "budget",
                budget,
                f"below sinks + window = {self.kept_first} + {self.kept_last}: "
                f"give at least {floor}, or a smaller window",
            )
        require(self.min_budget in ("raise", "clamp"), "min_budget", self.min_budget, "give 'raise' or 'clamp'")
        spans = tuple((int(start), int(stop)) for start, stop in self.protect)
        object.__setattr__(self, "protect", spans)
        self._check_upkeep()

    def _check_upkeep(self) -> None:
        every, merge = self.every, self.merge
        if every is not None:
            number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
            require(number, "every", every, "give a number of tokens, at least 1")
            require(self.scorer is not None, "every", every, "this policy keeps everything: leave it out")
            require(not self.evicts, "every", every, "this policy drops a row for every token already: leave it out")
            require(not self.carries_over, "every", every, "layers that build on one another are chosen once only")
        if merge is not None:
            require(isinstance(merge, Merger), "merge", merge, "give Merge(...), or None")
            require(self.scorer is not None, "merge", merge, "this policy drops nothing: leave it out")
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
        share = Fraction(repr(self.recent_share))
        others = np.asarray(forced) - self.kept_last
        return np.maximum(self.kept_last, np.maximum(rows - others, 0) * share.numerator // share.denominator)

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
        if scorer is None or not (self.evicts or self.every):
            return None
        return Upkeep(
            evicts=self.evicts,
            carry=scorer.carry,
            scored=scorer.carry not in (None, Carry.AGE),
            together=isinstance(self.heads, SharedHeads),
            sinks=self.kept_first,
            protect=self.protect,
            merge=self.merge,
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
        return np.maximum(budget, self.budget) if isinstance(self.budget, int) else budget

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
        if self.budget is None or self.scorer is None:
            return lengths.copy()
        if isinstance(self.budget, float):
            share = Fraction(repr(self.budget))  # the decimal that was written: 0.1 of 600 is 60
            rows = np.asarray([max(1, n * share.numerator // share.denominator) for n in lengths.tolist()], np.int64)
        else:
            rows = np.minimum(self.budget, lengths)
        low = np.flatnonzero(rows < forced)
        if strict and low.size and (self.min_budget == "raise" or not isinstance(self.budget, float)):
            row = int(low[0])
            remedy = f"prompt {row} ({lengths[row]} tokens) keeps {rows[row]} rows, but sinks, window and protected "
            remedy += f"spans take {forced[row]}: raise the budget"
            remedy += ", or give min_budget='clamp'" if isinstance(self.budget, float) else ""
            require(False, "budget", self.budget, remedy)
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
        for start, stop in self.protect:
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
        if self.merge is not None:
            parts["dropped rows"] = repr(self.merge)
        if self.upkeep is not None:
            parts["while decoding"] = (
                "one row out for each row in" if self.evicts else f"again every {self.every} tokens"
            )
        return parts
