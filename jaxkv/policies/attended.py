"""Scores by the attention that rows receive, and pooling over neighbours. Float32 per kv head and row; higher stays."""

import dataclasses
import enum

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import attention
from jaxkv._errors import require
from jaxkv._values import Value, choice, count, flag
from jaxkv.attention import Implementation
from jaxkv.policies.rank import ByAttention, Rank
from jaxkv.policies.scorer import GroupReduce, Observed, Scorer, group_of, sees_query_heads
from jaxkv.sharding.collectives import mean_of_devices, most_of_devices
from jaxkv.sharding.mesh import Axes


class PoolOrder(enum.Enum):
    """When neighbours are pooled: after the mean over window and group (published code), or before (Ada-KV's text)."""

    LAST = "last"
    FIRST = "first"


@dataclasses.dataclass(frozen=True)
class MaxPool(Value):
    """Each position takes the largest score within `kernel // 2` of it, so that neighbours of a peak stay with it."""

    kernel: int = 7

    def __post_init__(self) -> None:
        _require_odd(self)

    def __call__(self, scores: Float[Array, "*rows S"], inside: Bool[Array, "*#rows S"]) -> Float[Array, "*rows S"]:
        """Pools over positions that are inside; the others count as absent."""
        return _slide(jnp.where(inside, scores, -jnp.inf), self.kernel, -jnp.inf, lax.max)


@dataclasses.dataclass(frozen=True)
class AvgPool(Value):
    """Mean over `kernel` neighbours, absent ones counted as zero: the edges come out low, as in the published code."""

    kernel: int = 5

    def __post_init__(self) -> None:
        _require_odd(self)

    def __call__(self, scores: Float[Array, "*rows S"], inside: Bool[Array, "*#rows S"]) -> Float[Array, "*rows S"]:
        """Pools over positions that are inside; the others count as zero."""
        return _slide(jnp.where(inside, scores, 0.0), self.kernel, 0.0, lax.add) / self.kernel


@dataclasses.dataclass(frozen=True)
class NoPool(Value):
    """Scores as they are."""

    def __call__(self, scores: Float[Array, "*rows S"], inside: Bool[Array, "*#rows S"]) -> Float[Array, "*rows S"]:
        """The scores, unchanged."""
        return scores


Pooling = MaxPool | AvgPool | NoPool


def _require_odd(pool: "MaxPool | AvgPool") -> None:
    count(pool, "kernel", 1, "give a positive odd number of neighbours")
    require(pool.kernel % 2 == 1, "kernel", pool.kernel, "an even kernel has no middle: give an odd number")


# Wider kernels are one operation: as shifts they would be a program of their own length.
_MOST_SHIFTS = 63


def _slide(values: Float[Array, "*rows S"], kernel: int, empty: float, combine) -> Float[Array, "*rows S"]:
    # Shifts instead of reduce_window: a handful of vector operations, and a fixed order of summation.
    half = kernel // 2
    if kernel > _MOST_SHIFTS:
        ones, reach = (1,) * (values.ndim - 1), min(half, values.shape[-1] - 1)
        window, pads = (*ones, 2 * reach + 1), [(0, 0)] * (values.ndim - 1) + [(reach, reach)]
        return lax.reduce_window(values, empty, combine, window, (*ones, 1), pads)
    pad = [(0, 0)] * (values.ndim - 1) + [(half, half)]
    padded = jnp.pad(values, pad, constant_values=empty)
    slots = values.shape[-1]
    result = padded[..., :slots]
    for shift in range(1, kernel):
        result = combine(result, padded[..., shift : shift + slots])
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class CumulativeAttention(Scorer, Value):
    """H2O's score: the attention each row received from all queries so far, mean over the group.

    Attributes:
        mean: divide by the number of queries that could see the row (RoCo), so that early rows have no advantage.

    References:
        Zhang et al., H2O: Heavy-Hitter Oracle, arXiv:2306.14048, section 4; D2O, arXiv:2406.13035, equation 7; for
        the mean, Ren and Zhu, arXiv:2402.06262, section 4.
    """

    mean: bool = False

    def __post_init__(self) -> None:
        flag(self, "mean")

    @property
    def sums(self) -> bool:
        """All queries count."""
        return True

    @property
    def rank(self) -> Rank:
        """Each token adds its own attention."""
        return ByAttention(mean=self.mean)

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """The sums, mean over the group."""
        if seen.sums is None:
            raise TypeError("CumulativeAttention needs sums over all queries")
        return seen.sums.mean(axis=2)

    def scores(self, observed: Float[Array, "B K S"], length: Int[Array, " B"]) -> Float[Array, "B K S"]:
        """What was received, or that per query."""
        age = length[:, None] - jnp.arange(observed.shape[-1], dtype=jnp.int32)
        return self.rank.rank(observed, age[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastAttention(Scorer, Value):
    """TOVA's score: the attention of the last token alone, mean over the group."""

    @property
    def queries(self) -> int:
        """The last one's."""
        return 1

    @property
    def rank(self) -> Rank:
        """Each token's attention replaces that of the one before."""
        return ByAttention(decay=0.0)

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """The last query's probabilities."""
        return attention.window_mass(seen.q, seen.k, seen.q_positions, lambda p, _: p.mean(axis=(0, 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowAttention(Scorer, Value):
    """SnapKV's score: attention that the last `window` queries of the prompt pay to each row.

    Attributes:
        window: queries observed.
        pooling: how scores spread to neighbours; the window's own columns take no part.
        group: from query heads to kv head.
        order: when the pooling happens.

    References:
        SnapKV, arXiv:2404.14469, section 4; Ada-KV, arXiv:2407.11550, algorithm 2.
    """

    window: int = 32
    pooling: Pooling = MaxPool(7)
    group: GroupReduce | str = GroupReduce.MEAN
    order: PoolOrder | str = PoolOrder.LAST

    def __post_init__(self) -> None:
        count(self, "window", 1, "observe at least 1 query")
        choice(self, "group", GroupReduce)
        choice(self, "order", PoolOrder)

    @property
    def queries(self) -> int:
        """Those of the window."""
        return self.window

    def observe(self, seen: Observed) -> Float[Array, "B K S"]:
        """Mean attention of the window's queries on each row, reduced over the group."""

        def reduce(p: Float[Array, "G w S"], position: Int[Array, " w"]) -> Float[Array, " S"]:
            exists = position >= 0
            if self.order is PoolOrder.FIRST:
                p = self.pooling(p, _before(position[-1:] + 1 - self.window, p.shape[-1]))
            weights = exists.astype(jnp.float32) / jnp.maximum(exists.sum(), 1).astype(jnp.float32)
            # A sum of products rather than a matrix product: its order, and so its rounding, is the same everywhere.
            heads = (p * weights[:, None]).sum(axis=1)
            return heads.mean(axis=0) if self.group is GroupReduce.MEAN else heads.max(axis=0)

        kernels = seen.implementation is not Implementation.XLA
        if kernels and (self.order, self.group) == (PoolOrder.LAST, GroupReduce.MEAN):
            # A plain mean needs no probabilities in memory.
            sums = attention.window_sums(
                seen.q, seen.k, seen.q_positions[:, 0], seen.length, implementation=seen.implementation
            )
            return sums / jnp.minimum(seen.length, self.window).astype(jnp.float32)[:, None, None]
        return attention.window_mass(seen.q, seen.k, seen.q_positions, reduce)

    def scores(self, observed: Float[Array, "B K S"], length: Int[Array, " B"]) -> Float[Array, "B K S"]:
        """Spreads what was observed to neighbours, the window's columns left out."""
        if self.order is PoolOrder.FIRST:
            return observed
        return self.pooling(observed, _before((length - self.window)[:, None, None], observed.shape[-1]))


def of_group(observed: Float[Array, "B K S"], scorer: Scorer, axes: Axes | None) -> Float[Array, "B K S"]:
    """What a scorer observes of each kv head's whole group, where several devices have a part of its query heads.

    Args:
        observed: by the device's part.
        scorer: who did.
        axes: of the mesh, if there is one.

    Returns:
        The mean over the parts, or where the scorer reduces the group to its largest, that.
    """
    if not sees_query_heads(scorer):
        # It sees nothing of the query heads: what the devices have observed is the same.
        return observed
    largest = group_of(scorer) is GroupReduce.MAX
    return (most_of_devices if largest else mean_of_devices)(observed, "G", axes)


def _before(end: Int[Array, "*rows 1"], slots: int) -> Bool[Array, "*rows S"]:
    return jnp.arange(slots, dtype=jnp.int32) < end
