"""Transfers of pool rows between HBM and VMEM on a TPU: blocks of segments in a ring buffer, and changed tiles.

HBM is read and written in tiles of `TILE` rows of any dtype. A segment that begins inside a tile is copied from the
tile's first row on, and rows of other segments are masked. An entry is written with the rows around it, as a tile.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import _compat_tpu as tpu

# Rows of an HBM tile, of 16 and of 32 bits.
TILE = 8
# Rows per product, and rows per copy.
BLOCK, CHUNK = 1024, 256
# Numbers per sublane of a register.
LANES = 128
# Blocks in flight while one is multiplied: bytes in flight have to cover the latency of HBM.
AHEAD = 3


def whole_tile(row, tile=TILE):
    """Return the first row of the tile of a row, i32."""
    return tpu.multiple_of(row & -tile, tile)


class Copies:
    """Copies of segments' blocks from HBM into a ring of VMEM buffers, in the order of their products."""

    def __init__(self, start, length, pools, ring, *, chunk: int, unit: int = TILE):
        self.start, self.length, self.pools, (self.buffers, self.arrived, self.numbers) = (
            start,
            length,
            pools,
            ring,
        )
        self.chunk, self.unit, buffers = chunk, unit, self.buffers
        self.size, self.rows = buffers[0].shape[1], pools[0].shape[1]

    def first(self, b, h):
        """Return the first row of the tile, or of the unit of more rows, in which a segment begins, i32."""
        return whole_tile(self.start[b, h], self.unit)

    def blocks(self, b, h):
        """Return the number of blocks with a segment's rows, i32; 0 for an empty segment."""
        rows = self.start[b, h] - self.first(b, h) + self.length[b, h]
        return jnp.where(
            self.length[b, h] > 0, lax.div(rows + (self.size - 1), jnp.int32(self.size)), 0
        )

    def begin(self):
        """Point the ring at the first non-empty segment, and start the copies of AHEAD blocks."""
        for index in (2, 3, 4):
            self.numbers[index] = jnp.int32(0)
        self._point_at(jnp.int32(0), jnp.int32(0))
        lax.fori_loop(0, AHEAD, lambda index, _: self._begin_next(), None)

    def awaited(self, b, h, index):
        """Wait for a block and start the copy of a later one; return the index of the block's buffer, i32."""
        self._begin_next()
        done = self.numbers[4]
        self.numbers[4] = done + 1
        slot = lax.rem(done, jnp.int32(AHEAD + 1))
        self._each(b, h, index, slot, lambda copy: copy.wait())
        return slot

    def inside(self, b, h, index, shape):
        """Mask of a block's columns that are rows of the segment, without repeated rows."""
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        within = lax.rem(column, jnp.int32(self.chunk))
        begin = self.first(b, h) + index * self.size + (column - within)
        row = jnp.minimum(begin, self.rows - self.chunk) + within
        return (row >= jnp.maximum(begin, self.start[b, h])) & (
            row < self.start[b, h] + self.length[b, h]
        )

    def _point_at(self, b, h):
        """Point the ring at the first non-empty segment from (b, h) on; without one, past all sequences."""
        batch, heads = self.start.shape

        def empty(at):
            b, h = at
            return (b < batch) & (self.length[jnp.minimum(b, batch - 1), h] == 0)

        def after(at):
            b, h = at
            return jnp.where(h + 1 < heads, b, b + 1), jnp.where(h + 1 < heads, h + 1, 0)

        self.numbers[0], self.numbers[1] = lax.while_loop(empty, after, (b, h))

    def _begin_next(self):
        """Start the copy of the next block in the ring, if any is left, and advance the ring."""
        b, h, index, copied = (self.numbers[each] for each in range(4))
        batch, heads = self.start.shape

        @tpu.when(b < batch)
        def _():
            self._each(
                b, h, index, lax.rem(copied, jnp.int32(AHEAD + 1)), lambda copy: copy.start()
            )
            self.numbers[3] = copied + 1
            more = index + 1 < self.blocks(b, h)
            self.numbers[2] = jnp.where(more, index + 1, 0)

            @tpu.when(~more)
            def _():
                self._point_at(
                    jnp.where(h + 1 < heads, b, b + 1), jnp.where(h + 1 < heads, h + 1, 0)
                )

    def chunks(self, b, h, index):
        """List for each chunk of a block its first pool row, and whether the segment has rows there.

        The last chunk of a pool begins earlier; repeated rows are masked.
        """
        first, end = self.first(b, h) + index * self.size, self.start[b, h] + self.length[b, h]
        begins = [first + number * self.chunk for number in range(self.size // self.chunk)]
        rows = [tpu.multiple_of(jnp.minimum(at, self.rows - self.chunk), TILE) for at in begins]
        return [(row, at < end) for row, at in zip(rows, begins, strict=True)]

    def _each(self, b, h, index, slot, act):
        """Call `act` on each copy of a block: chunks of keys and values, up to the last row of the segment."""
        for number, (row, some) in enumerate(self.chunks(b, h, index)):

            @tpu.when(some)
            def _(row=row, number=number):
                for pool, buffer in zip(self.pools, self.buffers, strict=True):
                    target = buffer.at[slot, tpu.ds(number * self.chunk, self.chunk)]
                    act(
                        tpu.async_copy(
                            pool.at[b, tpu.ds(row, self.chunk)], target, self.arrived.at[slot]
                        )
                    )


class NewEntries:
    """New entries of sequences: their tiles are read, changed and written during the products of other rows."""

    def __init__(self, start, length, tables, new, pools, tiles, read, wrote):
        self.start, self.length, self.new, self.pools, self.tiles = start, length, new, pools, tiles
        self.counts, self.before, self.last = tables
        self.read, self.wrote, (self.heads, self.tile) = read, wrote, tiles.shape[2:4]

    def append(self, b, sequences):
        """Put a sequence's new entries into their tiles and start to write them; start to read the next sequence's."""
        mine = lax.rem(b, jnp.int32(2))

        @tpu.when(b == 0)
        def _():
            self._each_read(b, lambda copy: copy.start())

        self._each_read(b, lambda copy: copy.wait())

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, lambda h, _: self._change(b, h, mine), None)

        self._each_write(b, lambda copy: copy.start())

        # Tiles of the next sequence overwrite those of the previous one.
        @tpu.when(b > 0)
        def _():
            self.finish(b - 1)

        @tpu.when(b + 1 < sequences)
        def _():
            self._each_read(b + 1, lambda copy: copy.start())

    def finish(self, b):
        """Wait until a sequence's new entries are written."""
        self._each_write(b, lambda copy: copy.wait())

    def _base(self, b, h):
        """Return the first row of the tile of a segment's new entry, i32."""
        return whole_tile(self.start[b, h] + self.length[b, h], self.tile)

    def _change(self, b, h, mine):
        """Write a head's new key and value to its tile, starting from an earlier head's copy of that tile, if any."""
        from_tile = jnp.where(self.before[b, h] < 0, h, self.before[b, h])
        row = self.start[b, h] + self.length[b, h] - self._base(b, h)
        for each, new in enumerate(self.new):
            old = self.tiles[mine, each, from_tile].astype(jnp.float32)
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == row
            self.tiles[mine, each, h] = jnp.where(here, new[0, h], old).astype(self.tiles.dtype)

    def _each_read(self, b, act):
        """Call `act` on the copy of each head's tile from the pools; on none for a finished sequence."""
        mine = lax.rem(b, jnp.int32(2))

        def one(h, _):
            for pool, tile in self._places(b, h, mine):
                act(tpu.async_copy(pool, tile, self.read.at[mine]))

        self._each_head(b, one)

    def _each_write(self, b, act):
        """Call `act` on the copy of each changed tile to the pools; on none for a finished sequence."""
        mine = lax.rem(b, jnp.int32(2))

        def one(h, _):
            @tpu.when(self.last[b, h] > 0)
            def _():
                for pool, tile in self._places(b, h, mine):
                    act(tpu.async_copy(tile, pool, self.wrote.at[mine]))

        self._each_head(b, one)

    def _each_head(self, b, one):
        """Call `one` for each head, unless the sequence is finished."""

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, one, None)

    def _places(self, b, h, mine):
        """Yield the locations of a head's tile in the pools and in VMEM, of keys and of values."""
        for each, pool in enumerate(self.pools):
            there = pool.at[b, tpu.ds(self._base(b, h), self.tile)]
            yield there, self.tiles.at[mine, each, h]
