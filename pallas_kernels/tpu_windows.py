"""Windows of a pool that all layers share, for TPUs: a row of numbers for each segment, wherever it lies in the pool.

A window begins at the tile in which its segment begins (or with the last `CHUNK` rows of the pool, if that is behind
their first), and has as many numbers as the widest segment may need. One
kernel takes windows of positions or scores out of the pool, another adds windows of attention to scores, and a third
makes windows of cosines: it reads keys as the decode kernel does. What follows is then a reduction over windows, which
XLA computes at once; by itself it would walk segments in loops, and take each window in a trip of its own::

    pool          |  head 0, layer 0   |h1|  head 2    | ...  | head 7, layer 31 |
    windows       [  rows of head 0    |h1|  h] [h1|  head 2    |  ] ...            one below the other, [B, S, n]
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from . import _compat_tpu as tpu
from .tpu_rows import AHEAD, CHUNK, LANES, Copies, blocks_of, width, window_at

_SUBLANES = 8
# Rows of a pool, at most, whose positions or scores VMEM holds for one sequence; and segments of all sequences, whose
# tables scalar memory holds.
_MOST_ROWS, _MOST_SEGMENTS = 1 << 20, 1 << 16
# Numbers of windows in VMEM at once, at most: 2 MB, with a second buffer.
_MOST_NUMBERS = 1 << 19


def takes(pool_rows: int, batch: int, segments: int, widest: int) -> bool:
    """True if VMEM holds a sequence's positions or scores and some windows, and scalar memory all segments' tables."""
    fits = (
        pool_rows <= _MOST_ROWS and _at_once(segments) * width(widest, pool_rows) <= _MOST_NUMBERS
    )
    return fits and batch * segments <= _MOST_SEGMENTS


@partial(jax.jit, static_argnames=("widest", "interpret"))
def take(
    leaf: jax.Array, start: jax.Array, *, widest: int, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Copies windows out of a pool's positions or scores; returns first rows, and windows.

    Args:
        leaf: `[B, P]` numbers of 32 bits.
        start: `i32[B, S]` first row of each segment.
        widest: most rows of a segment.
        interpret: run on any device, to check it.

    Returns:
        `i32[B, S]` first row of each window, and `[B, S, n]` in the leaf's dtype, undefined outside of the segments.
    """
    (batch, segments), size = start.shape, width(widest, leaf.shape[1])
    line, heads = _line(leaf, size), _at_once(segments)
    (found,) = tpu.call(
        partial(_take, rows=leaf.shape[1]),
        (start,),
        (line,),
        name="tpu_windows",
        grid=(batch, segments // heads),
        given=[tpu.in_hbm()],
        made=[tpu.block((1, heads, size), lambda b, part: (b, part, 0))],
        shapes=[jax.ShapeDtypeStruct((batch, segments, size), leaf.dtype)],
        scratch=[tpu.vmem((1, *line.shape[1:]), leaf.dtype), tpu.semaphores((1,))],
        in_place={},
        interpret=interpret,
    )
    return window_at(start, leaf.shape[1]), found


@partial(jax.jit, static_argnames=("interpret",))
def add(leaf: jax.Array, start: jax.Array, new: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Adds windows to a pool's scores; returns the scores.

    Args:
        leaf: `f32[B, P]` scores.
        start: `i32[B, S]` first row of each segment.
        new: `f32[B, S, n]` windows from row `tpu_rows.window_at` on, n from `tpu_rows.width`; 0 outside of the
            segments.
        interpret: run on any device, to check it.

    Returns:
        `f32[B, P]`.
    """
    (batch, segments, size), line = new.shape, _line(leaf, new.shape[2])
    heads = _at_once(segments)
    (found,) = tpu.call(
        partial(_add, rows=leaf.shape[1]),
        (start,),
        (line, new),
        name="tpu_add",
        grid=(batch, segments // heads),
        given=[tpu.in_hbm(), tpu.block((1, heads, size), lambda b, part: (b, part, 0))],
        made=[tpu.in_hbm()],
        shapes=[jax.ShapeDtypeStruct(line.shape, line.dtype)],
        scratch=[tpu.vmem((1, *line.shape[1:]), leaf.dtype), tpu.semaphores((1,))],
        in_place={0: 0},
        interpret=interpret,
    )
    return found[:, 0, : leaf.shape[1]]


@partial(jax.jit, static_argnames=("widest", "interpret"))
def cosines(
    rows: jax.Array,
    of: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    widest: int,
    interpret: bool = False,
) -> jax.Array:
    """Compares a vector per segment with the segment's rows; returns windows of their cosines.

    Args:
        rows: `[B, P, D]` keys or values of a pool, bfloat16 or float32; P is a multiple of 8.
        of: `[B, S, D]` vectors, which are rounded to the rows' dtype.
        start: `i32[B, S]` first row of each segment.
        length: `i32[B, S]` its rows.
        widest: most rows of a segment.
        interpret: run on any device, to check it.

    Returns:
        `f32[B, S, n]` from row `tpu_rows.window_at` on, 0 outside of the segments; norms are 1e-6 at least.
    """
    (batch, segments), dim = start.shape, rows.shape[2]
    chunk, lanes = min(CHUNK, rows.shape[1]), width(widest, rows.shape[1])
    some, (_, size) = _at_once(segments), blocks_of(widest, rows.shape[1])
    (found,) = tpu.call(
        partial(_compare, chunk=chunk),
        (start, length),
        (of.astype(rows.dtype).astype(jnp.float32)[:, :, None], rows),
        name="tpu_cosines",
        grid=(batch, segments),
        given=[tpu.block((1, 1, 1, dim), lambda b, s: (b, s, 0, 0)), tpu.in_hbm()],
        made=[tpu.block((1, some, lanes), lambda b, s: (b, lax.div(s, jnp.int32(some)), 0))],
        shapes=[jax.ShapeDtypeStruct((batch, segments, lanes), jnp.float32)],
        scratch=[
            tpu.vmem((AHEAD + 1, size, dim), rows.dtype),
            tpu.semaphores((AHEAD + 1,)),
            tpu.smem((5,), jnp.int32),
        ],
        in_place={},
        interpret=interpret,
    )
    return found


def _at_once(segments):
    """Number of segments whose windows lie together in VMEM: whole tiles of them, or all."""
    return segments if segments % _SUBLANES else _SUBLANES


def _line(leaf, size):
    """Numbers `[B, 1, n]` of each sequence's rows, with room behind the last row for a window and a register."""
    lanes = -(-leaf.shape[1] // LANES) * LANES + size + LANES
    return jnp.pad(leaf, ((0, 0), (0, lanes - leaf.shape[1])))[:, None]


# Refs: in scalar memory `start` [B, S]; the pool's numbers [B, 1, n] in HBM; windows [1, heads, size]. Scratch:
# numbers of a sequence [1, 1, n], and a semaphore.
def _take(start, leaf, found, line, done, *, rows):
    """Copies the windows of some segments out of a sequence's numbers, which its first program reads."""
    b, part, heads, size = tpu.program_id(0), tpu.program_id(1), found.shape[1], found.shape[2]
    tpu.when(part == 0)(lambda: _copied(leaf.at[tpu.ds(b, 1)], line, done))

    def one(h, _):
        first = window_at(start[b, part * heads + h], rows)
        ahead = first & (LANES - 1)
        wide = line[0, :, tpu.ds(tpu.multiple_of(first - ahead, LANES), size + LANES)]
        found[0, tpu.ds(h, 1)] = tpu.roll(
            wide, lax.rem(size + LANES - ahead, jnp.int32(size + LANES)), 1
        )[:, :size]

    lax.fori_loop(0, heads, one, None)


# Refs: as those of `_take`, with windows between the pool's numbers and where these are written.
def _add(start, leaf, new, out, line, done, *, rows):
    """Adds the windows of some segments to a sequence's numbers, which its last program writes."""
    b, part, heads = tpu.program_id(0), tpu.program_id(1), new.shape[1]
    tpu.when(part == 0)(lambda: _copied(leaf.at[tpu.ds(b, 1)], line, done))

    def one(h, _):
        mine = jnp.pad(new[0, tpu.ds(h, 1)], ((0, 0), (0, LANES)))
        tpu.add_lanes(line, window_at(start[b, part * heads + h], rows), mine)

    lax.fori_loop(0, heads, one, None)
    last = start.shape[1] // heads - 1
    tpu.when(part == last)(lambda: _copied(line, out.at[tpu.ds(b, 1)], done))


def _copied(source, target, done):
    """Copies numbers between HBM and VMEM, and waits."""
    copy = tpu.async_copy(source, target, done.at[0])
    copy.start()
    copy.wait()


# Refs: in scalar memory `start` and `length` [B, S]; the vector f32[1, 1, 1, D] of the program's segment, and the pool
# [B, P, D] in HBM; windows f32[1, heads, n], its own among them. Scratch: blocks of rows, their semaphores and numbers,
# as in `tpu_decode`.
def _compare(start, length, of_ref, pool, found, buffer, arrived, numbers, *, chunk):
    """Writes the cosines of a segment's rows with its vector; begins copies of later blocks."""
    b, s = tpu.program_id(0), tpu.program_id(1)
    copies = Copies(start, length, (pool,), ((buffer,), arrived, numbers), chunk=chunk)
    tpu.when((b == 0) & (s == 0))(copies.begin)
    mine = lax.rem(s, jnp.int32(found.shape[1]))
    found[0, tpu.ds(mine, 1)] = jnp.zeros((1, found.shape[2]), found.dtype)
    narrow = buffer.dtype != jnp.float32
    one = of_ref[0, 0]
    norm = jnp.maximum(jnp.sqrt((one * one).sum(axis=1, keepdims=True)), 1e-6)
    of = jnp.broadcast_to(one, (_SUBLANES, one.shape[1])).astype(buffer.dtype)
    ones = jnp.ones(of.shape, buffer.dtype)
    exact = None if narrow else lax.Precision.HIGHEST
    origin = window_at(start[b, s], copies.rows)

    def dots(left, right):
        """Inner products f32[1, rows] of a vector, given in all sublanes, with rows."""
        found = lax.dot_general(
            left,
            right,
            (((1,), (1,)), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return found[:1]

    def squares(rows):
        """Sums f32[1, rows] of the squares of each row, which two numbers of 16 bits hold exactly."""
        wide = rows.astype(jnp.float32)
        square = wide * wide
        if not narrow:
            return dots(ones, square)
        high = square.astype(rows.dtype)
        return dots(ones, high) + dots(ones, (square - high.astype(jnp.float32)).astype(rows.dtype))

    def step(index, _):
        """Loop body: the cosines of one more block to their places; a chunk at a time, so that registers hold it."""
        slot = copies.awaited(b, s, index)
        for number, (row, some) in enumerate(copies.chunks(b, s, index)):

            @tpu.when(some)
            def _(number=number, row=row):
                rows = buffer[slot, number * chunk : (number + 1) * chunk]
                cosine = dots(of, rows) / (norm * jnp.maximum(jnp.sqrt(squares(rows)), 1e-6))
                inside = copies.inside(b, s, index, (1, copies.size))[
                    :, number * chunk : (number + 1) * chunk
                ]
                cosine = jnp.where(inside, cosine, 0.0)
                tpu.add_lanes(found, row - origin, jnp.pad(cosine, ((0, 0), (0, LANES))), mine)

    lax.fori_loop(0, copies.blocks(b, s), step, None)
