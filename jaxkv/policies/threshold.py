"""Rows kept by the least score they must have: `ThresholdHeads`, around head budgets that bound their number."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import field, real
from jaxkv._errors import require
from jaxkv.policies.heads import HeadBudgets, HeadsAround, own_limits, shares_positions

_LARGEST, _REMEDY = 1e30, "give the least score of a row that stays"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdHeads(HeadsAround):
    """Head budgets by KVzap's rule: of the rows that inner `budgets` choose, keep all scored at least `threshold`.

    Attributes:
        threshold: the least score of a row that stays. Rows that stay anyway, such as the window, may have less.
        budgets: how the layer's rows spread over heads: the most rows that stay.

    References:
        Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv:2601.07891.
    """

    uniform: ClassVar[bool] = False

    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        field(self, "threshold", real, _REMEDY, low=-_LARGEST, high=_LARGEST)
        remedy = "give UniformHeads(), or AdaptiveHeads()"
        inner = self.budgets
        require(
            not isinstance(inner, ThresholdHeads),
            "budgets",
            inner,
            f"one threshold is enough: {remedy}",
        )
        require(
            not shares_positions(inner),
            "budgets",
            inner,
            f"heads that keep the same rows share scores: {remedy}",
        )
        require(
            own_limits(inner) is None,
            "budgets",
            inner,
            f"heads with numbers of rows of their own: {remedy}",
        )

    @property
    def needs_norms(self) -> bool:
        """True if the inner `budgets` read the norms of values."""
        return self.budgets.needs_norms

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],  # noqa: F821
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
        layer: Int[Array, ""] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of the rows that `budgets` choose and whose scores are at least the threshold."""
        chosen = self.chosen_within((scores, candidates, base, forced), norms, layer)
        return self.above(chosen, scores, candidates)[0]

    def above(
        self,
        chosen: Bool[Array, "B K S"],
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],  # noqa: F821
    ) -> tuple[Bool[Array, "B K S"], Int[Array, "B K"]]:
        """Mask `[B, K, S]` of chosen rows scored >= `threshold`; number `[B, K]` of unchosen candidates above it."""
        high = scores >= jnp.float32(self.threshold)
        return chosen & high, (candidates & high & ~chosen).sum(axis=-1, dtype=jnp.int32)


def as_threshold(value: Any, low: float = -_LARGEST, high: float = _LARGEST) -> None:
    """Checks the field `threshold` of a dataclass, None or in [low, high] (else ValueError); stores it as a float."""
    if value.threshold is not None:
        between = "" if high == _LARGEST else f", between {low:g} and {high:g}"
        field(value, "threshold", real, f"{_REMEDY}{between}, or None", low=low, high=high)


def threshold_of(heads: HeadBudgets) -> float | None:
    """Least score of a row that stays under `ThresholdHeads`; None for other head budgets."""
    return heads.threshold if isinstance(heads, ThresholdHeads) else None


def without_threshold(heads: HeadBudgets) -> HeadBudgets:
    """The head budgets inside `ThresholdHeads`; other head budgets are returned as they are."""
    return heads.budgets if isinstance(heads, ThresholdHeads) else heads


def with_threshold(heads: HeadBudgets, threshold: float | None) -> HeadBudgets:
    """Returns the head budgets wrapped in `ThresholdHeads` of this threshold; unchanged if it is None."""
    return heads if threshold is None else ThresholdHeads(threshold=threshold, budgets=heads)


def check_threshold(heads: HeadBudgets) -> None:
    """Raises ValueError if `ThresholdHeads` lie inside other head budgets: they have to be outermost."""
    while isinstance(heads, HeadsAround):
        inside = isinstance(heads.budgets, ThresholdHeads)
        kind = type(heads).__name__
        remedy = (
            f"put the threshold around {kind}: ThresholdHeads(threshold=..., budgets={kind}(...))"
        )
        require(not inside, "heads", heads, remedy)
        heads = heads.budgets
