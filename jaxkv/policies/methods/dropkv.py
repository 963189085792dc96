"""DropKV: keep the entries whose single removal changes the attention output of the prompt's last queries most."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.xla import exact_einsum
from jaxkv.policies.attended import NoPool, Pooling, WindowScorer
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import ScorerInputs, Scores


@frozen_dataclass
class OutputChangeScorer(WindowScorer):
    """DropKV's scorer: squared change of the window's attention outputs if the entry alone is evicted.

    Query i, with probabilities p and output o, then gives o + (o - v_j) p_j / (1 - p_j): attention is normalised over
    the other entries. The squared L2 norm of the change is summed over the window's queries, and averaged over the
    query heads of a group.

    Attributes:
        window: number of the prompt's last queries, the observation window.
        pooling: pooling of scores over neighbours; the window's own columns are left out.
    """

    pooling: Pooling = NoPool()

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return `[B, K, S]`: squared output change if an entry is evicted; sum over window, mean over query heads."""
        return seen.reduce_window_attention(_compute_output_changes, seen.v)


def _compute_output_changes(
    p: Float[Array, "G w S"], position: Int[Array, " w"], v: Float[Array, "S D"]
) -> Float[Array, " S"]:
    """Return a kv head's squared output change `[S]` per evicted entry: query sum, mean over query heads."""
    index = jnp.arange(p.shape[-1], dtype=jnp.int32)
    inside = index <= position[-1]
    v = jnp.where(inside[:, None], v.astype(jnp.float32), 0.0)
    # Only differences of values matter: near their mean, squares cancel least.
    mean = v.sum(axis=0) / jnp.maximum(position[-1] + 1, 1).astype(jnp.float32)
    v = jnp.where(inside[:, None], v - mean, 0.0)
    # One entry may have nearly all of a query's attention. Its change, p (v - output of the other entries), is computed
    # without 1 - p and without the small difference of v and o; the other entries' p is at most a half. Where float32
    # rounds all of theirs to 0 (logits 87 below the peak's), their mean output is that of all entries, 0 here.
    peak = p.argmax(axis=-1)
    is_peak = index == peak[..., None]
    others = jnp.where(is_peak, 0.0, p)
    most = p.max(axis=-1, keepdims=True)
    best = v[peak]
    held = exact_einsum("gws,sd->gwd", others, v)
    left = others.sum(axis=-1, keepdims=True)
    of_peak = ((most * (best - held / jnp.where(left > 0, left, 1.0))) ** 2).sum(
        axis=-1, keepdims=True
    )
    out = held + most * best
    products = exact_einsum("gwd,sd->gws", out, v)
    distances = jnp.maximum(
        (v * v).sum(axis=-1) - 2 * products + (out * out).sum(axis=-1, keepdims=True), 0.0
    )
    changes = jnp.where(is_peak, of_peak, (others / (1 - others)) ** 2 * distances)
    return jnp.where((position >= 0)[:, None], changes, 0.0).sum(axis=1).mean(axis=0)


@register
@frozen_dataclass
class DropKV(BudgetMethod):
    """Keep the entries whose eviction would change attention outputs of the prompt's last queries most.

    Outputs are those of the prompt's last queries.

    Attributes:
        window: number of the prompt's last tokens: their queries score the other entries, and they are always kept.
        sinks: number of first tokens, always kept.
        pooling: pooling of scores over neighbours.

    References:
        DropKV: eviction by decoupled residual-output perturbation, https://openreview.net/forum?id=MqfNzH3TVH.
    """

    window: int = 32
    sinks: int = 0
    pooling: Pooling = NoPool()

    paper = "DropKV, openreview MqfNzH3TVH"

    scored_by = OutputChangeScorer
