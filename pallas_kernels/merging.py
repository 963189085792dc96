"""Second kernels of decode attention: `combine_chunk_outputs`, `add_attention_to_scores`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import (
    MASKED,
    BlockSpec,
    call_triton_kernel,
    load,
    program_id,
    round_up_head_dim,
    store,
    when,
)
from pallas_kernels.chunks import WorkTable
from pallas_kernels.rows import (
    DecodeKernelOptions,
    LogitsLayout,
    get_chunk_refs,
    make_layer_operand,
    make_segment_operand,
    make_table_operands,
    make_whole_operand,
)


def combine_chunk_outputs(
    parts: Array,
    part_lse: Array,
    chunks: WorkTable,
    layer: int,
    sink_logits: Array | None = None,
    *,
    dtype: jnp.dtype,
    how: DecodeKernelOptions,
    sequences: int | None = None,
) -> tuple[Array, Array]:
    """Combine each segment's chunk outputs in a layer, and any sink logits, by log-sum-exp; return outputs and lse.

    Blocks of a program (s, r): part [W*R, D] and lse [W*R], complete; the layer, a scalar; first and count of all
    layers' segments [L, B*K], complete, and the sink logits [K*R]; out: out [R, D] and lse [R] of segment s, of which
    it writes query r.

    Args:
        parts: `f32[W, R, D]` outputs of chunks.
        part_lse: `f32[W, R]` their log-sum-exp, to base 2.
        chunks: the work table.
        layer: layer of the chunks.
        sink_logits: `[K, R]` learned logits in the softmax, without a value; none by default.
        dtype: dtype of the output.
        how: tiles and launch.
        sequences: M of the output, B by default; sequences from B on are undefined.

    Returns:
        `[M, K, R, D]`, and `f32[B, K, R]` natural log-sum-exp; 0 and -inf for an empty segment.
    """
    width, rows, dim = parts.shape
    batch, heads = chunks.count.shape[1:]
    segments = batch * heads
    # Number of chunks merged at a time: those of a segment if all segments have equal lengths.
    many = min(64, max(8, 1 << (width // segments - 1).bit_length()))
    # At most eight chunks per warp, so that all loads are issued before the first result is used.
    launch = dataclasses.replace(
        how.tiles.merge_launch, warps=max(how.tiles.merge_launch.warps, many // 8)
    )

    def kernel(refs):
        query = program_id(1)
        mine = (refs.layer[...], program_id(0))
        begin = load(refs.first.at[mine])
        number = load(refs.count.at[mine])
        # The loop bound depends on both loads, so that the first is not issued after the loop begins.
        number = jnp.where(begin < 0, 0, number)
        column = jnp.arange(round_up_head_dim(dim), dtype=jnp.int32)
        real = column < dim

        def step(index, carry):
            top, total, acc = carry
            which = index * many + jnp.arange(many, dtype=jnp.int32)
            inside = which < number
            at = (begin + which) * rows + query
            lse = load(refs.part_lse.at[at], mask=inside, other=MASKED)
            mask = jnp.broadcast_to(inside[:, None], (many, round_up_head_dim(dim)))
            if round_up_head_dim(dim) != dim:
                mask = mask & jnp.broadcast_to(real[None, :], mask.shape)
            part = load(refs.parts.at[at[:, None], column[None, :]], mask=mask, other=0.0)
            new_top = jnp.maximum(top, lse.max())
            shrink = jnp.exp2(top - new_top)
            # A chunk without rows has weight 0, even if it is the segment's only one.
            weight = jnp.where(lse > MASKED, jnp.exp2(lse - new_top), 0.0)
            return (
                new_top,
                total * shrink + weight.sum(),
                acc * shrink + (part * weight[:, None]).sum(axis=0),
            )

        top = jnp.float32(MASKED)
        total = jnp.float32(0.0)
        if sink_logits is not None:
            top = load(refs.sinks.at[program_id(0) % heads * rows + query]) * math.log2(math.e)
            total = jnp.float32(1.0)
        carry = (top, total, jnp.zeros((round_up_head_dim(dim),), jnp.float32))
        top, total, acc = lax.fori_loop(0, (number + many - 1) // many, step, carry)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        store(refs.out.at[query, column], (acc / total).astype(refs.out.dtype), mask=real)
        lse = (top + jnp.log2(total)) * math.log(2)
        store(refs.lse.at[query], jnp.where(empty, -jnp.inf, lse))

    def per_segment(sequences, dtype, *shape):
        block = BlockSpec((None, *shape), lambda s, r: (s,) + (0,) * len(shape))
        return jax.ShapeDtypeStruct((sequences * heads, *shape), dtype), block

    inputs = {
        "parts": make_whole_operand(parts.reshape(width * rows, dim)),
        "part_lse": make_whole_operand(part_lse.reshape(width * rows)),
        "layer": make_layer_operand(layer),
        "first": make_segment_operand(chunks.first),
        "count": make_segment_operand(chunks.count),
    }
    if sink_logits is not None:
        inputs["sinks"] = make_whole_operand(sink_logits.astype(jnp.float32).reshape(-1))
    found = call_triton_kernel(
        kernel,
        name="ragged_decode_merge",
        grid=(segments, rows),
        inputs=inputs,
        outputs={
            "out": per_segment(sequences or batch, dtype, rows, dim),
            "lse": per_segment(batch, jnp.float32, rows),
        },
        launch=launch,
        interpret=how.interpret,
    )
    return found["out"].reshape(-1, heads, rows, dim), found["lse"].reshape(batch, heads, rows)


def add_attention_to_scores(
    kept: Array,
    logits: LogitsLayout,
    lse: Array,
    chunks: WorkTable,
    layer: int,
    out: Array,
    score: Array,
    counts: Array | None,
    begin: Array | None,
    *,
    how: DecodeKernelOptions,
) -> tuple[Array, Array]:
    """Add mean softmax weights to scores (of a new entry, to `begin`) where `counts`; return given output, new scores.

    Blocks of a program (w,): logits [B, R, width], lse [B*K, R], score [B, P], counts [B], begin [B*K] and start [B*K],
    complete; segment, row, rows and last of chunk w, scalars; out [B, K, R, D], not read; out again, and score, of
    which it writes the chunk's rows.

    Args:
        kept: `f32[B, R, width]` logits, to base 2.
        logits: layout of the logits.
        lse: `f32[B, K, R]` natural log-sum-exp.
        chunks: the work table.
        layer: layer of the chunks.
        out: attention output, returned so that the next operation waits for the scores and the logits of few layers are
            live.
        score: `f32[B, P]`.
        counts: `i32[B]` 0 for sequences whose attention is not added; by default all are.
        begin: `f32[B, K]` initial score of the new entry of each segment, if one was appended in this step.
        how: tiles and launch.

    Returns:
        The output, and the scores.
    """
    batch, heads, rows = lse.shape
    padded = 1 << (rows - 1).bit_length()
    segments = batch * heads
    # About 32 logits per thread for any R; chunks are seldom longer than this.
    block = max(16, min(256, how.tiles.merge_launch.warps * 1024 // padded))

    def kernel(refs):
        segment, row, here, last = (load(each) for each in get_chunk_refs(refs))
        end = here if begin is None else here + last

        @when((end > 0) & (segment >= 0) & (row >= 0))
        def _():
            sequence = segment // heads
            counted = (
                end if counts is None else jnp.where(load(refs.counts.at[sequence]) > 0, end, 0)
            )
            query = jnp.arange(padded, dtype=jnp.int32)
            real = query < rows
            total = load(refs.lse.at[segment, query], mask=real, other=0.0) * math.log2(math.e)
            cell = logits.locate_logit_cell(refs, segment, row)

            def step(index, carry):
                offset = index * block + jnp.arange(block, dtype=jnp.int32)
                inside = offset < counted
                wanted = real[:, None] & inside[None, :]
                at = refs.logits.at[sequence, query[:, None], (cell + offset)[None, :]]
                weights = (
                    jnp.exp2(load(at, mask=wanted, other=MASKED) - total[:, None]).sum(axis=0)
                    / rows
                )
                old = load(
                    refs.old.at[sequence, row + offset], mask=inside & (offset < here), other=0.0
                )
                if begin is not None:
                    old = jnp.where(offset < here, old, load(refs.begin.at[segment]))
                store(refs.score.at[sequence, row + offset], old + weights, mask=inside)
                return carry

            lax.fori_loop(0, (counted + block - 1) // block, step, jnp.int32(0))

    inputs = {
        "logits": make_whole_operand(kept),
        "lse": make_whole_operand(lse.reshape(segments, rows)),
        **make_table_operands(chunks, layer),
    }
    if counts is not None:
        inputs["counts"] = make_whole_operand(counts)
    if begin is not None:
        inputs["begin"] = make_whole_operand(begin.reshape(segments))
    if logits.widest is not None:
        inputs["start"] = make_segment_operand(logits.start)
    out_shape, score_shape = (jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (out, score))
    found = call_triton_kernel(
        kernel,
        name="ragged_mass",
        grid=(chunks.segment.shape[1],),
        inputs=inputs | {"handed": make_whole_operand(out), "old": make_whole_operand(score)},
        outputs={"out": make_whole_operand(out_shape), "score": make_whole_operand(score_shape)},
        launch=how.tiles.merge_launch,
        interpret=how.interpret,
        aliases={"handed": "out", "old": "score"},
    )
    return found["out"], found["score"]
