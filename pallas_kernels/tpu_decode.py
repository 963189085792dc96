r"""Attention of a few queries per kv head over ragged segments of a pool, for TPUs; the new token's row joins the pool.

A program takes a segment, one after the other, and the copies of its rows from HBM run `AHEAD` blocks before the
products, whichever segment they belong to, so that no program waits for its first block::

    pool rows   |   |  head 0            |hd 1|  |  head 2      |
    blocks          |  0  |  1  |  2  |3 | 4  |  |  5  |  6  |7 |      of BLOCK rows, copied in chunks of CHUNK rows
    copied             while block 0 is multiplied, blocks 1 to AHEAD are on their way

Tiles of new rows (`tpu_rows`) of all heads of a sequence are read while the sequence before it is multiplied, changed,
and written while its own rows are. Heads whose new rows lie in one tile change one copy of it. The rows around a new
row do not change, so reading them meanwhile is no race, and the new row itself enters the softmax from VMEM.

With scores a segment's logits stay in VMEM until their log-sum-exp is known; then each row's attention is added up over
the queries, and written to its place in the sequence's part of a pool.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _compat_tpu as tpu
from . import tpu_codes
from .tpu_rows import AHEAD, BLOCK, CHUNK, LANES, TILE, Copies, NewRows, blocks_of, width, window_at

# Sublanes of a 32-bit register; queries are padded to multiples of it.
_SUBLANES = 8
_MASKED = -1e30
# Logits of a segment and scores of a pool's rows, at most, that VMEM holds: 4 MB each, the latter with a second buffer.
_MOST_LOGITS, _MOST_SCORES = 1 << 20, 1 << 17


def takes(pool_rows: int, dtype: jax.typing.DTypeLike) -> bool:
    """True if the kernel takes pools of so many rows: whole tiles, of bfloat16, float32 or 8-bit codes."""
    if jnp.dtype(dtype) == jnp.dtype(jnp.int8):
        return tpu_codes.takes(pool_rows)
    known = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    return known and pool_rows % TILE == 0


def takes_scores(pool_rows: int, widest: int, queries: int) -> bool:
    """True if VMEM holds what the kernel keeps of scores: a segment's logits, and one number for each pool row."""
    held = -(-queries // _SUBLANES) * _SUBLANES * (widest + BLOCK)
    return held <= _MOST_LOGITS and pool_rows <= _MOST_SCORES


@partial(jax.jit, static_argnames=("softcap", "interpret"))
def attend(
    q: jax.Array,
    k: tpu_codes.Rows,
    v: tpu_codes.Rows,
    start: jax.Array,
    length: jax.Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of R queries per kv head over that head's segment of a pool; returns output and log-sum-exp.

    Args:
        q: `[B, K, R, D]` float; for decoding R is the group.
        k: `[B, P, D]` pool rows, bfloat16 or float32, or codes `i8[B, P, D]` and scales `f16[B, P]`; P is a multiple
            of 8.
        v: `[B, P, D]` likewise, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment; 0 gives output 0 and lse -inf.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype, and `f32[B, K, R]` natural log-sum-exp of the scaled logits.
    """
    out, lse = _run(q, (), k, v, (start, length), _How(softcap, interpret))
    return out, lse


@partial(jax.jit, static_argnames=("softcap", "interpret"))
def append_and_attend(
    q: jax.Array,
    new: tuple[tpu_codes.Rows, tpu_codes.Rows],
    k: tpu_codes.Rows,
    v: tpu_codes.Rows,
    start: jax.Array,
    length: jax.Array,
    counts: jax.Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, tpu_codes.Rows, tpu_codes.Rows]:
    """Writes each head's new row behind its segment and attends to the segment with it; output, lse and the pool.

    Rows are written in place if the pool is donated. A window is a later `start` with a smaller `length`.

    Args:
        q: `[B, K, R, D]` rotated queries.
        new: keys and values `[B, K, D]` of the token, the keys rotated; codes and scales for a pool of such rows.
        k: `[B, P, D]` pool rows, bfloat16 or float32, or codes `i8[B, P, D]` and scales `f16[B, P]`; P is a multiple
            of 8.
        v: `[B, P, D]` likewise, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment before the token, with room for one more behind them.
        counts: `i32[B]` 0 for an ended sequence, for which nothing is written; else 1.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype; `f32[B, K, R]` natural log-sum-exp of the scaled logits; and k and v with the rows.
    """
    how = _How(softcap, interpret)
    if isinstance(k, tuple):
        tables = _tables(start, length, counts, tpu_codes.tile_of(k[0]))
        end = jnp.where(counts[:, None] > 0, start + length, k[0].shape[1])
        (k, new_k), (v, new_v) = (
            tpu_codes.joined(*each, end) for each in zip((k, v), new, strict=True)
        )
        out, lse, *codes = _run(q, (new_k, new_v), k, v, tables, how)
        return out, lse, (codes[0], k[1]), (codes[1], v[1])
    tables = _tables(start, length, counts)
    out, lse, k, v = _run(q, _narrowed(new, k.dtype), k, v, tables, how)
    return out, lse, k, v


@partial(jax.jit, static_argnames=("widest", "windows", "softcap", "interpret"))
def append_and_score(
    q: jax.Array,
    new: tuple[jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    length: jax.Array,
    counts: jax.Array,
    *,
    widest: int,
    windows: bool = False,
    sink_logits: jax.Array | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Writes each head's new row behind its segment and attends; output, attention that rows received, and the pool.

    Rows are written in place if the pool is donated.

    Args:
        q: `[B, K, R, D]` rotated queries.
        new: keys and values `[B, K, D]` of the token, the keys rotated.
        k: `[B, P, D]` pool rows, bfloat16 or float32; P is a multiple of 8.
        v: `[B, P, D]` likewise, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment before the token, with room for one more behind them.
        counts: `i32[B]` 0 for an ended sequence, for which nothing is written; else 1.
        widest: most rows of a segment, the new one included.
        windows: True returns the attention in windows, for pools of so many rows that most are other layers'.
        sink_logits: `[K, R]` learned logits that take part in the softmax, without a value; by default none.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype; `f32[B, P]` softmax weight of each row, mean over the R queries of its head, 0 in
        ended sequences and outside of segments, or `f32[B, K, n]` in windows from row `tpu_rows.window_at` on;
        and k and v with the rows.
    """
    token = _narrowed(new, k.dtype)
    if sink_logits is not None:
        wide = jnp.pad(
            sink_logits.astype(jnp.float32), ((0, 0), (0, -sink_logits.shape[1] % _SUBLANES))
        )
        token = (*token, jnp.broadcast_to(wide[..., None], (*wide.shape, LANES)))
    how = _How(softcap, interpret, widest, windows)
    out, _, k, v, received = _run(q, token, k, v, _tables(start, length, counts), how)
    if windows:
        return out, received, k, v
    return out, received[:, 0, : k.shape[1]], k, v


def _narrowed(new, dtype):
    """New keys and values `f32[B, K, 1, D]` rounded to the pool's dtype: 16-bit sublanes have no addresses."""
    return tuple(each.astype(dtype).astype(jnp.float32)[:, :, None] for each in new)


def _tables(start, length, counts, tile=TILE):
    """Five tables of a kernel that appends: `start`, `length` and `counts`; the heads whose tiles a head shares.

    Of heads that write into one tile each begins with the copy of the one before, -1 for none; the last one writes.
    """
    base = (start + length) // tile
    shared = base[:, :, None] == base[:, None, :]
    head = jnp.arange(base.shape[1], dtype=jnp.int32)
    before = jnp.where(shared & (head < head[:, None]), head, -1).max(axis=-1)
    last = ~(shared & (head > head[:, None])).any(axis=-1)
    return start, length, counts.astype(jnp.int32), before, last.astype(jnp.int32)


class _How(NamedTuple):
    """Static settings of the kernel: the logits' cap, interpretation, most rows of a segment, None without scores.

    With `windows` the attention that rows receive is written in a window for each segment, not at the rows' places.
    """

    softcap: float | None
    interpret: bool
    widest: int | None = None
    windows: bool = False


def _run(q, new, k, v, tables, how):
    """Calls the kernel: `new` rows (and sinks) and five `tables` to append, none and two to attend; its outputs."""
    batch, heads, rows, dim = q.shape
    padded = -(-rows // _SUBLANES) * _SUBLANES
    coded, beside = isinstance(k, tuple), ()
    if coded:
        beside, (k, v) = (tpu_codes.scales_of(k[1]), tpu_codes.scales_of(v[1])), (k[0], v[0])
    scaled = (q.astype(jnp.float32) / math.sqrt(dim)).astype(
        tpu_codes.numbers_of(q.dtype) if coded else k.dtype
    )
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    chunk = min(CHUNK, k.shape[1])
    appends, size = bool(new), (tpu_codes.CODED_BLOCK if coded else BLOCK) // CHUNK * chunk
    if how.widest is not None:
        # Equal blocks, so that the last one is not almost empty.
        count, size = blocks_of(how.widest, k.shape[1])
    one, all_heads = (lambda b, h: (b, h, 0, 0)), (lambda b, h: (b, 0, 0, 0))
    token = [tpu.block((1, heads, *each.shape[2:]), all_heads) for each in new[:2]]
    sinks = [tpu.block((1, padded, LANES), lambda b, h: (h, 0, 0))] * (len(new) - len(token))
    scales = [tpu.block((1, *each.shape[1:]), lambda b, h: (b, 0, 0)) for each in beside]
    scratch = [
        tpu.vmem((AHEAD + 1, size, dim), k.dtype),
        tpu.vmem((AHEAD + 1, size, dim), v.dtype),
        tpu.semaphores((AHEAD + 1,)),
        tpu.smem((5,), jnp.int32),
    ]
    if appends:
        scratch += [
            tpu.vmem((2, 2, heads, tpu_codes.tile_of(k), dim), k.dtype),
            tpu.semaphores((2,)),
            tpu.semaphores((2,)),
        ]
    shapes = [
        jax.ShapeDtypeStruct(scaled.shape, scaled.dtype if coded else q.dtype),
        jax.ShapeDtypeStruct((batch, heads, padded, LANES), jnp.float32),
    ]
    made = [tpu.block((1, 1, padded, dim), one), tpu.block((1, 1, padded, LANES), one)]
    if appends:
        shapes += [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v)]
        made += [tpu.in_hbm()] * 2
    if how.widest is not None:
        # A chunk's part begins at a whole register, and may end in another one behind the pool.
        lines, lanes = 1, -(-k.shape[1] // LANES) * LANES + chunk + LANES
        if how.windows:
            lines, lanes = heads, width(how.widest, k.shape[1])
        shapes += [jax.ShapeDtypeStruct((batch, lines, lanes), jnp.float32)]
        made += [tpu.block((1, lines, lanes), lambda b, h: (b, 0, 0))]
        scratch += [tpu.vmem((padded, count * size), jnp.float32)]
    static = {
        "appends": appends,
        "sinks": bool(sinks),
        "scores": how.widest is not None,
        "queries": rows,
    }
    static |= {"windows": how.windows, "coded": coded}
    first = len(new) + len(beside) + 1
    out, lse, *pool = tpu.call(
        partial(_kernel, chunk=chunk, softcap=how.softcap, **static),
        tables,
        (scaled, *new, *beside, k, v),
        name="tpu_decode" if appends else "tpu_attend",
        grid=(batch, heads),
        given=[
            tpu.block((1, 1, padded, dim), one),
            *token,
            *sinks,
            *scales,
            tpu.in_hbm(),
            tpu.in_hbm(),
        ],
        made=made,
        shapes=shapes,
        scratch=scratch,
        in_place={first: 2, first + 1: 3} if appends else {},
        interpret=how.interpret,
    )
    return out[:, :, :rows].astype(q.dtype), lse[:, :, :rows, 0], *pool


# Refs: in scalar memory `start` and `length` [B, K], and to append `counts` [B], `before` and `last` [B, K]. Inputs
# q [1, 1, R, D] of the program's head, new keys and values f32[1, K, 1, D] of its sequence (of codes f32[1, K, 2, D]:
# decoded, and codes), sink logits f32[1, R, 128] of its head, scales of codes f32[1, n, 128] each,
# and the pools [B, P, D] in HBM. Outputs out [1, 1, R, D], lse [1, 1, R, 128], the pools, and attention
# that rows received, f32[1, 1, P and more] of its sequence or f32[1, K, n]. Scratch: AHEAD + 1 blocks
# of keys and of values [AHEAD + 1, rows of a block, D], a semaphore for each; five numbers (sequence, head and
# block that are copied next, and how many blocks were copied and multiplied); to append tiles of new rows [2 sequences,
# keys and values, K, TILE, D], and a semaphore for the reads and one for the writes of both sequences; for scores
# logits f32[R, rows].
def _kernel(*refs, appends, sinks, scores, windows, coded, queries, chunk, softcap):
    """Attends a program's queries to its segment; begins copies of later blocks, and of the sequences' new rows."""
    start, length, *refs = refs
    counts, before, last, *refs = refs if appends else (None, None, None, *refs)
    q_ref, *refs = refs
    new_k, new_v, *refs = refs if appends else (None, None, *refs)
    sink_ref, *refs = refs if sinks else (None, *refs)
    scales, refs = (refs[:2], refs[2:]) if coded else ((), refs)
    k_hbm, v_hbm, out_ref, lse_ref, *refs = refs
    pools, refs = (refs[:2], refs[2:]) if appends else ((), refs)
    received, *refs = refs if scores else (None, *refs)
    kbuf, vbuf, arrived, numbers, *refs = refs
    tiles, kept = refs[:3], refs[3:]
    b, h = tpu.program_id(0), tpu.program_id(1)
    batch, heads = start.shape
    ring = (kbuf, vbuf), arrived, numbers
    copies = Copies(
        start, length, (k_hbm, v_hbm), ring, chunk=chunk, unit=tpu_codes.UNIT if coded else TILE
    )
    stored = new_k, new_v
    if coded and appends:
        stored = tuple(each.at[:, :, tpu.ds(1, 1)] for each in stored)
        new_k, new_v = (each.at[:, :, tpu.ds(0, 1)] for each in (new_k, new_v))

    @tpu.when((b == 0) & (h == 0))
    def _():
        if not coded:
            # Rows of a block that were never copied get no weight: they have to be numbers.
            vbuf[...] = jnp.zeros(vbuf.shape, vbuf.dtype)
        copies.begin()

    if appends:
        own = NewRows(start, length, (counts, before, last), stored, pools, *tiles)

        @tpu.when(h == 0)
        def _():
            own.append(b, batch)

    if scores:

        @tpu.when(h == 0)
        def _():
            received[...] = jnp.zeros(received.shape, received.dtype)

    q = q_ref[0, 0]
    shape = (q.shape[0], 1)
    carry = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if appends:
        joins = counts[b] > 0
        logit = _capped((q.astype(jnp.float32) * new_k[0, h]).sum(axis=1, keepdims=True), softcap)
        value = jnp.broadcast_to(new_v[0, h], q.shape)
        carry = (
            jnp.where(joins, logit, carry[0]),
            jnp.where(joins, 1.0, carry[1]),
            jnp.where(joins, value, carry[2]),
        )
    if sinks:
        # A row of weight exp(sink) and of no value.
        sink = sink_ref[0, :, :1]
        higher = jnp.maximum(carry[0], sink)
        shrink = jnp.exp(carry[0] - higher)
        carry = higher, carry[1] * shrink + jnp.exp(sink - higher), carry[2] * shrink
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    def step(index, carry):
        """Loop body: softmax maximum and sum, and unnormalised output, after one more block."""
        top, total, acc = carry
        slot = copies.awaited(b, h, index)
        logits = product(q, kbuf[slot].astype(q.dtype), (((1,), (1,)), ((), ())))
        if coded:
            key_scales, value_scales = (
                tpu_codes.of_block(each, copies, b, h, index) for each in scales
            )
            logits = logits * key_scales
        logits = _capped(logits, softcap)
        inside = copies.inside(b, h, index, logits.shape)
        logits = jnp.where(inside, logits, _MASKED)
        if scores:
            kept[0][:, tpu.ds(copies.at(index), copies.size)] = logits
        higher = jnp.maximum(top, logits.max(axis=1, keepdims=True))
        weights = jnp.where(inside, jnp.exp(logits - higher), 0.0)
        shrink = jnp.exp(top - higher)
        shares = weights * value_scales if coded else weights
        part = product(shares.astype(q.dtype), vbuf[slot].astype(q.dtype), (((1,), (0,)), ((), ())))
        return higher, total * shrink + weights.sum(axis=1, keepdims=True), acc * shrink + part

    top, total, acc = lax.fori_loop(0, copies.blocks(b, h), step, carry)
    some = jnp.maximum(total, 1e-30)
    out_ref[0, 0] = (acc / some).astype(out_ref.dtype)
    lse = jnp.where(total > 0, top + jnp.log(some), -jnp.inf)
    lse_ref[0, 0] = jnp.broadcast_to(lse, lse_ref.shape[2:])
    if scores:
        line, origin = (h, window_at(start[b, h], copies.rows)) if windows else (0, 0)
        tpu.when(joins)(
            lambda: _receive(received, *kept, copies, b, h, logit, lse, queries, line, origin)
        )
    if appends:

        @tpu.when((b == batch - 1) & (h == heads - 1))
        def _():
            own.finish(b)


def _receive(received, kept, copies, b, h, logit, lse, queries, line, origin):
    """Adds a segment's attention, mean over its queries, to `received` at its rows' places, the new row's too."""
    real = (lax.broadcasted_iota(jnp.int32, lse.shape, 0) < queries).astype(jnp.float32) / queries
    total = lse - jnp.log(jnp.maximum(real, 1e-30))

    def step(index, _):
        """Loop body: a block's attention goes to its rows, chunk by chunk."""
        shares = jnp.exp(kept[:, tpu.ds(copies.at(index), copies.size)] - total).sum(
            axis=0, keepdims=True
        )
        for number, (row, some) in enumerate(copies.chunks(b, h, index)):

            @tpu.when(some)
            def _(number=number, row=row):
                mine = shares[:, number * copies.chunk : (number + 1) * copies.chunk]
                tpu.add_lanes(received, row - origin, jnp.pad(mine, ((0, 0), (0, LANES))), line)

    lax.fori_loop(0, copies.blocks(b, h), step, None)
    new = jnp.exp(logit - total).sum(axis=0, keepdims=True)
    first = lax.broadcasted_iota(jnp.int32, (1, 2 * LANES), 1) == 0
    tpu.add_lanes(received, copies.end(b, h) - origin, jnp.where(first, new, 0.0), line)


def _capped(logits, softcap):
    """Logits as they are without a `softcap`; with one softcap * tanh(logits / softcap)."""
    return logits if softcap is None else jnp.tanh(logits * (1 / softcap)) * softcap
