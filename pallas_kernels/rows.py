"""The pass over rows of decode attention: each program reads one chunk of a segment, and leaves its output and weight.

On request a new token's row comes first: the program with a segment's last chunk rotates its key, writes it behind the
segment, and attends to it from registers. No other program looks there, so nothing has to wait.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
from .chunks import Chunks
from .tuning import DecodeTiles

# One number of an array of one.
ONE = BlockSpec((None,), lambda *_: (0,))


class Token(NamedTuple):
    """One new token of each sequence, before rotation, and what its rows join.

    Attributes:
        kv: `[n, M, 2, K, D]` parts of keys and values.
        cos: `f32[B, D/2]` of its place.
        sin: likewise.
        position: `i32[B]` in the text.
        counts: `i32[B]` 0 for a sequence that has ended: nothing is written.
        pos: `i32[B, P]` positions of the pool's rows.
    """

    kv: jax.Array
    cos: jax.Array
    sin: jax.Array
    position: jax.Array
    counts: jax.Array
    pos: jax.Array


def layer_of(layer: int) -> jax.Array:
    """A layer's number as kernels take it, which is seen by them as a scalar through `ONE`."""
    return jnp.full((1,), layer, jnp.int32)


class Logits(NamedTuple):
    """Where logits lie that are kept: as the rows do; or where a segment has `widest` rows, head after head.

    Attributes:
        start: `i32[L, B, K]` first row of each segment.
        widest: rows of a segment, or None.
    """

    start: jax.Array
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

    Blocks of a program (w, t): q [B*K*R, D], with a token its parts [n*M*K*R, D], k and v [B, P, D] whole; the layer, a
    scalar, and segment, row, rows and last of all layers' chunks [L, W], whole; of a token kv [n*M*2*K, D], cos and sin
    [B, D/2], position and counts [B], and pos [B, P], whole; start [L, B*K] where logits lie head after head. Out: part
    [R, D] and lse [R] of chunk w, of which it writes tile t; logits [B, R, width] whole, of which it writes its rows'
    cells; k, v [B, P, D] and pos [B, P], in place, of which it writes a row.

    Args:
        q: `[B, K, R, D]`; with a token its parts before rotation, `[n, M, K, R, D]` of any float dtype.
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
    *parts, padded_batch, heads, rows, dim = q.shape
    batch, pool_rows, _ = k.shape
    width = chunks.segment.shape[1]
    scale = math.log2(math.e) / dim**0.5
    block, tile = how.tiles.block, how.tile
    packed = logits is not None and logits.widest is not None

    def kernel(q_ref, k_ref, v_ref, layer_ref, segment_ref, row_ref, rows_ref, last_ref, *refs):
        refs = list(refs)
        at_layer = layer_ref[...]
        of_token = [refs.pop(0) for _ in range(5)] if token is not None else None
        if token is not None:
            refs.pop(0)  # Positions as they were, which nobody reads.
        start_ref = refs.pop(0) if packed else None
        part_ref, lse_ref = refs.pop(0), refs.pop(0)
        logits_ref = refs.pop(0) if logits is not None else None
        tile_index = program_id(1)
        query = tile_index * tile + jnp.arange(tile, dtype=jnp.int32)
        mine = lambda ref: load(ref.at[at_layer, program_id(0)])  # noqa: E731
        segment, row, here, last = mine(segment_ref), mine(row_ref), mine(rows_ref), mine(last_ref) > 0

        @when(last | (here > 0))
        def _():
            real = query < rows
            sequence = segment // heads
            cell = row
            if packed:
                cell = (segment - sequence * heads) * logits.widest + row - load(start_ref.at[at_layer, segment])
            keep = lambda cells, s, mask: store(logits_ref.at[sequence, query[:, None], cells[None, :]], s, mask=mask)  # noqa: E731
            if of_token is None:
                queries = take_rows(q_ref, segment * rows + query, real, dim)
                carry = (
                    jnp.full((tile,), MASKED, jnp.float32),
                    jnp.zeros((tile,), jnp.float32),
                    jnp.zeros((tile, pad_dim(dim)), jnp.float32),
                )
            else:
                turned = _Turn(*of_token[1:3], sequence, dim)
                of_part = padded_batch * heads * rows
                queries = turned.rows(q_ref, segment * rows + query, real, parts[0], of_part).astype(k_ref.dtype)
                joins = last & (load(of_token[4].at[sequence]) > 0)
                kv = _NewRow(of_token[0], parts[0], padded_batch, heads, segment)
                key, value = _join(of_token, refs, turned, kv, sequence, row + here, joins & (tile_index == 0))
                own = (queries.astype(jnp.float32) * key[None, :]).sum(axis=1) * scale
                if logits_ref is not None:
                    store(
                        logits_ref.at[sequence, query, jnp.broadcast_to(cell + here, (tile,))], own, mask=real & joins
                    )
                carry = (
                    jnp.where(joins, own, MASKED),
                    jnp.where(joins, jnp.ones((tile,), jnp.float32), jnp.zeros((tile,), jnp.float32)),
                    jnp.broadcast_to(jnp.where(joins, value, 0.0)[None, :], (tile, pad_dim(dim))),
                )

            def step(index, carry):
                top, total, acc = carry
                offset = index * block + jnp.arange(block, dtype=jnp.int32)
                inside = offset < here
                keys = take_rows(k_ref, row + offset, inside, dim, sequence)
                s = dot(queries, keys, transpose_b=True) * scale
                if logits_ref is not None:
                    keep(cell + offset, s, real[:, None] & inside[None, :])
                s = jnp.where(inside[None, :], s, MASKED)
                new_top = jnp.maximum(top, s.max(axis=1))
                weights = jnp.exp2(s - new_top[:, None])
                shrink = jnp.exp2(top - new_top)
                values = take_rows(v_ref, row + offset, inside, dim, sequence)
                acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values)
                return new_top, total * shrink + weights.sum(axis=1), acc

            top, total, acc = lax.fori_loop(0, (here + block - 1) // block, step, carry)
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            put_rows(part_ref, query, real, dim, acc / total[:, None])
            store(lse_ref.at[query], jnp.where(empty, MASKED, top + jnp.log2(total)), mask=real)

    whole = lambda *shape: BlockSpec(shape, lambda w, t: (0,) * len(shape))  # noqa: E731
    per_chunk = lambda *shape: BlockSpec((None, *shape), lambda w, t: (w,) + (0,) * len(shape))  # noqa: E731
    pool = whole(batch, pool_rows, dim)
    # The layer is an argument, so that the kernels of all layers are one program.
    inputs = [q.reshape(-1, dim), k, v, layer_of(layer), chunks.segment, chunks.row, chunks.rows, chunks.last]
    specs = [whole(q.size // dim, dim), pool, pool, ONE, *[whole(*chunks.segment.shape)] * 4]
    shapes = [
        jax.ShapeDtypeStruct((width, rows, dim), jnp.float32),
        jax.ShapeDtypeStruct((width, rows), jnp.float32),
    ]
    outputs, aliases = [per_chunk(rows, dim), per_chunk(rows)], {}
    if logits is not None:
        shapes.append(jax.ShapeDtypeStruct((batch, rows, logits.width(pool_rows)), jnp.float32))
        outputs.append(whole(*shapes[-1].shape))
    if token is not None:
        given = [token.kv.reshape(-1, dim), *token[1:]]
        aliases = {1: len(outputs), 2: len(outputs) + 1, len(inputs) + 5: len(outputs) + 2}
        inputs += given
        specs += [whole(*each.shape) for each in given]
        shapes += [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v, token.pos)]
        outputs += [pool, pool, whole(batch, pool_rows)]
    if logits is not None and packed:
        inputs.append(logits.start.reshape(-1, batch * heads))
        specs.append(whole(*inputs[-1].shape))
    results = call(
        kernel,
        *inputs,
        name="ragged_decode",
        grid=(width, -(-rows // tile)),
        inputs=specs,
        outputs=outputs,
        shapes=shapes,
        launch=how.tiles.launch,
        interpret=how.interpret,
        aliases=aliases,
    )
    return Passed(
        out=results[0],
        lse=results[1],
        logits=results[2] if logits is not None else None,
        pool=tuple(results[-3:]) if token is not None else (),
    )


class _Turn:
    """RoPE inside a kernel: a row meets the angles of its channels and, gathered once more, its partners' values."""

    def __init__(self, cos_ref, sin_ref, sequence, dim):
        self.dim, half = dim, dim // 2
        self.column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
        self.real = self.column < dim
        first = self.column < half
        self.partner = jnp.where(first, self.column + half, self.column - half)
        pair = jnp.where(first, self.column, self.column - half)
        self.cos = load(cos_ref.at[sequence, pair], mask=self.real, other=0.0)
        sin = load(sin_ref.at[sequence, pair], mask=self.real, other=0.0)
        self.sin = jnp.where(first, -sin, sin)

    def rows(self, ref, rows, inside, parts, of_part):
        """Rows of a `[parts * of_part, dim]` ref, parts added up, turned: `f32[n, pad_dim(dim)]`."""
        shape = (rows.shape[0], self.column.shape[0])
        mask = jnp.broadcast_to(inside[:, None], shape) & jnp.broadcast_to(self.real[None, :], shape)

        def at(column):
            of = lambda part: load(  # noqa: E731
                ref.at[(part * of_part + rows)[:, None], column[None, :]], mask=mask, other=0.0
            ).astype(jnp.float32)
            return sum((of(part) for part in range(1, parts)), start=of(0))

        return at(self.column) * self.cos[None, :] + at(self.partner) * self.sin[None, :]

    def row(self, at):
        """One row, of which `at` gives columns."""
        return at(self.column, self.real) * self.cos + at(self.partner, self.real) * self.sin


class _NewRow:
    """One head's new key or value, its parts added up: float32 columns."""

    def __init__(self, ref, parts, padded_batch, heads, segment):
        sequence = segment // heads
        self.ref, self.heads = ref, heads
        self.at = [((part * padded_batch + sequence) * 2) * heads + segment - sequence * heads for part in range(parts)]

    def key(self, column, real):
        """Of the key."""
        return self._of(0, column, real)

    def value(self, column, real):
        """Of the value."""
        return self._of(self.heads, column, real)

    def _of(self, behind, column, real):
        each = [load(self.ref.at[at + behind, column], mask=real, other=0.0).astype(jnp.float32) for at in self.at]
        return sum(each[1:], start=each[0])


def _join(of_token, pool_refs, turned, kv, sequence, row, joins):
    """Writes a new row, if it joins; gives its key and value as they are read from the pool, in float32."""
    position_ref = of_token[3]
    k_pool, v_pool, pos_pool = pool_refs
    key = turned.row(kv.key).astype(k_pool.dtype)
    value = kv.value(turned.column, turned.real).astype(v_pool.dtype)
    store(k_pool.at[sequence, row, turned.column], key, mask=turned.real & joins)
    store(v_pool.at[sequence, row, turned.column], value, mask=turned.real & joins)
    store(pos_pool.at[sequence, row], load(position_ref.at[sequence]), mask=joins)
    return key.astype(jnp.float32), value.astype(jnp.float32)
