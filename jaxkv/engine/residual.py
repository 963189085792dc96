"""Residual stream between the blocks of a decode step; a fused add-and-norm kernel may do its last addition."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Block, Ends, Leaves
from jaxkv.models.layers import RMSNorm, linear, linear_parts
from jaxkv.sharding.mesh import Axes

# Rows of a tensor core tile in 16 bits.
_TILE = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """Hidden states between two blocks, and partial sums (`added`) not yet added to them.

    Attributes:
        x: hidden states `[M, N, E]`, float32 while `added` is not None; M is B, or more with padding.
        added: split-K partial sums `f32[n, M, N, E]` of the last block's output; None if `x` includes them.
    """

    x: Float[Array, "M N E"]
    added: Float[Array, "n M N E"] | None = None


def first_stream(x: Float[Array, "B N E"], spec: Spec, block: Leaves) -> Residual:
    """Return the `Residual` of embeddings before the first block, padded to 16-bit tiles if steps are fused."""
    # Kernels that multiply one vector by codes need no padding.
    coded = x.shape[0] == 1 and any(leaf.dtype in (jnp.int8, jnp.uint8) for leaf in block)
    if spec.streams(x.shape[1]) and x.dtype.itemsize == 2 and not coded:
        # XLA pads 16-bit products to tiles on a GPU: pad once here instead of in each product.
        x = _padded(x, _TILE)
    return Residual(x=x)


def attention_input(
    block: Block, stream: Residual, spec: Spec
) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
    """Return hidden states with pending sums added, and the same normalised as the input of attention."""
    norm = block.attention_norm
    if stream.added is None:
        return stream.x, block.normed(stream.x)
    return _joined(stream.x, stream.added, norm, norm.scale[...].dtype, spec)


def block_output(
    block: Block, x: Float[Array, "M N E"], attended: Float[Array, "B K G N D"], spec: Spec
) -> Residual:
    """Return the `Residual` after a block's output projection and MLP; fused steps keep partial sums of the MLP."""
    if not spec.streams(x.shape[1]):
        return Residual(x=block.finish(x, attended))
    merged = _padded(attended, x.shape[0]).reshape(*x.shape[:2], -1)
    added = _added(block.attention, "out", merged, block.axes)
    wide, normed = _joined(x, added, block.mlp_norm, jnp.dtype(jnp.float32), spec)
    added = _added(block.mlp, "down", block.mlp.hidden(normed), block.axes)
    return Residual(x=wide, added=added)


def logits(outer: Ends, stream: Residual, batch: int, spec: Spec) -> Float[Array, "B V"]:
    """Return float32 logits `[B, V]` of one token per sequence; on a mesh, of the device's part of the vocabulary."""
    if stream.added is None:
        return outer.logits(stream.x[:batch, 0])
    _, normed = _joined(stream.x, stream.added, outer.norm, outer.norm.scale[...].dtype, spec)
    return outer.logits_of(normed[:, 0])[:batch]


def _added(
    module: Any, name: str, x: Float[Array, "M N F"], axes: Axes | None
) -> Float[Array, "n M N E"]:
    """Apply a module's weight to `x` as split-K partial sums; a single part with a bias or on a mesh."""
    if axes is None or axes.size("H") == 1:
        return linear_parts(module, name, x)
    return linear(module, name, x, wide=True, over=axes)[None]


def _padded(a: Array, rows: int) -> Array:
    """Pad an array with zeros to at least `rows` rows along its first axis."""
    more = max(0, rows - a.shape[0])
    return jnp.pad(a, ((0, more), *((0, 0),) * (a.ndim - 1))) if more else a


def _joined(
    x: Array, added: Array, norm: RMSNorm, dtype: jnp.dtype, spec: Spec
) -> tuple[Array, Array]:
    """Return hidden states plus partial sums, and the same RMS-normalised, from a fused kernel."""
    return spec.backend.add_norm(x, added, norm.scale[...], eps=norm.eps, dtype=dtype)
