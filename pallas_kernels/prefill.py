"""Causal attention of complete prompts (`flash`), and its exact column sums, without the S x S matrix."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import (
    LOG2E,
    MASKED,
    apply_softcap,
    call_triton_kernel,
    compute_scaled_exp2,
    load,
    load_masked_rows,
    make_head_operand,
    make_query_head_operand,
    make_sequence_operand,
    multiply_matrices,
    program_id,
    round_up_head_dim,
    store,
    store_masked_rows,
)
from pallas_kernels.tiles import PrefillTiles, choose_prefill_tiles


@partial(jax.jit, static_argnames=("tiles", "softcap", "window", "interpret"))
def flash(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    length: Array,
    *,
    tiles: PrefillTiles | None = None,
    softcap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Compute causal attention of T queries per sequence in Triton, with any softcap and window; return output, lse.

    Args:
        q: `[B, K, G, T, D]` rotated queries, at positions first .. first + T.
        k: `[B, K, S, D]` rotated keys at positions 0 .. S, in q's dtype.
        v: `[B, K, S, D]` values in q's dtype.
        first: `i32[B]` position of each sequence's first query.
        length: `i32[B]` tokens of each sequence; later queries and keys are padding.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        window: sliding window in tokens, the query's own included; None for all. Blocks of keys before the windows of
            all of a block's queries are not read.
        interpret: True runs on any device, for tests.

    Returns:
        `[B, K, G, T, D]` in q's dtype and `f32[B, K, G, T]` natural log-sum-exp of the scaled logits; padding queries
        return output 0 and lse -inf.
    """
    batch, heads, group, queries, dim = q.shape
    slots = k.shape[2]
    tiles = tiles or choose_prefill_tiles(dim=dim, itemsize=k.dtype.itemsize)
    block_q = tiles.queries
    block_k = tiles.keys
    scale = LOG2E / dim**0.5
    exp2 = partial(compute_scaled_exp2, interpret=interpret)
    # Softcap of the products before scaling.
    cap = None if softcap is None else softcap * dim**0.5

    # Blocks of a program (i, h, b), h over H query heads: q [T, D] of head h; k, v [S, D] of its kv head; first and
    # length of sequence b, scalars; out [T, D], lse [T] of head h; it writes rows i * block_q on.
    def kernel(refs):
        # The longest rows of the triangle start first, so that the last programs to finish are short ones.
        index = -(-queries // block_q) - 1 - program_id(0)
        begin = refs.first[...]
        tokens = refs.length[...]
        row = index * block_q + jnp.arange(block_q, dtype=jnp.int32)
        mine = row < queries
        position = begin + row
        rows = load_masked_rows(refs.q, row, mine, dim)

        def step(block, carry, *, masked):
            top, total, acc = carry
            key = block * block_k + jnp.arange(block_k, dtype=jnp.int32)
            keys = load_masked_rows(refs.k, key, key < slots if masked else None, dim)
            s = apply_softcap(
                multiply_matrices(rows, keys, transpose_b=True), cap, interpret=interpret
            )
            if masked:
                seen = (key[None, :] <= position[:, None]) & (key < tokens)[None, :]
                if window is not None:
                    seen &= key[None, :] > position[:, None] - window
                s = jnp.where(seen, s, MASKED)
            new_top = jnp.maximum(top, s.max(axis=1))
            anchor = new_top
            if masked and window is not None:
                # A window may begin after the block: weights of its keys are then 0, not powers of rounding errors.
                anchor = jnp.where(new_top > MASKED, new_top, 0.0)
            weights = exp2(s, scale, -(anchor * scale)[:, None])
            shrink = exp2(top, scale, -anchor * scale)
            values = load_masked_rows(refs.v, key, key < slots if masked else None, dim)
            acc = acc * shrink[:, None] + multiply_matrices(weights.astype(values.dtype), values)
            return new_top, total * shrink + weights.sum(axis=1), acc

        carry = (
            jnp.full((block_q,), MASKED, jnp.float32),
            jnp.zeros((block_q,), jnp.float32),
            jnp.zeros((block_q, round_up_head_dim(dim)), jnp.float32),
        )
        first_query = begin + index * block_q
        end = jnp.minimum(jnp.minimum(first_query + block_q, tokens), slots)
        end = jnp.where(first_query < tokens, end, 0)
        # Blocks of keys completely before the first query, and without padding, need no mask.
        whole = jnp.minimum(jnp.maximum(first_query + 1, 0), end) // block_k
        inside = 0
        if window is not None:
            # Blocks within the windows of all queries need none, either; blocks in some windows do.
            reach = jnp.maximum(first_query - window + 1, 0) // block_k
            inside = (jnp.maximum(first_query + block_q - window, 0) + block_k - 1) // block_k
            whole = jnp.maximum(whole, reach)
            inside = jnp.minimum(jnp.maximum(inside, reach), whole)
            carry = lax.fori_loop(reach, inside, partial(step, masked=True), carry)
        carry = lax.fori_loop(inside, whole, partial(step, masked=False), carry)
        top, total, acc = lax.fori_loop(
            whole, (end + block_k - 1) // block_k, partial(step, masked=True), carry
        )
        empty = (position < 0) | (position >= tokens)
        total = jnp.where(empty, 1.0, total)
        store_masked_rows(
            refs.out, row, mine, dim, jnp.where(empty[:, None], 0.0, acc / total[:, None])
        )
        store(
            refs.lse.at[row],
            jnp.where(empty, -jnp.inf, (top * scale + jnp.log2(total)) / LOG2E),
            mask=mine,
        )

    found = call_triton_kernel(
        kernel,
        name="flash_prefill",
        grid=(-(-queries // block_q), heads * group, batch),
        inputs={
            "q": make_query_head_operand(q, group),
            "k": make_head_operand(k, group),
            "v": make_head_operand(v, group),
            "first": make_sequence_operand(first),
            "length": make_sequence_operand(length),
        },
        outputs={
            "out": make_query_head_operand(jax.ShapeDtypeStruct(q.shape, q.dtype), group),
            "lse": make_query_head_operand(jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32), group),
        },
        launch=tiles.launch,
        interpret=interpret,
    )
    return found["out"], found["lse"]


@partial(jax.jit, static_argnames=("per_query_head", "tiles", "softcap", "interpret"))
def sum_attention_per_key(
    q: Array,
    k: Array,
    lse: Array,
    first: Array,
    length: Array,
    *,
    per_query_head: bool = False,
    tiles: PrefillTiles | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> Array:
    """Sum the causal attention that keys receive from queries of known lse; mean over a group unless `per_query_head`.

    With all queries of a prompt this is H2O's score; for a few queries `sum_window_attention` is faster.

    Args:
        q: `[B, K, G, T, D]` rotated queries, at positions first .. first + T; negative positions are padding.
        k: `[B, K, S, D]` rotated keys at positions 0 .. S, in q's dtype.
        lse: `f32[B, K, G, T]` from `flash`; -inf for ignored queries.
        first: `i32[B]` position of each sequence's first query.
        length: `i32[B]` tokens of each sequence; later queries and keys are padding.
        per_query_head: True returns sums per query head; False returns their mean over the group.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        interpret: True runs on any device, for tests.

    Returns:
        `f32[B, K, S]`, or `f32[B, K, G, S]`: sums over queries; 0 for padding keys.
    """
    batch, heads, group, queries, dim = q.shape
    slots = k.shape[2]
    tiles = tiles or choose_prefill_tiles(dim=dim, itemsize=k.dtype.itemsize)
    block_k = tiles.keys
    block_q = min(tiles.queries, round_up_head_dim(queries))
    scale = LOG2E / dim**0.5
    cap = None if softcap is None else softcap * dim**0.5

    # Blocks of a program (j, h, b), h over H query heads: q [T, D] and shift [T] of head h; k [S, D] of its kv head;
    # first and length of sequence b, scalars; out [S] of head h; it writes keys j * block_k on.
    def kernel(refs):
        begin = refs.first[...]
        tokens = refs.length[...]
        at = program_id(0) * block_k
        key = at + jnp.arange(block_k, dtype=jnp.int32)
        mine = key < slots
        keys = load_masked_rows(refs.k, key, mine, dim)

        def step(index, acc, *, masked):
            row = index * block_q + jnp.arange(block_q, dtype=jnp.int32)
            position = begin + row
            counts = (row < queries) & (position >= 0) & (position < tokens)
            rows = load_masked_rows(refs.q, row, counts if masked else None, dim)
            shift = (
                load(refs.shift.at[row], mask=counts, other=0.0)
                if masked
                else load(refs.shift.at[row])
            )
            # Keys are rows and queries columns, so that a key's sum is in the threads that hold its row.
            s = apply_softcap(
                multiply_matrices(keys, rows, transpose_b=True), cap, interpret=interpret
            )
            if masked:
                s = jnp.where((key[:, None] <= position[None, :]) & counts[None, :], s, MASKED)
            return acc + compute_scaled_exp2(s, scale, shift[None, :], interpret=interpret).sum(
                axis=1
            )

        # Queries before these keys do not see them; blocks of real queries after all of them need no mask.
        last = jnp.minimum(tokens - begin, queries)
        earliest = jnp.maximum(at - begin, 0) // block_q
        # No real query sees padding keys.
        latest = jnp.where(at < tokens, (last + block_q - 1) // block_q, earliest)
        behind = (jnp.maximum(at + block_k - 1 - begin, 0) + block_q - 1) // block_q
        whole = jnp.minimum(jnp.maximum(behind, earliest), latest)
        end = jnp.minimum(jnp.maximum(last // block_q, whole), latest)
        acc = jnp.zeros((block_k,), jnp.float32)
        acc = lax.fori_loop(earliest, whole, partial(step, masked=True), acc)
        acc = lax.fori_loop(whole, end, partial(step, masked=False), acc)
        acc = lax.fori_loop(end, latest, partial(step, masked=True), acc)
        store(refs.out.at[key], jnp.where(key < tokens, acc, 0.0), mask=mine)

    shape = jax.ShapeDtypeStruct((batch, heads, group, slots), jnp.float32)
    out = call_triton_kernel(
        kernel,
        name="column_sums",
        grid=(-(-slots // block_k), heads * group, batch),
        inputs={
            "q": make_query_head_operand(q, group),
            "k": make_head_operand(k, group),
            "shift": make_query_head_operand(-lse * LOG2E, group),
            "first": make_sequence_operand(first),
            "length": make_sequence_operand(length),
        },
        outputs={"out": make_query_head_operand(shape, group)},
        launch=tiles.scores_launch,
        interpret=interpret,
    )["out"]
    return out if per_query_head else out.mean(axis=2)
