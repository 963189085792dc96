"""CAKE: more entries for layers whose attention is spread out and varies from query to query."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import field, namespace, real
from jaxkv.attention.columns import mean_over_window
from jaxkv.policies.attended import AvgPool, Pooling, WindowAttention
from jaxkv.policies.layer_budgets import FromScores, LayerBudgets, Reals, finite
from jaxkv.policies.methods.snapkv import WindowPolicy
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Observed, Scores


def _variance(p: Float[Array, "G w S"], position: Int[Array, " w"]) -> Float[Array, "G S"]:
    """Return the unbiased variance `[G, S]` of attention over the window's queries; 0 for a single query."""
    exists = (position >= 0).astype(jnp.float32)[:, None]
    off = (p - mean_over_window(p, position)[:, None]) * exists
    return (off * off).sum(axis=1) / jnp.maximum(exists.sum() - 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VaryingAttention(WindowAttention):
    """CAKE's scorer: mean of the window's attention to each entry plus `gamma` times its variance over queries, pooled.

    Attributes:
        gamma: weight of the variance.
    """

    pooling: Pooling = AvgPool(5)
    gamma: float = 200.0

    def __post_init__(self) -> None:
        field(self, "gamma", real, "give 0 or more", high=1e30)
        super().__post_init__()

    def observe(self, seen: Observed) -> Scores:
        """Return attention `[B, K, S]`: mean plus `gamma` times variance over queries, reduced over query heads."""
        return self.reduced(
            seen, lambda p, at: mean_over_window(p, at) + self.gamma * _variance(p, at)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLayers(FromScores):
    """CAKE's layer budgets: entries in proportion to entropy^(1/tau1) * variance^(1/tau2) of last queries' attention.

    Entries that a layer cannot use go to the others in even parts, as in the published code. Budgets are rounded by
    largest remainder; the published code rounds down and gives the rest to the first layers.

    Attributes:
        tau1: temperature of the entropy of each query's attention over entries.
        tau2: temperature of the variance of each entry's attention over queries.
    """

    needs_queries = True

    tau1: float = 1.0
    tau2: float = 1.0

    def __post_init__(self) -> None:
        field(self, "tau1", real, "give a temperature of 0.01 or more", low=0.01, high=1e30)
        field(self, "tau2", real, "give a temperature of 0.01 or more", low=0.01, high=1e30)

    def of_heads(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K G 2"]:
        """Return the entropy and variance `[B, K, G, 2]` of each query head's attention before the last queries."""

        def reduce(p: Float[Array, "G w S"], position: Int[Array, " w"]) -> Float[Array, "G 2"]:
            before = jnp.arange(p.shape[-1], dtype=jnp.int32) <= position[-1] - len(position)
            p = jnp.where(before & (position >= 0)[:, None], p, 0.0)
            entropy = -(p * jnp.log(jnp.where(p > 0, p, 1.0))).sum(axis=(1, 2))
            return jnp.stack([entropy, _variance(p, position).sum(axis=-1)], axis=-1)

        return seen.window_mass(reduce)

    def weight(self, heads: Float[Array, "B H 2"]) -> Float[Array, " B"]:
        """Return the log weight `[B]` of one layer in dividing entries, from its heads' summed entropy and variance."""
        logs = jnp.log(jnp.maximum(heads.sum(axis=1), jnp.finfo(jnp.float32).tiny))
        return logs[:, 0] / self.tau1 + logs[:, 1] / self.tau2

    def proportions(self, weights: Any) -> Reals:
        """Return the proportions `[L, N]` of the layers' entries: exp(`weights`), over the largest layer's."""
        logs = finite(weights)
        return namespace(logs).exp(logs - logs.max(axis=0))


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class CAKE(WindowPolicy):
    """Keep entries by mean and variance of attention, with layer budgets by both.

    Scores are from the window's queries. Layers of spread-out, varying attention get more entries. Layers are
    recompressed while those above run, as in the published cascade, to the most entries that they may get: the result
    is the same as from all entries. Tokens after the prompt are appended.

    Attributes:
        gamma: weight of the attention's variance over queries, relative to its mean.
        layers: layer budgets. The published code sets `PreferenceLayers(tau1=..., tau2=...)` by model.

    References:
        Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv:2503.12491.
    """

    pooling: Pooling = AvgPool(5)
    gamma: float = 200.0
    layers: LayerBudgets = PreferenceLayers()

    paper = "CAKE, arXiv:2503.12491"

    scored_by = VaryingAttention
