"""What becomes of dropped rows: folded into the kept row they resemble most, where they resemble it enough."""

import dataclasses
import enum
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._values import Value, choice, count, flag, real
from jaxkv.policies.merger import Joined, Merged, Merger, Row
from jaxkv.sharding.collectives import any_of_devices, first, gathered, own
from jaxkv.sharding.mesh import Axes

_EPS = 1e-6
# Dropped rows, and kept rows, that are compared at a time.
_DROPPED_BLOCK, _KEPT_BLOCK = 256, 512


class Metric(enum.Enum):
    """Whose cosines decide: the keys' for both, the values' for both, or each one's own for itself."""

    KEY = "key"
    VALUE = "value"
    BOTH = "both"


class Weights(enum.Enum):
    """How rows are joined: exp(cosine) over the sum with e for the kept row; plainly averaged; or as published code.

    SCATTER_MEAN adds dropped rows times their cosine and divides by their number and one: weights do not sum to one.
    """

    SOFTMAX = "softmax"
    AVERAGE = "average"
    SCATTER_MEAN = "scatter_mean"


class Scope(enum.Enum):
    """Whether each kv head has a threshold of its own, or the heads of a layer share one."""

    HEAD = "head"
    LAYER = "layer"


class Decision(enum.Enum):
    """Whether each dropped row is judged alone, or, as in published code, all heads' i-th dropped rows together."""

    TOKEN = "token"
    SHARED_POSITION = "shared_position"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge(Merger, Value):
    """D2O's merging: a dropped row joins its nearest kept row if it is no less like it than rows dropped before.

    Attributes:
        beta: weight of the latest similarity in the running threshold.
        metric: whose cosines decide.
        weights: how rows are joined.
        scope: whose threshold it is.
        decision: what is judged together.
        threshold: a fixed threshold instead of the running one: -inf merges everything, +inf nothing.

    References:
        Wan et al., D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
        Models, arXiv:2406.13035, equations 9 to 12; in 12 the dropped rows' weights are read per row, so that all sum
        to one.
    """

    beta: float = 0.7
    metric: Metric | str = Metric.KEY
    weights: Weights | str = Weights.SOFTMAX
    scope: Scope | str = Scope.HEAD
    decision: Decision | str = Decision.TOKEN
    threshold: float | None = None

    def __post_init__(self) -> None:
        real(self, "beta", "give a weight between 0 and 1", low=0, high=1)
        for name, kind in (("metric", Metric), ("weights", Weights), ("scope", Scope), ("decision", Decision)):
            choice(self, name, kind)
        if self.threshold is not None:
            real(self, "threshold", "give a cosine, an infinity, or None", low=-math.inf, high=math.inf)

    @property
    def thresholds(self) -> int:
        """One, or keys' and values'."""
        return 2 if self.metric is Metric.BOTH else 1

    @property
    def needs_equal_heads(self) -> bool:
        """Where heads' i-th dropped rows are judged together."""
        return self.decision is Decision.SHARED_POSITION

    @property
    def across_heads(self) -> bool:
        """Where they share a threshold, or a decision."""
        return self.scope is Scope.LAYER or self.decision is Decision.SHARED_POSITION

    @property
    def compares(self) -> tuple[str, ...]:
        """Whose cosines decide: the keys', the values', or each one's own."""
        return {Metric.KEY: ("k",), Metric.VALUE: ("v",), Metric.BOTH: ("k", "v")}[Metric(self.metric)]

    def _changes(self, index: int) -> str:
        """What the cosines of this metric decide for."""
        return self.compares[index] if self.metric is Metric.BOTH else "kv"

    def moved(
        self, tau: Float[Array, "B K"], similarity: Float[Array, "B K N"], dropped: Bool[Array, "B K N"]
    ) -> Float[Array, "B K"]:
        """The running threshold after these rows were dropped (equation 10)."""
        if self.scope is Scope.LAYER:
            axes: tuple[int, ...] = (1, 2)
        else:
            axes = (2,)
        count = dropped.sum(axis=axes, keepdims=True, dtype=jnp.int32)
        total = jnp.where(dropped, similarity, 0.0).sum(axis=axes, keepdims=True)
        latest = (total / jnp.maximum(count, 1).astype(jnp.float32))[..., 0]
        latest = jnp.broadcast_to(latest, tau.shape)
        after = jnp.where(jnp.isneginf(tau), latest, self.beta * latest + (1 - self.beta) * tau)
        return jnp.where(jnp.broadcast_to(count[..., 0] > 0, tau.shape), after, tau)

    def joins(
        self, tau: Float[Array, "B K"], similarity: Float[Array, "B K N"], dropped: Bool[Array, "B K N"]
    ) -> Bool[Array, "B K N"]:
        """Which dropped rows are merged."""
        level = tau if self.threshold is None else jnp.full_like(tau, self.threshold)
        if self.decision is Decision.SHARED_POSITION:
            # The i-th dropped row of every head, in order of position: a different token in each.
            order = jnp.argsort(~dropped, axis=-1, stable=True)
            together = jnp.take_along_axis(similarity, order, axis=-1).mean(axis=1, keepdims=True)
            rank = jnp.maximum(jnp.cumsum(dropped, axis=-1, dtype=jnp.int32) - 1, 0)
            similarity = jnp.take_along_axis(jnp.broadcast_to(together, similarity.shape), rank, axis=-1)
        return dropped & (similarity >= level[..., None])

    def _decided(self, tau: Array, similarity: Array, dropped: Array, axes: Axes | None) -> tuple[Array, Array]:
        """The thresholds that have moved, and which rows are merged: by all heads' numbers, if they decide together."""
        over = axes if self.across_heads else None
        tau, similarity, dropped = (gathered(each, "K", 1, over) for each in (tau, similarity, dropped))
        level = self.moved(tau, similarity, dropped)
        joins = self.joins(level, similarity, dropped)
        return own(level, "K", 1, over), own(joins, "K", 1, over)

    def shares(self, similarity: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."], float]:
        """What a dropped row of this cosine adds to the sum of rows, and to what that is divided by; the kept row's."""
        if self.weights is Weights.SOFTMAX:
            weight = jnp.exp(similarity)
            return weight, weight, math.e
        one = jnp.ones_like(similarity)
        return (one if self.weights is Weights.AVERAGE else similarity), one, 1.0

    def merge(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
        axes: Axes | None = None,
    ) -> Merged:
        """See `Merger.merge`; rows are compared in blocks, so that memory is O(S)."""
        if tau is None:
            raise TypeError("Merge needs its thresholds")
        dropped = inside & ~kept
        rows, after = {"k": k, "v": v}, tau
        for index, metric in enumerate(self.compares):
            similarity, nearest = nearest_kept({"k": k, "v": v}[metric], kept, dropped)
            level, joins = self._decided(tau[..., index], similarity, dropped, axes)
            after = after.at[..., index].set(level)
            for name in self._changes(index):
                rows[name] = self._join(rows[name], similarity, nearest, joins)
        return Merged(rows["k"], rows["v"], after)

    def merge_one(
        self,
        index: int,
        cosine: Float[Array, "N K"],
        dropped: Row,
        nearest: Row,
        goes: Bool[Array, "N K"],
        tau: Float[Array, "N K n"] | None,
        axes: Axes | None = None,
    ) -> Joined:
        """See `Merger.merge_one`."""
        if tau is None:
            raise TypeError("Merge needs its thresholds")
        similarity, going = cosine[..., None], goes[..., None]
        level, joins = self._decided(tau[..., index], similarity, going, axes)
        joins = joins[..., 0]
        add, divide, own = self.shares(cosine)
        new = {
            name: (own * getattr(nearest, name) + add[..., None] * getattr(dropped, name)) / (own + divide)[..., None]
            for name in self._changes(index)
        }
        return Joined(joins, new.get("k"), new.get("v"), tau.at[..., index].set(level))

    def _join(self, rows: Array, similarity: Array, nearest: Array, joins: Array) -> Array:
        add, divide, own = self.shares(similarity)
        add, divide = jnp.where(joins, add, 0.0), jnp.where(joins, divide, 0.0)

        @jax.vmap
        @jax.vmap
        def one(rows, add, divide, nearest):
            wide = rows.astype(jnp.float32)
            total = jnp.full(add.shape, own, jnp.float32).at[nearest].add(divide)
            summed = (own * wide).at[nearest].add(add[:, None] * wide)
            return jnp.where((total != own)[:, None], summed / total[:, None], wide).astype(rows.dtype)

        return one(rows, add, divide, nearest)


def unit(rows: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Rows of length one, float32; rows near zero stay near zero."""
    wide = rows.astype(jnp.float32)
    return wide / jnp.maximum(jnp.sqrt((wide**2).sum(axis=-1, keepdims=True)), _EPS)


def nearest_kept(
    rows: Float[Array, "B K S D"], kept: Bool[Array, "B K S"], dropped: Bool[Array, "B K S"]
) -> tuple[Float[Array, "B K S"], Int[Array, "B K S"]]:
    """The kept row with the largest cosine, for each dropped one; the matrix of all cosines is never whole.

    Args:
        rows: what is compared.
        kept: rows that stay; at least one wherever any is dropped.
        dropped: rows that do not.

    Returns:
        The cosine and the kept row's index, the lowest among equals; anything finite for rows that are not dropped.
    """
    batch, heads, slots, dim = rows.shape
    take, across = min(_DROPPED_BLOCK, slots), min(_KEPT_BLOCK, slots)
    index = jnp.arange(slots, dtype=jnp.int32)

    def head(inputs):
        rows, kept, dropped = inputs
        # Kept rows first, then dropped ones, each in order.
        order = jnp.argsort(jnp.where(kept, 0, jnp.where(dropped, 1, 2)), stable=True).astype(jnp.int32)
        count = kept.sum(dtype=jnp.int32)
        end = count + dropped.sum(dtype=jnp.int32)
        units = unit(rows[order])

        def block(number, found):
            begin = jnp.minimum(count + number * take, slots - take)
            mine = lax.dynamic_slice_in_dim(units, begin, take)

            def compare(number, best):
                top, at = best
                first = jnp.minimum(number * across, slots - across)
                column = first + jnp.arange(across, dtype=jnp.int32)
                others = lax.dynamic_slice_in_dim(units, first, across)
                cosine = lax.dot_general(mine, others, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
                cosine = jnp.where(column < count, cosine, -jnp.inf)
                most = cosine.max(axis=1)
                lowest = jnp.where(cosine == most[:, None], column, slots).min(axis=1)
                return jnp.where(most > top, most, top), jnp.where(most > top, lowest, at)

            none = (jnp.full((take,), -jnp.inf, jnp.float32), jnp.zeros((take,), jnp.int32))
            best = lax.fori_loop(0, (count + across - 1) // across, compare, none)
            put = lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, begin, 0)  # noqa: E731
            return put(found[0], best[0]), put(found[1], best[1])

        nothing = (jnp.zeros((slots,), jnp.float32), jnp.zeros((slots,), jnp.int32))
        cosine, at = lax.fori_loop(0, (end - count + take - 1) // take, block, nothing)
        place = jnp.zeros((slots,), jnp.int32).at[order].set(index, unique_indices=True)
        back = cosine[place]
        return jnp.where(dropped, back, 0.0), jnp.where(dropped, order[at[place]], 0)

    flat = lambda a: a.reshape(batch * heads, *a.shape[2:])  # noqa: E731
    cosine, at = lax.map(head, (flat(rows), flat(kept), flat(dropped)))
    return cosine.reshape(batch, heads, slots), at.reshape(batch, heads, slots)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueMerge(Merger, Value):
    """CaM's merging: values fold into those of the tokens behind them, by chance as likely as they are attended to.

    Attributes:
        window: tokens behind that take a share each; the policy's window.
        start: first part of the prompt that keeps its values to itself, as a share.
        expected: multiply by the probability instead of drawing.

    References:
        Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024, section 4, in the form of
        KVCache-Factory, applied to a copy: the prompt's own attention sees values as they were.
    """

    window: int = 32
    start: float = 0.1
    expected: bool = False

    def __post_init__(self) -> None:
        count(self, "window", 1, "give at least 1 token")
        real(self, "start", "give a share from 0 up to, but not, 1", low=0, high=math.nextafter(1, 0))
        flag(self, "expected")

    @property
    def across_heads(self) -> bool:
        """Draws count heads, and values fold where any head drops something."""
        return True

    @property
    def draws(self) -> bool:
        """Unless values fold by their probability."""
        return not self.expected

    def merge(
        self,
        k: Float[Array, "B K S D"],
        v: Float[Array, "B K S D"],
        kept: Bool[Array, "B K S"],
        inside: Bool[Array, "B K S"],
        mass: Float[Array, "B K S"],
        tau: Float[Array, "B K n"] | None,
        key: PRNGKeyArray,
        axes: Axes | None = None,
    ) -> Merged:
        """See `Merger.merge`; kept and dropped rows alike are folded, where anything is dropped at all."""
        batch, heads, slots, _ = v.shape
        head = jnp.arange(heads, dtype=jnp.int32)
        if axes is not None:
            head = head + first("K", heads, axes)
        keys = jax.vmap(lambda h: jax.random.fold_in(key, h))(head)
        each = jax.vmap(lambda k, at: jax.random.uniform(jax.random.fold_in(k, at)), in_axes=(None, 0))
        draws = jax.vmap(each, in_axes=(0, None))(keys, jnp.arange(slots, dtype=jnp.int32))
        length = inside.sum(axis=-1, dtype=jnp.int32)
        fold = jax.vmap(jax.vmap(self._fold), in_axes=(0, 0, 0, None))
        if slots <= self.window:
            return Merged(k, v, tau)
        drops = any_of_devices((inside & ~kept).any(axis=(1, 2)), "K", axes)[:, None, None, None]
        return Merged(k, jnp.where(drops, fold(v, mass, length, draws), v), tau)

    @partial(jax.jit, static_argnums=0)
    def _fold(self, v: Float[Array, "S D"], mass: Float[Array, " S"], length: Array, draws: Float[Array, " S"]):
        slots, window = v.shape[0], self.window
        index = jnp.arange(slots, dtype=jnp.int32)
        share = Fraction(repr(float(self.start))).limit_denominator(1000)
        begin = -(-(length * share.numerator) // share.denominator)
        first_top = jnp.where(index < begin, mass, 0.0).max()
        padded = jnp.pad(mass, (0, window - 1))
        # The largest of each row and the window - 1 behind it.
        around = lax.reduce_window(padded, 0.0, lax.max, (window,), (1,), "VALID")
        top = jnp.maximum(first_top, around)
        chance = jnp.where(top > 0, jnp.clip(mass / jnp.where(top > 0, top, 1.0), 0, 1), jnp.where(mass > 0, 1.0, 0.0))
        factor = chance if self.expected else (draws < chance).astype(jnp.float32)
        acts = (index >= begin) & (index + window < length)
        factor = jnp.where(acts, factor, 0.0) / window

        def step(at, wide):
            mine = lax.dynamic_slice_in_dim(wide, at, 1)
            behind = lax.dynamic_slice_in_dim(wide, at + 1, window)
            return lax.dynamic_update_slice_in_dim(wide, behind + factor[at] * mine, at + 1, 0)

        wide = lax.fori_loop(begin, jnp.maximum(length - window, begin), step, v.astype(jnp.float32))
        return wide.astype(v.dtype)
