"""Segment tables of a decode step, and reductions over the entries of segments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.xla import (
    SegmentReadMode,
    gather_row_blocks,
    locate_segment_block,
    mask_segment_rows,
)


@jax.tree_util.register_dataclass
@frozen_dataclass
class Segments:
    """Tables of one layer's segments, `[B, K]`: first pool row, length, limit, and state of the policy.

    Layers of a shared pool count as additional heads if they are handled together.

    Attributes:
        start: first pool row.
        length: number of entries; in `evict`, with the new token's entry.
        limit: maximum number of entries after eviction.
        recent: number of most recent positions that are never evicted.
        tau: running similarity thresholds of mergers; None without thresholds.
        prompt: number of tokens of each sequence's prompt.
        seen: number of tokens of each sequence so far; in `evict`, with the new token.
    """

    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    limit: Int[Array, "B K"]
    recent: Int[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    prompt: Int[Array, " B"]
    seen: Int[Array, " B"]


def restrict_to_window(
    start: Int[Array, "*n K"], length: Int[Array, "*n K"], window: Any
) -> tuple[Int[Array, "*n K"], Int[Array, "*n K"]]:
    """Return first pool row and length of the last `window` entries of segments; both unchanged for None.

    The entries of a sliding-window layer are in order of position, without gaps. `window` may be an array.
    """
    if window is None:
        return start, length
    beyond = jnp.maximum(length - window, 0)
    return start + beyond, length - beyond


def build_window_mask(
    first: Any, queries: int, older: int, tokens: int, window: int
) -> Bool[Array, "N m"]:
    """Return the mask `bool[N, m]` of keys in each query's sliding window; queries are new tokens from index `first`.

    Keys are `older` entries from before the step, then the new tokens, which start at index 0.
    """
    key = jnp.arange(-older, tokens, dtype=jnp.int32)
    query = (first + jnp.arange(queries, dtype=jnp.int32))[:, None]
    return (key <= query) & (key > query - window)


def fold_over_entries(
    body: Callable,
    carry: tuple,
    leaves: tuple[Array, ...],
    start: Int[Array, "B K"],
    length: Array,
    *,
    walk: SegmentReadMode,
    block: int,
) -> tuple:
    """Fold `body` over the entries of segments, all in one step or in windows of `block` entries; return the carry.

    `body(carry, row, inside, *leaves)` returns the carry. Its arguments are pool row indices `i32[B|1, K|1, n]`, the
    mask `[B, K, n]` of entries inside the segment, and each pool array's entries `[B, K|1, n, ...]`.
    """
    batch, heads = start.shape
    pool_rows = leaves[0].shape[1]
    match walk:
        case SegmentReadMode.STRIDES:
            each = pool_rows // heads
            offset = jnp.arange(each, dtype=jnp.int32)
            row = (jnp.arange(heads, dtype=jnp.int32)[:, None] * each + offset)[None]
            views = tuple(leaf.reshape(batch, heads, each, *leaf.shape[2:]) for leaf in leaves)
            return body(carry, row, offset < length[..., None], *views)
        case SegmentReadMode.WHOLE:
            row = jnp.arange(pool_rows, dtype=jnp.int32)
            return body(
                carry,
                row[None, None],
                mask_segment_rows(row, start, length),
                *(leaf[:, None] for leaf in leaves),
            )
        case SegmentReadMode.WINDOWS:
            block = min(block, pool_rows)

            def step(index, carry):
                begin, row, inside = locate_segment_block(start, length, index, block, pool_rows)
                return body(
                    carry, row, inside, *(gather_row_blocks(leaf, begin, block) for leaf in leaves)
                )

            return lax.fori_loop(0, (length.max() + block - 1) // block, step, carry)


def order_after_read(value: Shaped[Array, "*n"], read: Float[Array, "*#n"]) -> Shaped[Array, "*n"]:
    """Return `value` with a data dependence on `read`, to order writes after reads; NaN or False where `read` is NaN.

    A program that reads a pool and then writes it in place must order the reads first. Otherwise XLA copies the whole
    pool on a CPU at every step. `lax.optimization_barrier` does not help, as it is removed before buffers are assigned.
    A dependence on whether a number from the read is NaN cannot be folded away.
    """
    if value.dtype == jnp.bool_:
        return value & ~jnp.isnan(read)
    return jnp.where(jnp.isnan(read), jnp.nan, value)


def take_number_per_head(out: Float[Array, "M K G N D"], batch: int) -> Float[Array, "B K"]:
    """Return one number of each head's attention output, `[B, K]`, on which later writes can be made to depend."""
    return out[:batch, :, 0, 0, 0]
