"""Budgets of heads: how a layer's entries spread over its kv heads, and how many of them one device's heads may hold."""

import dataclasses
import enum
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv._checks import field, instance, optional, overrides, real
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.topk import count, keys_of, only, top

# The largest capacity: no layer's kv heads are on more devices.
_UNLIMITED = 1000.0
_LARGEST, _LEAST_SCORE = 1e30, "give the least score of an entry that stays"
# Python ints, or numpy or JAX arrays.
Numbers = TypeVar("Numbers", int, Array)


class Order(enum.Enum):
    """By what order of entries the kv heads of a layer keep their best: `HeadBudgets.order`.

    Attributes:
        OWN: as many entries in each head, the best by its own scores alone, in every layer alike.
        MEAN: as many, the best by the mean of all heads' scores: the same positions.
        COMMON: `AdaptiveHeads` and `ProtectedHeads`: all heads' entries in one order.
        OTHER: in none of these ways.
    """

    OWN = "own"
    MEAN = "mean"
    COMMON = "common"
    OTHER = "other"


class ScoredRows(NamedTuple):
    """One layer's scored entries, and how many of them its kv heads choose.

    Attributes:
        scores: `f32[B, K, S]`, higher stays.
        candidates: mask `[B, K | 1, S]` of entries that can be chosen: neither padding nor among those that stay anyway.
        base: `i32[B]` entries to choose per head, on average.
        always_kept: `i32[B]` entries per head that stay anyway.
        norms: `f32[B, K, S]` norms of the values seen through the output projection, where heads need them.
        layer: `i32[]` the layer's index among those without a window, where heads' budgets differ by layer.
    """

    scores: Float[Array, "B K S"]
    candidates: Bool[Array, "B #K S"]  # noqa: F821
    base: Int[Array, " B"]
    always_kept: Int[Array, " B"]
    norms: Float[Array, "B K S"] | None = None
    layer: Int[Array, ""] | None = None

    @property
    def keys(self) -> UInt[Array, "B K S"]:
        """Sort keys of the candidates' scores; 0, the lowest key, for other entries."""
        return keys_of(self.scores, self.candidates)


class HeadBudgets:
    """Base of what divides a layer's row budget among its kv heads: `choose` returns the mask of entries to keep."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that overrides a method chooses in another way than its base, unless it declares an `order`."""
        super().__init_subclass__(**options)
        if overrides(cls, "order"):
            cls.order = Order.OTHER  # type: ignore[assignment,method-assign]

    @property
    def order(self) -> Order:
        """`Order` in which heads keep their best entries, by which the engine knows what it may choose early or apart."""
        return Order.OTHER

    @property
    def uniform(self) -> bool:
        """True if every kv head keeps the same number of entries."""
        return False

    @property
    def needs_norms(self) -> bool:
        """True if `choose` reads `norms`, the norms of value vectors seen through the output projection."""
        return False

    @property
    def needs_layer(self) -> bool:
        """True if budgets differ by layer: `choose` then reads `layer`, its index."""
        return False

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of the K * base best-scored candidates to keep; ties go to the lowest head, then position.

        Args:
            rows: of one layer.

        Returns:
            The mask.
        """
        raise NotImplementedError

    def limits(self) -> Int[np.ndarray, "L K"] | None:
        """Most entries `[L, K]` that each kv head's segment grows to under `Evict`; by default None: the budget says it.

        Head budgets with limits of their own are the policy's layer budgets, too.
        """
        return None

    def among(self, sliding_windows: SlidingWindows) -> "HeadBudgets":
        """Budgets of the layers without a window alone, by `ModelConfig.sliding_windows`; by default the same.

        Head budgets that differ by layer override it; those that do not are rejected beside windows.
        """
        return self

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for a model that this is not made for; passes by default."""


def _mean_of_heads(scores: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Scores averaged over the kv heads, broadcast back to `[B, K, S]`."""
    return jnp.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformHeads(HeadBudgets):
    """Head budgets under which every kv head keeps the same number of entries: those of its own highest scores."""

    order = Order.OWN
    uniform = True

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of the `base` candidates of highest scores in each head."""
        return top(rows.keys, rows.base[:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedHeads(HeadBudgets):
    """Head budgets under which a layer's kv heads keep the same positions: those of highest mean score over heads."""

    order = Order.MEAN
    uniform = True

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of the `base` candidates of highest mean score, the same in each head."""
        return UniformHeads().choose(rows._replace(scores=_mean_of_heads(rows.scores)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Uneven(HeadBudgets):
    """Base of head budgets whose kv heads compete for entries: `alpha` is sure to a head, `capacity` limits a device."""

    alpha: float = 0.2
    capacity: float = 1.5

    def __post_init__(self) -> None:
        field(self, "alpha", real, "give a share between 0 and 1", high=1.0)
        remedy = f"give 1 or more, {_UNLIMITED:g} at most: entries of a device's heads over their even share"
        field(self, "capacity", real, remedy, low=1.0, high=_UNLIMITED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(_Uneven):
    """Ada-KV's head budgets: kv heads compete for a layer's entries by score, each sure of `alpha` of its even share.

    Attributes:
        alpha: the share that is uniform: 0 is Theorem 3.3's optimum, 1 is no adaption.
        capacity: on a mesh, entries of a layer that the heads of one device may hold, over their even share; what a
            device has no room for goes to other devices' heads.

    References:
        Ada-KV, arXiv:2407.11550, algorithm 1 and algorithm 2 line 8 (whose alpha is read as the published code does:
        the text of its Table 4 agrees with the code, the printed formula is reversed).
    """

    order = Order.COMMON

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of each head's best entries, as many as `targets` gives for its share of the top K * base."""
        keys = rows.keys
        batch, heads, padded_len = keys.shape
        winners = top(keys.reshape(batch, heads * padded_len), heads * rows.base).reshape(
            keys.shape
        )
        return top(keys, self.targets(count(winners), rows.base))

    def targets(self, won: Int[Array, "B K"], base: Int[Array, " B"]) -> Int[Array, "B K"]:
        """Entries per head `[B, K]`: (1 - alpha) * won + alpha * base, rounded by largest remainder; the sum stays equal.

        Args:
            won: entries each head has among the layer's best K * base.
            base: entries per head of the uniform budget.

        Returns:
            Entries per head. Ties of remainders go to the lowest head.
        """
        floor, remainder = self._divided(won, base)
        missing = won.sum(axis=-1, keepdims=True, dtype=jnp.int32) - floor.sum(
            axis=-1, keepdims=True, dtype=jnp.int32
        )
        # Keys start at 1: a head without a remainder never takes an entry before one that has some.
        extra = top((remainder + 1).astype(jnp.uint32), missing[:, 0])
        return floor + extra.astype(jnp.int32)

    def most_targets(self, won: Int[Array, "B K"], base: Int[Array, " B"]) -> Int[Array, "B K"]:
        """Upper bound `[B, K]` of `targets` for at most `won` wins: (1 - alpha) * won + alpha * base, rounded up."""
        floor, remainder = self._divided(won, base)
        return floor + (remainder > 0).astype(jnp.int32)

    def _divided(
        self, won: Int[Array, "B K"], base: Int[Array, " B"]
    ) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
        """Two arrays `[B, K]`: (1 - alpha) * won + alpha * base rounded down, and remainders times the denominator."""
        share = Fraction(self.alpha).limit_denominator(1000)
        den, num = share.denominator, share.numerator
        # Split by the denominator first: exact in int32 at any length.
        base = base[:, None]
        rest = (den - num) * (won % den) + num * (base % den)
        return (den - num) * (won // den) + num * (base // den) + rest // den, rest % den

    def floor(self, base: Int[Array, " B"], always_kept: Int[Array, " B"]) -> Int[Array, " B"]:
        """Guaranteed entries per head `[B]`: alpha * base, rounded down.

        Args:
            base: entries to choose per head, on average.
            always_kept: entries per head that stay anyway.

        Returns:
            Guaranteed entries per head.
        """
        return most_rows(self.alpha, base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProtectedHeads(_Uneven):
    """kvpress' head budgets: a kv head keeps its best entries up to `alpha` of its even share; heads compete for the rest.

    Attributes:
        alpha: share of a head's budget that is safe, the entries that stay anyway counted first.
        capacity: as for `AdaptiveHeads`.
    """

    order = Order.COMMON

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of K * base entries: each head's `floor` best, then the best others of all heads together."""
        keys = rows.keys
        batch, heads, padded_len = keys.shape
        safe = top(keys, self.floor(rows.base, rows.always_kept)[:, None])
        rest = only(keys, ~safe).reshape(batch, heads * padded_len)
        left = heads * rows.base - safe.sum(axis=(1, 2), dtype=jnp.int32)
        return safe | top(rest, left).reshape(keys.shape)

    def floor(self, base: Int[Array, " B"], always_kept: Int[Array, " B"]) -> Int[Array, " B"]:
        """Guaranteed entries per head `[B]` besides the forced: max(1, alpha * (base + forced)) - forced, in [0, base].

        Args:
            base: entries to choose per head, on average.
            always_kept: entries per head that stay anyway.

        Returns:
            Guaranteed entries per head, at most `base`.
        """
        share = Fraction(self.alpha).limit_denominator(1000)
        return jnp.clip(
            jnp.maximum(1, (base + always_kept) * share.numerator // share.denominator)
            - always_kept,
            0,
            base,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsAround(HeadBudgets):
    """Base of head budgets around inner head budgets, the field `budgets`, whose choice of entries they change."""

    budgets: HeadBudgets = UniformHeads()

    def __post_init__(self) -> None:
        instance("budgets", self.budgets, HeadBudgets, "give head budgets, UniformHeads() say")
        outermost = not isinstance(self.budgets, ThresholdHeads)
        require(outermost, "budgets", self.budgets, "put one threshold, around all other budgets")

    @property
    def needs_layer(self) -> bool:
        """True if the inner `budgets` differ by layer."""
        return self.budgets.needs_layer

    def limits(self) -> Int[np.ndarray, "L K"] | None:
        """Limits `[L, K]` of the inner `budgets`; None if these have none."""
        return self.budgets.limits()

    def among(self, sliding_windows: SlidingWindows) -> "HeadsAround":
        """Copy around the inner `budgets` of the layers without a window alone."""
        return dataclasses.replace(self, budgets=self.budgets.among(sliding_windows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoStageHeads(HeadsAround):
    """CriticalKV's head budgets: the share `first` of a head's entries by score, others by score times value norm.

    Attributes:
        budgets: how the layer's entries spread over heads.
        first: the share chosen by score alone, entries that stay anyway counted in.
        epsilon: added to scores in the second stage, so that a large value counts where attention is small.

    References:
        Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
        arXiv:2502.03805, algorithm 1.
    """

    needs_norms = True

    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        field(self, "first", real, "give a share between 0 and 1", high=1.0)
        field(self, "epsilon", real, "give 0 or a small number", high=1e30)

    @property
    def order(self) -> Order:
        """`Order` of the inner `budgets`: they say a head's number of entries, and its own scores say which."""
        return self.budgets.order

    @property
    def uniform(self) -> bool:
        """True if the inner `budgets` give every kv head the same number of entries."""
        return self.budgets.uniform

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]`, in each head as many entries as `budgets` choose: `first` by score, others by score * norm."""
        return self.staged(rows, count(self.budgets.choose(rows)))

    def staged(self, rows: ScoredRows, each: Int[Array, "B K"]) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of `each` entries per head: the share `first` by score, others by score times value norm."""
        scores, candidates, always_kept = rows.scores, rows.candidates, rows.always_kept[:, None]
        assert rows.norms is not None
        share = Fraction(repr(float(self.first))).limit_denominator(10_000)
        safe = jnp.clip(_part(share, each + always_kept) - always_kept, 0, each)
        weighted = (scores + jnp.float32(self.epsilon)) * rows.norms
        if shares_positions(self.budgets):
            scores, weighted = (_mean_of_heads(each) for each in (scores, weighted))
        chosen = top(keys_of(scores, candidates), safe)
        rest = keys_of(weighted, candidates & ~chosen)
        return chosen | top(rest, each - safe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdHeads(HeadsAround):
    """Head budgets by KVzap's rule: of the entries that inner `budgets` choose, keep all scored at least `threshold`.

    Attributes:
        threshold: the least score of an entry that stays. Entries that stay anyway, such as the window, may have less.
        budgets: how the layer's entries spread over heads: the most entries that stay.

    References:
        Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv:2601.07891.
    """

    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        field(self, "threshold", real, _LEAST_SCORE, low=-_LARGEST, high=_LARGEST)
        remedy = (
            "heads that keep the same entries share scores: give UniformHeads(), or AdaptiveHeads()"
        )
        require(not shares_positions(self.budgets), "budgets", self.budgets, remedy)

    @property
    def needs_norms(self) -> bool:
        """True if the inner `budgets` read the norms of values."""
        return self.budgets.needs_norms

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of the entries that the inner `budgets` choose, of scores that are at least the threshold."""
        return self.above(self.budgets.choose(rows), rows)[0]

    def above(
        self, chosen: Bool[Array, "B K S"], rows: ScoredRows
    ) -> tuple[Bool[Array, "B K S"], Int[Array, "B K"]]:
        """Mask `[B, K, S]` of chosen entries scored >= `threshold`; number `[B, K]` of unchosen candidates above it."""
        high = rows.scores >= jnp.float32(self.threshold)
        return chosen & high, count(rows.candidates & high & ~chosen)


def as_threshold(value: Any, low: float = -_LARGEST, high: float = _LARGEST) -> None:
    """Checks the field `threshold` of a dataclass, None or in [low, high] (else ValueError); stores it as a float."""
    optional(value, "threshold", real, f"{_LEAST_SCORE}, or None", low=low, high=high)


def threshold_of(heads: HeadBudgets) -> float | None:
    """Least score of an entry that stays under `ThresholdHeads`; None for other head budgets."""
    return heads.threshold if isinstance(heads, ThresholdHeads) else None


def without_threshold(heads: HeadBudgets) -> HeadBudgets:
    """The head budgets inside `ThresholdHeads`; other head budgets are returned as they are."""
    return heads.budgets if isinstance(heads, ThresholdHeads) else heads


def with_threshold(heads: HeadBudgets, threshold: float | None) -> HeadBudgets:
    """Returns the head budgets wrapped in `ThresholdHeads` of this threshold; unchanged if it is None."""
    return heads if threshold is None else ThresholdHeads(threshold=threshold, budgets=heads)


def inner_budgets(heads: HeadBudgets) -> HeadBudgets:
    """Head budgets inside all `HeadsAround` wrappers (two stages, thresholds); unwrapped ones are returned as given."""
    return inner_budgets(heads.budgets) if isinstance(heads, HeadsAround) else heads


def within_stages(heads: HeadBudgets, budgets: HeadBudgets) -> HeadBudgets:
    """Returns `heads` with its innermost budgets replaced by `budgets`; `budgets` itself if `heads` wraps none."""
    if not isinstance(heads, HeadsAround):
        return budgets
    return dataclasses.replace(heads, budgets=within_stages(heads.budgets, budgets))


def shares_positions(heads: HeadBudgets) -> bool:
    """True if all kv heads of a layer keep the same positions: `SharedHeads`, also inside wrappers."""
    return isinstance(inner_budgets(heads), SharedHeads)


def own_budgets(heads: HeadBudgets) -> AdaptiveHeads | ProtectedHeads | None:
    """Returns the `AdaptiveHeads` or `ProtectedHeads` of head budgets, also inside wrappers; None for other classes."""
    inner = inner_budgets(heads)
    return inner if isinstance(inner, (AdaptiveHeads, ProtectedHeads)) else None


def capacity_of(heads: HeadBudgets) -> float:
    """Largest ratio (float) of one device's entries in a layer to an even share; 1 for equal heads, 1000 if unlimited."""
    if inner_budgets(heads).uniform:
        return 1.0
    own = own_budgets(heads)
    return _UNLIMITED if own is None else own.capacity


def most_rows(capacity: float, even: Numbers) -> Numbers:
    """`capacity * even` rounded down, int or int array; `capacity` counts as a fraction of denominator 1000 at most."""
    return _part(Fraction(capacity).limit_denominator(1000), even)


def _part(share: Fraction, rows: Numbers) -> Numbers:
    """`share * rows` rounded down, int or int array; exact in int32 whenever the result fits."""
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
    """Tuple of a mask of entries, chosen anew so that no device's heads keep over `most`, and how many `[B]` were moved.

    Heads of a device that has too many give up their weakest entries, heads together, but none below `floor`. The best
    candidates of devices that have room take their place, so that the sum stays the same. `keys` are sort keys of all
    candidates, the chosen ones included, and 0 elsewhere; `most` is at least K * base / devices; each device has as
    many heads, in order. Returns the new mask, and entries that went to another device's heads.
    """
    batch = len(chosen)

    def by_device(array: Array) -> Array:
        return array.reshape(batch, devices, -1)

    def flat(array: Array) -> Array:
        return array.reshape(batch, -1)

    safe = top(only(keys, chosen), jnp.minimum(floor[:, None], count(chosen)))
    loose = by_device(only(keys, chosen & ~safe))
    headroom = most[:, None] - count(by_device(safe))
    stays = top(loose, jnp.minimum(headroom, count(loose > 0))) | by_device(safe)
    others = only(by_device(keys), ~stays)
    # Each device's best candidates that it has room for, and the best of these over all devices.
    could = flat(top(others, jnp.minimum(most[:, None] - count(stays), count(others > 0))))
    others = flat(others)
    moved = count(flat(chosen)) - count(flat(stays))
    taken = top(only(others, could), jnp.minimum(moved, count(could)))
    # Of a cache from elsewhere a device may hold less than its share: the others then take more than theirs.
    more = top(only(others, ~taken), moved - count(taken))
    return (flat(stays) | taken | more).reshape(chosen.shape), moved
