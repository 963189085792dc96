"""Head budgets: how a layer's entries are divided among its kv heads, and how many entries one device's heads hold."""

import dataclasses
import enum
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv._checks import (
    has_overridden_methods,
    require_instance,
    validate_field,
    validate_float,
    validate_optional_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.topk import compute_candidate_sort_keys, count_true, mask_sort_keys, mask_top_k

# The largest capacity: more than the number of devices that hold a layer's kv heads.
_UNLIMITED = 1000.0
_LARGEST = 1e30
_LEAST_SCORE = "give the lowest score of a kept entry"
# Python ints, or numpy or JAX arrays.
Numbers = TypeVar("Numbers", int, Array)


class SelectionOrder(enum.Enum):
    """Enum of how kv heads choose: by their own scores (OWN), mean scores (MEAN), ranked together (COMMON), or OTHER.

    Attributes:
        OWN: every head of every layer keeps the same number of entries, the best by the head's own scores alone.
        MEAN: every head keeps the same positions, the best by the mean of all heads' scores.
        COMMON: all heads' entries are ranked together (`AdaptiveHeads`, `ProtectedHeads`).
        OTHER: any other order.
    """

    OWN = "own"
    MEAN = "mean"
    COMMON = "common"
    OTHER = "other"


class ScoredEntries(NamedTuple):
    """NamedTuple input of `choose_entries`: scores, candidates, counts to choose and always kept, norms, layer index.

    Attributes:
        scores: `f32[B, K, S]`; higher scores are kept.
        candidates: mask `[B, K | 1, S]` of entries to choose from: neither padding nor always-kept entries.
        base: `i32[B]` entries to choose per head, on average.
        always_kept: `i32[B]` always-kept entries per head.
        norms: `f32[B, K, S]` norms of the values after the output projection, where head budgets need them.
        layer: `i32[]` index among the layers without a sliding window, where head budgets differ by layer.
    """

    scores: Float[Array, "B K S"]
    candidates: Bool[Array, "B #K S"]  # noqa: F821
    base: Int[Array, " B"]
    always_kept: Int[Array, " B"]
    norms: Float[Array, "B K S"] | None = None
    layer: Int[Array, ""] | None = None

    @property
    def sort_keys(self) -> UInt[Array, "B K S"]:
        """Sort keys `u32[B, K, S]` of the candidates' scores; 0, the lowest key, for all other entries."""
        return compute_candidate_sort_keys(self.scores, self.candidates)


class HeadBudgets:
    """Base of head budgets, which divide a layer's budget among kv heads: `choose_entries` masks entries to keep."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Set `selection_order` to OTHER in `HeadBudgets` subclasses that override methods but declare none."""
        super().__init_subclass__(**options)
        if has_overridden_methods(cls, "selection_order"):
            cls.selection_order = SelectionOrder.OTHER  # type: ignore[assignment,method-assign]

    @property
    def selection_order(self) -> SelectionOrder:
        """`SelectionOrder` of the kv heads: by own scores, mean scores, or all ranked together; OTHER by default."""
        return SelectionOrder.OTHER

    @property
    def is_uniform(self) -> bool:
        """True if head budgets keep equally many entries in every kv head of a layer; False by default."""
        return False

    @property
    def needs_value_norms(self) -> bool:
        """True if `choose_entries` reads `norms` of values after the output projection; False by default."""
        return False

    @property
    def needs_layer_index(self) -> bool:
        """True if budgets differ by layer, and `choose_entries` reads the index `layer`; False by default."""
        return False

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of candidates to keep, usually K * base per prompt; subclasses implement it.

        Args:
            rows: the scored entries of one layer.

        Returns:
            The mask of chosen entries; always-kept entries are not part of it.
        """
        raise NotImplementedError

    def get_segment_limits(self) -> Int[np.ndarray, "L K"] | None:
        """Return the most entries `[L, K]` of kv heads' segments under `Evict`; None (default) if the budget sets them.

        Head budgets with limits must also be the policy's layer budgets.
        """
        return None

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "HeadBudgets":
        """Return these head budgets for only the layers without a sliding window; the same object by default.

        `sliding_windows` are `ModelConfig.sliding_windows`. Override this where budgets differ by layer: otherwise
        models with sliding windows are rejected.
        """
        return self

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if the model does not fit these head budgets; by default every model fits."""


def _average_over_heads(scores: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """Return scores averaged over the kv heads, broadcast to `[B, K, S]`."""
    return jnp.broadcast_to(scores.mean(axis=1, keepdims=True), scores.shape)


@frozen_dataclass
class UniformHeads(HeadBudgets):
    """Head budgets that keep the same number of entries in every kv head: the best by the head's own scores."""

    selection_order = SelectionOrder.OWN
    is_uniform = True

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of each head's `base` candidates of highest score."""
        return mask_top_k(rows.sort_keys, rows.base[:, None])


@frozen_dataclass
class SharedHeads(HeadBudgets):
    """Head budgets that keep the same positions in all kv heads of a layer: the best by the mean score over heads."""

    selection_order = SelectionOrder.MEAN
    is_uniform = True

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of `base` candidates, equal in all heads: the best by mean score over heads."""
        return UniformHeads().choose_entries(rows._replace(scores=_average_over_heads(rows.scores)))


@frozen_dataclass
class _CompetingHeads(HeadBudgets):
    """Base of competing head budgets: each head is guaranteed share `alpha`; `capacity` limits one device's entries."""

    alpha: float = 0.2
    capacity: float = 1.5

    def __post_init__(self) -> None:
        validate_field(self, "alpha", validate_float, "give a share between 0 and 1", high=1.0)
        remedy = f"give 1 to {_UNLIMITED:g}: the entries of a device's heads over their even share"
        validate_field(self, "capacity", validate_float, remedy, low=1.0, high=_UNLIMITED)


@frozen_dataclass
class AdaptiveHeads(_CompetingHeads):
    """Ada-KV's head budgets: kv heads compete for a layer's entries; each is guaranteed `alpha` of an even share.

    Attributes:
        alpha: share of the budget that is uniform: 0 is the optimum of Theorem 3.3, 1 gives uniform heads.
        capacity: on a mesh, most entries of a layer in one device's heads, over their even share; entries above it
            go to other devices' heads.

    References:
        Ada-KV, arXiv:2407.11550, algorithm 1 and algorithm 2 line 8. `alpha` is that of the published code: the text
        on Table 4 agrees with the code, the printed formula is reversed.
    """

    selection_order = SelectionOrder.COMMON

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of each head's best entries: alpha * base + (1 - alpha) * wins in the layer."""
        keys = rows.sort_keys
        batch, heads, padded_len = keys.shape
        winners = mask_top_k(keys.reshape(batch, heads * padded_len), heads * rows.base).reshape(
            keys.shape
        )
        return mask_top_k(keys, self.compute_head_entries(count_true(winners), rows.base))

    def compute_head_entries(
        self, won: Int[Array, "B K"], base: Int[Array, " B"]
    ) -> Int[Array, "B K"]:
        """Return entries per head `[B, K]`: (1 - alpha) * won + alpha * base, rounded by largest remainder to sum(won).

        Args:
            won: entries of each head among the layer's best K * base.
            base: entries per head under a uniform budget.

        Returns:
            Entries per head, of the same sum as `won`. Ties of remainders go to the lowest head.
        """
        floor, remainder = self._mix_won_and_base(won, base)
        missing = won.sum(axis=-1, keepdims=True, dtype=jnp.int32) - floor.sum(
            axis=-1, keepdims=True, dtype=jnp.int32
        )
        # Keys start at 1: heads with a remainder precede heads without one.
        extra = mask_top_k((remainder + 1).astype(jnp.uint32), missing[:, 0])
        return floor + extra.astype(jnp.int32)

    def bound_head_entries(
        self, won: Int[Array, "B K"], base: Int[Array, " B"]
    ) -> Int[Array, "B K"]:
        """Return an upper bound `[B, K]` of a head's entries: (1 - alpha) * won + alpha * base, rounded up."""
        floor, remainder = self._mix_won_and_base(won, base)
        return floor + (remainder > 0).astype(jnp.int32)

    def _mix_won_and_base(
        self, won: Int[Array, "B K"], base: Int[Array, " B"]
    ) -> tuple[Int[Array, "B K"], Int[Array, "B K"]]:
        """Return ints `[B, K]`, (1 - alpha) * won + alpha * base rounded down, and the remainders' int numerators."""
        share = Fraction(self.alpha).limit_denominator(1000)
        den = share.denominator
        num = share.numerator
        # Dividing by the denominator first is exact in int32 at any length.
        base = base[:, None]
        rest = (den - num) * (won % den) + num * (base % den)
        return (den - num) * (won // den) + num * (base // den) + rest // den, rest % den

    def count_guaranteed_entries(
        self, base: Int[Array, " B"], always_kept: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """Return the number `[B]` of entries guaranteed to each head: alpha * base, rounded down.

        Args:
            base: entries to choose per head, on average.
            always_kept: always-kept entries per head.

        Returns:
            Guaranteed entries per head.
        """
        return multiply_rounding_down(self.alpha, base)


@frozen_dataclass
class ProtectedHeads(_CompetingHeads):
    """kvpress' head budgets: each kv head is guaranteed `alpha` of an even share; heads compete for the rest.

    Attributes:
        alpha: guaranteed share of a head's budget; always-kept entries count towards it first.
        capacity: as in `AdaptiveHeads`.
    """

    selection_order = SelectionOrder.COMMON

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of K * base entries: each head's guaranteed best, then the best of all heads."""
        keys = rows.sort_keys
        batch, heads, padded_len = keys.shape
        safe = mask_top_k(keys, self.count_guaranteed_entries(rows.base, rows.always_kept)[:, None])
        rest = mask_sort_keys(keys, ~safe).reshape(batch, heads * padded_len)
        left = heads * rows.base - safe.sum(axis=(1, 2), dtype=jnp.int32)
        return safe | mask_top_k(rest, left).reshape(keys.shape)

    def count_guaranteed_entries(
        self, base: Int[Array, " B"], always_kept: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """Return entries guaranteed to each head `[B]`: the share `alpha` of all, at least 1, less always-kept ones.

        The number is max(1, alpha * (base + always_kept)) - always_kept, clipped to [0, base].

        Args:
            base: entries to choose per head, on average.
            always_kept: always-kept entries per head.

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


@frozen_dataclass
class HeadBudgetsWrapper(HeadBudgets):
    """Base of head budgets that wrap other head budgets, the field `budgets`, and change their choice of entries."""

    budgets: HeadBudgets = UniformHeads()

    def __post_init__(self) -> None:
        require_instance(
            "budgets", self.budgets, HeadBudgets, "give head budgets, such as UniformHeads()"
        )
        outermost = not isinstance(self.budgets, ThresholdHeads)
        require(outermost, "budgets", self.budgets, "two thresholds: wrap all other budgets in one")

    @property
    def needs_layer_index(self) -> bool:
        """True if the wrapped `budgets` differ by layer and read the layer's index."""
        return self.budgets.needs_layer_index

    def get_segment_limits(self) -> Int[np.ndarray, "L K"] | None:
        """Return segment limits `[L, K]`, in entries, of the wrapped `budgets`; None if they have none."""
        return self.budgets.get_segment_limits()

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "HeadBudgetsWrapper":
        """Return a copy whose wrapped `budgets` are restricted to the layers without a sliding window."""
        return dataclasses.replace(
            self, budgets=self.budgets.restrict_to_full_attention(sliding_windows)
        )


@frozen_dataclass
class TwoStageHeads(HeadBudgetsWrapper):
    """CriticalKV's head budgets: counts per head from `budgets`, `first` by score, the rest by score * norm.

    Attributes:
        budgets: head budgets that divide the layer's entries among kv heads.
        first: share chosen by score alone, always-kept entries included.
        epsilon: added to scores in the second stage, so that large values count where attention is small.

    References:
        Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
        arXiv:2502.03805, algorithm 1.
    """

    needs_value_norms = True

    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_field(self, "first", validate_float, "give a share between 0 and 1", high=1.0)
        validate_field(self, "epsilon", validate_float, "give 0 or a small number", high=1e30)

    @property
    def selection_order(self) -> SelectionOrder:
        """`SelectionOrder` of the wrapped `budgets`, which set each head's number of entries."""
        return self.budgets.selection_order

    @property
    def is_uniform(self) -> bool:
        """True if the wrapped `budgets` keep the same number of entries in every kv head."""
        return self.budgets.is_uniform

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of as many entries per head as `budgets` choose, by score, then score * norm."""
        return self.choose_in_two_stages(rows, count_true(self.budgets.choose_entries(rows)))

    def choose_in_two_stages(
        self, rows: ScoredEntries, each: Int[Array, "B K"]
    ) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of `each` entries per head: share `first` by score, the rest by score * norm."""
        scores = rows.scores
        candidates = rows.candidates
        always_kept = rows.always_kept[:, None]
        assert rows.norms is not None
        share = Fraction(repr(float(self.first))).limit_denominator(10_000)
        safe = jnp.clip(_multiply_by_fraction(share, each + always_kept) - always_kept, 0, each)
        weighted = (scores + jnp.float32(self.epsilon)) * rows.norms
        if heads_share_positions(self.budgets):
            scores, weighted = (_average_over_heads(each) for each in (scores, weighted))
        chosen = mask_top_k(compute_candidate_sort_keys(scores, candidates), safe)
        rest = compute_candidate_sort_keys(weighted, candidates & ~chosen)
        return chosen | mask_top_k(rest, each - safe)


@frozen_dataclass
class ThresholdHeads(HeadBudgetsWrapper):
    """KVzap's head budgets: of the entries that the wrapped `budgets` choose, keep those scored at least `threshold`.

    Attributes:
        threshold: lowest score of a kept entry. Always-kept entries, such as the window, may score less.
        budgets: head budgets that divide the layer's entries among kv heads: the most entries to keep.

    References:
        Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv:2601.07891.
    """

    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_field(
            self, "threshold", validate_float, _LEAST_SCORE, low=-_LARGEST, high=_LARGEST
        )
        remedy = (
            "heads that keep the same entries share scores: give UniformHeads() or AdaptiveHeads()"
        )
        require(not heads_share_positions(self.budgets), "budgets", self.budgets, remedy)

    @property
    def needs_value_norms(self) -> bool:
        """True if the wrapped `budgets` read the norms of values."""
        return self.budgets.needs_value_norms

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of the entries that the wrapped `budgets` choose and that reach `threshold`."""
        return self.apply_score_threshold(self.budgets.choose_entries(rows), rows)[0]

    def apply_score_threshold(
        self, chosen: Bool[Array, "B K S"], rows: ScoredEntries
    ) -> tuple[Bool[Array, "B K S"], Int[Array, "B K"]]:
        """Return the mask of chosen entries that reach `threshold`, and how many other candidates `[B, K]` do."""
        high = rows.scores >= jnp.float32(self.threshold)
        return chosen & high, count_true(rows.candidates & high & ~chosen)


def check_threshold_field(value: Any, low: float = -_LARGEST, high: float = _LARGEST) -> None:
    """Validate and store a dataclass's field `threshold`: None, or a float in [low, high]; else ValueError."""
    validate_optional_field(
        value, "threshold", validate_float, f"{_LEAST_SCORE}, or None", low=low, high=high
    )


def get_score_threshold(heads: HeadBudgets) -> float | None:
    """Return the field `threshold`, the lowest score to keep, of `ThresholdHeads`; None for other budgets."""
    return heads.threshold if isinstance(heads, ThresholdHeads) else None


def remove_score_threshold(heads: HeadBudgets) -> HeadBudgets:
    """Return the head budgets inside `ThresholdHeads`; other head budgets unchanged."""
    return heads.budgets if isinstance(heads, ThresholdHeads) else heads


def add_score_threshold(heads: HeadBudgets, threshold: float | None) -> HeadBudgets:
    """Return the head budgets wrapped in `ThresholdHeads` of this threshold; unchanged if it is None."""
    return heads if threshold is None else ThresholdHeads(threshold=threshold, budgets=heads)


def unwrap_head_budgets(heads: HeadBudgets) -> HeadBudgets:
    """Return the innermost head budgets, inside all `HeadBudgetsWrapper` wrappers; others unchanged."""
    return unwrap_head_budgets(heads.budgets) if isinstance(heads, HeadBudgetsWrapper) else heads


def replace_inner_budgets(heads: HeadBudgets, budgets: HeadBudgets) -> HeadBudgets:
    """Return `heads` with its innermost budgets replaced by `budgets`; `budgets` if `heads` wraps none."""
    if not isinstance(heads, HeadBudgetsWrapper):
        return budgets
    return dataclasses.replace(heads, budgets=replace_inner_budgets(heads.budgets, budgets))


def heads_share_positions(heads: HeadBudgets) -> bool:
    """Return True if head budgets keep the same positions in all kv heads: `SharedHeads`, also inside wrappers."""
    return isinstance(unwrap_head_budgets(heads), SharedHeads)


def get_competing_budgets(heads: HeadBudgets) -> AdaptiveHeads | ProtectedHeads | None:
    """Return the `AdaptiveHeads` or `ProtectedHeads` of head budgets, also inside wrappers; None for other classes."""
    inner = unwrap_head_budgets(heads)
    return inner if isinstance(inner, (AdaptiveHeads, ProtectedHeads)) else None


def get_device_capacity(heads: HeadBudgets) -> float:
    """Return a device's most entries / even share: 1 if uniform, `capacity` if heads compete, else 1000."""
    if unwrap_head_budgets(heads).is_uniform:
        return 1.0
    own = get_competing_budgets(heads)
    return _UNLIMITED if own is None else own.capacity


def multiply_rounding_down(capacity: float, even: Numbers) -> Numbers:
    """Return `capacity * even` rounded down; `capacity` counts as a fraction of denominator 1000 at most."""
    return _multiply_by_fraction(Fraction(capacity).limit_denominator(1000), even)


def _multiply_by_fraction(share: Fraction, rows: Numbers) -> Numbers:
    """Return `share * rows` rounded down; exact in int32 whenever the result fits."""
    # Dividing by the denominator first is exact in int32 at any length.
    part = rows // share.denominator
    rest = rows % share.denominator
    return part * share.numerator + rest * share.numerator // share.denominator


def limit_entries_per_device(
    chosen: Bool[Array, "B K S"],
    keys: UInt[Array, "B K S"],
    floor: Int[Array, " B"],
    most: Int[Array, " B"],
    devices: int,
) -> tuple[Bool[Array, "B K S"], Int[Array, " B"]]:
    """Return the mask with at most `most` entries per device, and how many `[B]` other devices' heads keep instead.

    Heads of a device above `most` give up their weakest entries, ranked together, but none goes below `floor`. The
    best candidates of other devices replace them, so that the sum is unchanged.

    Args:
        chosen: mask of chosen entries.
        keys: sort keys of all candidates, chosen ones included; 0 for other entries.
        floor: guaranteed entries per head.
        most: most entries per device, at least K * base / devices.
        devices: number of devices, each with the same number of consecutive heads.

    Returns:
        The new mask, and the number of entries `[B]` that moved to another device's heads.
    """
    batch = len(chosen)

    def by_device(array: Array) -> Array:
        return array.reshape(batch, devices, -1)

    def flat(array: Array) -> Array:
        return array.reshape(batch, -1)

    safe = mask_top_k(mask_sort_keys(keys, chosen), jnp.minimum(floor[:, None], count_true(chosen)))
    loose = by_device(mask_sort_keys(keys, chosen & ~safe))
    headroom = most[:, None] - count_true(by_device(safe))
    kept = mask_top_k(loose, jnp.minimum(headroom, count_true(loose > 0))) | by_device(safe)
    others = mask_sort_keys(by_device(keys), ~kept)
    # The best candidates that each device has headroom for, then the best of these over all devices.
    could = flat(
        mask_top_k(others, jnp.minimum(most[:, None] - count_true(kept), count_true(others > 0)))
    )
    others = flat(others)
    moved = count_true(flat(chosen)) - count_true(flat(kept))
    taken = mask_top_k(mask_sort_keys(others, could), jnp.minimum(moved, count_true(could)))
    # In a loaded cache a device may hold less than its share: other devices then exceed `most`.
    more = mask_top_k(mask_sort_keys(others, ~taken), moved - count_true(taken))
    return (flat(kept) | taken | more).reshape(chosen.shape), moved
