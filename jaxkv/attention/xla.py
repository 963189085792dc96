"""Attention in plain XLA: the reference of all backends, and the fastest on a CPU.

The formulation depends on the shape; comments give the measurement for each choice, at 4e135878, 2026-11-28.
"""

import enum
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.shaping import LogitShaping

LOG2E = math.log2(math.e)
_LN2 = math.log(2.0)
# Einsum of float32 arrays in float32 on every device; GPUs would use TF32.
exact_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
# Large and finite, so that a masked logit minus a masked maximum is 0 instead of NaN.
MASKED = -1e30
KEY_BLOCK = 512
WALK_BLOCK = 128
# Maximum bytes of one block's windows, which are copied before they are multiplied: this size fits a core's own cache.
_WINDOW_BYTES = 2 << 20
# Number of entries from which a product of weights and values is split, and allowed chunk sizes, to use all cores.
_SPLIT_FROM = 1024
_SPLIT_CHUNKS = range(64, 513)
# Number of queries per kv head from which segments are read in WINDOWS for any `walk`: the logits of many queries and
# all entries exceed a core's cache. Over a half-full pool, 16 to 256 tokens need a half to a tenth of the time of
# STRIDES, and a twentieth or less of that of WHOLE (K = 3 and 8).
_MANY_QUERIES = 48


class SegmentReadMode(enum.Enum):
    """Enum of how XLA attention reads a pool's segments: at fixed strides, all rows masked, or in windows of blocks.

    STRIDES: head k's segment begins at row k * P/K, known at trace time. WHOLE: every head is multiplied with all rows
    of the pool, and masked to its segment. WINDOWS: segment by segment, in blocks from its first row on.
    """

    STRIDES = "strides"
    WHOLE = "whole"
    WINDOWS = "windows"


@frozen_dataclass
class SegmentRanges:
    """First row and number of entries of each segment that queries attend to `[B, K]`, and how they are read.

    Attributes:
        start: first row to read of each segment.
        length: number of entries to read from there; 0 returns output 0 and a log-sum-exp of -inf.
        walk: how entries are read, for backends whose formulation depends on it.
        widest: maximum number of entries of a segment in a shared pool; None if unknown.
        shared: True if the pool also holds other layers' segments.
        rotated: function that rotates keys as they are read; None if the pool holds rotated keys.
    """

    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    walk: SegmentReadMode
    widest: int | None = None
    shared: bool = False
    rotated: Callable[[Array], Array] | None = None

    @classmethod
    def make_strided_ranges(cls, length: Int[Array, "B K"], rows: int) -> "SegmentRanges":
        """Return `SegmentRanges` of each head's first `length` entries, head k from pool row k * `rows` on."""
        start = jnp.arange(length.shape[1], dtype=jnp.int32) * rows
        return cls(
            start=jnp.broadcast_to(start, length.shape), length=length, walk=SegmentReadMode.STRIDES
        )

    def decode_rotated_entries(
        self, store: Any
    ) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Return a store's decoded keys and values `[B, P, D]`, the keys rotated by `rotated` if it is set."""
        k, v = store.decode_entries()
        return (k if self.rotated is None else self.rotated(k)), v


def compute_logit_divisor(dim: int) -> float:
    """Return the square root of the head dim as a float, the divisor of attention logits."""
    return math.sqrt(dim)


def scale_queries(q: Float[Array, "*n D"], by: float = 1.0) -> Float[Array, "*n D"]:
    """Multiply queries by `by` / sqrt(D) in float32; return them in their own dtype."""
    return (q.astype(jnp.float32) * (by / compute_logit_divisor(q.shape[-1]))).astype(q.dtype)


def apply_softcap(
    logits: Float[Array, "*n"], softcap: float | None, unit: float = 1.0
) -> Float[Array, "*n"]:
    """Return softcap * tanh(logits / softcap) * unit; without a `softcap` the logits unchanged."""
    return logits if softcap is None else jnp.tanh(logits * (1 / softcap)) * (softcap * unit)


def compute_causal_attention(
    q: Float[Array, "K G T D"],
    k: Float[Array, "K S D"],
    v: Float[Array, "K S D"],
    first: Int[Array, ""],
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Float[Array, "K G T D"], Float[Array, "K G T"]]:
    """Compute causal attention of T queries of a sequence, with any softcap and window; return output and float32 lse.

    T divides S, and `first`, the position of the first query, is a multiple of T. Values are finite everywhere. The
    loop reads keys in blocks up to the diagonal, with a sliding `window` from the first block that it reaches. Output
    is in q's dtype. Logits are `apply_softcap`.
    """
    heads, group, queries, dim = q.shape
    block = min(KEY_BLOCK, k.shape[1])
    # exp2 with the scale multiplied into q saves a multiplication per logit. A softcap needs logits to base e.
    scaled = scale_queries(q, LOG2E if softcap is None else 1.0).reshape(
        heads, group * queries, dim
    )
    query_positions = first + jnp.tile(jnp.arange(queries, dtype=jnp.int32), group)

    def attend_kv_head(inputs):
        """Return output `f32[G * T, D]` and log-sum-exp `f32[G * T]` of one kv head's queries."""
        q_head, index_of_head = inputs

        def slice_head_block(of, begin):
            """Return `block` keys or values of the kv head from row `begin` on, `[block, D]`."""
            return lax.dynamic_slice(of, (index_of_head, begin, 0), (1, block, dim))[0]

        def attend_key_block(index, carry, *, masked):
            """Loop body: update softmax maximum and sum and the unnormalised output by one more block of keys."""
            maximum, total, acc = carry
            # If the block does not divide the buffer, the last block starts earlier; entries read before are masked.
            begin = jnp.minimum(index * block, k.shape[1] - block)
            keys = slice_head_block(k, begin)
            values = slice_head_block(v, begin)
            logits = apply_softcap(multiply_transposed(q_head, keys), softcap, LOG2E)
            if masked:
                position = begin + jnp.arange(block, dtype=jnp.int32)
                seen = (position >= index * block) & (position <= query_positions[:, None])
                if window is not None:
                    seen &= position > query_positions[:, None] - window
                logits = jnp.where(seen, logits, MASKED)
            top = jnp.maximum(maximum, logits.max(axis=-1))
            weights = jnp.exp2(logits - top[:, None])
            shrink = jnp.exp2(maximum - top)
            total = total * shrink + weights.sum(axis=-1)
            acc = acc * shrink[:, None] + _multiply_matrices(weights.astype(v.dtype), values)
            return top, total, acc

        count = group * queries
        carry = (
            jnp.full((count,), MASKED, jnp.float32),
            jnp.zeros((count,), jnp.float32),
            jnp.zeros((count, dim), jnp.float32),
        )
        last = (first + queries + block - 1) // block
        if window is None:
            whole = first // block  # Blocks before the first query need no mask.
            carry = lax.fori_loop(
                0, whole, lambda i, c: attend_key_block(i, c, masked=False), carry
            )
        else:
            whole = jnp.maximum(first - window + 1, 0) // block
        maximum, total, acc = lax.fori_loop(
            whole, last, lambda i, c: attend_key_block(i, c, masked=True), carry
        )
        return acc / total[:, None], (maximum + jnp.log2(total)) * _LN2

    out, lse = lax.map(attend_kv_head, (scaled, jnp.arange(heads, dtype=jnp.int32)))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:-1])


def attend_masked_keys(
    q: Float[Array, "G N D"],
    k: Float[Array, "m D"],
    v: Float[Array, "m D"],
    seen: Bool[Array, "N m"],
    shaping: LogitShaping,
) -> Float[Array, "G N D"]:
    """Return attention output `[G, N, D]` of a kv head's queries to keys in mask `seen`, with softcap and sinks."""
    logits = exact_einsum("gnd,md->gnm", scale_queries(q), k, preferred_element_type=jnp.float32)
    logits = apply_softcap(logits, shaping.softcap)
    weights = softmax_with_sink_logits(jnp.where(seen, logits, MASKED), shaping.sink_logits)
    out = exact_einsum(
        "gnm,md->gnd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype)


def softmax_with_sink_logits(
    logits: Float[Array, "G n m"], sink_logits: Float[Array, " G"] | None
) -> Float[Array, "G n m"]:
    """Return the softmax over the last axis; a query head's sink logit, if given, joins the denominator alone."""
    if sink_logits is None:
        return jax.nn.softmax(logits, axis=-1)
    sink = sink_logits.astype(jnp.float32)[:, None, None]
    top = jnp.maximum(logits.max(axis=-1, keepdims=True), sink)
    weights = jnp.exp(logits - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - top))


def attend_over_pool(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    reach: SegmentRanges,
    softcap: float | None = None,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Compute attention of R queries per kv head over its pool segment; return output in q's dtype, log-sum-exp.

    Segments are read by WINDOWS if R >= 48. Logits are `apply_softcap`.
    """
    scaled = scale_queries(q)
    if q.shape[2] >= _MANY_QUERIES or reach.walk is SegmentReadMode.WINDOWS:
        out, lse = attend_block_by_block(scaled, k, v, reach, softcap)
        return out.astype(q.dtype), lse
    logits, inside = compute_pool_logits(scaled, k, reach, softcap)
    weights, total, lse = _compute_softmax_weights(logits, inside[:, :, None])
    batch, heads, rows, dim = q.shape
    if reach.walk is SegmentReadMode.STRIDES:
        out = _sum_values_in_chunks(weights.astype(v.dtype), v.reshape(batch, heads, -1, dim))
    else:
        # K times the required arithmetic, in one well-shaped product: at equal bytes this beats walking the segments in
        # blocks for K = 3 (0.6x), and is within a fifth for K = 8 and 32.
        flat = weights.reshape(batch, heads * rows, -1).astype(v.dtype)
        out = lax.dot_general(
            flat, v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
        ).reshape(q.shape)
    return (out / total[..., None]).astype(q.dtype), lse


def compute_pool_logits(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    reach: SegmentRanges,
    softcap: float | None,
) -> tuple[Float[Array, "B K R n"], Bool[Array, "B K n"]]:
    """Return capped logits `[B, K, R, n]` of scaled queries, n = P / K at strides, else P; and the mask of entries."""
    batch, heads, rows, dim = q.shape
    if reach.walk is SegmentReadMode.STRIDES:
        keys = k.reshape(batch, heads, -1, dim)
        inside = jnp.arange(keys.shape[2], dtype=jnp.int32) < reach.length[..., None]
        return apply_softcap(compute_head_logits(q, keys), softcap), inside
    logits = lax.dot_general(
        q.reshape(batch, heads * rows, dim),
        k,
        (((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    inside = mask_segment_rows(jnp.arange(k.shape[1], dtype=jnp.int32), reach.start, reach.length)
    return apply_softcap(logits.reshape(batch, heads, rows, -1), softcap), inside


def compute_head_logits(
    q: Float[Array, "B K R D"], keys: Float[Array, "B K n D"]
) -> Float[Array, "B K R n"]:
    """Return float32 products `[B, K, R, n]` of each kv head's queries and keys."""
    return lax.dot_general(
        q, keys, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )


def sum_weighted_values(
    weights: Float[Array, "B K R n"], values: Float[Array, "B K n D"]
) -> Float[Array, "B K R D"]:
    """Return sums `f32[B, K, R, D]` of each kv head's n values, multiplied by weights."""
    return lax.dot_general(
        weights, values, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )


def _sum_values_in_chunks(
    weights: Float[Array, "B K R n"], values: Float[Array, "B K n D"]
) -> Float[Array, "B K R D"]:
    """Return sums `f32[B, K, R, D]` of values multiplied by weights; long sums in chunks, for all CPU cores."""
    batch, heads, rows, count = weights.shape
    chunk = next((size for size in _SPLIT_CHUNKS if count % size == 0), count)
    if count < _SPLIT_FROM or chunk == count:
        return sum_weighted_values(weights, values)
    # A CPU computes a product of few rows and a long contraction on one core. A batch of short ones uses all cores:
    # twice as fast on two cores for 8 sequences of 4160 entries (0.8x the time for one sequence).
    weights = weights.reshape(batch, heads, rows, -1, chunk)
    values = values.reshape(batch, heads, -1, chunk, values.shape[-1])
    parts = lax.dot_general(
        weights, values, (((4,), (3,)), ((0, 1, 3), (0, 1, 2))), preferred_element_type=jnp.float32
    )
    return parts.sum(axis=2)


def attend_block_by_block(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    reach: SegmentRanges,
    softcap: float | None,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Return float32 attention output and log-sum-exp of scaled queries over their segments, read block by block."""
    block = choose_segment_block_size(k, q.shape[1])
    block = block if reach.widest is None else min(block, reach.widest)

    def attend_to_entry_block(index, carry):
        """Loop body: update the running softmax by one more block of each segment."""
        begin, _, inside = locate_segment_block(reach.start, reach.length, index, block, k.shape[1])
        keys = gather_row_blocks(k, begin, block)
        values = gather_row_blocks(v, begin, block)
        logits = apply_softcap(compute_head_logits(q, keys), softcap)
        return update_running_softmax(
            carry, jnp.where(inside[:, :, None], logits, MASKED), inside, values
        )

    trips = (reach.length.max() + block - 1) // block
    return finish_running_softmax(
        lax.fori_loop(0, trips, attend_to_entry_block, init_running_softmax(q))
    )


# Running maximum and sum of a softmax, and its unnormalised output.
Running = tuple[Float[Array, "B K R"], Float[Array, "B K R"], Float[Array, "B K R D"]]


def init_running_softmax(q: Float[Array, "B K R D"]) -> Running:
    """Return a running softmax over no entries: maximum -1e30, sum 0 `[B, K, R]` and output 0 `[B, K, R, D]`."""
    shape = q.shape[:3]
    return (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )


def update_running_softmax(
    carry: Running,
    logits: Float[Array, "B K R n"],
    inside: Bool[Array, "B K n"],
    values: Float[Array, "B K n D"],
) -> Running:
    """Return the running softmax updated by n more entries per kv head; those outside the mask `inside` are ignored."""
    maximum, total, acc = carry
    top = jnp.maximum(maximum, logits.max(axis=-1))
    weights = jnp.where(inside[:, :, None], jnp.exp(logits - top[..., None]), 0.0)
    shrink = jnp.exp(maximum - top)
    total = total * shrink + weights.sum(axis=-1)
    return (
        top,
        total,
        acc * shrink[..., None] + sum_weighted_values(weights.astype(values.dtype), values),
    )


def finish_running_softmax(carry: Running) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Return the normalised output and log-sum-exp of a running softmax; 0 and -inf if it had no entries."""
    maximum, total, acc = carry
    lse = jnp.where(total > 0, maximum + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
    return acc / jnp.maximum(total, 1e-30)[..., None], lse


def locate_segment_block(
    start: Int[Array, "B K"], length: Int[Array, "B K"], index: Any, block: int, rows: int
) -> tuple[Int[Array, "B K"], Int[Array, "B K n"], Bool[Array, "B K n"]]:
    """Return first row, row indices and mask of block `index` of each segment; rows stay within the pool."""
    begin = start + index * block
    clamped = jnp.clip(begin, 0, rows - block)
    row = clamped[..., None] + jnp.arange(block, dtype=jnp.int32)
    inside = (row >= begin[..., None]) & (row < (start + length)[..., None])
    return clamped, row, inside


def gather_row_blocks(
    rows: Shaped[Array, "B P *D"], begin: Int[Array, "B K"], size: int
) -> Shaped[Array, "B K n *D"]:
    """Gather `size` consecutive pool rows from row `begin` on, for each sequence and kv head: `[B, K, size, ...]`."""
    batch, count, *rest = rows.shape
    first = begin + count * jnp.arange(batch, dtype=jnp.int32)[:, None]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, 3 + len(rest))), collapsed_slice_dims=(), start_index_map=(0,)
    )
    # All sequences as one long pool, because an axis of sequences makes XLA's copy a fifth slower.
    flat = rows.reshape(batch * count, *rest)
    return lax.gather(
        flat, first[..., None], numbers, (size, *rest), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )


def choose_segment_block_size(pool: Shaped[Array, "B P D"], heads: int) -> int:
    """Return pool rows per block of segments: 128, or 64 or 32 to fit a CPU core's cache; all of a pool below 128."""
    row_bytes = pool.shape[0] * heads * pool.shape[2] * pool.dtype.itemsize
    block = WALK_BLOCK
    while block > WALK_BLOCK // 4 and block * row_bytes > _WINDOW_BYTES:
        block //= 2
    return block if pool.shape[1] >= WALK_BLOCK else pool.shape[1]


def mask_segment_rows(
    row: Int[Array, "*of P"], start: Int[Array, "B K"], length: Int[Array, "B K"]
) -> Bool[Array, "B K P"]:
    """Return a mask `bool[B, K, P]`: True where pool row `row` is in the segment of that sequence and kv head."""
    return (row >= start[..., None]) & (row < (start + length)[..., None])


def _compute_softmax_weights(logits, inside):
    """Return unnormalised softmax weights, their sum and log-sum-exp; 0, 1 and -inf for an empty segment."""
    logits = jnp.where(inside, logits, MASKED)
    top = logits.max(axis=-1)
    weights = jnp.exp(logits - top[..., None])
    empty = top <= MASKED
    weights = jnp.where(empty[..., None], 0.0, weights)
    total = jnp.where(empty, 1.0, weights.sum(axis=-1))
    return weights, total, jnp.where(empty, -jnp.inf, top + jnp.log(total))


def multiply_transposed(a: Float[Array, "m D"], b: Float[Array, "n D"]) -> Float[Array, "m n"]:
    """Return the matrix product `a @ b.T`, `f32[m, n]`."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _multiply_matrices(a: Float[Array, "m n"], b: Float[Array, "n D"]) -> Float[Array, "m D"]:
    """Return the matrix product `a @ b`, `f32[m, D]`."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
