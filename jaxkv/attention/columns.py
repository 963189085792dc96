"""Column sums of attention in plain XLA: the attention that each key receives, given the log-sum-exps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.xla import (
    KEY_BLOCK,
    LOG2E,
    MASKED,
    WALK_BLOCK,
    SegmentRanges,
    SegmentReadMode,
    apply_softcap,
    choose_segment_block_size,
    compute_head_logits,
    compute_logit_divisor,
    compute_pool_logits,
    finish_running_softmax,
    gather_row_blocks,
    init_running_softmax,
    locate_segment_block,
    mask_segment_rows,
    multiply_transposed,
    scale_queries,
    softmax_with_sink_logits,
    update_running_softmax,
)


def sum_attention_per_key(
    q: Float[Array, "K G T D"],
    k: Float[Array, "K S D"],
    lse: Float[Array, "K G T"],
    first: Int[Array, ""],
    *,
    softcap: float | None = None,
) -> Float[Array, "K G S"]:
    """Return causal attention `f32[K, G, S]` to each key of a sequence, summed over T queries of known log-sum-exp.

    T divides S, and `first`, the position of the first query, is a multiple of T. `lse` is from `causal`, +inf for
    ignored queries. Runs in blocks of O(S) memory. Logits are `xla.capped`.
    """
    heads, group, queries, dim = q.shape
    padded_len = k.shape[1]
    block = min(KEY_BLOCK, padded_len)
    scaled = scale_queries(q, LOG2E if softcap is None else 1.0).reshape(
        heads, group * queries, dim
    )
    query_positions = first + jnp.tile(jnp.arange(queries, dtype=jnp.int32), group)

    def sum_one_head_attention(inputs):
        """Return the attention `f32[G, S]` that one kv head's keys receive, summed over its queries."""
        q_head, k_head, total = inputs

        def sum_key_block_attention(index, sums, *, masked):
            """Loop body: add the attention that one more block of keys receives to the column sums `f32[G, S]`."""
            begin = jnp.minimum(index * block, padded_len - block)
            products = multiply_transposed(q_head, lax.dynamic_slice_in_dim(k_head, begin, block))
            logits = apply_softcap(products, softcap, LOG2E) - total[:, None]
            if masked:
                position = begin + jnp.arange(block, dtype=jnp.int32)
                seen = (position >= index * block) & (position <= query_positions[:, None])
                logits = jnp.where(seen, logits, MASKED)
            part = jnp.exp2(logits).reshape(group, queries, block).sum(axis=1)
            old = lax.dynamic_slice_in_dim(sums, begin, block, axis=1)
            return lax.dynamic_update_slice_in_dim(sums, old + part, begin, axis=1)

        sums = jnp.zeros((group, padded_len), jnp.float32)
        whole = first // block
        last = (first + queries + block - 1) // block
        sums = lax.fori_loop(
            0, whole, lambda i, c: sum_key_block_attention(i, c, masked=False), sums
        )
        return lax.fori_loop(
            whole, last, lambda i, c: sum_key_block_attention(i, c, masked=True), sums
        )

    return lax.map(sum_one_head_attention, (scaled, k, lse.reshape(heads, -1) * LOG2E))


def sum_attention_in_block(
    q: Float[Array, "B K G T D"],
    k: Float[Array, "B K T D"],
    inside: Bool[Array, "B T"],
    *,
    zeros: bool = False,
) -> Float[Array, "B K G T"]:
    """Return attention `f32[B, K, G, T]` to a block's keys, summed over its queries; masked only by `inside`.

    Only queries and keys `inside` count. With `zeros`, as in kvpress, logits are not divided, and all other keys are in
    the softmax with logits of 0.
    """
    logits = jnp.einsum(
        "bkgtd,bksd->bkgts",
        q,
        k,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    queries = inside[:, None, None, :, None]
    keys = inside[:, None, None, None]
    if zeros:
        return jax.nn.softmax(jnp.where(queries & keys, logits, 0.0), axis=-1).sum(axis=3)
    p = jax.nn.softmax(
        jnp.where(keys, logits * (1.0 / compute_logit_divisor(q.shape[-1])), MASKED), axis=-1
    )
    return jnp.where(queries & keys, p, 0.0).sum(axis=3)


def compute_attention_probabilities(
    q: Float[Array, "G w D"],
    k: Float[Array, "S D"],
    position: Int[Array, " w"],
    shaping: LogitShaping = PLAIN,
) -> Float[Array, "G w S"]:
    """Return attention probabilities `f32[G, w, S]` of w queries of one kv head; 0 for keys later than a query.

    `position` is the position of each query; probabilities of negative ones, which are padding, are undefined. With
    sink logits the sum of probabilities is less than 1.
    """
    group, window, dim = q.shape
    logits = multiply_transposed(q.reshape(group * window, dim), k).reshape(group, window, -1)
    logits = apply_softcap(logits * (1.0 / compute_logit_divisor(dim)), shaping.softcap)
    seen = jnp.arange(k.shape[0], dtype=jnp.int32) <= position[:, None]
    return softmax_with_sink_logits(jnp.where(seen, logits, MASKED), shaping.sink_logits)


def reduce_window_attention(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    reduce: Callable[..., Float[Array, "*n"]],
    *rows: Shaped[Array, "B K ..."],
    shaping: LogitShaping = PLAIN,
) -> Float[Array, "B K *n"]:
    """Apply `reduce` to each kv head's probabilities `[G, w, S]`, query positions, `rows`; stack results `[B, K, ...]`.

    `reduce` accepts one kv head's float32 probabilities `[G, w, S]`, its queries' positions `[w]`, and its part of each
    array in `rows`, such as values. Negative positions are padding, of a prompt shorter than w. Sink logits of
    `shaping` differ by sequence and have no column in the result.
    """
    batch, heads, _, window, _ = q.shape

    def reduce_one_head_attention(inputs):
        """Return `reduce` of one kv head's attention probabilities `[G, w, S]`."""
        (q_head, k_head, position, *others), shape = inputs
        return reduce(
            compute_attention_probabilities(q_head, k_head, position, shape), position, *others
        )

    spread = jnp.broadcast_to(positions[:, None], (batch, heads, window))
    given = (q, k, spread, *rows), shaping
    by_head = jax.tree.map(lambda a: a.reshape(batch * heads, *a.shape[2:]), given)
    reduced = lax.map(reduce_one_head_attention, by_head)
    return reduced.reshape(batch, heads, *reduced.shape[1:])


def compute_group_max_logits(
    q: Float[Array, "B K G w D"], k: Float[Array, "B K S D"]
) -> Float[Array, "B K w S"]:
    """Return the largest scaled logit `f32[B, K, w, S]` of each query and key over a kv head's query heads; not causal.

    Memory holds all logits of one kv head at a time.
    """

    def compute_head_max_logits(inputs: tuple[Array, Array]) -> Float[Array, "w S"]:
        """Return one kv head's largest logits `f32[w, S]` over its query heads."""
        q_head, k_head = inputs
        logits = multiply_transposed(q_head.reshape(-1, q_head.shape[-1]), k_head)
        return logits.reshape(*q_head.shape[:2], -1).max(axis=0) * (
            1.0 / compute_logit_divisor(q_head.shape[-1])
        )

    most = lax.map(
        compute_head_max_logits, (q.reshape(-1, *q.shape[2:]), k.reshape(-1, *k.shape[2:]))
    )
    return most.reshape(*k.shape[:2], *most.shape[1:])


def average_over_queries(
    p: Float[Array, "G w S"], position: Int[Array, " w"]
) -> Float[Array, "G S"]:
    """Return the mean `f32[G, S]` of attention probabilities over w queries, without padding (position < 0)."""
    exists = position >= 0
    weights = exists.astype(jnp.float32) / jnp.maximum(exists.sum(), 1).astype(jnp.float32)
    # A sum of products, not a matrix product: its order, and so its rounding, is the same on all devices.
    return (p * weights[:, None]).sum(axis=1)


def add_attention_to_scores(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    lse: Float[Array, "B K R"],
    reach: SegmentRanges,
    score: Float[Array, "B P"],
    *,
    weight: float,
    softcap: float | None,
) -> Float[Array, "B P"]:
    """Return entries' scores `f32[B, P]` plus `weight` times the attention received from R queries per kv head.

    R combines the group and the tokens. `lse` is the queries' log-sum-exp, +inf for ignored queries. Logits are
    `xla.capped`.
    """
    scaled = scale_queries(q)
    if reach.walk is SegmentReadMode.WINDOWS:
        return _add_attention_blockwise(scaled, k, lse, reach, score, weight, softcap)
    # The same product as in `xla.attend_over_pool`: with the same queries the compiler computes it only once.
    received = _sum_attention_over_queries(*compute_pool_logits(scaled, k, reach, softcap), lse)
    strides = reach.walk is SegmentReadMode.STRIDES
    return score + weight * (received.reshape(score.shape) if strides else received.sum(axis=1))


def attend_and_score_blockwise(
    q: Float[Array, "B K G D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    reach: SegmentRanges,
    score: Float[Array, "B P"],
    counts: Bool[Array, " B"],
    shaping: LogitShaping,
) -> tuple[Float[Array, "B K G D"], Float[Array, "B P"]]:
    """Attend with a token, reading segments once; return output, scores plus mean attention where `counts`.

    Queries are not scaled. Segments have at most `reach.widest` entries.
    """
    group = q.shape[2]
    start = reach.start
    length = reach.length
    block = choose_segment_block_size(k, q.shape[1])
    scaled = scale_queries(q)
    assert reach.widest is not None
    first, width = compute_segment_windows(start, k.shape[1], reach.widest)
    row = first[..., None] + jnp.arange(width, dtype=jnp.int32)
    inside = mask_segment_rows(row, start, length)

    def attend_to_entry_block(index, carry):
        """Loop body: update the running softmax by one more block of each segment, and store its logits."""
        softmax, held = carry
        keys, values = (gather_row_blocks(leaf, first + index * block, block) for leaf in (k, v))
        mine = lax.dynamic_slice_in_dim(inside, index * block, block, axis=2)
        logits = apply_softcap(compute_head_logits(scaled, keys), shaping.softcap)
        logits = jnp.where(mine[:, :, None], logits, MASKED)
        held = lax.dynamic_update_slice_in_dim(held, logits, index * block, axis=3)
        return update_running_softmax(softmax, logits, mine, values), held

    carry = init_running_softmax(q), jnp.full((*q.shape[:3], width), MASKED, jnp.float32)
    trips = ((start - first + length).max() + block - 1) // block
    softmax, held = lax.fori_loop(0, trips, attend_to_entry_block, carry)
    out, lse = finish_running_softmax(softmax)
    out, lse = shaping.include_sink_logits(out.astype(q.dtype), lse)
    lse = jnp.where(counts[:, None, None], lse, jnp.inf)
    received = _sum_attention_over_queries(held, held[:, :, 0] > MASKED, lse) / group
    return out, scatter_add_windows(score, first, received)


def supports_block_windows(rows: int, widest: int) -> bool:
    """True if windows of complete blocks in a pool of `rows` rows can cover segments of up to `widest` entries."""
    block = min(WALK_BLOCK, rows)
    return min(widest, rows) <= rows // block * block


def compute_segment_windows(
    start: Int[Array, "B K"], rows: int, widest: int
) -> tuple[Int[Array, "B K"], int]:
    """Return first rows `i32[B, K]` and the common width (int) of windows of a pool that each cover one segment.

    The width is a multiple of the block. Windows that would exceed the pool are moved back.
    """
    block = min(WALK_BLOCK, rows)
    width = min(-(-widest // block) * block, rows // block * block)
    return jnp.minimum(start, rows - width), width


def _sum_attention_over_queries(logits, inside, lse):
    """Return attention `f32[B, K, n]` to each entry: exp(logits - lse) summed over R queries; 0 outside the mask."""
    weights = jnp.exp(logits - lse[..., None])
    return jnp.where(inside, weights.sum(axis=2), 0.0)


def _add_attention_blockwise(q, k, lse, reach, score, weight, softcap):
    """Return scores `f32[B, P]` plus `weight` times the attention received, reading segments block by block."""
    block = choose_segment_block_size(k, q.shape[1])

    def add_block_attention(index, score):
        """Loop body: add the attention received by one more block of each segment to the scores `f32[B, P]`."""
        begin, _, inside = locate_segment_block(reach.start, reach.length, index, block, k.shape[1])
        logits = apply_softcap(compute_head_logits(q, gather_row_blocks(k, begin, block)), softcap)
        return scatter_add_windows(
            score, begin, weight * _sum_attention_over_queries(logits, inside, lse)
        )

    return lax.fori_loop(0, (reach.length.max() + block - 1) // block, add_block_attention, score)


def scatter_add_windows(
    leaf: Float[Array, "B P"], begin: Int[Array, "B K"], new: Float[Array, "B K n"]
) -> Float[Array, "B P"]:
    """Add n values per segment to a pool array `f32[B, P]` from row `begin` on; return it; windows may overlap."""
    batch, heads, size = new.shape
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    return lax.scatter_add(
        leaf, begin[..., None], new, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
    )
