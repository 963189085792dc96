"""Compactor: keep entries by attention within blocks of the prompt, and by leverage of their keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkv._checks import (
    validate_bool,
    validate_field,
    validate_float,
    validate_int,
    validate_optional_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.attended import AvgPool
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import BlockAttention, Needs, Scorer, ScorerInputs, Scores
from jaxkv.sharding.collectives import average_over_devices, slice_own_shard, sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh


@frozen_dataclass
class BlockAttentionLeverageScorer(Scorer):
    """Compactor's scorer: attention from an entry's own block times its value norm, plus weighted leverage of its key.

    Leverage is that of centred keys, with a ridge of 0.01, or more for keys so large that float32 would lose it.

    Attributes:
        blocks: settings of the blocks; tokens outside all blocks are not scored.
        blending: weight of the leverage scores, both scores being normalised over the layer; 0 leaves them out.
        sketch: columns of the random projection of keys for leverage scores.
    """

    blocks: BlockAttention = BlockAttention()
    blending: float = 0.35
    sketch: int = 48

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: attention within blocks, and keys before RoPE."""
        return Needs(blocks=self.blocks, unrotated=True)

    @property
    def uses_random_key(self) -> bool:
        """True if `score_entries` samples a random projection of keys: if `blending` is above 0."""
        return self.blending > 0

    def score_entries(self, seen: ScorerInputs) -> Scores:
        """Return scores `[B, K, S]`: Z-score of pooled block attention * value norm + `blending` * leverage Z-score."""
        counts = seen.mask_entries_between(self.blocks.first, self.blocks.last)
        received = average_over_devices(seen.blocks.mean(axis=2), "G", seen.group_axes)
        v = seen.v.astype(jnp.float32)
        score = _compute_z_scores(
            AvgPool(3)(received * jnp.linalg.norm(v, axis=-1), counts), counts, seen.axes
        )
        if not self.uses_random_key:
            return score
        heads = score.shape[1] * (1 if seen.axes is None else seen.axes.count_axis_shards("K"))
        projection = jax.random.normal(
            jax.random.fold_in(seen.key, seen.layer), (heads, seen.k.shape[-1], self.sketch)
        )
        leverage = _compute_key_leverage(
            seen.unrotated,
            slice_own_shard(projection, "K", 0, seen.axes) / self.sketch**0.5,
            counts[..., None],
        )
        return score + jnp.float32(self.blending) * _compute_z_scores(leverage, counts, seen.axes)


def _compute_key_leverage(k: Array, projection: Array, inside: Array) -> Float[Array, "B K S"]:
    """Return ridge leverage scores `[B, K, S]` of keys in mask `inside`, after centring and random projection."""
    k = jnp.where(inside, k.astype(jnp.float32), 0.0)
    mean = k.sum(axis=2, keepdims=True) / jnp.maximum(inside.sum(axis=2, keepdims=True), 1).astype(
        jnp.float32
    )
    y = jnp.einsum(
        "bksd,kdm->bksm", jnp.where(inside, k - mean, 0.0), projection, precision="highest"
    )
    gram = jnp.einsum("bksm,bksn->bkmn", y, y, precision="highest")
    ridge = jnp.maximum(0.01, 4e-6 * jnp.trace(gram, axis1=2, axis2=3))[..., None, None]
    factor = jax.lax.linalg.cholesky(gram + ridge * jnp.eye(gram.shape[-1], dtype=jnp.float32))
    return (jax.lax.linalg.triangular_solve(factor, y, lower=True, transpose_a=True) ** 2).sum(
        axis=-1
    )


def _compute_z_scores(
    x: Float[Array, "B K S"], counts: Bool[Array, "B 1 S"], axes: ShardingMesh | None
) -> Float[Array, "B K S"]:
    """Return Z-scores `[B, K, S]` of `x` over the entries of all kv heads in mask `counts`; arbitrary elsewhere."""

    def summed(each: Array) -> Array:
        return sum_over_devices(
            jnp.where(counts, each, 0.0).sum(axis=(1, 2), keepdims=True), axes, "K"
        )

    number = jnp.maximum(summed(jnp.ones_like(x)), 2.0)
    off = x - summed(x) / number
    return off / jnp.maximum(jnp.sqrt(summed(off * off) / (number - 1.0)), 1e-6)


@register
@frozen_dataclass
class Compactor(BudgetMethod):
    """Keep entries by attention from their own block of the prompt times value norm, plus leverage of their keys.

    Attention within blocks of the prompt is not causal.

    Attributes:
        sinks: number of first tokens, always kept and not scored.
        window: number of last tokens, always kept and not scored.
        block: tokens per block.
        sketch: columns of the random projection of keys.
        blending: weight of leverage; None uses the share of evicted entries for a ratio, and 0.35 for entries.
        published: kvpress' arithmetic within blocks: logits are not divided by sqrt(D), and zeros fill the last block.

    References:
        Chari and Van Durme, Compactor: Calibrated Query-Agnostic KV Cache Compression, arXiv:2507.08143.
    """

    sinks: int = 8
    window: int = 4
    block: int = 256
    sketch: int = 48
    blending: float | None = None
    published: bool = False

    paper = "Compactor, arXiv:2507.08143"

    def _check_fields(self) -> None:
        validate_field(self, "block", validate_int, "give 1 or more tokens")
        validate_field(self, "sketch", validate_int, "give 1 or more columns")
        validate_field(self, "published", validate_bool)
        validate_optional_field(
            self, "blending", validate_float, "give 0 or a small weight, or None", high=1e30
        )

    def create_scorer(self) -> BlockAttentionLeverageScorer:
        """Return a `BlockAttentionLeverageScorer`; default `blending`: the evicted share, 0.35 for entries or bytes."""
        keep = self.always_kept_entries
        blocks = BlockAttention(
            size=self.block, first=keep.sinks, last=keep.window, zeros=self.published
        )
        usual = 1 - self.budget if isinstance(self.budget, float) else 0.35
        weight = usual if self.blending is None else self.blending
        return self.create_part(BlockAttentionLeverageScorer, blocks=blocks, blending=weight)
