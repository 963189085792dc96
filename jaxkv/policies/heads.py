"""Budgets of heads: how a layer's rows spread over its kv heads, and how many of them one device's heads may hold."""

import dataclasses
from fractions import Fraction
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv._checks import field, real
from jaxkv._values import Value
from jaxkv.policies.topk import sortable, top

# The largest capacity: no layer's kv heads lie on more devices.
_UNLIMITED = 1000.0
_Keys = UInt[Array, "B K S"]
# Of Python's, of numpy's, or on a device.
Numbers = TypeVar("Numbers", int, Array)


@runtime_checkable
class HeadBudgets(Protocol):
    """Protocol of how a layer's rows spread over its kv heads: `choose` masks the rows to keep."""

    @property
    def uniform(self) -> bool:
        """True if every head keeps the same number of rows."""

    @property
    def needs_norms(self) -> bool:
        """True if `choose` reads the norms of values."""

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Mask of K * base rows chosen among the candidates; ties go to the lowest head, then the lowest position.

        Args:
            scores: float32, higher stays.
            candidates: rows that can be chosen: neither padding nor among those that stay anyway.
            base: rows to choose per head, on average.
            forced: rows per head that stay anyway.
            norms: of the values, seen through the output projection, if needed.
        """


def _keys(scores: Float[Array, "B K S"], candidates: Bool[Array, "B #K S"]) -> _Keys:
    """Sort keys of scores; 0, the lowest, for rows that are no candidates."""
    return jnp.where(candidates, sortable(scores), jnp.uint32(0))


def _mean_of_heads(scores: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Mean of scores over kv heads, repeated for each of them."""
    return jnp.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ByKeys(Value):
    """Base of budgets that choose by sort keys alone: subclasses say `uniform`, and write `_pick`."""

    uniform: ClassVar[bool]
    needs_norms: ClassVar[bool] = False

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Mask of K * base rows chosen among the candidates by their scores; see `HeadBudgets.choose`."""
        if shares_positions(self):
            scores = _mean_of_heads(scores)
        return self._pick(_keys(scores, candidates), base, forced)

    def _pick(
        self, keys: UInt[Array, "B K S"], base: Int[Array, " B"], forced: Int[Array, " B"]
    ) -> Bool[Array, "B K S"]:
        """Mask of the `base` rows of largest sort key in each head."""
        return top(keys, base[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformHeads(_ByKeys):
    """Every kv head keeps as many rows: those of its own best scores."""

    uniform: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedHeads(_ByKeys):
    """All kv heads of a layer keep the same positions: the best by the mean of their scores."""

    uniform: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Uneven(_ByKeys):
    """Base of budgets under which heads compete: each kv head keeps its own number of rows."""

    uniform: ClassVar[bool] = False

    alpha: float = 0.2
    capacity: float = 1.5

    def __post_init__(self) -> None:
        field(self, "alpha", real, "give a share between 0 and 1", high=1.0)
        remedy = f"give 1 or more, {_UNLIMITED:g} at most: rows of a device's heads over their even share"
        field(self, "capacity", real, remedy, low=1.0, high=_UNLIMITED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(_Uneven):
    """Ada-KV: heads compete for the layer's rows, with a share of the uniform budget guaranteed.

    Attributes:
        alpha: the share that is uniform: 0 is Theorem 3.3's optimum, 1 is no adaption.
        capacity: on a mesh, rows of a layer that the heads of one device may hold, over their even share; what a
            device has no room for goes to other devices' heads.

    References:
        Ada-KV, arXiv:2407.11550, algorithm 1 and algorithm 2 line 8 (whose alpha is read as the published code does:
        the text of its Table 4 agrees with the code, the printed formula is reversed).
    """

    def _pick(
        self, keys: UInt[Array, "B K S"], base: Int[Array, " B"], forced: Int[Array, " B"]
    ) -> Bool[Array, "B K S"]:
        """Mask of each head's best rows, as many as it wins among the layer's best K * base, mixed with `base`."""
        batch, heads, slots = keys.shape
        winners = top(keys.reshape(batch, heads * slots), heads * base).reshape(keys.shape)
        return top(keys, self.targets(winners.sum(axis=-1, dtype=jnp.int32), base))

    def targets(self, won: Int[Array, "B K"], base: Int[Array, " B"]) -> Int[Array, "B K"]:
        """Rows per head: (1 - alpha) * won + alpha * base, by largest remainder; the sum over heads stays the same.

        Args:
            won: rows each head has among the layer's best K * base.
            base: rows per head of the uniform budget.

        Returns:
            Rows per head. Ties of remainders go to the lowest head.
        """
        share = Fraction(self.alpha).limit_denominator(1000)
        den, num = share.denominator, share.numerator
        # Split by the denominator first: exact in int32 at any length.
        base = base[:, None]
        rest = (den - num) * (won % den) + num * (base % den)
        floor = (den - num) * (won // den) + num * (base // den) + rest // den
        remainder = rest % den
        missing = won.sum(axis=-1, keepdims=True, dtype=jnp.int32) - floor.sum(axis=-1, keepdims=True, dtype=jnp.int32)
        # Keys start at 1: a head without a remainder never takes a row before one that has some.
        extra = top((remainder + 1).astype(jnp.uint32), missing[:, 0])
        return floor + extra.astype(jnp.int32)

    def floor(self, base: Int[Array, " B"], forced: Int[Array, " B"]) -> Int[Array, " B"]:
        """Rows that every head may choose whatever its scores: alpha * base, rounded down.

        Args:
            base: rows to choose per head, on average.
            forced: rows per head that stay anyway.

        Returns:
            Guaranteed rows per head.
        """
        return most_rows(self.alpha, base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtectedHeads(_Uneven):
    """kvpress' safeguard: a share of each head's best rows is safe, the worst of all others go, heads together.

    Attributes:
        alpha: share of a head's budget that is safe, the rows that stay anyway counted first.
        capacity: as for `AdaptiveHeads`.
    """

    def _pick(
        self, keys: UInt[Array, "B K S"], base: Int[Array, " B"], forced: Int[Array, " B"]
    ) -> Bool[Array, "B K S"]:
        """Mask of each head's safe rows, and of the best of the rest over all heads together."""
        batch, heads, slots = keys.shape
        safe = top(keys, self.floor(base, forced)[:, None])
        rest = jnp.where(safe, jnp.uint32(0), keys).reshape(batch, heads * slots)
        left = heads * base - safe.sum(axis=(1, 2), dtype=jnp.int32)
        return safe | top(rest, left).reshape(keys.shape)

    def floor(self, base: Int[Array, " B"], forced: Int[Array, " B"]) -> Int[Array, " B"]:
        """Safe rows of each head, those that stay anyway left out.

        Args:
            base: rows to choose per head, on average.
            forced: rows per head that stay anyway.

        Returns:
            Guaranteed rows per head, at most `base`.
        """
        share = Fraction(self.alpha).limit_denominator(1000)
        return jnp.clip(jnp.maximum(1, (base + forced) * share.numerator // share.denominator) - forced, 0, base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStageHeads(Value):
    """CriticalKV: a part of each head's rows by score, the rest by score times the value's norm at the layer's output.

    Attributes:
        budgets: how the layer's rows spread over heads.
        first: the share chosen by score alone, rows that stay anyway counted in.
        epsilon: added to scores in the second stage, so that a large value counts where attention is small.

    References:
        Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
        arXiv:2502.03805, algorithm 1.
    """

    needs_norms: ClassVar[bool] = True

    budgets: HeadBudgets = UniformHeads()
    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        field(self, "first", real, "give a share between 0 and 1", high=1.0)
        field(self, "epsilon", real, "give 0 or a small number", high=1e30)

    @property
    def uniform(self) -> bool:
        """True if the budgets give every head the same number of rows."""
        return self.budgets.uniform

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Mask of as many rows per head as the budgets say, in two stages; see `HeadBudgets.choose`."""
        if norms is None:
            raise TypeError("TwoStageHeads needs the values' norms")
        count = self.budgets.choose(scores, candidates, base, forced).sum(axis=-1, dtype=jnp.int32)
        share = Fraction(repr(float(self.first))).limit_denominator(10_000)
        safe = _part(share, count + forced[:, None]) - forced[:, None]
        weighted = (scores + jnp.float32(self.epsilon)) * norms
        if shares_positions(self.budgets):
            scores, weighted = (_mean_of_heads(each) for each in (scores, weighted))
        chosen = top(_keys(scores, candidates), jnp.clip(safe, 0, count))
        rest = _keys(weighted, candidates & ~chosen)
        return chosen | top(rest, count - jnp.clip(safe, 0, count))


def chooses_apart(heads: HeadBudgets) -> bool:
    """True if each kv head's rows are known to be chosen by its own scores alone."""
    # A class derived from these may choose otherwise.
    return type(heads) is UniformHeads or (type(heads) is TwoStageHeads and chooses_apart(heads.budgets))


def inner_budgets(heads: HeadBudgets) -> HeadBudgets:
    """Budgets of heads within two stages; without stages the budgets themselves."""
    return inner_budgets(heads.budgets) if isinstance(heads, TwoStageHeads) else heads


def within_stages(heads: HeadBudgets, budgets: HeadBudgets) -> HeadBudgets:
    """Replaces the budgets of heads, inside two stages if the heads have them."""
    return dataclasses.replace(heads, budgets=budgets) if isinstance(heads, TwoStageHeads) else budgets


def shares_positions(heads: HeadBudgets) -> bool:
    """True if all kv heads of a layer keep the same positions."""
    return isinstance(inner_budgets(heads), SharedHeads)


def own_budgets(heads: HeadBudgets) -> AdaptiveHeads | ProtectedHeads | None:
    """Per-head budgets that a device's capacity can clamp; None for heads that get equal rows, or a user's class."""
    inner = inner_budgets(heads)
    return inner if isinstance(inner, (AdaptiveHeads, ProtectedHeads)) else None


def capacity_of(heads: HeadBudgets) -> float:
    """Ratio of the most rows of a layer that one device's kv heads may hold to their even share."""
    if heads.uniform:
        return 1.0
    own = own_budgets(heads)
    return _UNLIMITED if own is None else own.capacity


def most_rows(capacity: float, even: Numbers) -> Numbers:
    """`capacity` times a number of rows, rounded down; the ratio to a thousandth."""
    return _part(Fraction(capacity).limit_denominator(1000), even)


def _part(share: Fraction, rows: Numbers) -> Numbers:
    """A fraction of whole numbers of rows, rounded down."""
    # Split by the denominator first: exact in int32 at any length.
    part, rest = rows // share.denominator, rows % share.denominator
    return part * share.numerator + rest * share.numerator // share.denominator


def within_capacity(
    chosen: Bool[Array, "B K S"],
    keys: UInt[Array, "B K S"],
    floor: Int[Array, " B"],
    most: Int[Array, " B"],
    devices: int,
) -> tuple[Bool[Array, "B K S"], Int[Array, " B"]]:
    """Moves a layer's chosen rows between heads so that no device's heads hold more than `most`.

    Heads of a device that has too many give up their weakest rows, heads together, but none below `floor`. The best
    candidates of devices that have room take their place, so that the sum stays the same. `keys` are sort keys of all
    candidates, the chosen ones included, and 0 elsewhere; `most` is at least K * base / devices; each device has as
    many heads, in order. Returns the new mask, and rows that went to another device's heads.
    """
    batch = len(chosen)

    def by_device(array: Array) -> Array:
        return array.reshape(batch, devices, -1)

    def flat(array: Array) -> Array:
        return array.reshape(batch, -1)

    def count(mask: Array) -> Array:
        return mask.sum(axis=-1, dtype=jnp.int32)

    def keys_of(mask: Array) -> Array:
        return jnp.where(mask, keys, jnp.uint32(0))

    safe = top(keys_of(chosen), jnp.minimum(floor[:, None], count(chosen)))
    loose = by_device(keys_of(chosen & ~safe))
    room = most[:, None] - count(by_device(safe))
    stays = top(loose, jnp.minimum(room, count(loose > 0))) | by_device(safe)
    others = jnp.where(stays, jnp.uint32(0), by_device(keys))
    # Each device's best candidates that it has room for, and the best of these over all devices.
    could = flat(top(others, jnp.minimum(most[:, None] - count(stays), count(others > 0))))
    others = flat(others)
    moved = count(flat(chosen)) - count(flat(stays))
    taken = top(jnp.where(could, others, jnp.uint32(0)), jnp.minimum(moved, count(could)))
    # Of a cache from elsewhere a device may hold less than its share: the others then take more than theirs.
    more = top(jnp.where(taken, jnp.uint32(0), others), moved - count(taken))
    return (flat(stays) | taken | more).reshape(chosen.shape), moved
