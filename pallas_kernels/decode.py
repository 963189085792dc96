r"""Attention of a few queries per kv head over ragged segments of a pool, split so that every program does equal work.

The segments of a pool are cut into chunks (`chunks`), at run time and by their actual lengths; program w takes the w-th
chunk, whichever head it belongs to, so one long head fills the chip as well as many equal ones do::

    pool rows     |  head 0            |hd 1|  head 2                     | room |
    chunks        |  0  |  1  |  2  |3 | 4  |  5  |  6  |  7  |  8  |  9  |
                     |     |     |   |   |     |     |     |     |     |
    partials         o0    o1    o2  o3  o4    o5    o6    o7    o8    o9      out and lse of each chunk, float32
                     \_____ | ____/   |   |     \____ | ______________/
    merged                head 0         hd 1       head 2                    second kernel: weighs by exp(lse)

The partials of one head are neighbours. `attend` takes queries that are rotated, `decode_token` a new token that is
not, and whose row joins the pool on the way.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chunks import Chunks, work_table
from pallas_kernels.codes import Rows, itemsize_of
from pallas_kernels.merging import add_mass, merge
from pallas_kernels.rows import How, Logits, Picks, Token, pass_rows
from pallas_kernels.tiles import DecodeTiles, decode_tiles, programs


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["score", "begin", "counts", "start"],
    meta_fields=["widest"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a pool's rows, to which the attention that each row receives is added.

    Attributes:
        score: `f32[B, P]` to which it is added, in place if donated.
        begin: `f32[B, K]` initial score of a token's new row, for `decode_token`.
        counts: `bool[B]` or `i32[B]` mask of the sequences whose attention `attend` adds; by default all.
        start: `i32[L, B, K]` first row of each segment, for all layers, for `decode_token`.
        widest: most rows of a segment with the token, if known: kept logits then take this much memory, not P.
    """

    score: jax.Array
    begin: jax.Array | None = None
    counts: jax.Array | None = None
    start: jax.Array | None = None
    widest: int | None = None

    def logits(self, start: Any) -> Logits:
        """Memory layout of kept logits: like the pool's rows, or packed by segment where that takes less memory."""
        packed = self.widest is not None and self.widest * start.shape[2] < self.score.shape[1]
        return Logits(start=start, widest=self.widest if packed else None)


@partial(jax.jit, static_argnames=("layer", "tiles", "softcap", "interpret"))
def attend(
    q: jax.Array,
    k: Rows,
    v: Rows,
    start: jax.Array,
    length: jax.Array,
    *,
    sink_logits: jax.Array | None = None,
    scores: Scores | None = None,
    chunks: Chunks | None = None,
    layer: int = 0,
    tiles: DecodeTiles | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of R queries per kv head over that head's segment; returns output, log-sum-exp, and scores if given.

    Args:
        q: `[B, K, R, D]` float; for decoding R is the group, for several tokens group times tokens.
        k: `[B, P, D]` pool rows, in q's dtype, or their codes.
        v: `[B, P, D]` likewise.
        start: `i32[B, K]` first row of each segment.
        length: `i32[B, K]` rows of each segment; 0 gives output 0 and lse -inf.
        sink_logits: `[K, R]` learned logits that take part in the softmax, without a value; by default none.
        scores: of the pool's rows; by default none.
        chunks: table dealt from these segments; by default it is made here.
        layer: of the chunks, where they are given.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        `[B, K, R, D]` in q's dtype, `f32[B, K, R]` natural log-sum-exp of the scaled logits, and if there are scores
        `f32[B, P]`: the score plus the softmax weight of each row, mean over the R queries of its head. The output is
        then available only with the score, so that the logits of few layers are alive at once.
    """
    tiles, tile = _tiles(q, itemsize_of(k, v, q.dtype), q.dtype, tiles)
    if chunks is None:
        itemsize = itemsize_of(k, v, q.dtype)
        together = programs(dim=q.shape[3], itemsize=itemsize, interpret=interpret)
        # Each tile of many queries has programs of its own.
        each = max(1, together // -(-q.shape[2] // tile))
        chunks, layer = work_table(start[None], length[None], programs=each, block=tiles.chunk), 0
    logits = None if scores is None else scores.logits(start[None])
    how = How(tiles=tiles, tile=tile, dtype=q.dtype, interpret=interpret, softcap=softcap)
    passed = pass_rows(q, k, v, chunks, layer, token=None, logits=logits, how=how)
    out, lse = merge(passed.out, passed.lse, chunks, layer, sink_logits, dtype=q.dtype, how=how)
    if scores is None or logits is None or passed.logits is None:
        return out, lse
    counted = None if scores.counts is None else scores.counts.astype(jnp.int32)
    out, score = add_mass(
        passed.logits, logits, lse, chunks, layer, out, scores.score, counted, None, how=how
    )
    return out, lse, score


@partial(jax.jit, static_argnames=("layer", "dtype", "tiles", "softcap", "interpret"))
def decode_token(
    q: jax.Array,
    token: Token,
    rows: tuple[Rows, Rows],
    chunks: Chunks,
    *,
    layer: int,
    dtype: Any,
    scores: Scores | None = None,
    picks: Picks | None = None,
    sink_logits: jax.Array | None = None,
    tiles: DecodeTiles | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Rotate one new token per sequence, appends its row to the pool, attends; return output, pool, scores if given.

    Rows are written in place if the pool is donated. An ended sequence attends to the rows that it has.

    Args:
        q: `[n, M, K, G, D]` queries before rotation, of any float dtype: n parts whose sum they are, of M sequences, of
            which the first B are read.
        token: its keys and values, and where it stands.
        rows: keys and values of the pool, `[B, P, D]` or codes, with room for one more row behind every segment.
        chunks: dealt from all layers' segments as they are before the token.
        layer: index of this layer among the L.
        dtype: the model's.
        scores: of the pool's rows, with a start and an initial score; by default none.
        picks: rows that are read, if not all; chunks are dealt from their counts, and from starts of 0.
        sink_logits: `[K, G]` learned logits that take part in the softmax, without a value; by default none.
        tiles: block sizes and launch; by default by the shape and the device.
        softcap: of the scaled logits, which become softcap * tanh(logits / softcap); None for none.
        interpret: run on any device, to check it.

    Returns:
        The output `[M, K, G, D]` in the model's dtype, undefined from sequence B on; keys, values and positions with
        the token's rows; and the scores, if there are any.
    """
    k, v = rows
    dtype = jnp.dtype(dtype)
    tiles, tile = _tiles(q, itemsize_of(k, v, dtype), dtype, tiles)
    logits = None if scores is None else scores.logits(scores.start)
    how = How(tiles=tiles, tile=tile, dtype=dtype, interpret=interpret, softcap=softcap)
    passed = pass_rows(q, k, v, chunks, layer, token=token, logits=logits, picks=picks, how=how)
    given = (passed.out, passed.lse, chunks, layer, sink_logits)
    out, lse = merge(*given, dtype=dtype, how=how, sequences=q.shape[1])
    if scores is None or logits is None or passed.logits is None:
        return out, *passed.pool
    begun = (out, scores.score, token.counts, scores.begin)
    out, score = add_mass(passed.logits, logits, lse, chunks, layer, *begun, how=how)
    return out, *passed.pool, score


def _tiles(q, itemsize, dtype, tiles):
    """Tiles of decode attention, by default those for q's shape, and the number of queries of one program."""
    tiles = tiles or decode_tiles(dim=q.shape[-1], itemsize=itemsize, exact=dtype == jnp.float32)
    return tiles, min(tiles.queries, max(16, 1 << (q.shape[-2] - 1).bit_length()))
