"""`sum_window_attention`: attention that keys receive from the observation window, in two passes over the keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import (
    LOG2E,
    MASKED,
    BlockSpec,
    apply_softcap,
    call_triton_kernel,
    compute_scaled_exp2,
    load,
    load_masked_rows,
    make_head_operand,
    make_sequence_operand,
    multiply_matrices,
    program_id,
    store,
)
from pallas_kernels.tiles import WindowTiles, choose_window_tiles


@partial(jax.jit, static_argnames=("tiles", "softcap", "interpret"))
def sum_window_attention(
    q: Array,
    k: Array,
    first: Array,
    length: Array,
    sink_logits: Array | None = None,
    *,
    tiles: WindowTiles | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> Array:
    """Return attention `f32[B, K, S]` that keys receive from the observation window: sum over w queries, mean over G.

    The group's queries are rows of one tile, so that each pass reads a key once for all of them.

    Args:
        q: `[B, K, G, w, D]` rotated queries, at positions first .. first + w; negative positions are padding.
        k: `[B, K, S, D]` rotated keys at positions 0 .. S, in q's dtype.
        first: `i32[B]` position of each sequence's first query.
        length: `i32[B]` tokens of each sequence; later queries and keys are padding.
        sink_logits: `[B, K, G]` learned logits in the softmax of each query head, without a key; None for none.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        interpret: True runs on any device, for tests.

    Returns:
        `f32[B, K, S]` sums over queries, mean over the group; 0 for keys that no query sees.
    """
    batch, heads, group, window, dim = q.shape
    tiles = tiles or choose_window_tiles(rows=group * window, dim=dim, itemsize=k.dtype.itemsize)
    # Rows of a tile are queries, head after head; padding rows have position -1.
    count = -(-group * window // tiles.rows) * tiles.rows
    row = jnp.arange(count, dtype=jnp.int32)
    position = first[:, None] + row % window
    real = (row < group * window) & (position >= 0) & (position < length[:, None])
    position = jnp.where(real, position, -1)
    q = q.reshape(batch, heads, group * window, dim)
    # Softcap of the products before scaling.
    cap = None if softcap is None else softcap * dim**0.5
    parts = _compute_chunk_lse(q, k, position, length, cap, tiles, interpret)
    lse = jax.nn.logsumexp(parts, axis=2)
    if sink_logits is not None:
        of_rows = jnp.repeat(sink_logits.astype(jnp.float32), window, axis=2)
        lse = jnp.logaddexp(lse, jnp.pad(of_rows, ((0, 0), (0, 0), (0, count - group * window))))
    shift = jnp.where(real[:, None], -lse * LOG2E, MASKED)
    return _sum_attention_weights(q, k, position, shift, length, cap, tiles, interpret) / group


def _compute_chunk_lse(q, k, position, length, cap, tiles, interpret):
    """Return log-sum-exps `f32[B, K, n, R]` of each query over each of n chunks of keys; -inf where it sees none."""
    batch, heads, rows, dim = q.shape
    slots = k.shape[2]
    count = position.shape[1]
    block_q = tiles.rows
    block_k = tiles.keys
    blocks = -(-slots // block_k)
    per_chunk = tiles.chunk // block_k
    chunks = -(-blocks // per_chunk)
    scale = LOG2E / dim**0.5

    # Blocks of a program (c, h, b), h over kv heads and their tiles of rows: q [R, D] of the head; its k [S, D];
    # position [R] and length of sequence b; out [R] of chunk c; it writes its tile's rows.
    def kernel(refs):
        chunk = program_id(0)
        tile = program_id(1) % (count // block_q)
        tokens = refs.length[...]
        row = tile * block_q + jnp.arange(block_q, dtype=jnp.int32)
        at = load(refs.position.at[row])
        queries = load_masked_rows(refs.q, row, row < rows, dim)

        def step(block, carry, *, masked):
            top, total = carry
            key = block * block_k + jnp.arange(block_k, dtype=jnp.int32)
            keys = load_masked_rows(refs.k, key, key < slots if masked else None, dim)
            s = apply_softcap(
                multiply_matrices(queries, keys, transpose_b=True), cap, interpret=interpret
            )
            if masked:
                s = jnp.where(key[None, :] <= at[:, None], s, MASKED)
            new_top = jnp.maximum(top, s.max(axis=1))
            weights = compute_scaled_exp2(
                s, scale, -(new_top * scale)[:, None], interpret=interpret
            )
            shrink = compute_scaled_exp2(top, scale, -new_top * scale, interpret=interpret)
            return new_top, total * shrink + weights.sum(axis=1)

        # All real queries see keys before the earliest of them; none sees keys after the last one.
        begin = chunk * per_chunk
        end = jnp.minimum(begin + per_chunk, (tokens + block_k - 1) // block_k)
        earliest = jnp.min(jnp.where(at < 0, slots, at))
        whole = jnp.maximum(jnp.minimum((earliest + 1) // block_k, end), begin)
        carry = jnp.full((block_q,), MASKED, jnp.float32), jnp.zeros((block_q,), jnp.float32)
        carry = lax.fori_loop(begin, whole, partial(step, masked=False), carry)
        top, total = lax.fori_loop(whole, end, partial(step, masked=True), carry)
        nothing = (at < 0) | (top <= MASKED)
        total = jnp.where(nothing, 1.0, total)
        store(
            refs.out.at[row], jnp.where(nothing, -jnp.inf, (top * scale + jnp.log2(total)) / LOG2E)
        )

    across = count // block_q
    shape = jax.ShapeDtypeStruct((batch, heads, chunks, count), jnp.float32)
    of_chunk = BlockSpec((None, None, None, count), lambda c, h, b: (b, h // across, c, 0))
    return call_triton_kernel(
        kernel,
        name="window_lse",
        grid=(chunks, heads * across, batch),
        inputs={
            "q": make_head_operand(q, across),
            "k": make_head_operand(k, across),
            "position": make_sequence_operand(position),
            "length": make_sequence_operand(length),
        },
        outputs={"out": (shape, of_chunk)},
        launch=tiles.launch,
        interpret=interpret,
    )["out"]


def _sum_attention_weights(q, k, position, shift, length, cap, tiles, interpret):
    """Return the attention `f32[B, K, S]` that each key receives, summed over queries of known log-sum-exp."""
    batch, heads, rows, dim = q.shape
    slots = k.shape[2]
    count = position.shape[1]
    block_q = tiles.rows
    block_k = tiles.keys
    scale = LOG2E / dim**0.5

    # Blocks of a program (j, h, b): q [R, D] of kv head h; its k [S, D]; position [R] and length of sequence b; shift
    # [R] of head h; out [S] of head h; it writes keys j * block_k on.
    def kernel(refs):
        key = program_id(0) * block_k + jnp.arange(block_k, dtype=jnp.int32)
        # Padding keys are not read.
        real = key < refs.length[...]
        mine = key < slots
        keys = load_masked_rows(refs.k, key, real & mine, dim)

        def step(tile, acc):
            row = tile * block_q + jnp.arange(block_q, dtype=jnp.int32)
            queries = load_masked_rows(refs.q, row, row < rows, dim)
            s = apply_softcap(
                multiply_matrices(keys, queries, transpose_b=True), cap, interpret=interpret
            )
            s = jnp.where(key[:, None] <= load(refs.position.at[row])[None, :], s, MASKED)
            return acc + compute_scaled_exp2(
                s, scale, load(refs.shift.at[row])[None, :], interpret=interpret
            ).sum(axis=1)

        acc = lax.fori_loop(0, count // block_q, step, jnp.zeros((block_k,), jnp.float32))
        store(refs.out.at[key], jnp.where(real, acc, 0.0), mask=mine)

    return call_triton_kernel(
        kernel,
        name="window_sums",
        grid=(-(-slots // block_k), heads, batch),
        inputs={
            "q": make_head_operand(q),
            "k": make_head_operand(k),
            "position": make_sequence_operand(position),
            "shift": make_head_operand(shift),
            "length": make_sequence_operand(length),
        },
        outputs={
            "out": make_head_operand(jax.ShapeDtypeStruct((batch, heads, slots), jnp.float32))
        },
        launch=tiles.launch,
        interpret=interpret,
    )["out"]
