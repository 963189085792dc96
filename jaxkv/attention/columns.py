"""How much attention each row receives: sums over queries by a second pass with known log-sum-exps, in plain XLA."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.xla import KEY_BLOCK, LOG2E, MASKED, WALK_BLOCK, Form, inside_segments, rows_dot, windows


def column_sums(
    q: Float[Array, "K G T D"],
    k: Float[Array, "K S D"],
    lse: Float[Array, "K G T"],
    first: Int[Array, ""],
) -> Float[Array, "K G S"]:
    """Attention that T consecutive queries of one sequence pay to each key; see `jaxkv.attention.column_sums`."""
    heads, group, queries, dim = q.shape
    slots = k.shape[1]
    block = min(KEY_BLOCK, slots)
    scale = jnp.asarray(LOG2E / math.sqrt(dim), jnp.float32)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(heads, group * queries, dim)
    query_positions = first + jnp.tile(jnp.arange(queries, dtype=jnp.int32), group)

    def head(inputs):
        q_head, k_head, total = inputs

        def step(index, sums, *, masked):
            begin = jnp.minimum(index * block, slots - block)
            logits = rows_dot(q_head, lax.dynamic_slice_in_dim(k_head, begin, block)) - total[:, None]
            if masked:
                position = begin + jnp.arange(block, dtype=jnp.int32)
                seen = (position >= index * block) & (position <= query_positions[:, None])
                logits = jnp.where(seen, logits, MASKED)
            part = jnp.exp2(logits).reshape(group, queries, block).sum(axis=1)
            old = lax.dynamic_slice_in_dim(sums, begin, block, axis=1)
            return lax.dynamic_update_slice_in_dim(sums, old + part, begin, axis=1)

        sums = jnp.zeros((group, slots), jnp.float32)
        whole = first // block
        last = (first + queries + block - 1) // block
        sums = lax.fori_loop(0, whole, lambda i, c: step(i, c, masked=False), sums)
        return lax.fori_loop(whole, last, lambda i, c: step(i, c, masked=True), sums)

    return lax.map(head, (scaled, k, lse.reshape(heads, -1) * LOG2E))


def window_mass(
    q: Float[Array, "B K G w D"],
    k: Float[Array, "B K S D"],
    positions: Int[Array, "B w"],
    reduce: Callable[[Float[Array, "G w S"], Int[Array, " w"]], Float[Array, " S"]],
) -> Float[Array, "B K S"]:
    """Probabilities of a few queries, one kv head at a time; see `jaxkv.attention.window_mass`."""
    batch, heads, group, window, dim = q.shape
    key_positions = jnp.arange(k.shape[2], dtype=jnp.int32)

    def head(inputs):
        q_head, k_head, position = inputs
        logits = rows_dot(q_head.reshape(group * window, dim), k_head).reshape(group, window, -1)
        logits = logits * (1.0 / math.sqrt(dim))
        seen = key_positions <= position[:, None]
        probabilities = jax.nn.softmax(jnp.where(seen, logits, MASKED), axis=-1)
        return reduce(probabilities, position)

    flat = lambda a: a.reshape(batch * heads, *a.shape[2:])  # noqa: E731
    spread = jnp.broadcast_to(positions[:, None], (batch, heads, window))
    return lax.map(head, (flat(q), flat(k), flat(spread))).reshape(batch, heads, -1)


def pool_sums(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B P D"],
    lse: Float[Array, "B K R"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    score: Float[Array, "B P"],
    *,
    form: Form,
    weight: float,
) -> Float[Array, "B P"]:
    """Adds the attention of R queries to each row's score; see `jaxkv.attention.pool_sums`."""
    batch, heads, rows, dim = q.shape
    scaled = (q.astype(jnp.float32) * (1.0 / math.sqrt(dim))).astype(q.dtype)
    padded = jnp.pad(scaled, ((0, 0), (0, 0), (0, 1), (0, 0))) if rows == 1 and q.dtype.itemsize == 2 else scaled
    # Written as `xla.over_pool` writes it: where both look at the same queries the compiler computes one product.
    match form:
        case Form.EQUAL:
            keys = k.reshape(batch, heads, -1, dim)
            logits = lax.dot_general(padded, keys, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
            inside = jnp.arange(keys.shape[2], dtype=jnp.int32) < length[..., None]
            return score + weight * _summed(logits[:, :, :rows], lse, inside).reshape(score.shape)
        case Form.RAGGED:
            flat = padded.reshape(batch, -1, dim)
            logits = lax.dot_general(flat, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
            logits = logits.reshape(batch, heads, -1, k.shape[1])[:, :, :rows]
            inside = inside_segments(jnp.arange(k.shape[1], dtype=jnp.int32), start, length)
            return score + weight * _summed(logits, lse, inside).sum(axis=1)
        case Form.SHARED:
            return _walk_sums(padded, k, lse, start, length, score, rows, weight)


def walk_scored(
    q: Float[Array, "B K G D"],
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    score: Float[Array, "B P"],
    counts: Bool[Array, " B"],
    *,
    widest: int,
) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"], Float[Array, "B P"]]:
    """`walk` for one token, its logits kept until their sum is known: no second pass over the keys.

    Args:
        q: queries as they come, not scaled.
        k: pool rows, rotated keys.
        v: pool rows.
        start: first row of each segment.
        length: rows of each segment, at most `widest`.
        score: what rows have received so far.
        counts: sequences whose queries are to be counted.
        widest: the most rows a segment can have.

    Returns:
        Output, log-sum-exp, and the scores.
    """
    batch, heads, group, dim = q.shape
    block = min(WALK_BLOCK, k.shape[1])
    width = min(-(-widest // block) * block, k.shape[1] // block * block)
    scaled = (q.astype(jnp.float32) * (1.0 / math.sqrt(dim))).astype(q.dtype)
    if group == 1 and q.dtype.itemsize == 2:
        scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, 1), (0, 0)))
    # Every segment is seen through a window of the same width, moved back where it would leave the pool.
    first = jnp.minimum(start, k.shape[1] - width)
    offsets = jnp.arange(width, dtype=jnp.int32)
    row = first[..., None] + offsets
    inside = (row >= start[..., None]) & (row < (start + length)[..., None])

    def step(index, carry):
        maximum, total, acc, held = carry
        keys, values = (windows(leaf, first + index * block, block) for leaf in (k, v))
        mine = lax.dynamic_slice_in_dim(inside, index * block, block, axis=2)[:, :, None]
        logits = lax.dot_general(scaled, keys, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        logits = jnp.where(mine, logits[:, :, :group], MASKED)
        held = lax.dynamic_update_slice_in_dim(held, logits, index * block, axis=3)
        top = jnp.maximum(maximum, logits.max(axis=-1))
        weights = jnp.where(mine, jnp.exp(logits - top[..., None]), 0.0)
        shrink = jnp.exp(maximum - top)
        part = lax.dot_general(
            weights.astype(v.dtype), values, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
        )
        return top, total * shrink + weights.sum(axis=-1), acc * shrink[..., None] + part, held

    shape = (batch, heads, group)
    carry = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
        jnp.full((*shape, width), MASKED, jnp.float32),
    )
    trips = ((start - first + length).max() + block - 1) // block
    maximum, total, acc, held = lax.fori_loop(0, trips, step, carry)
    lse = jnp.where(total > 0, maximum + jnp.log(jnp.maximum(total, 1e-30)), -jnp.inf)
    heard = jnp.where(counts[:, None, None], lse, jnp.inf)
    mass = _summed(held, heard, inside) / group
    out = (acc / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
    return out, lse, add_windows(score, first, mass)


def _summed(logits, lse, inside):
    weights = jnp.exp(logits - lse[..., None])
    return jnp.where(inside, weights.sum(axis=2), 0.0)


def _walk_sums(q, k, lse, start, length, score, rows, weight):
    block = min(WALK_BLOCK, k.shape[1])
    offsets = jnp.arange(block, dtype=jnp.int32)

    def step(index, score):
        begin = start + index * block
        clamped = jnp.clip(begin, 0, k.shape[1] - block)
        row = clamped[..., None] + offsets
        inside = (row >= begin[..., None]) & (row < (start + length)[..., None])
        keys = windows(k, clamped, block)
        logits = lax.dot_general(q, keys, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        return add_windows(score, clamped, weight * _summed(logits[:, :, :rows], lse, inside))

    return lax.fori_loop(0, (length.max() + block - 1) // block, step, score)


def add_windows(leaf: Float[Array, "B P"], begin: Int[Array, "B K"], new: Float[Array, "B K n"]) -> Float[Array, "B P"]:
    """Adds n neighbours to a leaf of the pool from each first row on; windows may overlap."""
    batch, heads, size = new.shape
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2,),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(1,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    return lax.scatter_add(leaf, begin[..., None], new, numbers, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
