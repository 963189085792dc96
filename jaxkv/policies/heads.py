"""How a layer's rows spread over its kv heads, and how many of them the heads of one device may hold."""

import dataclasses
from fractions import Fraction
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv._values import Value, real
from jaxkv.policies.topk import sortable, top

# The largest capacity: no layer's kv heads lie on more devices.
_UNLIMITED = 1000.0
# Of Python's, of numpy's, or on a device.
Numbers = TypeVar("Numbers", int, Array)


@runtime_checkable
class HeadBudgets(Protocol):
    """How a layer's rows spread over its kv heads.

    Attributes:
        uniform: whether every head gets as many.
        needs_norms: whether the values' norms are needed.
    """

    @property
    def uniform(self) -> bool:
        """Whether every head gets as many."""

    @property
    def needs_norms(self) -> bool:
        """Whether `norms` must be given."""

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Picks K * base rows among the candidates.

        Args:
            scores: float32, higher stays.
            candidates: rows that can be chosen: neither padding nor among those that stay anyway.
            base: rows to choose per head, on average.
            forced: rows per head that stay anyway.
            norms: of the values, seen through the output projection, if needed.

        Returns:
            The mask of chosen rows; ties go to the lowest head, then to the lowest position.
        """


def _keys(scores: Float[Array, "B K S"], candidates: Bool[Array, "B #K S"]) -> UInt[Array, "B K S"]:
    return jnp.where(candidates, sortable(scores), jnp.uint32(0))


def _mean_of_heads(scores: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    return jnp.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Equal(Value):
    """What choices share that give every head as many rows."""

    uniform: ClassVar[bool] = True
    needs_norms: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Uneven(Value):
    """What choices share that give each head its own number of rows."""

    uniform: ClassVar[bool] = False
    needs_norms: ClassVar[bool] = False

    alpha: float = 0.2
    capacity: float = 1.5

    def __post_init__(self) -> None:
        real(self, "alpha", "give a share between 0 and 1", low=0, high=1)
        remedy = f"give 1 or more, {_UNLIMITED:g} at most: rows of a device's heads over their even share"
        real(self, "capacity", remedy, low=1, high=_UNLIMITED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformHeads(_Equal):
    """Every kv head keeps as many."""

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """The best `base` rows of each head."""
        return top(_keys(scores, candidates), base[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedHeads(_Equal):
    """All kv heads of a layer keep the same positions: the best by the mean of their scores."""

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """The best `base` rows, the same in each head."""
        return top(_keys(_mean_of_heads(scores), candidates), base[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(_Uneven):
    """Ada-KV: heads compete for the layer's rows, with a share of the uniform budget guaranteed.

    Attributes:
        alpha: the share that is uniform: 0 is Theorem 3.3's optimum, 1 is no adaption.
        capacity: on a mesh, rows of a layer that the heads of one device may hold, over their even share; see
            `within_capacity`.

    References:
        Ada-KV, arXiv:2407.11550, algorithm 1 and algorithm 2 line 8 (whose alpha is read as the published code does:
        the text of its Table 4 agrees with the code, the printed formula is reversed).
    """

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """The best K * base rows of all heads decide each head's budget; then each head's best."""
        keys = _keys(scores, candidates)
        batch, heads, slots = keys.shape
        winners = top(keys.reshape(batch, heads * slots), heads * base).reshape(keys.shape)
        return top(keys, self.targets(winners.sum(axis=-1, dtype=jnp.int32), base))

    def targets(self, won: Int[Array, "B K"], base: Int[Array, " B"]) -> Int[Array, "B K"]:
        """(1 - alpha) * won + alpha * base in whole rows, by largest remainder; the sum over heads is kept.

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
        """Rows that every head gets whatever its scores.

        Args:
            base: rows to choose per head, on average.
            forced: rows per head that stay anyway.

        Returns:
            How many of those to choose.
        """
        return most_rows(self.alpha, base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtectedHeads(_Uneven):
    """kvpress' safeguard: a share of each head's best rows is safe, the worst of all others go, heads together.

    Attributes:
        alpha: share of a head's budget that is safe, the rows that stay anyway counted first.
        capacity: as for `AdaptiveHeads`.
    """

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """Safe rows first, then the best of the rest over all heads together."""
        keys = _keys(scores, candidates)
        batch, heads, slots = keys.shape
        safe = top(keys, self.floor(base, forced)[:, None])
        rest = jnp.where(safe, jnp.uint32(0), keys).reshape(batch, heads * slots)
        left = heads * base - safe.sum(axis=(1, 2), dtype=jnp.int32)
        return safe | top(rest, left).reshape(keys.shape)

    def floor(self, base: Int[Array, " B"], forced: Int[Array, " B"]) -> Int[Array, " B"]:
        """Rows of each head that are safe.

        Args:
            base: rows to choose per head, on average.
            forced: rows per head that stay anyway.

        Returns:
            How many of those to choose.
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
        real(self, "first", "give a share between 0 and 1", low=0, high=1)
        real(self, "epsilon", "give 0 or a small number", low=0, high=1e30)

    @property
    def uniform(self) -> bool:
        """As the budgets are."""
        return self.budgets.uniform

    def choose(
        self,
        scores: Float[Array, "B K S"],
        candidates: Bool[Array, "B #K S"],
        base: Int[Array, " B"],
        forced: Int[Array, " B"],
        norms: Float[Array, "B K S"] | None = None,
    ) -> Bool[Array, "B K S"]:
        """As many per head as the budgets say, in two stages; heads that keep the same rows go by the mean of both."""
        if norms is None:
            raise TypeError("TwoStageHeads needs the values' norms")
        count = self.budgets.choose(scores, candidates, base, forced).sum(axis=-1, dtype=jnp.int32)
        share = Fraction(repr(float(self.first))).limit_denominator(10_000)
        whole = count + forced[:, None]
        # Split by the denominator first: exact in int32 at any length.
        part, rest = whole // share.denominator, whole % share.denominator
        safe = part * share.numerator + rest * share.numerator // share.denominator - forced[:, None]
        weighted = (scores + jnp.float32(self.epsilon)) * norms
        if shares_positions(self.budgets):
            scores, weighted = (_mean_of_heads(each) for each in (scores, weighted))
        chosen = top(_keys(scores, candidates), jnp.clip(safe, 0, count))
        rest = _keys(weighted, candidates & ~chosen)
        return chosen | top(rest, count - jnp.clip(safe, 0, count))


def chooses_apart(heads: HeadBudgets) -> bool:
    """Whether the rows of each kv head are known to be chosen without a look at the others'."""
    # A class derived from these may choose otherwise.
    return type(heads) is UniformHeads or (type(heads) is TwoStageHeads and chooses_apart(heads.budgets))


def shares_positions(heads: HeadBudgets) -> bool:
    """Whether all kv heads of a layer keep the same positions."""
    return isinstance(heads, SharedHeads) or (isinstance(heads, TwoStageHeads) and shares_positions(heads.budgets))


def own_budgets(heads: HeadBudgets) -> AdaptiveHeads | ProtectedHeads | None:
    """Who gives each kv head a number of rows of its own, as far as a device has room; None for others."""
    if isinstance(heads, TwoStageHeads):
        return own_budgets(heads.budgets)
    return heads if isinstance(heads, (AdaptiveHeads, ProtectedHeads)) else None


def capacity_of(heads: HeadBudgets) -> float:
    """Rows of a layer that the kv heads of one device may hold on a mesh, over their even share."""
    if heads.uniform:
        return 1.0
    own = own_budgets(heads)
    return _UNLIMITED if own is None else own.capacity


def most_rows(capacity: float, even: Numbers) -> Numbers:
    """A share of so many rows, in whole ones.

    Args:
        capacity: the share, 1 for all of them.
        even: rows; any whole numbers.

    Returns:
        As many, or the next smaller number.
    """
    share = Fraction(capacity).limit_denominator(1000)
    # Split by the denominator first: exact in int32 at any length.
    part, rest = even // share.denominator, even % share.denominator
    return part * share.numerator + rest * share.numerator // share.denominator


def within_capacity(
    chosen: Bool[Array, "B K S"],
    keys: UInt[Array, "B K S"],
    floor: Int[Array, " B"],
    most: Int[Array, " B"],
    devices: int,
) -> tuple[Bool[Array, "B K S"], Int[Array, " B"]]:
    """Spreads the rows chosen of a layer so that the heads of no device hold more than their pool has room for.

    Heads of a device that has too many give up their weakest rows, heads together, but none below what it is
    guaranteed. The best candidates of devices that have room take their place, so that as many stay whatever happens.

    Args:
        chosen: the choice of all heads.
        keys: `sortable` scores of all candidates, the chosen ones included; 0 for what is none.
        floor: rows that a head keeps of those chosen, whatever the others have.
        most: rows that the heads of a device may choose, K * base / devices at least.
        devices: over which heads are spread, as many in order on each.

    Returns:
        The mask, and how many rows went to another device's heads.
    """
    batch = len(chosen)
    apart = lambda a: a.reshape(batch, devices, -1)  # noqa: E731
    count = lambda mask: mask.sum(axis=-1, dtype=jnp.int32)  # noqa: E731
    of = lambda mask: jnp.where(mask, keys, jnp.uint32(0))  # noqa: E731
    safe = top(of(chosen), jnp.minimum(floor[:, None], count(chosen)))
    loose = apart(of(chosen & ~safe))
    stays = top(loose, jnp.minimum(most[:, None] - count(apart(safe)), count(loose > 0))) | apart(safe)
    others = jnp.where(stays, jnp.uint32(0), apart(keys))
    # Of each device what it could take, and of all that the best.
    could = top(others, jnp.minimum(most[:, None] - count(stays), count(others > 0)))
    moved = count(chosen.reshape(batch, -1)) - count(stays.reshape(batch, -1))
    could, others = could.reshape(batch, -1), others.reshape(batch, -1)
    taken = top(jnp.where(could, others, jnp.uint32(0)), jnp.minimum(moved, count(could)))
    # Of a cache from elsewhere a device may hold less than its share: the others then take more than theirs.
    more = top(jnp.where(taken, jnp.uint32(0), others), moved - count(taken))
    return (stays.reshape(batch, -1) | taken | more).reshape(chosen.shape), moved
