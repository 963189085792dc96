"""Residual stream between the blocks of a decode step; a fused add-and-norm kernel may do its last addition."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.decoder import EmbeddingAndHead
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.layers import RMSNorm, apply_linear, apply_linear_split_k
from jaxkv.models.split_decoder import Leaves
from jaxkv.sharding.mesh import ShardingMesh

# Rows of a tensor core tile in 16 bits.
_TILE = 8


@jax.tree_util.register_dataclass
@frozen_dataclass
class ResidualStream:
    """Hidden states between two blocks, and split-K partial sums (`added`) not yet added to them.

    Attributes:
        x: hidden states `[M, N, E]`, float32 while `added` is not None; M is B, or more with padding.
        added: split-K partial sums `f32[n, M, N, E]` of the last block's output; None if `x` includes them.
    """

    x: Float[Array, "M N E"]
    added: Float[Array, "n M N E"] | None = None


def start_residual_stream(
    x: Float[Array, "B N E"], spec: DecodeSpec, block: Leaves
) -> ResidualStream:
    """Return the `ResidualStream` of embeddings before the first block; 16-bit fused steps pad small batches to 8."""
    # Kernels that multiply one vector by codes need no padding.
    coded = x.shape[0] == 1 and any(leaf.dtype in (jnp.int8, jnp.uint8) for leaf in block)
    if spec.uses_fused_step(x.shape[1]) and x.dtype.itemsize == 2 and not coded:
        # XLA pads 16-bit products to tiles on a GPU: pad once here instead of in each product.
        x = _pad_first_axis(x, _TILE)
    return ResidualStream(x=x)


def compute_attention_input(
    block: DecoderBlock, stream: ResidualStream, spec: DecodeSpec
) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
    """Return hidden states `[M, N, E]` with pending sums added, and the same after the norm before attention."""
    norm = block.attention_norm
    if stream.added is None:
        return stream.x, block.normalise_for_attention(stream.x)
    return _add_and_norm(stream.x, stream.added, norm, norm.scale[...].dtype, spec)


def finish_block(
    block: DecoderBlock,
    x: Float[Array, "M N E"],
    attended: Float[Array, "B K G N D"],
    spec: DecodeSpec,
) -> ResidualStream:
    """Return the `ResidualStream` after a block's output projection and MLP, in fused steps with pending MLP sums."""
    if not spec.uses_fused_step(x.shape[1]):
        return ResidualStream(x=block.apply_output_and_mlp(x, attended))
    merged = _pad_first_axis(attended, x.shape[0]).reshape(*x.shape[:2], -1)
    added = _compute_partial_sums(block.attention, "out", merged, block.axes)
    wide, normed = _add_and_norm(x, added, block.mlp_norm, jnp.dtype(jnp.float32), spec)
    added = _compute_partial_sums(
        block.mlp, "down", block.mlp.compute_activations(normed), block.axes
    )
    return ResidualStream(x=wide, added=added)


def compute_stream_logits(
    outer: EmbeddingAndHead, stream: ResidualStream, batch: int, spec: DecodeSpec
) -> Float[Array, "B V"]:
    """Return float32 logits `[B, V]` of one token per sequence; on a mesh, of the device's part of the vocabulary."""
    if stream.added is None:
        return outer.compute_logits(stream.x[:batch, 0])
    _, normed = _add_and_norm(stream.x, stream.added, outer.norm, outer.norm.scale[...].dtype, spec)
    return outer.project_to_logits(normed[:, 0])[:batch]


def _compute_partial_sums(
    module: Any, name: str, x: Float[Array, "M N F"], axes: ShardingMesh | None
) -> Float[Array, "n M N E"]:
    """Apply a linear map, bias included; return split-K sums `[n, M, N, E]`; n = 1 on shards or with bias."""
    if axes is None or axes.count_axis_shards("H") == 1:
        return apply_linear_split_k(module, name, x)
    return apply_linear(module, name, x, wide=True, over=axes)[None]


def _pad_first_axis(a: Array, rows: int) -> Array:
    """Pad an array with zeros along its first axis to at least `rows` rows."""
    more = max(0, rows - a.shape[0])
    return jnp.pad(a, ((0, more), *((0, 0),) * (a.ndim - 1))) if more else a


def _add_and_norm(
    x: Array, added: Array, norm: RMSNorm, dtype: jnp.dtype, spec: DecodeSpec
) -> tuple[Array, Array]:
    """Return `x` plus its partial sums, and the same after RMSNorm, from the backend's fused kernel."""
    return spec.backend.add_norm(x, added, norm.scale[...], eps=norm.eps, dtype=dtype)
