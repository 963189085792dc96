"""First kernel of decode attention: each program reads one chunk of a segment, and writes output and log-sum-exp.

With a `NewTokenInputs`, the program of a segment's last chunk rotates the new key, writes it behind the segment, and
attends to it from registers. No other program reads that entry, so no synchronisation is needed.
"""

import dataclasses
import math
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import (
    MASKED,
    BlockSpec,
    Operand,
    apply_softcap,
    call_triton_kernel,
    load,
    program_id,
    store,
    when,
)
from pallas_kernels.chunks import WorkTable
from pallas_kernels.codes import Rows, get_pool_shape, list_pool_operands, rebuild_pool
from pallas_kernels.keys import KEYS, KeyReader
from pallas_kernels.tiles import DecodeTiles
from pallas_kernels.values import VALUES, ValueReader


class NewTokenInputs(NamedTuple):
    """New token per sequence: unrotated keys, values (split-K); cos, sin, position, write flag; pool positions.

    Attributes:
        kv: `[n, M, 2, K, D]` split-K parts of keys and values.
        cos: `f32[B, D/2]` cosines of its rotary position.
        sin: `f32[B, D/2]` sines.
        position: `i32[B]` position in the sequence.
        counts: `i32[B]` 0 for a finished sequence, for which nothing is written; else 1.
        pos: `i32[B, P]` positions of the pool's entries.
    """

    kv: Array
    cos: Array
    sin: Array
    position: Array
    counts: Array
    pos: Array


class LogitsLayout(NamedTuple):
    """Memory layout of logits kept for scoring: a cell per pool row, or `widest` cells per segment.

    Attributes:
        start: `i32[L, B, K]` first row of each segment.
        widest: maximum entries of a segment, or None.
    """

    start: Array
    widest: int | None

    def count_kept_logits(self, pool_rows: int) -> int:
        """Return the number of logits kept per query of a sequence: the pool's rows, or `widest` per kv head."""
        return pool_rows if self.widest is None else self.start.shape[2] * self.widest

    def locate_logit_cell(self, refs: Any, segment: Any, row: Any) -> Any:
        """Return the index of a pool row's logit in the layout, inside a kernel."""
        if self.widest is None:
            return row
        head = segment - segment // self.start.shape[2] * self.start.shape[2]
        return head * self.widest + row - load(refs.start.at[refs.layer[...], segment])


class SelectedEntries(NamedTuple):
    """Entries that attention reads in each segment: selected rows, and all rows from `rest` on.

    Attributes:
        rows: `i32[B, k, T]` selected rows, counted from a segment's first; k is K, or 1 if all heads share them.
        scheduled: `i32[B]` number of the T picks that the chunks cover; the rows from `rest` on follow.
        held: `i32[B, k]` number of valid picks.
        rest: `i32[L, B, K]` row, counted from the segment's first, from which all are read.
        start: `i32[L, B, K]` first row of each segment.
    """

    rows: Array
    scheduled: Array
    held: Array
    rest: Array
    start: Array


class DecodeKernelOptions(NamedTuple):
    """Options of the decode kernels: tiles, queries per program, model dtype, interpret mode, softcap.

    Attributes:
        tiles: block sizes and launches.
        tile: queries per program of the first kernel.
        dtype: the model's dtype, for products of queries with keys and of weights with values, unless these are codes.
        interpret: True runs them on any device.
        softcap: softcap of the scaled logits; None for none.
    """

    tiles: DecodeTiles
    tile: int
    dtype: Any
    interpret: bool
    softcap: float | None = None


class ChunkAttentionResults(NamedTuple):
    """Results of the first decode kernel: output and log-sum-exp of each chunk, kept logits, updated pool.

    Attributes:
        out: `f32[W, R, D]` output of each chunk.
        lse: `f32[W, R]` its log-sum-exp, to base 2; MASKED for an empty chunk.
        logits: `f32[B, R, width]` logits to base 2, if they are kept.
        pool: updated k, v and pos, with a token.
    """

    out: Array
    lse: Array
    logits: Array | None
    pool: tuple[Any, ...]


def attend_to_chunks(
    q: Array,
    k: Rows,
    v: Rows,
    chunks: WorkTable,
    layer: int,
    *,
    token: NewTokenInputs | None,
    logits: LogitsLayout | None,
    picks: SelectedEntries | None = None,
    how: DecodeKernelOptions,
) -> ChunkAttentionResults:
    """Run the first decode kernel: append the token, if any, and attend to each chunk; return `ChunkAttentionResults`.

    Blocks of a program (w, t): q [B*K*R, D], with a token its parts [n*M*K*R, D], k and v [B, P, D] complete, of codes
    with k_scale and v_scale [B, P]; the layer, a scalar, and segment, row, rows and last of all layers' chunks [L, W],
    complete; of a token kv [n, M, 2, K, D], cos and sin [B, D/2], position and counts [B], and pos [B, P], complete;
    start [L, B*K] if logits are packed by head; of picks rows [B, k, T], scheduled [B], held [B, k], rest and start [L,
    B*K], complete. Out: part [R, D] and lse [R] of chunk w; it writes tile t; logits [B, R, width] complete,
    of which it writes its rows' cells; k, v [B, P, D], their scales and pos [B, P], in place; it writes a row.

    Args:
        q: `[B, K, R, D]`; with a token its parts before rotation, `[n, M, K, R, D]` of any float dtype.
        k: `[B, P, D]` keys of the pool, or their codes.
        v: `[B, P, D]` values of the pool, as keys.
        chunks: the work table.
        layer: layer of the chunks.
        token: the token to append first, or None.
        logits: layout of kept logits; None keeps none.
        picks: selected entries to read; by default all. Chunks then count these, consecutively from 0.
        how: tiles and launch.

    Returns:
        Outputs and log-sum-exps of chunks, kept logits, and the updated pool.
    """
    *of_parts, heads, rows, dim = q.shape
    batch, pool_rows, _ = get_pool_shape(k)
    width = chunks.segment.shape[1]
    block = how.tiles.block
    tile = how.tile
    scale = math.log2(math.e) / dim**0.5
    cap = None if how.softcap is None else how.softcap * math.log2(math.e)

    # Row indices are loaded first: one stage for them and one for the loads that depend on them, with two in flight.
    launch = how.tiles.launch
    launch = launch if picks is None else dataclasses.replace(launch, stages=launch.stages + 2)

    def kernel(refs):
        tile_index = program_id(1)
        query = tile_index * tile + jnp.arange(tile, dtype=jnp.int32)
        segment, row, here, last = (load(each) for each in get_chunk_refs(refs))
        last = last > 0

        # The branch depends on all four, so that they are loaded together, not two of them after it.
        @when((last | (here > 0)) & (segment >= 0) & (row >= 0))
        def _():
            real = query < rows
            sequence = segment // heads
            lies, holds = _map_chunk_rows(refs, picks, segment, sequence, heads)
            cell = row if logits is None else logits.locate_logit_cell(refs, segment, row)

            def keep(cells, s, mask):
                if logits is not None:
                    store(
                        refs.logits.at[sequence, query[:, None], cells[None, :]],
                        s,
                        mask=mask & real[:, None],
                    )

            of = (refs, sequence, dim, how.dtype, how.interpret)
            keys = KEYS.get(type(k), KeyReader)(*of)
            values = VALUES.get(type(v), ValueReader)(*of)
            if token is None:
                queries = keys.prepare_queries(
                    keys.load_queries(refs.q, segment * rows + query, real)
                )
                none = jnp.full((tile,), MASKED, jnp.float32), jnp.zeros((tile,), jnp.float32)
                carry = (*none, values.make_accumulators((), tile, None))
            else:
                row_new = _NewTokenEntry(
                    refs, segment, heads, last, dim, of_parts, keys.columns, values.columns
                )
                turned = row_new.load_rotated_queries(
                    refs.q, segment * rows + query, real, heads * rows
                )
                rotated = tuple(each.astype(how.dtype) for each in turned)
                new_key, new_value, of_value = row_new.write_to_pool(
                    refs, lies(row + here), tile_index == 0, keys, values
                )
                own = apply_softcap(
                    row_new.multiply_queries_by_key(rotated, new_key) * scale,
                    cap,
                    interpret=how.interpret,
                )
                keep(jnp.broadcast_to(cell + here, (1,)), own[:, None], row_new.joins)
                own, weight = values.add_scale_to_new_logits(own, of_value)
                queries = keys.prepare_queries(rotated)
                own = (
                    jnp.where(row_new.joins, own, MASKED),
                    jnp.where(row_new.joins, weight, jnp.zeros_like(weight)),
                )
                carry = (*own, values.make_accumulators(new_value, tile, row_new.joins))

            def step(index, carry):
                top, total, sums = carry
                offset = index * block + jnp.arange(block, dtype=jnp.int32)
                inside = (offset < here) & holds(row + offset)
                at = lies(row + offset, inside)
                s = apply_softcap(
                    keys.compute_attention_logits(queries, at, inside, scale),
                    cap,
                    interpret=how.interpret,
                )
                keep(cell + offset, s, inside[None, :])
                s, factor = values.add_scales_to_logits(
                    jnp.where(inside[None, :], s, MASKED), at, inside
                )
                new_top = jnp.maximum(top, s.max(axis=1))
                weights = values.compute_weights(s, new_top)
                shrink = jnp.exp2(top - new_top)
                sums = values.accumulate_values(sums, shrink, weights, at, inside)
                true = weights if factor is None else weights * factor[None, :]
                return new_top, total * shrink + true.sum(axis=1), sums

            top, total, sums = lax.fori_loop(0, (here + block - 1) // block, step, carry)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            values.write_outputs(refs.part, query, real, sums, total)
            store(refs.lse.at[query], jnp.where(empty, MASKED, top + jnp.log2(total)), mask=real)

    def per_chunk(*shape):
        block_of_chunk = BlockSpec((None, *shape), lambda w, t: (w,) + (0,) * len(shape))
        return jax.ShapeDtypeStruct((width, *shape), jnp.float32), block_of_chunk

    outputs = {"part": per_chunk(rows, dim), "lse": per_chunk(rows)}
    if logits is not None:
        outputs["logits"] = make_whole_operand(
            jax.ShapeDtypeStruct((batch, rows, logits.count_kept_logits(pool_rows)), jnp.float32)
        )
    given = list_pool_operands("k", k) | list_pool_operands("v", v)
    pools = {} if token is None else {**given, "pos": token.pos}
    aliases = {name: f"pool_{name}" for name in pools}
    outputs |= {
        aliases[name]: make_whole_operand(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for name, leaf in pools.items()
    }
    arrays = {"q": q.reshape(-1, dim)} | given
    inputs = {
        name: make_whole_operand(each) for name, each in arrays.items()
    } | make_table_operands(chunks, layer)
    if token is not None:
        inputs |= {name: make_whole_operand(each) for name, each in token._asdict().items()}
    if logits is not None and logits.widest is not None:
        inputs["start"] = make_segment_operand(logits.start)
    if picks is not None:
        tables = {"picks": picks.rows, "scheduled": picks.scheduled, "held": picks.held}
        inputs |= {name: make_whole_operand(each) for name, each in tables.items()}
        inputs |= {
            "rest": make_segment_operand(picks.rest),
            "start": make_segment_operand(picks.start),
        }
    found = call_triton_kernel(
        kernel,
        name="ragged_decode",
        grid=(width, -(-rows // tile)),
        inputs=inputs,
        outputs=outputs,
        launch=launch,
        interpret=how.interpret,
        aliases=aliases,
    )
    pool = (
        ()
        if token is None
        else (rebuild_pool("pool_k", found, k), rebuild_pool("pool_v", found, v), found["pool_pos"])
    )
    return ChunkAttentionResults(
        out=found["part"], lse=found["lse"], logits=found.get("logits"), pool=pool
    )


def make_whole_operand(of: Any) -> Operand:
    """Return (array or shape, block spec) with which every program sees all of it."""
    return of, BlockSpec(of.shape, lambda *_: (0,) * len(of.shape))


_OF_CHUNK = ("segment", "row", "rows", "last")


def make_table_operands(chunks: WorkTable, layer: int) -> dict[str, Operand]:
    """Return kernel operands by name: a work table's segment, row, rows, last of chunks, and the layer's index."""
    return {name: make_whole_operand(getattr(chunks, name)) for name in _OF_CHUNK} | {
        "layer": make_layer_operand(layer)
    }


def get_chunk_refs(refs: Any) -> tuple[Any, ...]:
    """Return this program's cells of the work table, as refs: segment, first row, rows, 1 for a segment's last."""
    return tuple(getattr(refs, name).at[refs.layer[...], program_id(0)] for name in _OF_CHUNK)


def make_layer_operand(layer: int) -> Operand:
    """Return (array, block spec) of a layer's index, an input so that all layers share one compiled kernel."""
    return jnp.full((1,), layer, jnp.int32), BlockSpec((None,), lambda *_: (0,))


def make_segment_operand(table: Array) -> Operand:
    """Return (array, block spec) of a table `[L, B, K]`, reshaped to `[L, B*K]`, of which a program sees all."""
    return make_whole_operand(table.reshape(table.shape[0], -1))


def _map_chunk_rows(refs, picks, segment, sequence, heads):
    """Return two functions of a chunk's row numbers, inside a kernel: to pool rows, and to a mask of valid ones.

    With picks the numbers count the picks first, then the rows from `rest` on; without, they are pool rows.
    """
    if picks is None:
        return lambda row, inside=None: row, lambda row: True
    alike = picks.rows.shape[1] == 1
    most = picks.rows.shape[2]
    head = jnp.int32(0) if alike else segment - sequence * heads
    count = load(refs.scheduled.at[sequence])
    held = load(refs.held.at[sequence, head])
    start, rest = (load(ref.at[refs.layer[...], segment]) for ref in (refs.start, refs.rest))

    def lies(row, inside=True):
        wanted = inside & (row < count)
        at = load(refs.picks.at[sequence, head, jnp.minimum(row, most - 1)], mask=wanted, other=0)
        return start + jnp.where(row < count, at, rest + row - count)

    return lies, lambda row: (row < held) | (row >= count)


class _NewTokenEntry:
    """New token's rotated key and its value, in a decode kernel, with the rotation for its queries.

    Keys and values are in their readers' parts. Loads that the queries do not need are issued first, to overlap with
    the loads of queries. Each channel is combined with its pair's angle and, by a second gather, its partner's value.
    """

    def __init__(self, refs, segment, heads, last, dim, of_parts, key_columns, value_columns):
        self.parts, self.sequences = of_parts
        half = dim // 2
        sequence = segment // heads

        def take(which, column, real):
            def loaded(part):
                at = refs.kv.at[part, sequence, which, segment - sequence * heads, column]
                return load(at, mask=real & last, other=0.0)

            return self._sum_parts(loaded)

        self.sequence = sequence
        self.joins = last & (load(refs.counts.at[sequence]) > 0)
        self.position = load(refs.position.at[sequence])
        self.values = tuple(take(1, *columns) for columns in value_columns)
        self.turns = []
        keys = []
        for column, real in key_columns:
            first = column < half
            partner = jnp.where(first, column + half, column - half)
            pair = jnp.where(first, column, column - half)
            own = take(0, column, real)
            other = take(0, partner, real)
            cos = load(refs.cos.at[sequence, pair], mask=real, other=0.0)
            sin = load(refs.sin.at[sequence, pair], mask=real, other=0.0)
            sin = jnp.where(first, -sin, sin)
            keys.append(own * cos + other * sin)
            self.turns.append((column, partner, real, cos, sin))
        self.key = tuple(keys)

    def _sum_parts(self, of):
        """Return the float32 sum of a number's split-K parts; `of` loads one part."""
        return sum(
            (of(part).astype(jnp.float32) for part in range(1, self.parts)),
            start=of(0).astype(jnp.float32),
        )

    def load_rotated_queries(self, ref, rows, inside, of_sequence):
        """Load the token's queries, sum split-K parts and apply RoPE; return `f32[n, columns]` per part of a key."""
        of_part = self.sequences * of_sequence

        def rotated(column, partner, real, cos, sin):
            shape = (rows.shape[0], column.shape[0])
            mask = jnp.broadcast_to(inside[:, None], shape) & jnp.broadcast_to(real[None, :], shape)

            def take(column):
                return self._sum_parts(
                    lambda part: load(
                        ref.at[(part * of_part + rows)[:, None], column[None, :]],
                        mask=mask,
                        other=0.0,
                    )
                )

            return take(column) * cos[None, :] + take(partner) * sin[None, :]

        return tuple(rotated(*each) for each in self.turns)

    def multiply_queries_by_key(self, queries, key):
        """Return the dot products `f32[n]` of n queries and a new key, both in parts."""
        each = (
            (query.astype(jnp.float32) * part[None, :]).sum(axis=1)
            for query, part in zip(queries, key, strict=True)
        )
        return reduce(jnp.add, each)

    def write_to_pool(self, refs, row, writes, keys, values):
        """Write the entry to row `row` if `writes`; return float32 key, value (int8: codes), its scale or None."""
        at = (self.sequence, row)
        writes = self.joins & writes
        key = keys.write_new_key(at, self.key, writes)
        value, of_value = values.write_new_value(at, self.values, writes)
        store(refs.pool_pos.at[at], self.position, mask=writes)
        return key, value, of_value
