r"""Attention of a few queries per kv head over ragged segments of a pool, for TPUs, with the new token appended.

A program processes a segment, one after the other. Copies of rows from HBM run `AHEAD` blocks before the products,
across segments, so that no program waits for its first block::

    pool rows   |   |  head 0            |hd 1|  |  head 2      |
    blocks          |  0  |  1  |  2  |3 | 4  |  |  5  |  6  |7 |      of BLOCK rows, copied in chunks of CHUNK rows
    copied         while block 0 is multiplied, blocks 1 to AHEAD are in flight

Tiles of new entries (`rows`) of all heads of a sequence are read during the products of the sequence before, changed,
and written during the sequence's own products. Heads whose new entries are in one tile change one copy of it. The rows
around a new entry do not change, so concurrent reads are no race. The new entry itself is in VMEM for the softmax.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _compat_tpu as tpu
from pallas_kernels.tpu import codes
from pallas_kernels.tpu.codes import Rows
from pallas_kernels.tpu.rows import AHEAD, BLOCK, CHUNK, LANES, TILE, BlockCopyRing, EntryAppender

# Sublanes of a 32-bit register; queries are padded to multiples of it.
_SUBLANES = 8
_MASKED = -1e30


def supports_pool(pool_rows: int, dtype: jax.typing.DTypeLike) -> bool:
    """True if the TPU kernel supports a pool: a multiple of 8 rows (int8: at most 2**19) in bfloat16, float32, int8."""
    if jnp.dtype(dtype) == jnp.dtype(jnp.int8):
        return codes.supports_int8_pool(pool_rows)
    known = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
    return known and pool_rows % TILE == 0


@partial(jax.jit, static_argnames=("softcap", "interpret"))
def attend(
    q: Array,
    k: Rows,
    v: Rows,
    start: Array,
    length: Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Compute attention of R queries per kv head over its segment of a pool, on a TPU; return output, log-sum-exp.

    Args:
        q: `[B, K, R, D]` float; for decoding R is the group.
        k: `[B, P, D]` keys of the pool, bfloat16 or float32, or codes `i8[B, P, D]` and scales `f16[B, P]`; P is a
            multiple of 8.
        v: `[B, P, D]` values of the pool, as keys, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` entries of each segment; 0 returns output 0 and lse -inf.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        interpret: True runs on any device, for tests.

    Returns:
        `[B, K, R, D]` in q's dtype, and `f32[B, K, R]` natural log-sum-exp of the scaled logits.
    """
    out, lse = _call_decode_kernel(q, (), k, v, (start, length), softcap, interpret)
    return out, lse


@partial(jax.jit, static_argnames=("softcap", "interpret"))
def append_and_attend(
    q: Array,
    new: tuple[Rows, Rows],
    k: Rows,
    v: Rows,
    start: Array,
    length: Array,
    counts: Array,
    *,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Rows, Rows]:
    """On a TPU, append an entry to each segment and attend, new one included; return output, lse, k, v pools.

    Entries are written in place if the pool is donated. A sliding window is a later `start` with a smaller `length`.

    Args:
        q: `[B, K, R, D]` rotated queries.
        new: keys and values `[B, K, D]` of the token, with rotated keys; codes and scales for a pool of codes.
        k: `[B, P, D]` keys of the pool, bfloat16 or float32, or codes `i8[B, P, D]` and scales `f16[B, P]`; P is a
            multiple of 8.
        v: `[B, P, D]` values of the pool, as keys, finite everywhere.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` entries of each segment before the token, with headroom for one more.
        counts: `i32[B]` 0 for a finished sequence, for which nothing is written; else 1.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        interpret: True runs on any device, for tests.

    Returns:
        `[B, K, R, D]` in q's dtype; `f32[B, K, R]` natural log-sum-exp of the scaled logits; and k and v with the
        entries.
    """
    if isinstance(k, tuple):
        tables = _build_append_tables(start, length, counts, codes.get_tile_rows(k[0]))
        end = jnp.where(counts[:, None] > 0, start + length, k[0].shape[1])
        (k, new_k), (v, new_v) = (
            codes.append_entry_scales(*each, end) for each in zip((k, v), new, strict=True)
        )
        out, lse, *written = _call_decode_kernel(
            q, (new_k, new_v), k, v, tables, softcap, interpret
        )
        return out, lse, (written[0], k[1]), (written[1], v[1])
    tables = _build_append_tables(start, length, counts)
    out, lse, k, v = _call_decode_kernel(
        q, _round_to_pool_dtype(new, k.dtype), k, v, tables, softcap, interpret
    )
    return out, lse, k, v


def _round_to_pool_dtype(new, dtype):
    """Round new keys and values to the pool's dtype; return float32 `[B, K, 1, D]`, for 32-bit sublanes."""
    return tuple(each.astype(dtype).astype(jnp.float32)[:, :, None] for each in new)


def _build_append_tables(start, length, counts, tile=TILE):
    """Return `start`, `length`, `counts`, each head's predecessor in its tile (-1: none), and 1 for a tile's last head.

    Heads that write into one tile form a chain: each starts from the copy of the one before (-1: none), and the last
    one writes.
    """
    base = (start + length) // tile
    shared = base[:, :, None] == base[:, None, :]
    head = jnp.arange(base.shape[1], dtype=jnp.int32)
    before = jnp.where(shared & (head < head[:, None]), head, -1).max(axis=-1)
    last = ~(shared & (head > head[:, None])).any(axis=-1)
    return start, length, counts.astype(jnp.int32), before, last.astype(jnp.int32)


def _call_decode_kernel(q, new, k, v, tables, softcap, interpret):
    """Call the TPU decode kernel, to append `new` and attend or only to attend; return output, lse, written pools."""
    batch, heads, rows, dim = q.shape
    padded = -(-rows // _SUBLANES) * _SUBLANES
    coded = isinstance(k, tuple)
    beside = ()
    if coded:
        beside = (codes.lay_out_scales(k[1]), codes.lay_out_scales(v[1]))
        k = k[0]
        v = v[0]
    scaled = (q.astype(jnp.float32) / math.sqrt(dim)).astype(
        codes.choose_product_dtype(q.dtype) if coded else k.dtype
    )
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    chunk = min(CHUNK, k.shape[1])
    appends = bool(new)
    size = (codes.CODED_BLOCK if coded else BLOCK) // CHUNK * chunk
    one, all_heads = (lambda b, h: (b, h, 0, 0)), (lambda b, h: (b, 0, 0, 0))
    token = [tpu.make_block_spec((1, heads, *each.shape[2:]), all_heads) for each in new]
    scales = [tpu.make_block_spec((1, *each.shape[1:]), lambda b, h: (b, 0, 0)) for each in beside]
    scratch = [
        tpu.vmem((AHEAD + 1, size, dim), k.dtype),
        tpu.vmem((AHEAD + 1, size, dim), v.dtype),
        tpu.make_semaphore_spec((AHEAD + 1,)),
        tpu.smem((5,), jnp.int32),
    ]
    if appends:
        scratch += [
            tpu.vmem((2, 2, heads, codes.get_tile_rows(k), dim), k.dtype),
            tpu.make_semaphore_spec((2,)),
            tpu.make_semaphore_spec((2,)),
        ]
    shapes = [
        jax.ShapeDtypeStruct(scaled.shape, scaled.dtype if coded else q.dtype),
        jax.ShapeDtypeStruct((batch, heads, padded, LANES), jnp.float32),
    ]
    made = [
        tpu.make_block_spec((1, 1, padded, dim), one),
        tpu.make_block_spec((1, 1, padded, LANES), one),
    ]
    if appends:
        shapes += [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (k, v)]
        made += [tpu.make_hbm_spec()] * 2
    first = len(new) + len(beside) + 1
    out, lse, *pool = tpu.call_tpu_kernel(
        partial(_decode_kernel, appends=appends, coded=coded, chunk=chunk, softcap=softcap),
        tables,
        (scaled, *new, *beside, k, v),
        name="tpu_decode" if appends else "tpu_attend",
        grid=(batch, heads),
        given=[
            tpu.make_block_spec((1, 1, padded, dim), one),
            *token,
            *scales,
            tpu.make_hbm_spec(),
            tpu.make_hbm_spec(),
        ],
        made=made,
        shapes=shapes,
        scratch=scratch,
        in_place={first: 2, first + 1: 3} if appends else {},
        interpret=interpret,
    )
    return out[:, :, :rows].astype(q.dtype), lse[:, :, :rows, 0], *pool


# Refs: in scalar memory `start` and `length` [B, K], and to append `counts` [B], `before` and `last` [B, K]. Inputs q
# [1, 1, R, D] of the program's head, new keys and values f32[1, K, 1, D] of its sequence (of codes f32[1, K, 2, D]:
# dequantised, and codes), scales of codes f32[1, n, 128] each, and the pools [B, P, D] in HBM. Outputs out [1, 1, R,
# D], lse [1, 1, R, 128], and the pools. Scratch: AHEAD + 1 blocks of keys and of values [AHEAD + 1, rows of a block,
# D], a semaphore for each; five numbers (sequence, head and block to be copied next, and how many blocks were copied
# and multiplied); to append tiles of new entries [2 sequences, keys and values, K, TILE, D], and a semaphore for the
# reads and one for the writes of both sequences.
def _decode_kernel(*refs, appends, coded, chunk, softcap):
    """TPU kernel: attend to a segment and any new entry; prefetch later blocks, write new entries to pools."""
    start, length, *refs = refs
    counts, before, last, *refs = refs if appends else (None, None, None, *refs)
    q_ref, *refs = refs
    new_k, new_v, *refs = refs if appends else (None, None, *refs)
    scales, refs = (refs[:2], refs[2:]) if coded else ((), refs)
    k_hbm, v_hbm, out_ref, lse_ref, *refs = refs
    pools, refs = (refs[:2], refs[2:]) if appends else ((), refs)
    kbuf, vbuf, arrived, numbers, *tiles = refs
    b = tpu.program_id(0)
    h = tpu.program_id(1)
    batch, heads = start.shape
    ring = (kbuf, vbuf), arrived, numbers
    copies = BlockCopyRing(
        start, length, (k_hbm, v_hbm), ring, chunk=chunk, unit=codes.UNIT if coded else TILE
    )
    stored = new_k, new_v
    if coded and appends:
        stored = tuple(each.at[:, :, tpu.ds(1, 1)] for each in stored)
        new_k, new_v = (each.at[:, :, tpu.ds(0, 1)] for each in (new_k, new_v))

    @tpu.when((b == 0) & (h == 0))
    def _():
        if not coded:
            # Rows of a block that were never copied have weight 0, but they must be finite.
            vbuf[...] = jnp.zeros(vbuf.shape, vbuf.dtype)
        copies.start_copies()

    if appends:
        own = EntryAppender(start, length, (counts, before, last), stored, pools, *tiles)

        @tpu.when(h == 0)
        def _():
            own.append_entries(b, batch)

    q = q_ref[0, 0]
    shape = (q.shape[0], 1)
    carry = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    if appends:
        joins = counts[b] > 0
        logit = _apply_softcap(
            (q.astype(jnp.float32) * new_k[0, h]).sum(axis=1, keepdims=True), softcap
        )
        value = jnp.broadcast_to(new_v[0, h], q.shape)
        carry = (
            jnp.where(joins, logit, carry[0]),
            jnp.where(joins, 1.0, carry[1]),
            jnp.where(joins, value, carry[2]),
        )
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    def attend_to_block(index, carry):
        """Add one block of keys and values to the online softmax: running maximum, sum and unnormalised output."""
        top, total, acc = carry
        slot = copies.wait_for_block(b, h, index)
        logits = product(q, kbuf[slot].astype(q.dtype), (((1,), (1,)), ((), ())))
        if coded:
            key_scales, value_scales = (
                codes.load_block_scales(each, copies, b, h, index) for each in scales
            )
            logits = logits * key_scales
        logits = _apply_softcap(logits, softcap)
        inside = copies.mask_segment_rows(b, h, index, logits.shape)
        logits = jnp.where(inside, logits, _MASKED)
        higher = jnp.maximum(top, logits.max(axis=1, keepdims=True))
        weights = jnp.where(inside, jnp.exp(logits - higher), 0.0)
        shrink = jnp.exp(top - higher)
        shares = weights * value_scales if coded else weights
        part = product(shares.astype(q.dtype), vbuf[slot].astype(q.dtype), (((1,), (0,)), ((), ())))
        return higher, total * shrink + weights.sum(axis=1, keepdims=True), acc * shrink + part

    top, total, acc = lax.fori_loop(0, copies.count_blocks(b, h), attend_to_block, carry)
    some = jnp.maximum(total, 1e-30)
    out_ref[0, 0] = (acc / some).astype(out_ref.dtype)
    lse = jnp.where(total > 0, top + jnp.log(some), -jnp.inf)
    lse_ref[0, 0] = jnp.broadcast_to(lse, lse_ref.shape[2:])
    if appends:

        @tpu.when((b == batch - 1) & (h == heads - 1))
        def _():
            own.wait_for_writes(b)


def _apply_softcap(logits, softcap):
    """Return softcap * tanh(logits / softcap); unchanged logits if the softcap is None."""
    return logits if softcap is None else jnp.tanh(logits * (1 / softcap)) * softcap
