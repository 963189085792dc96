"""`build_work_table`: the pool rows that each program of decode attention reads, for all layers, made on the device.

Segments are cut into chunks, and program w processes chunk w of any segment: one long head occupies the device as well
as many equal ones. The chunk size is selected per layer from its actual lengths, so that all programs finish at about
the same time.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

# Candidate chunk sizes, as multiples of total rows / programs: 1/4 to 2.
_SHARES = tuple(2 ** ((i - 20) / 10) for i in range(31))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkTable:
    """Work table of decode attention: segment, first row and number of rows of each program, for all layers.

    Every segment has at least one chunk, and its chunks are consecutive programs.

    Attributes:
        segment: `i32[L, W]` the chunk's segment, as sequence * K + head.
        row: `i32[L, W]` its first row in the sequence's pool.
        rows: `i32[L, W]` its number of rows; 0 for a program without work, and for an empty segment.
        last: `i32[L, W]` 1 for the last chunk of a segment, whose program writes a new entry to row + rows; else 0.
        first: `i32[L, B, K]` first chunk of each segment.
        count: `i32[L, B, K]` number of its chunks.
    """

    segment: Array
    row: Array
    rows: Array
    last: Array
    first: Array
    count: Array


def compute_max_chunks(programs: int, segments: int) -> int:
    """Return W, how many chunks a work table has for so many segments and concurrent programs: enough for any lengths.

    One wave of the device's programs, and up to four per segment, because its last chunk is not full and smaller chunks
    balance the load of many segments. With very many segments fewer, because programs without work have a cost, too.
    """
    return programs + 2 * segments + min(programs, 2 * segments)


def build_work_table(start: Array, length: Array, *, programs: int, block: int = 64) -> WorkTable:
    """Cut all layers' segments into chunks of similar work, one per program; return the `WorkTable`.

    Args:
        start: `i32[L, B, K]` first row of each segment in its sequence's pool.
        length: `i32[L, B, K]` entries of each segment.
        programs: number of programs that the device runs concurrently.
        block: rows; every chunk except a segment's last is a multiple of it.

    Returns:
        The table.
    """
    layers, batch, heads = length.shape
    segments = batch * heads
    width = compute_max_chunks(programs, segments)
    flat = length.reshape(layers, segments)
    size = _choose_chunk_rows(flat, programs=programs, block=block)
    # Within a segment chunks are as equal as blocks allow.
    count = jnp.maximum(_divide_rounding_up(flat, size[:, None]), 1)
    size = jnp.maximum(_divide_rounding_up(flat, count * block), 1) * block
    count = jnp.maximum(_divide_rounding_up(flat, size), 1)
    end = jnp.cumsum(count, axis=1, dtype=jnp.int32)
    first = end - count
    chunk = jnp.arange(width, dtype=jnp.int32)
    segment = (end[:, None, :] <= chunk[:, None]).astype(jnp.int32).sum(axis=-1, dtype=jnp.int32)
    works = segment < segments
    segment = jnp.minimum(segment, segments - 1)

    def of(table):
        return jnp.take_along_axis(table, segment, axis=1, mode="promise_in_bounds")

    offset = (chunk - of(first)) * of(size)
    return WorkTable(
        segment=segment,
        row=jnp.where(works, of(start.reshape(layers, segments)) + offset, 0),
        rows=jnp.where(works, jnp.clip(of(flat) - offset, 0, of(size)), 0),
        last=(works & (chunk == of(end) - 1)).astype(jnp.int32),
        first=first.reshape(length.shape),
        count=count.reshape(length.shape),
    )


def _choose_chunk_rows(length, *, programs, block):
    """Return rows per chunk of each layer, `[L]`: the candidate estimated to let the last program finish soonest."""
    segments = length.shape[1]
    total = length.sum(axis=1, keepdims=True, dtype=jnp.int32)
    # Smaller sizes might overflow the table: each segment adds less than one chunk to the full ones.
    least = jnp.maximum(
        _divide_rounding_up(total, (compute_max_chunks(programs, segments) - segments) * block), 1
    )
    even = total.astype(jnp.float32) / programs
    sizes = (
        jnp.maximum(
            jnp.ceil(even * (jnp.asarray(_SHARES, jnp.float32) / block)).astype(jnp.int32), least
        )
        * block
    )
    chunks = jnp.maximum(_divide_rounding_up(length[:, None, :], sizes[..., None]), 1).sum(
        axis=-1, dtype=jnp.int32
    )
    waves = _divide_rounding_up(chunks, programs).astype(jnp.float32)
    rows = sizes.astype(jnp.float32)
    # Time in rows: in equal waves, or with chunks assigned to idle programs, plus the overhead of each wave.
    cost = jnp.minimum(waves * rows, even + rows) + waves * (block / 2)
    fits = chunks <= compute_max_chunks(programs, segments)
    best = jnp.argmin(jnp.where(fits, cost, jnp.inf), axis=1, keepdims=True)
    return jnp.take_along_axis(sizes, best, axis=1, mode="promise_in_bounds")[:, 0]


def _divide_rounding_up(a, b):
    """Return a / b of integers, rounded up."""
    return (a + b - 1) // b
