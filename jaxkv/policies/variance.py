"""D2O's layer budgets: the more unevenly a layer's keys receive attention, the fewer entries it gets."""

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkv._checks import (
    FARTHEST,
    bisect_elementwise,
    is_traced,
    select_array_module,
    validate_enum,
    validate_field,
    validate_float,
    validate_int,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.layer_budgets import (
    Counts,
    LayerBudgetInputs,
    LayerBudgets,
    Reals,
    Table,
    require_finite_weights,
    round_by_largest_remainder,
    round_to_sum,
)
from jaxkv.policies.reads import list_full_attention_layers
from jaxkv.policies.scorer import ScorerInputs, Scores

# Every layer keeps at least 1 / _LEAST of the prompt, as in the published code.
_LEAST = 100


class VarianceWeighting(enum.Enum):
    """Enum of how the variance F of a layer's attention becomes the layer's weight in the division of entries.

    HEADNORM: exp(-F), F the mean over heads of variances scaled to [0, 1] within the layer: the published code.
    RAW: exp(-F), F the mean variance itself, as in the paper: nearly all entries go to the least uneven layers.
    LAYER_ZSCORE: exp(-F), F standardised over layers.
    RECIPROCAL, EXP_DECAY, UNIFORM: the ablations of D2O's Table 4: 1 / F; exp(-F) of the prompt, shifted by the same
    number of entries in each layer to reach the sum; the same for every layer.
    """

    HEADNORM = "headnorm"
    RAW = "raw"
    LAYER_ZSCORE = "layer_zscore"
    RECIPROCAL = "reciprocal"
    EXP_DECAY = "exp_decay"
    UNIFORM = "uniform"


@frozen_dataclass
class VarianceLayers(LayerBudgets):
    """D2O's layer budgets: layers whose attention is spread more evenly over keys get more entries; exact sum.

    Attributes:
        statistic: `VarianceWeighting`, or its value: how the variance of attention becomes a layer's weight.
        dense_layers: layers that keep the whole prompt, none with a sliding window; negative ones count from the top.
            Their entries are part of the budget.

    References:
        D2O, arXiv:2406.13035, equations 4 and 5, Table 4.
    """

    depends_on_scores = True
    needs_attention_sums = True

    statistic: VarianceWeighting | str = VarianceWeighting.HEADNORM
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validate_field(self, "statistic", validate_enum, VarianceWeighting)
        remedy = "give layers such as (0, 1, -1)"
        require(np.iterable(self.dense_layers), "dense_layers", self.dense_layers, remedy)
        layers = [
            validate_int("dense_layers", each, remedy, least=-FARTHEST)
            for each in self.dense_layers
        ]
        object.__setattr__(self, "dense_layers", tuple(layers))

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "VarianceLayers":
        """Return D2O's budgets, `dense_layers` counted in full-attention layers; ValueError for any other."""
        named = np.flatnonzero(mask_dense_layers(self.dense_layers, len(sliding_windows))).tolist()
        index = list_full_attention_layers(sliding_windows)
        found = [layer for layer in named if sliding_windows[layer] is not None]
        remedy = f"layers {found} have sliding windows and hold no more: choose from {', '.join(map(str, index))}"
        require(not found, "dense_layers", self.dense_layers, remedy)
        return dataclasses.replace(self, dense_layers=tuple(index.index(layer) for layer in named))

    def compute_head_statistic(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: ScorerInputs
    ) -> Float[Array, "B K G"]:
        """Return, for each query head `[B, K, G]`, the variance over keys of the attention that keys receive."""
        sums = seen.sums
        length = seen.length
        batch, heads, group, padded_len = sums.shape
        received = sums.reshape(batch, heads * group, padded_len)
        inside = seen.mask_entries_between()
        count = jnp.maximum(length, 1).astype(jnp.float32)[:, None]
        mean = jnp.where(inside, received, 0.0).sum(axis=-1) / count
        off = jnp.where(inside, received - mean[..., None], 0.0)
        return ((off * off).sum(axis=-1) / jnp.maximum(count - 1, 1)).reshape(batch, heads, group)

    def compute_layer_weight(self, heads: Float[Array, "B H"]) -> Float[Array, " B"]:
        """Return a layer's statistic F `[B]`: its heads' mean variance; HEADNORM scales variances to [0, 1] first."""
        variance = heads
        if self.statistic is VarianceWeighting.HEADNORM:
            least = variance.min(axis=-1, keepdims=True)
            most = variance.max(axis=-1, keepdims=True)
            variance = (variance - least) / (most - least + 1e-6)
        return variance.mean(axis=-1)

    def bound_layer_entries(self, budget: Counts, length: Counts) -> Counts:
        """Return a bound `[N]` on a layer's entries: length, or if less ceil(e * budget) + 1 (HEADNORM, none dense)."""
        length = np.asarray(length, np.int64)
        if self.statistic is not VarianceWeighting.HEADNORM or self.dense_layers:
            return length
        return np.minimum(length, np.ceil(np.e * np.asarray(budget, np.int64)).astype(np.int64) + 1)

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]` by the layers' variances; the prompt's length if the budget holds it."""
        stat = require_finite_weights(of.weights)
        xp = select_array_module(stat)
        budget, length, always_kept = of[:3]
        # Prompts within their budget are kept whole: placeholders take their place in the arithmetic.
        fits = budget >= length
        two = xp.full_like(length, 2)
        budget, long, always_kept = (
            xp.where(fits, two, each) for each in (budget, length, always_kept)
        )
        return xp.where(
            fits, length, self._divide_long_prompts(stat, budget, long, always_kept, of.layers)
        )

    def _divide_long_prompts(
        self, stat: Reals, budget: Counts, length: Counts, always_kept: Counts, layers: int
    ) -> Table:
        """Return entries per kv head `[L, N]` of prompts over the budget; ValueError if dense layers need too many."""
        xp = select_array_module(stat)
        dense = mask_dense_layers(self.dense_layers, layers)
        least = xp.minimum(budget, xp.maximum(always_kept + 1, -(-length // _LEAST)))
        free = layers - int(dense.sum())
        left = layers * budget - (layers - free) * length
        if not is_traced(left):
            self._require_dense_layers_fit(
                least * free <= left, (layers - free) * length, layers * budget
            )
        if not free:
            return xp.broadcast_to(length, stat.shape)
        spread = self._divide_by_variance(stat[~dense], left, length, least)
        # Each layer's index among the layers that are not dense.
        place = np.maximum(np.cumsum(~dense) - 1, 0)
        return xp.where(dense[:, None], length, spread[place])

    def _require_dense_layers_fit(self, fits: Any, taken: Any, total: Any) -> None:
        """Raise ValueError if `dense_layers` leave other layers too few of a prompt's `total` entries."""
        low = np.flatnonzero(~np.asarray(fits))
        at = int(low[0]) if low.size else 0
        remedy = (
            f"they need {taken[at]} of {total[at]} entries: name fewer layers, or raise the budget"
        )
        require(not low.size, "dense_layers", self.dense_layers, remedy)

    def _divide_by_variance(
        self, stat: Reals, total: Counts, length: Counts, least: Counts
    ) -> Table:
        """Return integer entries per layer `[L, N]`, each in [least, length], of sum `total`, by the variances F."""
        xp = select_array_module(stat)
        if self.statistic is VarianceWeighting.EXP_DECAY:
            wanted = length.astype(xp.float64) * xp.exp(-stat) - least.astype(xp.float64)
            return least + round_to_sum(wanted, total - least * len(stat), length - least)
        return round_by_largest_remainder(
            _scale_to_total(self._compute_variance_weights(stat), total, least, length),
            total,
            length,
        )

    def _compute_variance_weights(self, stat: Reals) -> Reals:
        """Return positive weights `[L, N]` of layers in the division of entries, from all layers' variances F."""
        xp = select_array_module(stat)
        match self.statistic:
            case VarianceWeighting.UNIFORM:
                return xp.ones_like(stat)
            case VarianceWeighting.RECIPROCAL:
                return 1 / xp.maximum(stat, 1e-12)
            case VarianceWeighting.LAYER_ZSCORE:
                off = stat.std(axis=0)
                flat = (stat.max(axis=0) == stat.min(axis=0)) | (off == 0)
                return xp.where(
                    flat, 1.0, xp.exp(-(stat - stat.mean(axis=0)) / xp.where(flat, 1.0, off))
                )
        return xp.exp(-(stat - stat.min(axis=0)))


def mask_dense_layers(dense_layers: tuple[int, ...], layers: int) -> Bool[np.ndarray, " L"]:
    """Return the mask `[L]` of layers with these indices, negative ones from the top; ValueError if out of range."""
    mask = np.zeros(layers, bool)
    for layer in dense_layers:
        require(
            -layers <= layer < layers,
            "dense_layers",
            dense_layers,
            f"the model has {layers} layers: give some of these",
        )
        mask[layer] = True
    return mask


def _scale_to_total(layer_weights: Reals, total: Counts, least: Counts, most: Counts) -> Reals:
    """Return real entries per layer `[L, N]` of sum `total`: clip(c * weights, least, most) with a common factor c.

    Layers of negligible weight share the entries that the other layers cannot hold.
    """
    xp = select_array_module(layer_weights)
    total, least, most = (each.astype(xp.float64) for each in (total, least, most))
    alive = layer_weights >= layer_weights.max(axis=0) * 1e-300
    reach = xp.where(alive, most, least)
    over = (total - reach.sum(axis=0)) / xp.maximum(1, (~alive).sum(axis=0)).astype(xp.float64)
    # In logarithms, because weights may differ by hundreds of orders of magnitude.
    logs = xp.log(xp.where(alive, layer_weights, 1.0))

    def lifted(by: Reals) -> Reals:
        return xp.where(
            alive, xp.clip(xp.exp(xp.minimum(logs + by, xp.log(most) + 1)), least, most), least
        )

    low = xp.log(least) - xp.where(alive, logs, -np.inf).max(axis=0) - 1.0
    high = xp.log(most) - xp.where(alive, logs, np.inf).min(axis=0) + 1.0
    high = bisect_elementwise(low, high, lambda middle: lifted(middle).sum(axis=0) < total)
    return xp.where(reach.sum(axis=0) <= total, reach + xp.where(alive, 0.0, over), lifted(high))


@frozen_dataclass
class OfficialVarianceLayers(VarianceLayers):
    """D2O's layer budgets as in its published code: dense layers keep whole prompts beyond the budget; sizes truncated.

    Attributes:
        recent_share: share of a layer's entries for the most recent tokens, truncated to an integer separately.
    """

    has_exact_sum = False

    dense_layers: tuple[int, ...] = (0, 1, -1)
    recent_share: float = 0.5

    def __post_init__(self) -> None:
        validate_field(
            self, "recent_share", validate_float, "give a share between 0 and 1", high=1.0
        )
        super().__post_init__()

    def split_scored_and_recent(
        self, budget: Counts, length: Counts, stat: Reals
    ) -> tuple[Table, Table]:
        """Return two integer tables `[L, N]` from layers' variances: entries to keep by score, and most recent entries.

        Args:
            budget: `[N]` entries per kv head and layer on average.
            length: `[N]` tokens of each prompt.
            stat: `[L, N]` statistics from `compute_layer_weight`.

        Returns:
            Both tables, truncated; they sum to the prompt's length in layers that evict nothing.
        """
        xp = select_array_module(stat)
        layers = len(stat)
        rho = budget.astype(xp.float64) / xp.maximum(1, length).astype(xp.float64)
        layer_weights = xp.exp(-(stat - stat.min(axis=0)))
        ratio = xp.clip(layer_weights / layer_weights.sum(axis=0) * layers * rho, 0.01, 1.0)
        rows = (length + 1).astype(xp.float64)
        recent = (rows * (ratio * self.recent_share)).astype(xp.int64)
        heavy = (rows * (ratio * (1 - self.recent_share))).astype(xp.int64)
        dense = mask_dense_layers(self.dense_layers, layers)[:, None] | (heavy + recent >= length)
        return xp.where(dense, length - recent, heavy), recent

    def _divide_long_prompts(
        self, stat: Reals, budget: Counts, length: Counts, always_kept: Counts, layers: int
    ) -> Table:
        """Return entries per kv head `[L, N]` of prompts over the budget, at least the always-kept ones."""
        xp = select_array_module(stat)
        heavy, recent = self.split_scored_and_recent(budget, length, stat)
        return xp.clip(heavy + recent, xp.minimum(always_kept, length), length)

    def count_recent_entries(self, budget: Counts, length: Counts, weights: Any) -> Table:
        """Return how many most recent entries `[L, N]` each layer keeps of each prompt, by the variances F."""
        return self.split_scored_and_recent(budget, length, require_finite_weights(weights))[1]

    def bound_total_entries(
        self, budget: Counts, length: Counts, always_kept: Counts, *, layers: int
    ) -> Counts:
        """Return an upper bound `[N]` of entries per head, layers summed: budget, minima, dense layers' prompts."""
        length = np.asarray(length, np.int64)
        dense = int(mask_dense_layers(self.dense_layers, layers).sum())
        least = (length + 1) // _LEAST
        # Both sizes are truncated separately, and always-kept entries count in any case.
        raised = layers * (
            np.asarray(budget, np.int64) + 2 + least + np.maximum(0, always_kept - least + 2)
        )
        return np.minimum(raised + dense * length, layers * length)

    def mask_layers_without_eviction(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Return the mask `[L]` of `dense_layers`, which keep the whole prompt and never evict."""
        return mask_dense_layers(self.dense_layers, layers)
