"""Scorers by the attention that entries receive, and pooling of scores over neighbours."""

import dataclasses
import enum
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import (
    require_instance,
    validate_bool,
    validate_enum,
    validate_field,
    validate_int,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import get_attention_backend
from jaxkv.attention.columns import average_over_queries
from jaxkv.policies.rank import ByAttention, Rank
from jaxkv.policies.scorer import GroupReduce, Needs, Scorer, ScorerInputs, Scores


class PoolOrder(enum.Enum):
    """When neighbouring scores are pooled: before (FIRST) or after (LAST) the reduction over queries and query heads.

    Published code uses LAST, Ada-KV's text FIRST.
    """

    LAST = "last"
    FIRST = "first"


@dataclasses.dataclass(frozen=True)
class MaxPool:
    """Callable that max-pools scores over `kernel` neighbouring positions, so that neighbours of a peak are kept too.

    Attributes:
        kernel: odd number of neighbours, the position itself included.
    """

    kernel: int = 7

    def __post_init__(self) -> None:
        _require_odd_kernel(self)

    def __call__(
        self, scores: Float[Array, "*rows S"], inside: Bool[Array, "*#rows S"]
    ) -> Float[Array, "*rows S"]:
        """Return scores `[..., S]`: largest of the `kernel` positions around each in mask `inside`; -inf if none."""
        return _combine_neighbours(
            jnp.where(inside, scores, -jnp.inf), self.kernel, -jnp.inf, lax.max
        )


@dataclasses.dataclass(frozen=True)
class AvgPool:
    """Callable that divides the sum of scores at `kernel` neighbouring positions by `kernel`; missing ones count as 0.

    Attributes:
        kernel: odd number of neighbours, the position itself included.
    """

    kernel: int = 5

    def __post_init__(self) -> None:
        _require_odd_kernel(self)

    def __call__(
        self, scores: Float[Array, "*rows S"], inside: Bool[Array, "*#rows S"]
    ) -> Float[Array, "*rows S"]:
        """Return scores `[..., S]`: sum of the `kernel` positions around each in mask `inside`, divided by `kernel`."""
        return (
            _combine_neighbours(jnp.where(inside, scores, 0.0), self.kernel, 0.0, lax.add)
            / self.kernel
        )


@dataclasses.dataclass(frozen=True)
class NoPool:
    """Callable that returns scores unchanged: no pooling over neighbouring positions."""

    def __call__(
        self, scores: Float[Array, "*rows S"], inside: Bool[Array, "*#rows S"]
    ) -> Float[Array, "*rows S"]:
        """Return the scores `[..., S]` unchanged; the mask `inside` is ignored."""
        return scores


Pooling = MaxPool | AvgPool | NoPool


def _require_odd_kernel(pool: "MaxPool | AvgPool") -> None:
    """Validate a pool's field `kernel` and store it as an int; ValueError unless it is positive and odd."""
    validate_field(pool, "kernel", validate_int, "give a positive odd number of neighbours")
    require(
        pool.kernel % 2 == 1,
        "kernel",
        pool.kernel,
        "an even kernel has no middle: give an odd number",
    )


def _combine_neighbours(
    values: Float[Array, "*rows S"], kernel: int, empty: float, combine
) -> Float[Array, "*rows S"]:
    """Return `[..., S]`: the `kernel` values around each position, reduced by `combine`; `empty` beyond the ends."""
    # Shifts, not reduce_window: few vector operations, and a fixed order of summation.
    half = kernel // 2
    pad = [(0, 0)] * (values.ndim - 1) + [(half, half)]
    padded = jnp.pad(values, pad, constant_values=empty)
    padded_len = values.shape[-1]
    result = padded[..., :padded_len]
    for shift in range(1, kernel):
        result = combine(result, padded[..., shift : shift + padded_len])
    return result


@frozen_dataclass
class CumulativeAttention(Scorer):
    """H2O's scorer: attention summed (`mean`: averaged) over the queries that see an entry, mean over its query heads.

    Attributes:
        mean: divide by the number of queries that could see the entry (RoCo), so that early entries have no advantage.

    References:
        Zhang et al., H2O: Heavy-Hitter Oracle, arXiv:2306.14048, section 4; D2O, arXiv:2406.13035, equation 7; for
        the mean, Ren and Zhu, arXiv:2402.06262, section 4.
    """

    needs = Needs(sums=True)

    mean: bool = False

    def __post_init__(self) -> None:
        validate_field(self, "mean", validate_bool)

    @property
    def eviction_rank(self) -> Rank:
        """`ByAttention` rank for decoding: attention summed over queries, divided by the entry's age with `mean`."""
        return ByAttention(mean=self.mean)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return attention `[B, K, S]` that entries receive: summed over all queries, mean over the group's heads."""
        return seen.sums.mean(axis=2)

    def finalise_scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Return scores `[B, K, S]`: attention received; with `mean`, divided by the number of queries that see it."""
        age = length[:, None] - jnp.arange(observed.shape[-1], dtype=jnp.int32)
        return self.eviction_rank.rank_entries(observed, age[:, None])


@frozen_dataclass
class LastAttention(Scorer):
    """TOVA's scorer: attention of the last query alone, averaged over the query heads of a group."""

    needs = Needs(queries=1)
    eviction_rank = ByAttention(decay=0.0)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return attention probabilities `[B, K, S]` of the last query, mean over the group's query heads."""
        return seen.reduce_window_attention(lambda p, _: p.mean(axis=(0, 1)))


@frozen_dataclass
class WindowScorer(Scorer):
    """Base of scorers that use the prompt's last `window` queries, and pool scores over neighbours by `pooling`.

    Attributes:
        window: number of the prompt's last queries, the observation window.
        pooling: pooling of scores over neighbours; the window's own columns are left out.
    """

    window: int = 32
    pooling: Pooling = MaxPool(7)

    def __post_init__(self) -> None:
        validate_field(self, "window", validate_int, "observe at least 1 query")
        validate_field(
            self, "pooling", require_instance, Callable, "give MaxPool(7), AvgPool(5) or NoPool()"
        )

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: the queries of the prompt's last `window` tokens."""
        return Needs(queries=self.window)

    def finalise_scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Return scores `[B, K, S]`: raw scores pooled over neighbours; the window's own entries do not contribute."""
        return self.pooling(
            observed,
            _mask_positions_before((length - self.window)[:, None, None], observed.shape[-1]),
        )


@frozen_dataclass
class ObservationWindowAttention(WindowScorer):
    """SnapKV's scorer: attention of the last `window` queries, mean over queries, mean or max over heads, pooled.

    Attributes:
        window: number of the prompt's last queries, the observation window.
        pooling: pooling of scores over neighbours; the window's own columns are left out.
        group: `GroupReduce`, or its value: reduction of query heads' scores to their kv head's.
        order: `PoolOrder`, or its value: pooling before or after the reduction over queries and query heads.

    References:
        SnapKV, arXiv:2404.14469, section 4; Ada-KV, arXiv:2407.11550, algorithm 2.
    """

    group: GroupReduce | str = GroupReduce.MEAN
    order: PoolOrder | str = PoolOrder.LAST

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_field(self, "group", validate_enum, GroupReduce)
        validate_field(self, "order", validate_enum, PoolOrder)

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return window attention `[B, K, S]`: query mean, then mean or max of heads; pooled only if order is FIRST."""
        if (self.order, self.group) == (PoolOrder.LAST, GroupReduce.MEAN):
            window_mean = get_attention_backend(seen.implementation).average_window_attention
            of = (seen.queries, seen.k)
            return window_mean(*of, seen.q_positions, seen.length, shaping=seen.attention_shaping)
        return self.reduce_attention(seen, average_over_queries)

    def reduce_attention(
        self,
        seen: ScorerInputs,
        over_queries: Callable[[Float[Array, "G w S"], Int[Array, " w"]], Float[Array, "G S"]],
    ) -> Scores:
        """Return window attention `[B, K, S]`: pooled if `PoolOrder.FIRST`, reduced by `over_queries`, then over heads.

        Args:
            seen: the layer.
            over_queries: function from one kv head's probabilities and the queries' positions to a number per query
                head and entry.

        Returns:
            The observations.
        """

        def reduce(p: Float[Array, "G w S"], position: Int[Array, " w"]) -> Float[Array, " S"]:
            if self.order is PoolOrder.FIRST:
                pooled = self.pooling(
                    p, _mask_positions_before(position[-1:] + 1 - self.window, p.shape[-1])
                )
                # Queries before the start of a prompt count nothing, not even infinities.
                p = jnp.where((position >= 0)[:, None], pooled, 0.0)
            heads = over_queries(p, position)
            return heads.mean(axis=0) if self.group is GroupReduce.MEAN else heads.max(axis=0)

        return seen.reduce_window_attention(reduce)

    def finalise_scores(self, observed: Scores, length: Int[Array, " B"]) -> Scores:
        """Return scores `[B, K, S]`: raw ones pooled, without the window's own; unchanged with `PoolOrder.FIRST`."""
        return (
            observed if self.order is PoolOrder.FIRST else super().finalise_scores(observed, length)
        )


def _mask_positions_before(end: Int[Array, "*rows 1"], padded_len: int) -> Bool[Array, "*rows S"]:
    """Return the boolean mask `[..., S]` of the positions 0 to S - 1 that are below `end` `[..., 1]`."""
    return jnp.arange(padded_len, dtype=jnp.int32) < end
