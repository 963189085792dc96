r"""Attention of a few queries per kv head over ragged segments of a pool, split so that every program does equal work.

The segments of a pool are cut into chunks of as many rows each; program w takes the w-th chunk, whichever head it
belongs to, so one long head fills the chip as well as many equal ones do::

    pool rows     |  head 0            |hd 1|  head 2                     | room |
    chunks        |  0  |  1  |  2  |3 | 4  |  5  |  6  |  7  |  8  |  9  |
                     |     |     |   |   |     |     |     |     |     |
    partials         o0    o1    o2  o3  o4    o5    o6    o7    o8    o9      out and lse of each chunk, float32
                     \_____ | ____/   |   |     \____ | ______________/
    merged                head 0         hd 1       head 2                    second kernel: weighs by exp(lse)

Chunks are counted per head (`first` is the running count), so the partials of one head are neighbours.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from . import tuning
from ._compat import (
    MASKED,
    BlockSpec,
    call,
    dot,
    load,
    pad_dim,
    program_id,
    put_rows,
    store,
    take_rows,
    when,
)
from .tuning import DecodeTiles


@partial(jax.jit, static_argnames=("widest", "tiles", "interpret"))
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    score: jax.Array | None = None,
    counts: jax.Array | None = None,
    widest: int | None = None,
    tiles: DecodeTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of R queries per kv head over the whole of that head's segment.

    Args:
        q: `[B, K, R, D]` float; for decoding R is the group, for several tokens group times tokens.
        k: `[B, P, D]` pool rows, in q's dtype.
        v: `[B, P, D]` likewise.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment; 0 gives output 0 and lse -inf.
        score: `f32[B, P]` to which each row's attention is to be added, in place if the caller gives it up.
        counts: `bool[B]` sequences whose attention is added; by default all.
        widest: the most rows that a segment has, if that is known: memory then goes by it, not by P.
        tiles: how the work is cut; by default after the shape and the device.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype, `f32[B, K, R]` natural log-sum-exp of the scaled logits, and if there is a score
        `f32[B, P]`: it with the softmax weight of each row, mean over the R queries of its head. The output is to be
        had when that is done: what reads it next does not leave the logits of many layers waiting.

    Raises:
        ValueError: if scores are asked for with more queries than one tile holds.
    """
    batch, heads, rows, dim = q.shape
    most = k.shape[1] if widest is None else min(k.shape[1], heads * widest)
    tiles = tiles or tuning.decode_tiles(
        batch=batch, heads=heads, rows=rows, pool_rows=most, dim=dim, itemsize=k.dtype.itemsize
    )
    tile = min(tiles.queries, max(16, 1 << (rows - 1).bit_length()))
    if score is not None and rows > tile:
        raise ValueError(f"score: {rows} queries per kv head do not fit one tile of {tile}: ask with fewer queries")
    count = (length + tiles.chunk - 1) // tiles.chunk
    first = jnp.cumsum(count, axis=-1, dtype=jnp.int32) - count
    # Each head's last chunk may be partial: there are at most K more than full ones.
    chunks = -(-most // tiles.chunk) + heads
    column = None
    if score is not None:
        # Logits lie as the rows do, or head after head where that takes less.
        beside = jnp.arange(heads, dtype=jnp.int32) * (most // heads)
        column = start if most == k.shape[1] else jnp.broadcast_to(beside, start.shape)
    parts, part_lse, logits = _chunks(
        q, k, v, start, length, first, column, chunks=chunks, width=most, tiles=tiles, tile=tile, interpret=interpret
    )
    out, lse = _reduce(parts, part_lse, first, count, q.dtype, heads=heads, tiles=tiles, tile=tile, interpret=interpret)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3])
    if score is None:
        return out, lse
    real = length if counts is None else jnp.where(counts[:, None], length, 0)
    longest = min(most, most if widest is None else widest)
    of = (logits, lse, start, column, real, out, score)
    out, score = _add_mass(*of, longest=longest, tiles=tiles, interpret=interpret)
    return out, lse, score


def _chunks(q, k, v, start, length, first, column, *, chunks, width, tiles, tile, interpret):
    """Attention of every chunk by itself; with columns its logits too, those of a segment's rows from its column on.

    Blocks of a program (w, t, b): q [K*R, D], k and v [P, D], start, length, first, column [K] of sequence b, whole;
    out: part [R, D] and lse [R] of chunk w, of which it writes tile t; logits [R, width] of the whole sequence.
    """
    batch, heads, rows, dim = q.shape
    pool_rows, keeps = k.shape[1], column is not None
    scale = 1.0 / dim**0.5
    block, padded_heads = tiles.block, 1 << (heads - 1).bit_length()

    def kernel(q_ref, k_ref, v_ref, start_ref, length_ref, first_ref, *refs):
        column_ref, (part_ref, lse_ref, *logits_ref) = (refs[0], refs[1:]) if keeps else (None, refs)
        chunk = program_id(0)
        query = program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
        head_ids = jnp.arange(padded_heads, dtype=jnp.int32)
        real_head = head_ids < heads
        begins = load(first_ref.at[head_ids], mask=real_head, other=jnp.iinfo(jnp.int32).max)
        # Of heads without rows, which begin where the next one does, the last is taken: the one with rows.
        head = (begins <= chunk).astype(jnp.int32).sum() - 1
        pick = lambda table: jnp.where(head_ids == head, table, 0).sum()  # noqa: E731
        of_head = lambda ref: pick(load(ref.at[head_ids], mask=real_head, other=0))  # noqa: E731
        offset = (chunk - pick(begins)) * tiles.chunk
        here = jnp.minimum(of_head(length_ref) - offset, tiles.chunk)
        row = of_head(start_ref) + offset
        cell = of_head(column_ref) + offset if keeps else None

        @when(here > 0)
        def _():
            real = query < rows
            queries = take_rows(q_ref, head * rows + query, real, dim)

            def step(index, carry):
                top, total, acc = carry
                inside = index * block + jnp.arange(block, dtype=jnp.int32) < here
                at = row + index * block + jnp.arange(block, dtype=jnp.int32)
                keys = take_rows(k_ref, at, inside, dim)
                s = dot(queries, keys, transpose_b=True) * scale
                if keeps:
                    cells = cell + index * block + jnp.arange(block, dtype=jnp.int32)
                    wanted = real[:, None] & inside[None, :]
                    store(logits_ref[0].at[query[:, None], cells[None, :]], s, mask=wanted)
                s = jnp.where(inside[None, :], s, MASKED)
                new_top = jnp.maximum(top, s.max(axis=1))
                weights = jnp.exp(s - new_top[:, None])
                shrink = jnp.exp(top - new_top)
                values = take_rows(v_ref, at, inside, dim)
                acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values)
                return new_top, total * shrink + weights.sum(axis=1), acc

            carry = (
                jnp.full((tile,), MASKED, jnp.float32),
                jnp.zeros((tile,), jnp.float32),
                jnp.zeros((tile, pad_dim(dim)), jnp.float32),
            )
            top, total, acc = lax.fori_loop(0, (here + block - 1) // block, step, carry)
            put_rows(part_ref, query, real, dim, acc / total[:, None])
            store(lse_ref.at[query], top + jnp.log(total), mask=real)

    per_sequence = lambda *shape: BlockSpec((None, *shape), lambda w, t, b: (b,) + (0,) * len(shape))  # noqa: E731
    per_chunk = lambda *shape: BlockSpec((None, None, *shape), lambda w, t, b: (b, w) + (0,) * len(shape))  # noqa: E731
    shapes = [
        jax.ShapeDtypeStruct((batch, chunks, rows, dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, chunks, rows), jnp.float32),
    ]
    outputs = [per_chunk(rows, dim), per_chunk(rows)]
    tables = (start, length, first)
    if keeps:
        tables = (*tables, column)
        shapes.append(jax.ShapeDtypeStruct((batch, rows, width), jnp.float32))
        outputs.append(per_sequence(rows, width))
    parts = call(
        kernel,
        q.reshape(batch, heads * rows, dim),
        k,
        v,
        *tables,
        name="ragged_decode",
        grid=(chunks, -(-rows // tile), batch),
        inputs=[
            per_sequence(heads * rows, dim),
            per_sequence(pool_rows, dim),
            per_sequence(pool_rows, dim),
            *(per_sequence(heads) for _ in tables),
        ],
        outputs=outputs,
        shapes=shapes,
        launch=tiles.launch,
        interpret=interpret,
    )
    return (*parts, None)[:3]


def _reduce(parts, part_lse, first, count, dtype, *, heads, tiles, tile, interpret):
    """Merges the chunks of each head.

    Blocks of a program (h, t, b): part [W, R, D] as [W*R, D] and lse [W*R] of sequence b, whole; first and count of
    head h, scalars; out: out [R, D] and lse [R] of head h, of which it writes tile t.
    """
    batch, chunks, rows, dim = parts.shape

    def kernel(part_ref, lse_ref, first_ref, count_ref, out_ref, total_ref):
        query = program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
        real = query < rows
        begin, number = first_ref[...], count_ref[...]

        def step(index, carry):
            top, total, acc = carry
            at = (begin + index) * rows + query
            lse = load(lse_ref.at[at], mask=real, other=MASKED)
            new_top = jnp.maximum(top, lse)
            shrink, weight = jnp.exp(top - new_top), jnp.exp(lse - new_top)
            part = take_rows(part_ref, at, real, dim)
            return new_top, total * shrink + weight, acc * shrink[:, None] + part * weight[:, None]

        carry = (
            jnp.full((tile,), MASKED, jnp.float32),
            jnp.zeros((tile,), jnp.float32),
            jnp.zeros((tile, pad_dim(dim)), jnp.float32),
        )
        top, total, acc = lax.fori_loop(0, number, step, carry)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        put_rows(out_ref, query, real, dim, acc / total[:, None])
        store(total_ref.at[query], jnp.where(empty, -jnp.inf, top + jnp.log(total)), mask=real)

    whole = lambda *shape: BlockSpec((None, *shape), lambda h, t, b: (b,) + (0,) * len(shape))  # noqa: E731
    scalar = BlockSpec((None, None), lambda h, t, b: (b, h))
    per_head = lambda *shape: BlockSpec((None, None, *shape), lambda h, t, b: (b, h) + (0,) * len(shape))  # noqa: E731
    return call(
        kernel,
        parts.reshape(batch, chunks * rows, dim),
        part_lse.reshape(batch, chunks * rows),
        first,
        count,
        name="ragged_decode_merge",
        grid=(heads, -(-rows // tile), batch),
        inputs=[whole(chunks * rows, dim), whole(chunks * rows), scalar, scalar],
        outputs=[per_head(rows, dim), per_head(rows)],
        shapes=[
            jax.ShapeDtypeStruct((batch, heads, rows, dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32),
        ],
        launch=tiles.merge_launch,
        interpret=interpret,
    )


def _add_mass(logits, lse, start, column, length, out, score, *, longest, tiles, interpret):
    """Adds the softmax weights of rows to their scores, mean over queries; the output is handed on as it is.

    Blocks of a program (w, h, b): logits [R, width] and score [P] of sequence b, whole; lse [R], start, column and
    length of head h, the last three scalars; out [K, R, D], not looked at; out again, and score, of which it writes the
    w-th block of head h's rows.
    """
    batch, heads, rows, dim = out.shape
    padded = 1 << (rows - 1).bit_length()
    # Four bytes of 32 logits or so for each thread, whatever R is.
    block = max(16, tiles.merge_launch.warps * 1024 // padded)

    def kernel(logits_ref, lse_ref, start_ref, column_ref, length_ref, _, old_ref, __, score_ref):
        row = program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        query = jnp.arange(padded, dtype=jnp.int32)
        inside, real = row < length_ref[...], query < rows
        wanted = real[:, None] & inside[None, :]
        total = load(lse_ref.at[query], mask=real, other=0.0)
        cells = column_ref[...] + row
        s = load(logits_ref.at[query[:, None], cells[None, :]], mask=wanted, other=MASKED)
        weights = jnp.exp(s - total[:, None]).sum(axis=0) / rows
        at = start_ref[...] + row
        store(score_ref.at[at], load(old_ref.at[at], mask=inside, other=0.0) + weights, mask=inside)

    whole = lambda *shape: BlockSpec((None, *shape), lambda w, h, b: (b,) + (0,) * len(shape))  # noqa: E731
    scalar = BlockSpec((None, None), lambda w, h, b: (b, h))
    per_head = BlockSpec((None, None, rows), lambda w, h, b: (b, h, 0))
    passed = [whole(heads, rows, dim), whole(score.shape[1])]
    return call(
        kernel,
        logits,
        lse,
        start,
        column,
        length,
        out,
        score,
        name="ragged_mass",
        grid=(-(-longest // block), heads, batch),
        inputs=[whole(*logits.shape[1:]), per_head, scalar, scalar, scalar, *passed],
        outputs=passed,
        shapes=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, score)],
        launch=tiles.merge_launch,
        interpret=interpret,
        aliases={5: 0, 6: 1},
    )
