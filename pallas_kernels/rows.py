"""The pass over rows of decode attention: each program reads one chunk of a segment, and leaves its output and weight.

On request a new token's row comes first: the program with a segment's last chunk rotates its key, writes it behind the
segment, and attends to it from registers. No other program looks there, so nothing has to wait.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._compat import (
    MASKED,
    BlockSpec,
    call_named,
    dot,
    load,
    pad_dim,
    program_id,
    put_rows,
    store,
    take_rows,
    when,
)
from .chunks import Chunks
from .tuning import DecodeTiles


class Token(NamedTuple):
    """One new token of each sequence, before rotation, and what its rows join.

    Attributes:
        k: `[B, K, D]` keys.
        v: `[B, K, D]` values.
        cos: `f32[B, D/2]` of its place.
        sin: likewise.
        position: `i32[B]` in the text.
        counts: `i32[B]` 0 for a sequence that has ended: nothing is written.
        pos: `i32[B, P]` positions of the pool's rows.
    """

    k: jax.Array
    v: jax.Array
    cos: jax.Array
    sin: jax.Array
    position: jax.Array
    counts: jax.Array
    pos: jax.Array


class Logits(NamedTuple):
    """Where logits lie that are kept: as the rows do; or where a segment has `widest` rows, head after head.

    Attributes:
        start: `i32[N, B, K]` first row of each segment.
        level: which of the N.
        widest: rows of a segment, or None.
    """

    start: jax.Array
    level: int
    widest: int | None

    def width(self, pool_rows: int) -> int:
        """Logits of a sequence's query."""
        return pool_rows if self.widest is None else self.start.shape[2] * self.widest


class How(NamedTuple):
    """How kernels run.

    Attributes:
        tiles: how the work is cut.
        tile: queries of one program of the pass over rows.
        interpret: run them on any device.
    """

    tiles: DecodeTiles
    tile: int
    interpret: bool


class Passed(NamedTuple):
    """What the pass over rows gives.

    Attributes:
        out: `f32[W, R, D]` output of each chunk.
        lse: `f32[W, R]` its log-sum-exp, to base 2; MASKED where it has no rows.
        logits: `f32[B, R, width]` to base 2, if they are kept.
        pool: its k, v and pos as they are now, with a token.
    """

    out: jax.Array
    lse: jax.Array
    logits: jax.Array | None
    pool: tuple[jax.Array, ...]


def pass_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    chunks: Chunks,
    layer: int,
    *,
    token: Token | None,
    logits: Logits | None,
    how: How,
) -> Passed:
    """Attention of every chunk by itself.

    Blocks of a program (w, t): q [B*K*R, D], k and v [B, P, D] whole; segment, row, rows and last of chunk w, scalars;
    of a token k and v [B*K, D], cos and sin [B, D/2], position and counts [B], and pos [B, P], whole; start [B*K] where
    logits lie head after head. Out: part [R, D] and lse [R] of chunk w, of which it writes tile t; logits [B, R, width]
    whole, of which it writes its rows' cells; k, v [B, P, D] and pos [B, P], in place, of which it writes a row.

    Args:
        q: `[B, K, R, D]`; with a token before rotation, in any float dtype.
        k: `[B, P, D]` pool.
        v: likewise.
        chunks: who reads what.
        layer: of the chunks.
        token: what joins the rows.
        logits: where they are kept, if they are.
        how: it runs.

    Returns:
        What chunks give.
    """
    batch, heads, rows, dim = q.shape
    pool_rows, width = k.shape[1], chunks.segment.shape[1]
    packed = logits is not None and logits.widest is not None
    block, tile, scale = how.tiles.block, how.tile, math.log2(math.e) / dim**0.5

    def kernel(refs):
        tile_index = program_id(1)
        query = tile_index * tile + jnp.arange(tile, dtype=jnp.int32)
        segment, row, here, last = refs.segment[...], refs.row[...], refs.rows[...], refs.last[...] > 0

        # Whether there is work depends on all four, so that they are loaded together, not two behind the branch.
        @when((last | (here > 0)) & (segment >= 0) & (row >= 0))
        def _():
            real = query < rows
            sequence = segment // heads
            cell = row
            if packed:
                cell = (segment - sequence * heads) * logits.widest + row - load(refs.start.at[segment])

            def keep(cells, s, mask):
                if logits is not None:
                    store(refs.logits.at[sequence, query[:, None], cells[None, :]], s, mask=mask & real[:, None])

            if token is None:
                queries = take_rows(refs.q, segment * rows + query, real, dim)
                carry = (
                    jnp.full((tile,), MASKED, jnp.float32),
                    jnp.zeros((tile,), jnp.float32),
                    jnp.zeros((tile, pad_dim(dim)), jnp.float32),
                )
            else:
                row_new = _NewRow(refs, segment, sequence, last, dim)
                queries = row_new.turned(refs.q, segment * rows + query, real).astype(refs.k.dtype)
                key, value = row_new.put(refs, row + here, tile_index == 0)
                own = (queries.astype(jnp.float32) * key[None, :]).sum(axis=1) * scale
                keep(jnp.broadcast_to(cell + here, (1,)), own[:, None], row_new.joins)
                carry = (
                    jnp.where(row_new.joins, own, MASKED),
                    jnp.where(row_new.joins, jnp.ones((tile,), jnp.float32), jnp.zeros((tile,), jnp.float32)),
                    jnp.broadcast_to(jnp.where(row_new.joins, value, 0.0)[None, :], (tile, pad_dim(dim))),
                )

            def step(index, carry):
                top, total, acc = carry
                offset = index * block + jnp.arange(block, dtype=jnp.int32)
                inside = offset < here
                keys = take_rows(refs.k, row + offset, inside, dim, sequence)
                s = dot(queries, keys, transpose_b=True) * scale
                keep(cell + offset, s, inside[None, :])
                s = jnp.where(inside[None, :], s, MASKED)
                new_top = jnp.maximum(top, s.max(axis=1))
                weights = jnp.exp2(s - new_top[:, None])
                shrink = jnp.exp2(top - new_top)
                values = take_rows(refs.v, row + offset, inside, dim, sequence)
                acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values)
                return new_top, total * shrink + weights.sum(axis=1), acc

            top, total, acc = lax.fori_loop(0, (here + block - 1) // block, step, carry)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            put_rows(refs.part, query, real, dim, acc / total[:, None])
            store(refs.lse.at[query], jnp.where(empty, MASKED, top + jnp.log2(total)), mask=real)

    per_chunk = lambda *shape: (  # noqa: E731
        jax.ShapeDtypeStruct((width, *shape), jnp.float32),
        BlockSpec((None, *shape), lambda w, t: (w,) + (0,) * len(shape)),
    )
    outputs = {"part": per_chunk(rows, dim), "lse": per_chunk(rows)}
    if logits is not None:
        outputs["logits"] = whole(jax.ShapeDtypeStruct((batch, rows, logits.width(pool_rows)), jnp.float32))
    aliases = {}
    if token is not None:
        aliases = {"k": "pool_k", "v": "pool_v", "pos": "pool_pos"}
        for name, leaf in zip(aliases.values(), (k, v, token.pos), strict=True):
            outputs[name] = whole(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    found = call_named(
        kernel,
        name="ragged_decode",
        grid=(width, -(-rows // tile)),
        inputs=_inputs(q, k, v, chunks, layer, token, logits if packed else None),
        outputs=outputs,
        launch=how.tiles.launch,
        interpret=how.interpret,
        aliases=aliases,
    )
    pool = tuple(found[name] for name in aliases.values())
    return Passed(out=found["part"], lse=found["lse"], logits=found.get("logits"), pool=pool)


def whole(of: Any) -> tuple[Any, BlockSpec]:
    """An array, or its shape, of which every program sees all."""
    return of, BlockSpec(of.shape, lambda *_: (0,) * len(of.shape))


def of_chunks(chunks: Chunks, layer: int) -> dict[str, tuple[jax.Array, BlockSpec]]:
    """What a program, one for each chunk of a layer, does: inputs of a kernel, scalars."""
    spec = BlockSpec((None, None), lambda w, *_: (layer, w))
    return {name: (getattr(chunks, name), spec) for name in ("segment", "row", "rows", "last")}


def starts(logits: Logits) -> tuple[jax.Array, BlockSpec]:
    """First rows of a layer's segments: an input of a kernel."""
    segments, level = math.prod(logits.start.shape[1:]), logits.level
    return logits.start.reshape(-1, segments), BlockSpec((None, segments), lambda *_: (level, 0))


def _inputs(q, k, v, chunks, layer, token, packed):
    dim = k.shape[2]
    inputs = {"q": whole(q.reshape(-1, dim)), "k": whole(k), "v": whole(v), **of_chunks(chunks, layer)}
    if token is not None:
        given = token._replace(k=token.k.reshape(-1, dim), v=token.v.reshape(-1, dim))._asdict()
        inputs |= {{"k": "k_new", "v": "v_new"}.get(name, name): whole(each) for name, each in given.items()}
    if packed is not None:
        inputs["start"] = starts(packed)
    return inputs


class _NewRow:
    """A token's row inside a kernel, and the rotation that it shares with the queries.

    All that the queries do not need is loaded first: it arrives while they are loaded. Channels meet the angle of their
    pair and, gathered once more, their partners' values.
    """

    def __init__(self, refs, segment, sequence, last, dim):
        half = dim // 2
        self.column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
        self.real = self.column < dim
        first = self.column < half
        self.partner = jnp.where(first, self.column + half, self.column - half)
        pair = jnp.where(first, self.column, self.column - half)
        wanted = self.real & last
        take = lambda ref, column: load(ref.at[segment, column], mask=wanted, other=0.0)  # noqa: E731
        self.sequence = sequence
        self.joins = last & (load(refs.counts.at[sequence]) > 0)
        self.position = load(refs.position.at[sequence])
        self.value = take(refs.v_new, self.column)
        own, other = take(refs.k_new, self.column), take(refs.k_new, self.partner)
        self.cos = load(refs.cos.at[sequence, pair], mask=self.real, other=0.0)
        sin = load(refs.sin.at[sequence, pair], mask=self.real, other=0.0)
        self.sin = jnp.where(first, -sin, sin)
        self.key = own.astype(jnp.float32) * self.cos + other.astype(jnp.float32) * self.sin

    def turned(self, ref, rows, inside):
        """Rows of a `[rows, dim]` ref, rotated: `f32[n, pad_dim(dim)]`."""
        shape = (rows.shape[0], self.column.shape[0])
        mask = jnp.broadcast_to(inside[:, None], shape) & jnp.broadcast_to(self.real[None, :], shape)
        at = lambda column: load(ref.at[rows[:, None], column[None, :]], mask=mask, other=0.0)  # noqa: E731
        own, other = at(self.column).astype(jnp.float32), at(self.partner).astype(jnp.float32)
        return own * self.cos[None, :] + other * self.sin[None, :]

    def put(self, refs, row, writes):
        """Writes the row, if it joins and this program writes; its key and value as the pool has them, in float32."""
        key, value = self.key.astype(refs.pool_k.dtype), self.value.astype(refs.pool_v.dtype)
        writes = self.joins & writes
        store(refs.pool_k.at[self.sequence, row, self.column], key, mask=self.real & writes)
        store(refs.pool_v.at[self.sequence, row, self.column], value, mask=self.real & writes)
        store(refs.pool_pos.at[self.sequence, row], self.position, mask=writes)
        return key.astype(jnp.float32), value.astype(jnp.float32)
