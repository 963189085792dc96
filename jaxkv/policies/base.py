"""What a policy is: frozen parts that say how many rows stay, which ones, and what scoring needs to see."""

import dataclasses
from fractions import Fraction
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.attention.xla import Form
from jaxkv.policies.budgets import LayerBudgets, UniformLayers
from jaxkv.policies.select import HeadBudgets, UniformHeads

Span = tuple[int, int]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "q_positions", "k", "v", "length", "layer", "key"],
    meta_fields=["implementation"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """What a scorer may look at: one layer of a prompt, padding on the right.

    Attributes:
        q: `[B, K, G, w, D]` rotated queries of the last w tokens of each sequence; w is the scorer's `queries`.
        q_positions: `i32[B, w]` their positions; negative where the prompt is shorter than w.
        k: `[B, K, S, D]` rotated keys.
        v: `[B, K, S, D]` values.
        length: `i32[B]` tokens of each sequence.
        layer: `i32[]` index of the layer.
        key: random key of this call.
        implementation: what computes attention.
    """

    q: Float[Array, "B K G w D"]
    q_positions: Int[Array, "B w"]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    length: Int[Array, " B"]
    layer: Int[Array, ""]
    key: PRNGKeyArray
    implementation: Implementation = Implementation.XLA


@runtime_checkable
class Scorer(Protocol):
    """Says how much each row matters, per kv head.

    Attributes:
        queries: how many of each sequence's last queries `Observed` must carry; 0 for none.
    """

    @property
    def queries(self) -> int:
        """Last queries needed, w."""

    def mass(self, seen: Observed) -> Float[Array, "B K S"]:
        """What was observed of every row. Rows past a sequence's length may hold anything."""

    def scores(self, mass: Float[Array, "B K S"], length: Int[Array, " B"]) -> Float[Array, "B K S"]:
        """Scores by which rows are chosen, higher stays; from the mass, smoothed or as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A KV-cache compression policy: a budget, and the parts a method of the literature is made of.

    Attributes:
        budget: int: rows kept per kv head and layer on average, sinks and window included. float in (0, 1]: that
            share of each sequence's own prompt. None: everything.
        min_budget: "raise" refuses a ratio that comes out below sinks + window + protected rows for some sequence;
            "clamp" raises it to them.
        protect: spans `(start, stop)` of positions that always stay, with Python's slice meaning on each sequence.
    """

    budget: int | float | None = None
    min_budget: str = "raise"
    protect: tuple[Span, ...] = ()

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

    # What follows from the parts.

    @property
    def form(self) -> Form:
        """How this policy's segments lie in the pool."""
        if self.layers.from_scores:
            return Form.SHARED
        return Form.EQUAL if isinstance(self.heads, UniformHeads) else Form.RAGGED

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
        return {"scorer": scorer, "layers": repr(self.layers), "heads": repr(self.heads), "always kept": kept}
