"""CAKE: more entries for layers whose attention is spread out and varies from query to query."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import select_array_module, validate_field, validate_float
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.columns import average_over_queries
from jaxkv.policies.attended import AvgPool, ObservationWindowAttention, Pooling
from jaxkv.policies.layer_budgets import LayerBudgets, Reals, WeightedLayers, require_finite_weights
from jaxkv.policies.methods.snapkv import ObservationWindowPolicy
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import ScorerInputs, Scores


def _compute_attention_variance(
    p: Float[Array, "G w S"], position: Int[Array, " w"]
) -> Float[Array, "G S"]:
    """Return a kv head's unbiased variance `[G, S]` of attention to each entry over window queries; 0 for one query."""
    exists = (position >= 0).astype(jnp.float32)[:, None]
    off = (p - average_over_queries(p, position)[:, None]) * exists
    return (off * off).sum(axis=1) / jnp.maximum(exists.sum() - 1, 1)


@frozen_dataclass
class AttentionMeanVarianceScorer(ObservationWindowAttention):
    """CAKE's scorer: mean of the window's attention to each entry plus `gamma` times its variance over queries, pooled.

    Attributes:
        gamma: weight of the variance.
    """

    pooling: Pooling = AvgPool(5)
    gamma: float = 200.0

    def __post_init__(self) -> None:
        validate_field(self, "gamma", validate_float, "give 0 or more", high=1e30)
        super().__post_init__()

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return raw scores `[B, K, S]`: window attention's mean + `gamma` * variance, reduced over query heads."""
        return self.reduce_attention(
            seen,
            lambda p, at: (
                average_over_queries(p, at) + self.gamma * _compute_attention_variance(p, at)
            ),
        )


@frozen_dataclass
class PreferenceLayerBudgets(WeightedLayers):
    """CAKE's layer budgets: entries in proportion to entropy^(1/tau1) * variance^(1/tau2) of last queries' attention.

    Entries that a layer cannot use go to the others in even parts, as in the published code. Budgets are rounded by
    largest remainder; the published code rounds down and gives the rest to the first layers.

    Attributes:
        tau1: temperature of the entropy of each query's attention over entries.
        tau2: temperature of the variance of each entry's attention over queries.
    """

    needs_last_queries = True

    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        validate_field(
            self, "tau1", validate_float, "give a temperature of 0.01 or more", low=0.01, high=1e30
        )
        validate_field(
            self, "tau2", validate_float, "give a temperature of 0.01 or more", low=0.01, high=1e30
        )

    def compute_head_statistic(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: ScorerInputs
    ) -> Float[Array, "B K G 2"]:
        """Return `[B, K, G, 2]`: sums of entropy and variance of the window's attention to earlier entries."""

        def reduce(p: Float[Array, "G w S"], position: Int[Array, " w"]) -> Float[Array, "G 2"]:
            before = jnp.arange(p.shape[-1], dtype=jnp.int32) <= position[-1] - len(position)
            p = jnp.where(before & (position >= 0)[:, None], p, 0.0)
            entropy = -(p * jnp.log(jnp.where(p > 0, p, 1.0))).sum(axis=(1, 2))
            return jnp.stack(
                [entropy, _compute_attention_variance(p, position).sum(axis=-1)], axis=-1
            )

        return seen.reduce_window_attention(reduce)

    def compute_layer_weight(self, heads: Float[Array, "B H 2"]) -> Float[Array, " B"]:
        """Return a layer's log weight `[B]`: log entropy / tau1 + log variance / tau2, both summed over heads first."""
        logs = jnp.log(jnp.maximum(heads.sum(axis=1), jnp.finfo(jnp.float32).tiny))
        return logs[:, 0] / self.tau1 + logs[:, 1] / self.tau2

    def compute_proportions(self, weights: Any) -> Reals:
        """Return proportions `[L, N]` of layers' entries per prompt: exp(log weight) over the largest; at most 1."""
        logs = require_finite_weights(weights)
        return select_array_module(logs).exp(logs - logs.max(axis=0))


@register
@frozen_dataclass
class CAKE(ObservationWindowPolicy):
    """Keep entries by mean and variance of the window's attention; layer budgets by its entropy and variance.

    Scores are from the window's queries. Layers of spread-out, varying attention get more entries. Layers are
    recompressed while those above run, as in the published cascade, to the most entries that they may get: the result
    is the same as from all entries. Tokens after the prompt are appended.

    Attributes:
        gamma: weight of the attention's variance over queries, relative to its mean.
        layers: layer budgets. The published code sets `PreferenceLayerBudgets(tau1=..., tau2=...)` by model.

    References:
        Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv:2503.12491.
    """

    pooling: Pooling = AvgPool(5)
    gamma: float = 200.0
    layers: LayerBudgets = PreferenceLayerBudgets()

    paper = "CAKE, arXiv:2503.12491"

    scored_by = AttentionMeanVarianceScorer
