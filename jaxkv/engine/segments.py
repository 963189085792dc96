"""Segments as a step sees them, and reductions over their rows as they lie."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention.xla import Walk, inside_segments, windows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments of a layer, or of all layers that share a pool one after the other, as a step sees them.

    Attributes:
        start: `i32[B, K]`.
        length: `i32[B, K]` rows, the new one included.
        limit: `i32[B, K]`.
        recent: `i32[B, K]` most recent rows that stay.
        tau: `f32[B, K, n]` merging's thresholds, or None.
        prompt: `i32[B]` tokens of the prompt.
        seen: `i32[B]` tokens seen, the new one included.
        likely: `i32[B, K]` the row most likely to go at this step, -1 for none known; None if nobody asks.
        choosable: `i32[B, K]` first rows that filter layers choose from; None where every layer reads everything.
    """

    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    limit: Int[Array, "B K"]
    recent: Int[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    prompt: Int[Array, " B"]
    seen: Int[Array, " B"]
    likely: Int[Array, "B K"] | None = None
    choosable: Int[Array, "B K"] | None = None


def fold(
    body: Callable,
    carry: tuple,
    leaves: tuple[Array, ...],
    start: Int[Array, "B K"],
    length: Array,
    *,
    walk: Walk,
    block: int,
) -> tuple:
    """Runs a reduction over the rows of segments.

    Args:
        body: takes the carry, rows `i32[B|1, K|1, n]`, whether each lies in the segment `[B, K, n]`, and each leaf's
            rows `[B, K|1, n, ...]`; gives the carry back.
        carry: what it starts from.
        leaves: of the pool, `[B, P, ...]`.
        start: first rows.
        length: rows of each segment.
        walk: how rows are reached.
        block: rows of a shared pool to look at together.

    Returns:
        The carry.
    """
    batch, heads = start.shape
    pool_rows = leaves[0].shape[1]
    match walk:
        case Walk.STRIDES:
            each = pool_rows // heads
            offset = jnp.arange(each, dtype=jnp.int32)
            row = (jnp.arange(heads, dtype=jnp.int32)[:, None] * each + offset)[None]
            views = tuple(leaf.reshape(batch, heads, each, *leaf.shape[2:]) for leaf in leaves)
            return body(carry, row, offset < length[..., None], *views)
        case Walk.WHOLE:
            row = jnp.arange(pool_rows, dtype=jnp.int32)
            return body(
                carry, row[None, None], inside_segments(row, start, length), *(leaf[:, None] for leaf in leaves)
            )
        case Walk.WINDOWS:
            block = min(block, pool_rows)
            offset = jnp.arange(block, dtype=jnp.int32)

            def step(index, carry):
                begin = start + index * block
                clamped = jnp.clip(begin, 0, pool_rows - block)
                row = clamped[..., None] + offset
                inside = (row >= begin[..., None]) & (row < (start + length)[..., None])
                return body(carry, row, inside, *(windows(leaf, clamped, block) for leaf in leaves))

            return lax.fori_loop(0, (length.max() + block - 1) // block, step, carry)
