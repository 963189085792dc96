"""Hidden states on their way from block to block of a step, where a kernel adds and norms at once."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Block, Ends
from jaxkv.models.layers import MIN_ROWS_16BIT, RMSNorm, products, project
from jaxkv.sharding.mesh import Axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """Hidden states between two blocks.

    Attributes:
        x: `[M, N, E]`, in float32 while something is to be added; M is B, or more rows that nobody reads.
        added: `f32[n, M, N, E]` parts of what the last block adds to them, if that is still to be done.
    """

    x: Float[Array, "M N E"]
    added: Float[Array, "n M N E"] | None = None


def begin(x: Float[Array, "B N E"], spec: Spec) -> Stream:
    """Hidden states before the first block.

    Args:
        x: the embedded tokens.
        spec: what is static.

    Returns:
        The stream.
    """
    if spec.streams(x.shape[1]) and x.dtype.itemsize == 2:
        # As many as a product has at least, so that none need fill up its own.
        x = _padded(x, MIN_ROWS_16BIT)
    return Stream(x=x)


def entered(block: Block, stream: Stream, spec: Spec) -> tuple[Float[Array, "M N E"], Float[Array, "M N E"]]:
    """Hidden states as a block meets them, and normed for its attention.

    Args:
        block: whose parameters these are.
        stream: from below.
        spec: what is static.

    Returns:
        Hidden states in the model's dtype, and their norm.
    """
    norm = block.attention_norm
    if stream.added is None:
        return stream.x, norm(stream.x)
    return _joined(stream.x, stream.added, norm, norm.scale[...].dtype, spec)


def left(block: Block, x: Float[Array, "M N E"], attended: Float[Array, "B K G N D"], spec: Spec) -> Stream:
    """Hidden states as a block leaves them.

    Args:
        block: whose parameters these are.
        x: as it met them.
        attended: what its heads have read.
        spec: what is static.

    Returns:
        The stream above it.
    """
    if not spec.streams(x.shape[1]):
        return Stream(x=block.finish(x, attended))
    merged = _padded(attended, x.shape[0]).reshape(*x.shape[:2], -1)
    added = _added(merged, block.attention.out, block.attention.out_bias, block.axes)
    wide, normed = _joined(x, added, block.mlp_norm, jnp.dtype(jnp.float32), spec)
    added = _added(block.mlp.hidden(normed), block.mlp.down, block.mlp.down_bias, block.axes)
    return Stream(x=wide, added=added)


def logits(outer: Ends, stream: Stream, batch: int, spec: Spec) -> Float[Array, "B V"]:
    """Float32 logits of one token per sequence.

    Args:
        outer: the parameters behind the last block.
        stream: what has come through it, `[M, 1, E]`.
        batch: B.
        spec: what is static.

    Returns:
        The logits; on a mesh those of the device's part of the vocabulary.
    """
    if stream.added is None:
        return outer.logits(stream.x[:batch, 0])
    _, normed = _joined(stream.x, stream.added, outer.norm, outer.norm.scale[...].dtype, spec)
    return outer.logits_of(normed[:, 0])[:batch]


def _added(
    x: Float[Array, "M N F"], weight: nnx.Param, bias: nnx.Param | None, axes: Axes | None
) -> Float[Array, "n M N E"]:
    """What a product adds to the stream, in parts where nothing else must be done to it."""
    if bias is None and (axes is None or axes.size("H") == 1):
        return products(x, weight[...])
    return project(x, weight[...], None if bias is None else bias[...], wide=True, over=axes)[None]


def _padded(a: Array, rows: int) -> Array:
    more = max(0, rows - a.shape[0])
    return jnp.pad(a, ((0, more), *((0, 0),) * (a.ndim - 1))) if more else a


def _joined(x: Array, added: Array, norm: RMSNorm, dtype: jnp.dtype, spec: Spec) -> tuple[Array, Array]:
    return spec.backend.add_norm(x, added, norm.scale[...], eps=norm.eps, dtype=dtype)
