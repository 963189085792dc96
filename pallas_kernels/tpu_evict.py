"""Eviction in place for TPUs: the newest row of a segment takes the evicted one's place, and no pool is copied.

One kernel finds the evicted rows, by positions and scores that fit VMEM, and moves these; another moves keys and
values: of each segment it reads two tiles of rows, the evicted row's and the newest one's, and writes the former.
"""

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

from . import _compat_tpu as tpu
from .tpu_rows import TILE, whole_tile

# Sequences whose rows are ranked at once: the sublanes of a register.
_SEQUENCES = 8
# Rows of them that are ranked at once, two registers for each number that is known of a row, and trips of that loop
# that are written one behind the other: more would not fit the registers, fewer would wait for results.
_AT_ONCE, _UNROLLED = 256, 4
# Rows of a pool, at most, whose positions and scores VMEM holds for as many sequences: 8 MB with second buffers.
_MOST_ROWS = 1 << 15
# Bytes of tiles in VMEM at once.
_TILES = 4 << 20


def takes(pool_rows: int) -> bool:
    """True if VMEM holds positions and scores of pools of so many rows."""
    return pool_rows <= _MOST_ROWS


@partial(jax.jit, static_argnames=("weigh", "interpret"))
def evict_rows(
    k: jax.Array,
    v: jax.Array,
    pos: jax.Array,
    score: jax.Array | None,
    start: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    recent: jax.Array,
    seen: jax.Array,
    prompt: jax.Array,
    *,
    weigh: Callable[..., tuple[jax.Array, jax.Array]],
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Evicts the lowest-ranked row of segments over their limit for the newest; returns the pool, and 1 where evicted.

    Args:
        k: `[B, P, D]` pool rows, bfloat16 or float32; P is a multiple of 8; written in place if donated, as all leaves.
        v: `[B, P, D]` likewise.
        pos: `i32[B, P]` positions, distinct within a segment.
        score: `f32[B, P]`, or None.
        start: `i32[B, K]` first row of each segment; it ascends over heads.
        length: `i32[B, K]` its rows; the last one is the newest.
        limit: `i32[B, K]` rows that may stay.
        recent: `i32[B, K]` newest positions that always stay.
        seen: `i32[B]` tokens seen.
        prompt: `i32[B]` tokens of the prompt.
        weigh: hashable function of rows' scores (0 without any), positions, seen and prompt, traced inside the kernel;
            returns float32 ranks, of which the lowest goes and of equal ones the latest, and the evictable rows.
        interpret: run on any device, to check it.

    Returns:
        Keys, values, positions (-1 in the newest row's old place), scores (0 there), and `i32[B, K]` 1 where a row was
        evicted.
    """
    (batch, heads), rows = start.shape, pos.shape[1]
    leaves = (pos,) if score is None else (pos, score)
    some = min(batch, _SEQUENCES)
    by_head, column, by_row = (
        tpu.block((some, width), lambda b, _: (b, 0)) for width in (heads, 1, rows)
    )
    table = jax.ShapeDtypeStruct(start.shape, jnp.int32)
    *moved, place, went = tpu.call(
        partial(_rank, weigh=weigh, leaves=len(leaves)),
        (),
        (start, length, limit, recent, seen[:, None], prompt[:, None], *leaves),
        name="tpu_rank",
        grid=(-(-batch // some), 1),
        given=[by_head] * 4 + [column] * 2 + [by_row] * len(leaves),
        made=[by_row] * len(leaves) + [by_head] * 2,
        shapes=[*(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in leaves), table, table],
        scratch=[],
        in_place={6 + index: index for index in range(len(leaves))},
        interpret=interpret,
    )
    k, v = _moved(k, v, place, start + length - 1, went, interpret)
    return k, v, moved[0], moved[1] if score is not None else None, went


@partial(jax.jit, static_argnames=("interpret",))
def replace_rows(
    k: jax.Array,
    v: jax.Array,
    pos: jax.Array,
    score: jax.Array | None,
    place: jax.Array,
    last: jax.Array,
    over: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Moves row `last` of each segment in mask `over` to row `place`, and empties its old row; returns the pool.

    Args:
        k: `[B, P, D]` pool rows, bfloat16 or float32; P is a multiple of 8; written in place if donated, as all leaves.
        v: `[B, P, D]` likewise.
        pos: `i32[B, P]` positions.
        score: `f32[B, P]`, or None.
        place: `i32[B, K]` row that is overwritten; where rows are, it ascends over heads.
        last: `i32[B, K]` row that is moved.
        over: `bool[B, K]` segments in which a row is moved; the others stay unchanged.
        interpret: run on any device, to check it.

    Returns:
        Keys, values, positions (-1 in the moved row's old place) and scores (0 there).
    """
    k, v = _moved(k, v, place, last, over.astype(jnp.int32), interpret)
    index = jnp.arange(len(pos), dtype=jnp.int32)[:, None]

    def cells(leaf, empty):
        """Array of positions or scores with each last row's cell moved, and `empty` in its old place."""
        newest = jnp.take_along_axis(leaf, last, axis=1)
        for row, new in ((place, newest), (last, jnp.full_like(newest, empty))):
            leaf = leaf.at[index, jnp.where(over, row, leaf.shape[1])].set(
                new, mode="drop", unique_indices=True
            )
        return leaf

    return k, v, cells(pos, -1), None if score is None else cells(score, 0)


def _moved(k, v, place, last, over, interpret):
    """Keys and values with row `last` of segments where `over` is 1 moved to row `place`, by a kernel."""
    (batch, heads), dim = place.shape, k.shape[2]
    most = max(1, _TILES // (4 * heads * TILE * dim * k.dtype.itemsize))
    some = next(size for size in range(min(batch, most), 0, -1) if batch % size == 0)
    return tpu.call(
        partial(_move, some=some),
        (place, last, over),
        (k, v),
        name="tpu_move",
        grid=(batch // some, 1),
        given=[tpu.in_hbm()] * 2,
        made=[tpu.in_hbm()] * 2,
        shapes=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v)],
        scratch=[
            tpu.vmem((2, 2, some * heads, TILE, dim), k.dtype),
            tpu.smem((some * heads,), jnp.int32),
            tpu.semaphores((2,)),
        ],
        in_place={0: 0, 1: 1},
        interpret=interpret,
    )


# Refs: inputs start, length, limit and recent i32[N, K], seen and prompt i32[N, 1], positions i32[N, P] and scores
# f32[N, P] of N sequences; outputs the latter two, places i32[N, K], and 1 where a row goes, i32[N, K].
def _rank(*refs, weigh, leaves):
    """Finds the row that each segment over its limit loses, and moves position and score of the newest row there."""
    start, length, limit, recent, seen, prompt, *refs = refs
    given, moved, (place_ref, went_ref) = (
        refs[:leaves],
        refs[leaves : 2 * leaves],
        refs[2 * leaves :],
    )
    for old, new in zip(given, moved, strict=True):
        new[...] = old[...]
    place_ref[...] = jnp.full(place_ref.shape, -1, jnp.int32)
    went_ref[...] = jnp.zeros(went_ref.shape, jnp.int32)
    head = lax.broadcasted_iota(jnp.int32, start.shape, 1)
    parts = _parts(moved[0].shape[1])

    def one(h, _):
        """Loop body: one head of all sequences."""

        def of(table):
            return jnp.where(head == h, table[...], 0).sum(axis=1, keepdims=True)

        first, rows, limited = of(start), of(length), of(length) > of(limit)
        last, until = first + rows - 1, seen[...] - of(recent)

        def chosen(at, size, found):
            """Loop body: of each lane the lowest rank of some rows or of those before, its position and row; newest."""
            values = [leaf[:, tpu.ds(at, size)] for leaf in moved]
            pos, scores = (
                values[0],
                values[1] if leaves > 1 else jnp.zeros(values[0].shape, jnp.float32),
            )
            row = at + lax.broadcasted_iota(jnp.int32, pos.shape, 1)
            ranks, may = weigh(scores, pos, seen[...], prompt[...])
            free = (row >= first) & (row <= last) & may & (pos < until) & limited
            rank, latest, place, *newest = found
            wins = free & ((ranks < rank) | ((ranks == rank) & (pos > latest)))
            best = (
                jnp.where(wins, new, old)
                for new, old in zip((ranks, pos, row), (rank, latest, place), strict=True)
            )
            return *best, *(
                jnp.where(row == last, new, old) for new, old in zip(values, newest, strict=True)
            )

        def none(size):
            """Start of the search: infinite ranks, no position, no row; zeros for the newest row's."""
            shape = (start.shape[0], size)
            integers = (jnp.full(shape, -1, jnp.int32),) * 2
            return (
                jnp.full(shape, jnp.inf),
                *integers,
                *(jnp.zeros(shape, leaf.dtype) for leaf in moved),
            )

        found = [_each(begin, end, size, chosen, none(size)) for begin, end, size in parts]
        low = reduce(jnp.minimum, (rank.min(axis=1, keepdims=True) for rank, *_ in found))
        latest = _most(jnp.where(rank == low, pos, -1) for rank, pos, *_ in found)
        place = _most(
            jnp.where((rank == low) & (pos == latest), row, -1) for rank, pos, row, *_ in found
        )
        newest = [
            sum(each[3 + leaf].sum(axis=1, keepdims=True) for each in found)
            for leaf in range(leaves)
        ]
        goes = place >= 0

        def write(at, size, _):
            """Loop body: some rows with the newest row's position and score in the evicted one's place."""
            row = at + lax.broadcasted_iota(jnp.int32, (start.shape[0], size), 1)
            for leaf, new, empty in zip(moved, newest, (-1, 0), strict=False):
                values = jnp.where(goes & (row == place), new, leaf[:, tpu.ds(at, size)])
                # Last, because the newest row may itself be the evicted one.
                leaf[:, tpu.ds(at, size)] = jnp.where(goes & (row == last), empty, values).astype(
                    leaf.dtype
                )

        for begin, end, size in parts:
            _each(begin, end, size, write, None)
        place_ref[...] = jnp.where(head == h, place, place_ref[...])
        went_ref[...] = jnp.where(head == h, goes.astype(jnp.int32), went_ref[...])

    lax.fori_loop(0, start.shape[1], one, None)


def _parts(lanes):
    """List of (first, end, size): rows from first to end in blocks of a size; registers hold what a block takes."""
    whole = lanes // _AT_ONCE * _AT_ONCE
    parts = (0, whole, _AT_ONCE), (whole, lanes, lanes - whole)
    return [part for part in parts if part[0] < part[1]]


def _each(begin, end, size, act, carry):
    """Calls `act(first row, size, carry)` for each block of rows; returns the last carry."""
    if end - begin == size:
        return act(begin, size, carry)
    return lax.fori_loop(
        0,
        (end - begin) // size,
        lambda index, carry: act(tpu.multiple_of(index * size, size), size, carry),
        carry,
        unroll=_UNROLLED,
    )


def _most(arrays):
    """Largest number of each sequence in arrays `[N, n]`, `[N, 1]`."""
    return reduce(jnp.maximum, (each.max(axis=1, keepdims=True) for each in arrays))


# Refs: in scalar memory place, last and over i32[B, K]; keys and values [B, P, D] in HBM, twice: the outputs are the
# inputs. Scratch: tiles [evicted and newest, keys and values, segments, TILE, D], for each segment the index of the one
# whose tile it changes, and a semaphore for reads and one for writes.
def _move(place, last, over, k_in, v_in, k_out, v_out, tiles, owner, done, *, some):
    """Moves a row of each segment of `some` sequences: reads all tiles, changes those of evicted rows, writes them."""
    first, heads = tpu.program_id(0) * some, place.shape[1]
    ends = (place, last)

    def each(act):
        """Calls `act` with sequence, head and index of each segment in which a row moves."""

        def one(index, _):
            b, h = first + lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))

            @tpu.when(over[b, h] > 0)
            def _():
                act(b, h, index)

        lax.fori_loop(0, some * heads, one, None)

    def read(b, h, index, act):
        for end, table in enumerate(ends):
            for leaf, pool in enumerate((k_in, v_in)):
                source = pool.at[b, tpu.ds(whole_tile(table[b, h]), TILE)]
                act(tpu.async_copy(source, tiles.at[end, leaf, index], done.at[0]))

    def write(b, h, index, act):
        @tpu.when(owner[index] == index)
        def _():
            for leaf, pool in enumerate((k_out, v_out)):
                target = pool.at[b, tpu.ds(whole_tile(place[b, h]), TILE)]
                act(tpu.async_copy(tiles.at[0, leaf, index], target, done.at[1]))

    def change(index, before):
        """Loop body: puts a segment's newest row into its tile, or into the one of the last changed segment `before`.

        Rows ascend over the segments of a sequence: those in one tile follow one another.
        """
        b, h = first + lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))
        moves = over[b, h] > 0
        other, tile = before
        mine = whole_tile(place[b, h])
        slot = jnp.where((tile == mine) & (other >= index - h), other, index)

        @tpu.when(moves)
        def _():
            owner[index] = slot
            for leaf in range(2):
                old, new = (
                    tiles[end, leaf, at].astype(jnp.float32) for end, at in ((0, slot), (1, index))
                )
                row = lax.broadcasted_iota(jnp.int32, old.shape, 0)
                newest = jnp.where(row == last[b, h] & (TILE - 1), new, 0.0).sum(
                    axis=0, keepdims=True
                )
                tiles[0, leaf, slot] = jnp.where(
                    row == place[b, h] & (TILE - 1), newest, old
                ).astype(tiles.dtype)

        return jnp.where(moves, slot, other), jnp.where(moves, mine, tile)

    each(lambda *of: read(*of, lambda copy: copy.start()))
    each(lambda *of: read(*of, lambda copy: copy.wait()))
    lax.fori_loop(0, some * heads, change, (jnp.int32(-1), jnp.int32(-1)))
    each(lambda *of: write(*of, lambda copy: copy.start()))
    each(lambda *of: write(*of, lambda copy: copy.wait()))
