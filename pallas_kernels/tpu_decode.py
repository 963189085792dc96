r"""Attention of a few queries per kv head over ragged segments of a pool, for TPUs; the new token's row joins the pool.

A program takes a segment, one after the other, and the copies of its rows from HBM run `AHEAD` blocks before the
products, whichever segment they belong to, so that no program waits for its first block::

    pool rows   |   |  head 0            |hd 1|  |  head 2      |
    blocks          |  0  |  1  |  2  |3 | 4  |  |  5  |  6  |7 |      of BLOCK rows, copied in chunks of CHUNK rows
    copied             while block 0 is multiplied, blocks 1 to AHEAD are on their way

HBM is read and written in tiles of `tile_rows` rows: a segment that begins inside a tile is copied from the tile's
first row on, and rows of other segments are masked. A new row is written with the rows around it, as a tile: tiles of
all heads of a sequence are read while the sequence before it is multiplied, changed, and written while its own rows
are. Heads whose new rows lie in one tile change one copy of it. The rows around a new row do not change, so reading
them meanwhile is no race, and the new row itself enters the softmax from VMEM.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _compat_tpu as tpu

# Rows multiplied at once, and rows of one copy.
BLOCK, CHUNK = 1024, 256
# Blocks on their way while one is multiplied: bytes in flight have to cover the latency of HBM.
AHEAD = 3
# Sublanes of a 32-bit register; queries are padded to multiples of it.
_SUBLANES = 8
_LANES = 128
_MASKED = -1e30


def tile_rows(dtype: jax.typing.DTypeLike) -> int:
    """Number of pool rows of a tile in HBM: 8 of 32 bits, 16 of 16 bits."""
    return _SUBLANES * 4 // jnp.dtype(dtype).itemsize


def takes(pool_rows: int, dtype: jax.typing.DTypeLike) -> bool:
    """True if the kernel takes pools of so many rows: whole tiles, of bfloat16 or float32."""
    known = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    return known and pool_rows % tile_rows(dtype) == 0


@partial(jax.jit, static_argnames=("softcap", "interpret"))
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of R queries per kv head over that head's segment of a pool; returns output and log-sum-exp.

    Args:
        q: `[B, K, R, D]` float; for decoding R is the group.
        k: `[B, P, D]` pool rows, bfloat16 or float32; P is a multiple of `tile_rows`.
        v: `[B, P, D]` likewise, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment; 0 gives output 0 and lse -inf.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype, and `f32[B, K, R]` natural log-sum-exp of the scaled logits.
    """
    out, lse = _run(q, (), k, v, (start, length), softcap=softcap, interpret=interpret)
    return out, lse


@partial(jax.jit, static_argnames=("softcap", "interpret"))
def append_and_attend(
    q: jax.Array,
    new: tuple[jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    length: jax.Array,
    counts: jax.Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Writes each head's new row behind its segment and attends to the segment with it; output, lse and the pool.

    Rows are written in place if the pool is donated. A window is a later `start` with a smaller `length`.

    Args:
        q: `[B, K, R, D]` rotated queries.
        new: keys and values `[B, K, D]` of the token, the keys rotated.
        k: `[B, P, D]` pool rows, bfloat16 or float32; P is a multiple of `tile_rows`.
        v: `[B, P, D]` likewise, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment before the token, with room for one more behind them.
        counts: `i32[B]` 0 for an ended sequence, for which nothing is written; else 1.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype; `f32[B, K, R]` natural log-sum-exp of the scaled logits; and k and v with the rows.
    """
    tile = tile_rows(k.dtype)
    base = (start + length) // tile
    # Heads that write into one tile, by pairs: each begins with the copy of the one before, and the last one writes.
    shared = base[:, :, None] == base[:, None, :]
    head = jnp.arange(base.shape[1], dtype=jnp.int32)
    before = jnp.where(shared & (head < head[:, None]), head, -1).max(axis=-1)
    last = ~(shared & (head > head[:, None])).any(axis=-1)
    tables = (start, length, counts.astype(jnp.int32), before, last.astype(jnp.int32))
    # Sublanes of 16-bit rows cannot be addressed one by one.
    rows = tuple(each.astype(k.dtype).astype(jnp.float32)[:, :, None] for each in new)
    out, lse, k, v = _run(q, rows, k, v, tables, softcap=softcap, interpret=interpret)
    return out, lse, k, v


def _run(q, new, k, v, tables, *, softcap, interpret):
    """Calls the kernel: `new` rows and five `tables` to append, none and two to attend; list of its outputs."""
    batch, heads, rows, dim = q.shape
    padded = -(-rows // _SUBLANES) * _SUBLANES
    scaled = (q.astype(jnp.float32) / math.sqrt(dim)).astype(k.dtype)
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    chunk = min(CHUNK, k.shape[1])
    size, tile, appends = BLOCK // CHUNK * chunk, tile_rows(k.dtype), bool(new)
    one, all_heads = (lambda b, h: (b, h, 0, 0)), (lambda b, h: (b, 0, 0, 0))
    token = [tpu.block((1, heads, 1, dim), all_heads)] * len(new)
    scratch = [
        tpu.vmem((AHEAD + 1, size, dim), k.dtype),
        tpu.vmem((AHEAD + 1, size, dim), v.dtype),
        tpu.semaphores((AHEAD + 1,)),
        tpu.smem((5,), jnp.int32),
    ]
    if appends:
        scratch += [tpu.vmem((2, 2, heads, tile, dim), k.dtype), tpu.semaphores((2,)), tpu.semaphores((2,))]
    shapes = [
        jax.ShapeDtypeStruct(scaled.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, heads, padded, _LANES), jnp.float32),
    ]
    made = [tpu.block((1, 1, padded, dim), one), tpu.block((1, 1, padded, _LANES), one)]
    if appends:
        shapes += [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v)]
        made += [tpu.in_hbm()] * 2
    out, lse, *pool = tpu.call(
        partial(_kernel, appends=appends, chunk=chunk, softcap=softcap),
        tables,
        (scaled, *new, k, v),
        name="tpu_decode" if appends else "tpu_attend",
        grid=(batch, heads),
        given=[tpu.block((1, 1, padded, dim), one), *token, tpu.in_hbm(), tpu.in_hbm()],
        made=made,
        shapes=shapes,
        scratch=scratch,
        in_place={3: 2, 4: 3} if appends else {},
        interpret=interpret,
    )
    return out[:, :, :rows], lse[:, :, :rows, 0], *pool


# Refs: in scalar memory `start` and `length` [B, K], and to append `counts` [B], `before` and `last` [B, K]. Inputs
# q [1, 1, R, D] of the program's head, new keys and values f32[1, K, 1, D] of its sequence, and the pools [B, P, D] in
# HBM. Outputs out [1, 1, R, D], lse [1, 1, R, 128], and the pools. Scratch: AHEAD + 1 blocks of keys and of values
# [AHEAD + 1, BLOCK, D], a semaphore for each; five numbers (sequence, head and block that are copied next, and how many
# blocks were copied and multiplied); and to append tiles of new rows [2 sequences, keys and values, K, tile, D], and a
# semaphore for the reads and one for the writes of each of the two sequences.
def _kernel(*refs, appends, chunk, softcap):
    """Attends a program's queries to its segment; begins copies of later blocks, and of the sequences' new rows."""
    start, length, *refs = refs
    counts, before, last, *refs = refs if appends else (None, None, None, *refs)
    q_ref, *refs = refs
    new_k, new_v, *refs = refs if appends else (None, None, *refs)
    k_hbm, v_hbm, out_ref, lse_ref, *refs = refs
    pools, refs = (refs[:2], refs[2:]) if appends else ((), refs)
    kbuf, vbuf, arrived, numbers, *tiles = refs
    b, h = tpu.program_id(0), tpu.program_id(1)
    batch, heads = start.shape
    copies = _Copies(start, length, (k_hbm, v_hbm), (kbuf, vbuf), arrived, numbers, chunk)

    @tpu.when((b == 0) & (h == 0))
    def _():
        # Rows of a block that were never copied get no weight: they have to be numbers.
        vbuf[...] = jnp.zeros(vbuf.shape, vbuf.dtype)
        copies.begin()

    if appends:
        own = _NewRows(start, length, (counts, before, last), (new_k, new_v), pools, *tiles)

        @tpu.when(h == 0)
        def _():
            own.append(b, batch)

    q = q_ref[0, 0]
    shape = (q.shape[0], 1)
    carry = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32)
    if appends:
        joins = counts[b] > 0
        logit = (q.astype(jnp.float32) * new_k[0, h]).sum(axis=1, keepdims=True)
        value = jnp.broadcast_to(new_v[0, h], q.shape)
        carry = (
            jnp.where(joins, _capped(logit, softcap), carry[0]),
            jnp.where(joins, 1.0, carry[1]),
            jnp.where(joins, value, carry[2]),
        )
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    def step(index, carry):
        """Loop body: softmax maximum and sum, and unnormalised output, after one more block."""
        top, total, acc = carry
        slot = copies.awaited(b, h, index)
        logits = _capped(product(q, kbuf[slot], (((1,), (1,)), ((), ()))), softcap)
        inside = copies.inside(b, h, index, logits.shape)
        logits = jnp.where(inside, logits, _MASKED)
        higher = jnp.maximum(top, logits.max(axis=1, keepdims=True))
        weights = jnp.where(inside, jnp.exp(logits - higher), 0.0)
        shrink = jnp.exp(top - higher)
        part = product(weights.astype(vbuf.dtype), vbuf[slot], (((1,), (0,)), ((), ())))
        return higher, total * shrink + weights.sum(axis=1, keepdims=True), acc * shrink + part

    top, total, acc = lax.fori_loop(0, copies.blocks(b, h), step, carry)
    some = jnp.maximum(total, 1e-30)
    out_ref[0, 0] = (acc / some).astype(out_ref.dtype)
    lse_ref[0, 0] = jnp.broadcast_to(jnp.where(total > 0, top + jnp.log(some), -jnp.inf), lse_ref.shape[2:])
    if appends:

        @tpu.when((b == batch - 1) & (h == heads - 1))
        def _():
            own.finish(b)


def _whole(row, tile):
    """Row at which the tile of a row begins, i32; `tile` is a power of two."""
    return tpu.multiple_of(row & -tile, tile)


def _capped(logits, softcap):
    """Logits as they are without a `softcap`; with one softcap * tanh(logits / softcap)."""
    return logits if softcap is None else jnp.tanh(logits * (1 / softcap)) * softcap


class _Copies:
    """Copies of segments' blocks from HBM into a ring of VMEM buffers, in the order in which they are multiplied."""

    def __init__(self, start: Any, length: Any, pools: Any, buffers: Any, arrived: Any, numbers: Any, chunk: int):
        self.start, self.length, self.pools, self.buffers = start, length, pools, buffers
        self.arrived, self.numbers, self.chunk = arrived, numbers, chunk
        self.size, self.rows = buffers[0].shape[1], pools[0].shape[1]
        self.tile = tile_rows(buffers[0].dtype)

    def first(self, b, h):
        """First row of the tile in which a segment begins, i32."""
        return _whole(self.start[b, h], self.tile)

    def blocks(self, b, h):
        """Number of blocks that hold a segment's rows, i32; 0 for an empty one."""
        rows = self.start[b, h] - self.first(b, h) + self.length[b, h]
        return jnp.where(self.length[b, h] > 0, lax.div(rows + (self.size - 1), jnp.int32(self.size)), 0)

    def begin(self):
        """Points the ring at the first segment with rows, and begins the copies of AHEAD blocks."""
        for index in (2, 3, 4):
            self.numbers[index] = jnp.int32(0)
        self._point_at(jnp.int32(0), jnp.int32(0))
        lax.fori_loop(0, AHEAD, lambda index, _: self._begin_next(), None)

    def awaited(self, b, h, index):
        """Waits for a block and begins the copy of a later one; returns the buffer in which it lies, i32."""
        self._begin_next()
        done = self.numbers[4]
        self.numbers[4] = done + 1
        slot = lax.rem(done, jnp.int32(AHEAD + 1))
        self._each(b, h, index, slot, lambda copy: copy.wait())
        return slot

    def inside(self, b, h, index, shape):
        """Mask of a block's columns that are rows of the segment, and no rows twice."""
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        within = lax.rem(column, jnp.int32(self.chunk))
        begin = self.first(b, h) + index * self.size + (column - within)
        row = jnp.minimum(begin, self.rows - self.chunk) + within
        return (row >= jnp.maximum(begin, self.start[b, h])) & (row < self.start[b, h] + self.length[b, h])

    def _point_at(self, b, h):
        """Points the ring at the first segment with rows from the one of (b, h) on; at none, behind all sequences."""
        batch, heads = self.start.shape

        def empty(at):
            b, h = at
            return (b < batch) & (self.length[jnp.minimum(b, batch - 1), h] == 0)

        def after(at):
            b, h = at
            return jnp.where(h + 1 < heads, b, b + 1), jnp.where(h + 1 < heads, h + 1, 0)

        self.numbers[0], self.numbers[1] = lax.while_loop(empty, after, (b, h))

    def _begin_next(self):
        """Begins the copy of the block that is next in the ring, if any is left, and points at the one behind it."""
        b, h, index, copied = (self.numbers[each] for each in range(4))
        batch, heads = self.start.shape

        @tpu.when(b < batch)
        def _():
            self._each(b, h, index, lax.rem(copied, jnp.int32(AHEAD + 1)), lambda copy: copy.start())
            self.numbers[3] = copied + 1
            more = index + 1 < self.blocks(b, h)
            self.numbers[2] = jnp.where(more, index + 1, 0)

            @tpu.when(~more)
            def _():
                self._point_at(jnp.where(h + 1 < heads, b, b + 1), jnp.where(h + 1 < heads, h + 1, 0))

    def _each(self, b, h, index, slot, act):
        """Calls `act` on each copy of a block: chunks of keys and values, up to the last row of the segment."""
        first, end = self.first(b, h) + index * self.size, self.start[b, h] + self.length[b, h]
        for number in range(self.size // self.chunk):
            at = first + number * self.chunk

            # The last chunk of a pool begins earlier; rows that it has twice are masked.
            @tpu.when(at < end)
            def _(at=at, number=number):
                row = tpu.multiple_of(jnp.minimum(at, self.rows - self.chunk), self.tile)
                for pool, buffer in zip(self.pools, self.buffers, strict=True):
                    target = buffer.at[slot, tpu.ds(number * self.chunk, self.chunk)]
                    act(tpu.async_copy(pool.at[b, tpu.ds(row, self.chunk)], target, self.arrived.at[slot]))


class _NewRows:
    """New rows of sequences: their tiles are read, changed and written while other rows are multiplied."""

    def __init__(self, start: Any, length: Any, tables: Any, new: Any, pools: Any, tiles: Any, read: Any, wrote: Any):
        self.start, self.length, self.new, self.pools, self.tiles = start, length, new, pools, tiles
        self.counts, self.before, self.last = tables
        self.read, self.wrote, self.heads, self.tile = read, wrote, tiles.shape[2], tiles.shape[3]

    def append(self, b, sequences):
        """Puts a sequence's new rows into their tiles and begins to write them; begins to read the next one's."""
        mine = lax.rem(b, jnp.int32(2))

        @tpu.when(b == 0)
        def _():
            self._each_read(b, lambda copy: copy.start())

        self._each_read(b, lambda copy: copy.wait())

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, lambda h, _: self._change(b, h, mine), None)

        self._each_write(b, lambda copy: copy.start())

        # The tiles of the sequence after this one take the place of those of the one before.
        @tpu.when(b > 0)
        def _():
            self.finish(b - 1)

        @tpu.when(b + 1 < sequences)
        def _():
            self._each_read(b + 1, lambda copy: copy.start())

    def finish(self, b):
        """Waits until a sequence's new rows are written."""
        self._each_write(b, lambda copy: copy.wait())

    def _base(self, b, h):
        """First row of the tile of a segment's new row, i32."""
        return _whole(self.start[b, h] + self.length[b, h], self.tile)

    def _change(self, b, h, mine):
        """Puts a head's new key and value into its tile, or into the one that an earlier head has changed."""
        from_tile = jnp.where(self.before[b, h] < 0, h, self.before[b, h])
        row = self.start[b, h] + self.length[b, h] - self._base(b, h)
        for each, new in enumerate(self.new):
            old = self.tiles[mine, each, from_tile].astype(jnp.float32)
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == row
            self.tiles[mine, each, h] = jnp.where(here, new[0, h], old).astype(self.tiles.dtype)

    def _each_read(self, b, act):
        """Calls `act` on the copy of each head's tile from the pools; on none for an ended sequence."""
        mine = lax.rem(b, jnp.int32(2))

        def one(h, _):
            for each, pool in enumerate(self.pools):
                source = pool.at[b, tpu.ds(self._base(b, h), self.tile)]
                act(tpu.async_copy(source, self.tiles.at[mine, each, h], self.read.at[mine]))

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, one, None)

    def _each_write(self, b, act):
        """Calls `act` on the copy of each changed tile to the pools; on none for an ended sequence."""
        mine = lax.rem(b, jnp.int32(2))

        def one(h, _):
            @tpu.when(self.last[b, h] > 0)
            def _():
                for each, pool in enumerate(self.pools):
                    target = pool.at[b, tpu.ds(self._base(b, h), self.tile)]
                    act(tpu.async_copy(self.tiles.at[mine, each, h], target, self.wrote.at[mine]))

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, one, None)
