"""Layer budgets: exact integer entries per kv head of each layer, by schedules or by statistics of its scores.

Budgets are computed by numpy on the host, or, from traced weights, by JAX with 64 bits enabled.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import (
    bisect_elementwise,
    is_traced,
    select_array_module,
    validate_field,
    validate_float,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.scorer import ScorerInputs, Scores

# numpy arrays on the host, or traced JAX arrays: int64[N] of N prompts; int64[L, N] and float64[L, N] of L layers.
Counts = Any
Table = Any
Reals = Any


class LayerBudgetInputs(NamedTuple):
    """NamedTuple input of layer budgets: N prompts' budgets, lengths, always-kept entries; L, window, layer weights.

    Attributes:
        budget: `[N]` entries per kv head and layer on average, always-kept ones included.
        length: `[N]` tokens of each prompt.
        always_kept: `[N]` always-kept entries, in every layer.
        layers: L.
        window: the observation window, for schedules that exclude it.
        weights: `[L, N]` from `LayerBudgets.compute_layer_weight`, if `depends_on_scores`; of the layers that have run
            so far.
    """

    budget: Counts
    length: Counts
    always_kept: Counts
    layers: int
    window: int = 0
    weights: Any = None

    @property
    def array_module(self) -> Any:
        """Array module of the layer budgets' inputs: `jax.numpy` if they are JAX arrays, else `numpy`."""
        return select_array_module(self.budget, self.weights)

    @property
    def mean_entries_to_choose(self) -> Counts:
        """Average entries `[N]` per kv head and layer to choose by score: the budget without always-kept ones."""
        return self.budget - self.always_kept

    def divide_by_shares(self, shares: Reals) -> Table:
        """Return entries per kv head `[L, N]`: always-kept ones, and the rest split by `shares`, at most the length."""
        total = self.layers * self.mean_entries_to_choose
        wanted = shares * total.astype(self.array_module.float64)
        return self.always_kept + round_to_sum(wanted, total, self.length - self.always_kept)


class LayerBudgets:
    """Base of layer budgets, which divide a budget among layers: `compute_layer_entries` returns entries per head."""

    @property
    def depends_on_scores(self) -> bool:
        """True if budgets depend on all layers' scores, so that one pool holds all layers; False by default."""
        return False

    @property
    def has_exact_sum(self) -> bool:
        """True, the default, if entries per kv head sum to L times the budget; False if the sum may differ."""
        return True

    @property
    def uses_joint_budget(self) -> bool:
        """True if kv heads of all layers compete by score for one budget, without layer weights; False by default."""
        return False

    @property
    def needs_attention_sums(self) -> bool:
        """True if `compute_head_statistic` reads `seen.sums`, attention from all queries; False by default."""
        return False

    @property
    def needs_last_queries(self) -> bool:
        """True if `compute_head_statistic` reads `seen.queries`, which the scorer must request; False by default."""
        return False

    @property
    def sets_entry_count(self) -> bool:
        """True if these budgets set the number of entries, and the policy's budget must be None; False by default."""
        return False

    @property
    def growth_limit(self) -> int | None:
        """Entries to which shorter prompts' segments may grow under `Evict`; None (default): up to the budget only."""
        return None

    def compute_head_statistic(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: ScorerInputs
    ) -> Float[Array, "B K *G"]:
        """Return one layer's statistic per kv or query head, for `compute_layer_weight`; TypeError unless overridden.

        Args:
            scores: scores before pooling.
            candidates: entries that are neither padding nor always kept.
            seen: the layer as the scorer sees it, with `seen.sums` if needed.

        Returns:
            `[B, K]`, `[B, K, G]`, or several statistics of each query head, `[B, K, G, n]`.
        """
        raise TypeError(
            f"{type(self).__name__} has no statistic of scores: override `compute_head_statistic`"
        )

    def compute_layer_weight(self, heads: Float[Array, "B H *n"]) -> Float[Array, " B"]:
        """Return the layer's weight `[B]` in the division of entries: by default the mean of its heads' statistics."""
        return heads.mean(axis=-1)

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]` to keep in each layer of each prompt; subclasses implement it.

        Args:
            of: the prompts and their average budgets.

        Returns:
            Entries, always-kept ones included, at most the prompt's length.
        """
        raise NotImplementedError

    def compute_average_entries(self, length: Counts, always_kept: Counts) -> Counts:
        """Return entries per kv head and layer on average `[N]`, if `sets_entry_count`; TypeError unless overridden."""
        raise TypeError(
            f"{type(self).__name__} lacks `compute_average_entries`, which `sets_entry_count` needs: write it"
        )

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "LayerBudgets":
        """Return these budgets for the layers without a sliding window, counted from 0; the same object by default.

        `sliding_windows` are `ModelConfig.sliding_windows`. Override this where budgets use layer indices.
        """
        return self

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if the model does not fit these layer budgets; by default every model fits."""

    def bound_total_entries(
        self, budget: Counts, length: Counts, always_kept: Counts, *, layers: int
    ) -> Counts:
        """Return an upper bound `[N]` of entries per kv head summed over layers: L times the budget by default."""
        return layers * np.asarray(budget, np.int64)

    def bound_layer_entries(self, budget: Counts, length: Counts) -> Counts:
        """Return an upper bound `[N]` of the entries per kv head of any layer: the prompt's length by default."""
        return np.asarray(length, np.int64)

    def count_recent_entries(self, budget: Counts, length: Counts, weights: Any) -> Table | None:
        """Return how many recent entries `[L, N]` each layer keeps; None, the default, for the share `Keep.recent`."""
        return None

    def mask_layers_without_eviction(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Return the mask `[L]` of layers that keep all new entries, even under `Evict`; all False by default."""
        return np.zeros(layers, bool)


def round_to_sum(values: Reals, total: Counts, most: Counts) -> Table:
    """Shift each prompt's reals by a constant, clip them to [0, most], and round to integers `[L, N]` of sum `total`.

    `total` is between 0 and L * most; ties of remainders go to the lowest layer.
    """
    xp = select_array_module(values, total, most)
    total = xp.asarray(total, xp.int64)
    most = xp.asarray(most, xp.int64)
    values, sums, ends = (xp.asarray(each, xp.float64) for each in (values, total, most))

    def shifted(shift: Reals) -> Reals:
        return xp.clip(values + shift, 0.0, ends)

    # The sum of clipped values does not decrease with the shift: bisection finds the shift.
    low = -values.max(axis=0) - 1.0
    high = ends - values.min(axis=0) + 1.0
    high = bisect_elementwise(low, high, lambda middle: shifted(middle).sum(axis=0) < sums)
    return round_by_largest_remainder(shifted(high), total, most)


def round_by_largest_remainder(real: Reals, total: Counts, most: Counts) -> Table:
    """Round reals `[L, N]`, which must sum to `total`, each at most `most`, to integers that do; by largest remainder.

    Ties of remainders go to the lowest layer.
    """
    xp = select_array_module(real, total, most)
    floor = xp.floor(real + 1e-9)
    fraction = xp.round(real - floor, 9)
    floor = floor.astype(xp.int64)
    missing = total - floor.sum(axis=0)
    fraction = xp.where(floor >= most, -1.0, fraction)
    order = xp.argsort(-fraction, axis=0, stable=True)
    rank = xp.argsort(order, axis=0, stable=True)
    return floor + (rank < missing).astype(xp.int64)


def require_finite_weights(weights: np.ndarray | Array | None) -> Reals:
    """Return layer weights as a float64 array; ValueError for weights that are not finite, unless they are traced."""
    xp = select_array_module(weights)
    values = xp.asarray(weights, xp.float64)
    sound = is_traced(values) or bool(np.isfinite(values).all())
    require(sound, "weights", "not finite", "the model's attention is not finite: check the model")
    return values


@frozen_dataclass
class UniformLayers(LayerBudgets):
    """Layer budgets that keep the same number of entries per kv head in every layer: the budget."""

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]`: the budget in every layer."""
        return of.array_module.broadcast_to(of.budget, (of.layers, *np.shape(of.budget)))


@frozen_dataclass
class GlobalLayers(UniformLayers):
    """Layer budgets under which the kv heads of all layers compete by score for one budget."""

    depends_on_scores = True
    uses_joint_budget = True


@frozen_dataclass
class _PyramidSchedule(LayerBudgets):
    """Base of pyramid layer budgets: `beta` is the ratio of average entries to the top layer's entries, at least 1."""

    beta: int | float = 20.0

    def __post_init__(self) -> None:
        validate_field(
            self,
            "beta",
            validate_float,
            "give at least 1 (uniform); the paper uses 14 to 20",
            low=1.0,
            high=1e30,
        )


@frozen_dataclass
class _ExactPyramid(_PyramidSchedule):
    """Base of pyramid schedules whose entries sum to the budget; subclasses define `compute_relative_entries`."""

    def compute_relative_entries(self, base: Any, depth: Any) -> Reals:
        """Return unscaled relative entries of layers at depths from 0 (bottom) to 1 (top); subclasses override it.

        Args:
            base: entries per kv head on average, without always-kept ones.
            depth: depth of each layer, in [0, 1].

        Returns:
            Positive numbers; `compute_layer_entries` scales them to the budget's sum.
        """
        raise NotImplementedError

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]`: always-kept ones, and the rest of the budget split by the schedule."""
        xp = of.array_module
        layers = of.layers
        depth = xp.asarray(np.arange(layers)[:, None] / max(layers - 1, 1))
        shape = self.compute_relative_entries(of.mean_entries_to_choose.astype(xp.float64), depth)
        return of.divide_by_shares(shape / xp.maximum(shape.sum(axis=0), 1e-300))


@frozen_dataclass
class LinearLayers(_ExactPyramid):
    """PyramidKV's schedule (arXiv:2406.02069, eq. 1): entries fall linearly from bottom to top layer; exact sum.

    Attributes:
        beta: average entries over entries of the top layer; at least 1.
    """

    def compute_relative_entries(self, base: Any, depth: Any) -> Reals:
        """Return entries on a line from 2 * base - base / beta (bottom layer) to base / beta (top layer)."""
        top = base / self.beta
        bottom = 2 * base - top
        return bottom - (bottom - top) * depth


@frozen_dataclass
class GeometricLayers(_ExactPyramid):
    """Pyramid schedule: entries fall geometrically, by a factor of 2 * beta - 1 over all layers (PyramidKV, Table 5).

    Attributes:
        beta: as in `LinearLayers`.
    """

    def compute_relative_entries(self, base: Any, depth: Any) -> Reals:
        """Return relative entries that fall geometrically, by a factor of 2 * beta - 1 from bottom to top layer."""
        return base * (1 / (2 * self.beta - 1)) ** depth


@frozen_dataclass
class ExponentialLayers(_ExactPyramid):
    """Pyramid schedule: entries decay exponentially, by `rate`, from bottom to top layer (PyramidKV, Table 5).

    Attributes:
        beta: as in `LinearLayers`.
        rate: decay at the top layer, exp(-rate).
    """

    rate: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_field(
            self, "rate", validate_float, "give a positive decay rate", high=1e30, open_low=True
        )

    def compute_relative_entries(self, base: Any, depth: Any) -> Reals:
        """Return relative entries: base / beta + 2 * (base - base / beta) * exp(-rate * depth)."""
        top = base / self.beta
        return top + (2 * base - 2 * top) * select_array_module(depth).exp(-self.rate * depth)


@frozen_dataclass
class WeightedLayers(LayerBudgets):
    """Base of layer budgets that divide entries in proportion to layer weights, a statistic of scores or attention."""

    depends_on_scores = True

    def compute_proportions(self, weights: Any) -> Reals:
        """Return the proportions `[L, N]`, 0 or more, of the layers' entries: the weights, checked to be finite.

        Only a common factor may depend on other layers' weights.
        """
        return require_finite_weights(weights)

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]`: always-kept ones, and the rest of the budget split by layer weights."""
        return of.divide_by_shares(self._compute_layer_shares(of.weights))

    def bound_lower_layers(self, of: LayerBudgetInputs) -> Table:
        """Return an upper bound `[n, N]` of entries per head of the bottom n layers, for any weights of layers above.

        `of.weights` are those of the n layers. All layers' bounds sum to at most L * (2 * budget + 1).
        """
        # A layer's share falls with every further layer. Entries above the length of full layers are spread evenly
        # over the other layers, at most L - 1; at least one layer is full then.
        xp = of.array_module
        total = of.layers * of.mean_entries_to_choose
        headroom = of.length - of.always_kept
        spread = xp.maximum(total - headroom, 0) / max(of.layers - 1, 1)
        wanted = self._compute_layer_shares(of.weights) * total.astype(xp.float64)
        most = xp.floor(wanted + spread + 1e-6).astype(xp.int64) + 1
        return of.always_kept + xp.minimum(most, headroom)

    def _compute_layer_shares(self, weights: Any) -> Reals:
        """Return each layer's share `[L, N]` of entries by `compute_proportions`; even shares if all are 0."""
        xp = select_array_module(weights)
        parts = self.compute_proportions(weights)
        total = parts.sum(axis=0)
        return xp.where(total > 0, parts / xp.where(total > 0, total, 1.0), 1 / len(parts))


def _normalise_scores(
    scores: Float[Array, "B K S"], candidates: Bool[Array, "B 1 S"]
) -> Float[Array, "B K S"]:
    """Return candidates' scores `[B, K, S]` divided by their sum in each kv head; 0 for other entries."""
    inside = jnp.where(candidates, scores.astype(jnp.float32), 0.0)
    total = inside.sum(axis=-1, keepdims=True)
    return inside / jnp.where(total > 0, total, 1.0)


@frozen_dataclass
class EntropyLayers(WeightedLayers):
    """Layer budgets by entropy: layers of more evenly spread attention get more entries (PyramidKV, Table 5)."""

    def compute_head_statistic(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: ScorerInputs
    ) -> Float[Array, "B K"]:
        """Return the entropy in nats `[B, K]` of each kv head's scores, normalised over the candidates."""
        share = _normalise_scores(scores, candidates)
        terms = jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1.0)), 0.0)
        return -terms.sum(axis=-1)


@frozen_dataclass
class GiniLayers(WeightedLayers):
    """Layer budgets by Gini coefficient: layers of more concentrated attention get more (PyramidKV, Table 5)."""

    def compute_head_statistic(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: ScorerInputs
    ) -> Float[Array, "B K"]:
        """Return the Gini coefficient `[B, K]` of each kv head's scores, normalised over the candidates."""
        share = jnp.where(candidates, _normalise_scores(scores, candidates), -1.0)
        count = candidates.sum(axis=-1, dtype=jnp.float32)
        # Ascending order puts the -1 of other entries first: ranks start after them.
        ordered = jnp.sort(share, axis=-1)
        padded_len = share.shape[-1]
        rank = jnp.arange(1, padded_len + 1, dtype=jnp.float32) - (padded_len - count)[..., None]
        weighted = jnp.where(ordered >= 0, (2 * rank - count[..., None] - 1) * ordered, 0.0).sum(
            axis=-1
        )
        return weighted / jnp.maximum(count, 1.0)


@frozen_dataclass
class _PublishedPyramid(_PyramidSchedule):
    """Base of pyramid schedules as in published code; the sum over layers may differ from the budget."""

    has_exact_sum = False

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]` of each prompt's schedule, clipped to always-kept entries and length."""
        columns = [
            self._schedule_prompt_entries(int(capacity), int(length), of.layers, of.window)
            for capacity, length in zip(of.budget, of.length, strict=True)
        ]
        return np.clip(np.stack(columns, axis=1), np.asarray(of.always_kept), np.asarray(of.length))

    def _schedule_prompt_entries(
        self, capacity: int, length: int, layers: int, window: int
    ) -> Int[np.ndarray, " L"]:
        """Return one prompt's entries per kv head `[L]`, window included; subclasses implement it."""
        raise NotImplementedError


@frozen_dataclass
class OfficialLayers(_PublishedPyramid):
    """KVCache-Factory's pyramid schedule: integer steps, up to 27% over budget; uniform for short prompts.

    Attributes:
        beta: as in `LinearLayers`.
    """

    def _schedule_prompt_entries(
        self, capacity: int, length: int, layers: int, window: int
    ) -> Int[np.ndarray, " L"]:
        base = capacity - window
        least = int(base // self.beta)
        most = 2 * base - least
        if most >= length - window:
            most = length - window
            least = 2 * base - most
        if length <= capacity or length < 2 * base or layers == 1:
            return np.full(layers, min(capacity, length))
        step = (most - least) // max(layers - 1, 1)
        return most - np.arange(layers) * step + window


@frozen_dataclass
class KVPressLayers(_PublishedPyramid):
    """kvpress' pyramid schedule, rounded half to even; uniform for short prompts, or if layers get less than a window.

    Attributes:
        beta: as in `LinearLayers`.
    """

    def _schedule_prompt_entries(
        self, kept: int, length: int, layers: int, window: int
    ) -> Int[np.ndarray, " L"]:
        least = kept / self.beta
        most = 2 * kept - least
        if most >= length - window:
            most = float(length - window)
            least = 2 * kept - most
        if not (length >= most >= least >= window) or layers == 1:
            return np.full(layers, kept)
        depth = np.arange(layers) / max(layers - 1, 1)
        return np.asarray([round(most - (most - least) * d) for d in depth.tolist()])
