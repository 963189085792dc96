"""What follows the pass over rows of decode attention: chunks become heads, and logits become rows' scores."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from ._compat import MASKED, BlockSpec, call, load, pad_dim, program_id, store, when
from .chunks import Chunks
from .rows import ONE, How, Logits, layer_of


def merge(
    parts: jax.Array,
    part_lse: jax.Array,
    chunks: Chunks,
    layer: int,
    *,
    dtype: jnp.dtype,
    how: How,
    sequences: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges the chunks of each segment, many at a time.

    Blocks of a program (s, r): part [W*R, D] and lse [W*R], whole; the layer, a scalar; first and count of all layers'
    segments [L, B*K], whole; out: out [R, D] and lse [R] of segment s, of which it writes query r.

    Args:
        parts: `f32[W, R, D]` outputs of chunks.
        part_lse: `f32[W, R]` their log-sum-exp, to base 2.
        chunks: whose they are.
        layer: of the chunks.
        dtype: of the output.
        how: it runs.
        sequences: M, of the output; by default B. What lies behind B is undefined.

    Returns:
        `[M, K, R, D]`, and `f32[B, K, R]` natural log-sum-exp; 0 and -inf for a segment without rows.
    """
    width, rows, dim = parts.shape
    batch, heads = chunks.count.shape[1:]
    segments = batch * heads
    # As many chunks as a segment has where segments are alike.
    many = min(64, max(8, 1 << (width // segments - 1).bit_length()))

    def kernel(part_ref, lse_ref, layer_ref, first_ref, count_ref, out_ref, total_ref):
        query = program_id(1)
        mine = (layer_ref[...], program_id(0))
        begin, number = load(first_ref.at[mine]), load(count_ref.at[mine])
        column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
        real = column < dim

        def step(index, carry):
            top, total, acc = carry
            which = index * many + jnp.arange(many, dtype=jnp.int32)
            inside = which < number
            at = (begin + which) * rows + query
            lse = load(lse_ref.at[at], mask=inside, other=MASKED)
            mask = jnp.broadcast_to(inside[:, None], (many, pad_dim(dim)))
            if pad_dim(dim) != dim:
                mask = mask & jnp.broadcast_to(real[None, :], mask.shape)
            part = load(part_ref.at[at[:, None], column[None, :]], mask=mask, other=0.0)
            new_top = jnp.maximum(top, lse.max())
            shrink = jnp.exp2(top - new_top)
            # A chunk without rows weighs nothing, even where there is no other.
            weight = jnp.where(lse > MASKED, jnp.exp2(lse - new_top), 0.0)
            return new_top, total * shrink + weight.sum(), acc * shrink + (part * weight[:, None]).sum(axis=0)

        carry = (jnp.float32(MASKED), jnp.float32(0.0), jnp.zeros((pad_dim(dim),), jnp.float32))
        top, total, acc = lax.fori_loop(0, (number + many - 1) // many, step, carry)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        store(out_ref.at[query, column], (acc / total).astype(out_ref.dtype), mask=real)
        lse = (top + jnp.log2(total)) * math.log(2)
        store(total_ref.at[query], jnp.where(empty, -jnp.inf, lse))

    whole = lambda *shape: BlockSpec(shape, lambda s, r: (0,) * len(shape))  # noqa: E731
    table = whole(chunks.first.shape[0], segments)
    per_segment = lambda *shape: BlockSpec((None, *shape), lambda s, r: (s,) + (0,) * len(shape))  # noqa: E731
    out, lse = call(
        kernel,
        parts.reshape(width * rows, dim),
        part_lse.reshape(width * rows),
        layer_of(layer),
        chunks.first.reshape(-1, segments),
        chunks.count.reshape(-1, segments),
        name="ragged_decode_merge",
        grid=(segments, rows),
        inputs=[whole(width * rows, dim), whole(width * rows), ONE, table, table],
        outputs=[per_segment(rows, dim), per_segment(rows)],
        shapes=[
            jax.ShapeDtypeStruct(((sequences or batch) * heads, rows, dim), dtype),
            jax.ShapeDtypeStruct((segments, rows), jnp.float32),
        ],
        launch=how.tiles.merge_launch,
        interpret=how.interpret,
    )
    return out.reshape(-1, heads, rows, dim), lse.reshape(batch, heads, rows)


def add_mass(
    kept: jax.Array,
    logits: Logits,
    lse: jax.Array,
    chunks: Chunks,
    layer: int,
    out: jax.Array,
    score: jax.Array,
    counts: jax.Array | None,
    begin: jax.Array | None,
    *,
    how: How,
) -> tuple[jax.Array, jax.Array]:
    """Adds the softmax weights of rows to their scores, mean over queries; the output is handed on as it is.

    Blocks of a program (w,): logits [B, R, width], lse [B*K, R], score [B, P], counts [B], begin [B*K] and start
    [L, B*K], whole; the layer, a scalar, and segment, row, rows and last of all layers' chunks [L, W], whole; out
    [M, K, R, D], not looked at; out again, and score, of which it writes the chunk's rows.

    Args:
        kept: `f32[B, R, width]` logits, to base 2.
        logits: where they lie.
        lse: `f32[B, K, R]` natural log-sum-exp.
        chunks: who looks at which rows.
        layer: of the chunks.
        out: `[M, K, R, D]`; what comes next reads this, and so leaves no logits of other layers waiting.
        score: `f32[B, P]`.
        counts: `i32[B]` 0 for sequences whose attention is not added; by default all are.
        begin: `f32[B, K]` what the row behind each segment starts with, if one has just joined it.
        how: it runs.

    Returns:
        The output, and the scores.
    """
    batch, heads, rows = lse.shape
    padded, segments = 1 << (rows - 1).bit_length(), batch * heads
    # Four bytes of 32 logits or so for each thread, whatever R is; chunks are seldom longer than this.
    block = max(16, min(256, how.tiles.merge_launch.warps * 1024 // padded))
    packed = logits.widest is not None

    def kernel(kept_ref, lse_ref, layer_ref, segment_ref, row_ref, rows_ref, last_ref, *refs):
        refs = list(refs)
        at_layer = layer_ref[...]
        mine = lambda ref: load(ref.at[at_layer, program_id(0)])  # noqa: E731
        counts_ref = None if counts is None else refs.pop(0)
        begin_ref = None if begin is None else refs.pop(0)
        start_ref = refs.pop(0) if packed else None
        _, old_ref, _, score_ref = refs
        segment, row, here = mine(segment_ref), mine(row_ref), mine(rows_ref)
        end = here if begin_ref is None else here + mine(last_ref)

        @when(end > 0)
        def _():
            sequence = segment // heads
            counted = end if counts_ref is None else jnp.where(load(counts_ref.at[sequence]) > 0, end, 0)
            query = jnp.arange(padded, dtype=jnp.int32)
            real = query < rows
            total = load(lse_ref.at[segment, query], mask=real, other=0.0) * math.log2(math.e)
            cell = row
            if packed:
                cell = (segment - sequence * heads) * logits.widest + row - load(start_ref.at[at_layer, segment])

            def step(index, carry):
                offset = index * block + jnp.arange(block, dtype=jnp.int32)
                inside = offset < counted
                wanted = real[:, None] & inside[None, :]
                at = kept_ref.at[sequence, query[:, None], (cell + offset)[None, :]]
                weights = jnp.exp2(load(at, mask=wanted, other=MASKED) - total[:, None]).sum(axis=0) / rows
                old = load(old_ref.at[sequence, row + offset], mask=inside & (offset < here), other=0.0)
                if begin_ref is not None:
                    old = jnp.where(offset < here, old, load(begin_ref.at[segment]))
                store(score_ref.at[sequence, row + offset], old + weights, mask=inside)
                return carry

            lax.fori_loop(0, (counted + block - 1) // block, step, jnp.int32(0))

    whole = lambda *shape: BlockSpec(shape, lambda w: (0,) * len(shape))  # noqa: E731
    inputs = [kept, lse.reshape(segments, rows), layer_of(layer), chunks.segment, chunks.row, chunks.rows, chunks.last]
    specs = [whole(*kept.shape), whole(segments, rows), ONE, *[whole(*chunks.segment.shape)] * 4]
    if counts is not None:
        inputs.append(counts)
        specs.append(whole(batch))
    if begin is not None:
        inputs.append(begin.reshape(segments))
        specs.append(whole(segments))
    if packed:
        inputs.append(logits.start.reshape(-1, segments))
        specs.append(whole(*inputs[-1].shape))
    passed = [whole(*out.shape), whole(*score.shape)]
    out, score = call(
        kernel,
        *inputs,
        out,
        score,
        name="ragged_mass",
        grid=(chunks.segment.shape[1],),
        inputs=[*specs, *passed],
        outputs=passed,
        shapes=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, score)],
        launch=how.tiles.merge_launch,
        interpret=how.interpret,
        aliases={len(inputs): 0, len(inputs) + 1: 1},
    )
    return out, score
