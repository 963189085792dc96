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
BLOCK = 1024
CHUNK = 256
# Numbers per sublane of a register.
LANES = 128
# Blocks in flight while one is multiplied: bytes in flight have to cover the latency of HBM.
AHEAD = 3


def find_tile_start(row, tile=TILE):
    """Return the first row, i32, of the tile of `tile` rows that contains a row."""
    return tpu.multiple_of(row & -tile, tile)


class BlockCopyRing:
    """Prefetcher: copies segments' blocks asynchronously from HBM to a ring of VMEM buffers, some ahead of use."""

    def __init__(self, start, length, pools, ring, *, chunk: int, unit: int = TILE):
        self.start = start
        self.length = length
        self.pools = pools
        self.buffers, self.arrived, self.numbers = ring
        self.chunk = chunk
        self.unit = unit
        buffers = self.buffers
        self.size = buffers[0].shape[1]
        self.rows = pools[0].shape[1]

    def find_first_row(self, b, h):
        """Return the first pool row copied for a segment, i32: its start, rounded down to a tile or larger unit."""
        return find_tile_start(self.start[b, h], self.unit)

    def count_blocks(self, b, h):
        """Return the number of blocks with a segment's rows, i32; 0 for an empty segment."""
        rows = self.start[b, h] - self.find_first_row(b, h) + self.length[b, h]
        return jnp.where(
            self.length[b, h] > 0, lax.div(rows + (self.size - 1), jnp.int32(self.size)), 0
        )

    def start_copies(self):
        """Start the copies of the first `AHEAD` blocks, from the first segment with entries on."""
        for index in (2, 3, 4):
            self.numbers[index] = jnp.int32(0)
        self._skip_empty_segments(jnp.int32(0), jnp.int32(0))
        lax.fori_loop(0, AHEAD, lambda index, _: self._start_next_copy(), None)

    def wait_for_block(self, b, h, index):
        """Start the copy of one more block, and wait for a segment's block `index`; return its buffer's index, i32."""
        self._start_next_copy()
        done = self.numbers[4]
        self.numbers[4] = done + 1
        slot = lax.rem(done, jnp.int32(AHEAD + 1))
        self._apply_to_copies(b, h, index, slot, lambda copy: copy.wait())
        return slot

    def mask_segment_rows(self, b, h, index, shape):
        """Return a mask of a block's columns: True for rows of the segment, without rows repeated by the last chunk."""
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        within = lax.rem(column, jnp.int32(self.chunk))
        begin = self.find_first_row(b, h) + index * self.size + (column - within)
        row = jnp.minimum(begin, self.rows - self.chunk) + within
        return (row >= jnp.maximum(begin, self.start[b, h])) & (
            row < self.start[b, h] + self.length[b, h]
        )

    def _skip_empty_segments(self, b, h):
        """Set the next segment to copy: the first with entries from (b, h) on; past the last sequence if none."""
        batch, heads = self.start.shape

        def empty(at):
            b, h = at
            return (b < batch) & (self.length[jnp.minimum(b, batch - 1), h] == 0)

        def after(at):
            b, h = at
            return jnp.where(h + 1 < heads, b, b + 1), jnp.where(h + 1 < heads, h + 1, 0)

        self.numbers[0], self.numbers[1] = lax.while_loop(empty, after, (b, h))

    def _start_next_copy(self):
        """Start the copy of the next block, if any is left, and advance to the one after it."""
        b, h, index, copied = (self.numbers[each] for each in range(4))
        batch, heads = self.start.shape

        @tpu.when(b < batch)
        def _():
            self._apply_to_copies(
                b, h, index, lax.rem(copied, jnp.int32(AHEAD + 1)), lambda copy: copy.start()
            )
            self.numbers[3] = copied + 1
            more = index + 1 < self.count_blocks(b, h)
            self.numbers[2] = jnp.where(more, index + 1, 0)

            @tpu.when(~more)
            def _():
                self._skip_empty_segments(
                    jnp.where(h + 1 < heads, b, b + 1), jnp.where(h + 1 < heads, h + 1, 0)
                )

    def list_block_chunks(self, b, h, index):
        """Return for each chunk of a block its first pool row, and whether the segment has rows in it.

        The last chunk of a pool begins earlier; repeated rows are masked.
        """
        first = self.find_first_row(b, h) + index * self.size
        end = self.start[b, h] + self.length[b, h]
        begins = [first + number * self.chunk for number in range(self.size // self.chunk)]
        rows = [tpu.multiple_of(jnp.minimum(at, self.rows - self.chunk), TILE) for at in begins]
        return [(row, at < end) for row, at in zip(rows, begins, strict=True)]

    def _apply_to_copies(self, b, h, index, slot, act):
        """Call `act`, which starts or waits, on the copies of each chunk of a block with rows of the segment."""
        for number, (row, some) in enumerate(self.list_block_chunks(b, h, index)):

            @tpu.when(some)
            def _(row=row, number=number):
                for pool, buffer in zip(self.pools, self.buffers, strict=True):
                    target = buffer.at[slot, tpu.ds(number * self.chunk, self.chunk)]
                    act(
                        tpu.async_copy(
                            pool.at[b, tpu.ds(row, self.chunk)], target, self.arrived.at[slot]
                        )
                    )


class EntryAppender:
    """Writer of new entries on a TPU: reads HBM tiles, inserts entries and writes tiles back, asynchronously."""

    def __init__(self, start, length, tables, new, pools, tiles, read, wrote):
        self.start = start
        self.length = length
        self.new = new
        self.pools = pools
        self.tiles = tiles
        self.counts, self.before, self.last = tables
        self.read = read
        self.wrote = wrote
        self.heads, self.tile = tiles.shape[2:4]

    def append_entries(self, b, sequences):
        """Put a sequence's new entries in their tiles, start to write them, and start to read the next sequence's."""
        mine = lax.rem(b, jnp.int32(2))

        @tpu.when(b == 0)
        def _():
            self._apply_to_reads(b, lambda copy: copy.start())

        self._apply_to_reads(b, lambda copy: copy.wait())

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, lambda h, _: self._insert_entry(b, h, mine), None)

        self._apply_to_writes(b, lambda copy: copy.start())

        # Tiles of the next sequence overwrite those of the previous one.
        @tpu.when(b > 0)
        def _():
            self.wait_for_writes(b - 1)

        @tpu.when(b + 1 < sequences)
        def _():
            self._apply_to_reads(b + 1, lambda copy: copy.start())

    def wait_for_writes(self, b):
        """Wait until the tiles with a sequence's new entries are written to HBM."""
        self._apply_to_writes(b, lambda copy: copy.wait())

    def _find_entry_tile(self, b, h):
        """Return the first pool row, i32, of the tile that contains a segment's new entry."""
        return find_tile_start(self.start[b, h] + self.length[b, h], self.tile)

    def _insert_entry(self, b, h, mine):
        """Write a head's new key and value in its VMEM tile, based on an earlier head's copy of that tile, if any."""
        from_tile = jnp.where(self.before[b, h] < 0, h, self.before[b, h])
        row = self.start[b, h] + self.length[b, h] - self._find_entry_tile(b, h)
        for each, new in enumerate(self.new):
            old = self.tiles[mine, each, from_tile].astype(jnp.float32)
            here = lax.broadcasted_iota(jnp.int32, old.shape, 0) == row
            self.tiles[mine, each, h] = jnp.where(here, new[0, h], old).astype(self.tiles.dtype)

    def _apply_to_reads(self, b, act):
        """Call `act` on the copy from HBM of each head's tile; on none if the sequence is finished."""
        mine = lax.rem(b, jnp.int32(2))

        def one(h, _):
            for pool, tile in self._yield_tile_refs(b, h, mine):
                act(tpu.async_copy(pool, tile, self.read.at[mine]))

        self._loop_over_heads(b, one)

    def _apply_to_writes(self, b, act):
        """Call `act` on the copy to HBM of each changed tile, once per tile; on none if the sequence is finished."""
        mine = lax.rem(b, jnp.int32(2))

        def one(h, _):
            @tpu.when(self.last[b, h] > 0)
            def _():
                for pool, tile in self._yield_tile_refs(b, h, mine):
                    act(tpu.async_copy(tile, pool, self.wrote.at[mine]))

        self._loop_over_heads(b, one)

    def _loop_over_heads(self, b, one):
        """Call `one` for each kv head in a loop, unless the sequence is finished."""

        @tpu.when(self.counts[b] > 0)
        def _():
            lax.fori_loop(0, self.heads, one, None)

    def _yield_tile_refs(self, b, h, mine):
        """Yield (HBM ref, VMEM ref) of the tile of a head's new key, and of that of its value."""
        for each, pool in enumerate(self.pools):
            there = pool.at[b, tpu.ds(self._find_entry_tile(b, h), self.tile)]
            yield there, self.tiles.at[mine, each, h]
