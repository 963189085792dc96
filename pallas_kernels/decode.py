r"""Attention of a few queries per kv head over ragged segments of a pool, split into programs of equal work.

The segments of a pool are cut into chunks (`chunks`) at run time, by their actual lengths. Program w processes chunk w
of any head, so one long head occupies the GPU as well as many equal ones do::

    pool rows     |  head 0            |hd 1|  head 2                   |headroom|
    chunks        |  0  |  1  |  2  |3 | 4  |  5  |  6  |  7  |  8  |  9  |
                     |     |     |   |   |     |     |     |     |     |
    partials         o0    o1    o2  o3  o4    o5    o6    o7    o8    o9      out and lse of each chunk, float32
                     \_____ | ____/   |   |     \____ | ______________/
    merged                head 0         hd 1       head 2                    second kernel: weighs by exp(lse)

The partials of one head are adjacent. `attend` accepts rotated queries; `append_and_attend` accepts an unrotated new
token, rotates it and appends its entry to the pool.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.chunks import WorkTable, build_work_table
from pallas_kernels.codes import Rows, compute_mean_itemsize
from pallas_kernels.merging import add_attention_to_scores, combine_chunk_outputs
from pallas_kernels.rows import (
    DecodeKernelOptions,
    LogitsLayout,
    NewTokenInputs,
    SelectedEntries,
    attend_to_chunks,
)
from pallas_kernels.tiles import DecodeTiles, choose_decode_tiles, count_concurrent_programs


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["score", "begin", "counts", "start"],
    meta_fields=["widest"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryScores:
    """Scores of a pool's entries, to which decode attention adds the softmax weight of each entry.

    Attributes:
        score: `f32[B, P]` scores, updated in place if donated.
        begin: `f32[B, K]` initial score of a token's new entries, for `append_and_attend`.
        counts: `bool[B]` or `i32[B]` mask of the sequences whose attention `attend` adds; by default all.
        start: `i32[L, B, K]` first row of each segment, for all layers, for `append_and_attend`.
        widest: maximum entries of a segment including the token, if known: bounds the memory of kept logits instead of
            P.
    """

    score: Array
    begin: Array | None = None
    counts: Array | None = None
    start: Array | None = None
    widest: int | None = None

    def choose_logits_layout(self, start: Any) -> LogitsLayout:
        """Return the `LogitsLayout` of logits kept for scores: by pool row, or packed by segment if that is smaller."""
        packed = self.widest is not None and self.widest * start.shape[2] < self.score.shape[1]
        return LogitsLayout(start=start, widest=self.widest if packed else None)


@partial(jax.jit, static_argnames=("layer", "tiles", "softcap", "interpret"))
def attend(
    q: Array,
    k: Rows,
    v: Rows,
    start: Array,
    length: Array,
    *,
    sink_logits: Array | None = None,
    scores: EntryScores | None = None,
    chunks: WorkTable | None = None,
    layer: int = 0,
    tiles: DecodeTiles | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Compute attention of R queries per kv head over its segment; return output, log-sum-exp, any new scores.

    Args:
        q: `[B, K, R, D]` float; for decoding R is the group, for several tokens group times tokens.
        k: `[B, P, D]` keys of the pool, in q's dtype, or their codes.
        v: `[B, P, D]` values of the pool, as keys.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` entries of each segment; 0 returns output 0 and lse -inf.
        sink_logits: `[K, R]` learned logits in the softmax, without a value; none by default.
        scores: scores of the pool's entries; none by default.
        chunks: work table of these segments; by default computed here.
        layer: layer of the chunks, if these are given.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        interpret: True runs on any device, for tests.

    Returns:
        `[B, K, R, D]` in q's dtype; `f32[B, K, R]` natural log-sum-exp of the scaled logits; with scores also `f32[B,
        P]`, the score plus the softmax weight of each entry, mean over the R queries of its head. The output then
        depends on the scores, so that the logits of few layers are live at a time.
    """
    tiles, tile = _resolve_tiles(q, compute_mean_itemsize(k, v, q.dtype), q.dtype, tiles)
    if chunks is None:
        itemsize = compute_mean_itemsize(k, v, q.dtype)
        together = count_concurrent_programs(dim=q.shape[3], itemsize=itemsize, interpret=interpret)
        # Each tile of many queries has its own programs.
        each = max(1, together // -(-q.shape[2] // tile))
        chunks = build_work_table(start[None], length[None], programs=each, block=tiles.chunk)
        layer = 0
    logits = None if scores is None else scores.choose_logits_layout(start[None])
    how = DecodeKernelOptions(
        tiles=tiles, tile=tile, dtype=q.dtype, interpret=interpret, softcap=softcap
    )
    passed = attend_to_chunks(q, k, v, chunks, layer, token=None, logits=logits, how=how)
    out, lse = combine_chunk_outputs(
        passed.out, passed.lse, chunks, layer, sink_logits, dtype=q.dtype, how=how
    )
    if scores is None or logits is None or passed.logits is None:
        return out, lse
    counted = None if scores.counts is None else scores.counts.astype(jnp.int32)
    out, score = add_attention_to_scores(
        passed.logits, logits, lse, chunks, layer, out, scores.score, counted, None, how=how
    )
    return out, lse, score


@partial(jax.jit, static_argnames=("layer", "dtype", "tiles", "softcap", "interpret"))
def append_and_attend(
    q: Array,
    token: NewTokenInputs,
    rows: tuple[Rows, Rows],
    chunks: WorkTable,
    *,
    layer: int,
    dtype: Any,
    scores: EntryScores | None = None,
    picks: SelectedEntries | None = None,
    sink_logits: Array | None = None,
    tiles: DecodeTiles | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Rotate and append a token per sequence, attend; return output, pool keys, values, positions, any scores.

    Entries are written in place if the pool is donated. A finished sequence attends to its entries without the token.

    Args:
        q: `[n, M, K, G, D]` queries before rotation, of any float dtype: n partial sums of M sequences, the first B of
            which are read.
        token: keys and values, rotary angles and position of the token.
        rows: keys and values of the pool, `[B, P, D]` or codes, with headroom for one entry in every segment.
        chunks: work table of all layers' segments before the token.
        layer: index of this layer among the L.
        dtype: the model's dtype.
        scores: scores of the pool's entries, with a start and an initial score; none by default.
        picks: selected entries to read; by default all. Chunks then cover their numbers, with starts of 0.
        sink_logits: `[K, G]` learned logits in the softmax, without a value; none by default.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: c, which maps scaled logits to c * tanh(logits / c); None for none.
        interpret: True runs on any device, for tests.

    Returns:
        The output `[M, K, G, D]` in the model's dtype, undefined from sequence B on; keys, values and positions with
        the token's entries; and the scores, if given.
    """
    k, v = rows
    dtype = jnp.dtype(dtype)
    tiles, tile = _resolve_tiles(q, compute_mean_itemsize(k, v, dtype), dtype, tiles)
    logits = None if scores is None else scores.choose_logits_layout(scores.start)
    how = DecodeKernelOptions(
        tiles=tiles, tile=tile, dtype=dtype, interpret=interpret, softcap=softcap
    )
    passed = attend_to_chunks(
        q, k, v, chunks, layer, token=token, logits=logits, picks=picks, how=how
    )
    given = (passed.out, passed.lse, chunks, layer, sink_logits)
    out, lse = combine_chunk_outputs(*given, dtype=dtype, how=how, sequences=q.shape[1])
    if scores is None or logits is None or passed.logits is None:
        return out, *passed.pool
    begun = (out, scores.score, token.counts, scores.begin)
    out, score = add_attention_to_scores(passed.logits, logits, lse, chunks, layer, *begun, how=how)
    return out, *passed.pool, score


def _resolve_tiles(q, itemsize, dtype, tiles):
    """Return the given tiles of decode attention, or those chosen for q's shape, and the queries per program."""
    tiles = tiles or choose_decode_tiles(
        dim=q.shape[-1], itemsize=itemsize, exact=dtype == jnp.float32
    )
    return tiles, min(tiles.queries, max(16, 1 << (q.shape[-2] - 1).bit_length()))
