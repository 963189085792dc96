"""Decode step of one layer, and of consecutive layers: project new tokens, add their rows, attend, finish the block.

`decode` runs all layers in one program, `staged` runs stretches of layers between transfers from host memory.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention import Received
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool, append
from jaxkv.cache.stores import put_cells
from jaxkv.engine.bookkeeping import decay_of, scores_of, with_received
from jaxkv.engine.hadamard import transformed
from jaxkv.engine.joining import attend_joining, joins
from jaxkv.engine.pages import PageRows, chosen_pages, over_pages, with_new_rows
from jaxkv.engine.segments import Segments, behind, in_window
from jaxkv.engine.sliding import over_window, several_in_window
from jaxkv.engine.sparse import Chosen, Loaded, chosen_at, over_chosen, over_rest, picks_of
from jaxkv.engine.spec import Spec
from jaxkv.engine.stream import Stream, attention_input, block_output
from jaxkv.engine.tokens import (
    NewTokens,
    StepAngles,
    Token,
    pool_attention,
    project,
    readable,
    remembered,
    rolled,
    token_of_parts,
)
from jaxkv.models.decoder import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dealt:
    """Row chunks that a fused decode kernel reads, of all layers, and the segments from which they were computed.

    Attributes:
        chunks: from `Backend.deal`.
        start: first rows of all layers' segments.
        picked: chosen rows per sequence that chunks were dealt for; None without sparse layers.
        rest: row of each segment from which on sparse layers read all; None without sparse layers.
    """

    chunks: Any
    start: Int[Array, "L B K"]
    picked: Int[Array, " B"] | None = None
    rest: Int[Array, "L B K"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRows:
    """Input and output of one layer's step: pool, segments, RoPE angles, query ring, chosen positions.

    The step returns it with the new tokens' rows in the pool, and their queries in the ring.

    Attributes:
        pool: rows of the layer, with room behind every segment for the new ones.
        segments: segments before the step.
        by: RoPE angles of the new tokens, and of rows held before RoPE.
        layer: index into the tables of `dealt`.
        ring: last queries of the layer; None if it keeps none.
        asks: True for a filter layer, which chooses positions for the layers above it.
        sparse: True if the layer reads chosen positions, and rows that need no choice, alone.
        chosen: the positions that a sparse layer reads.
        loaded: the chosen rows, if they come from host memory.
        dealt: table of a kernel that rotates, appends and attends at once; None runs separate steps.
        gate: weights of the layer's gate, by which new rows are scored; None without one.
        pages: rows of the pages chosen for the new token; None before the choice, and without pages.
        window: number of last tokens that the layer's tokens attend to; None for all.
        centre: vector taken off all keys of a head before they were transformed; None if rows are as they are.
    """

    pool: Pool
    segments: Segments
    by: StepAngles
    layer: int = 0
    ring: Float[Array, "B K G R D"] | None = None
    asks: bool = False
    sparse: bool = False
    chosen: Chosen | None = None
    loaded: Loaded | None = None
    dealt: Dealt | None = None
    gate: Any = None
    pages: PageRows | None = None
    window: int | None = None
    centre: Float[Array, "B K D"] | None = None

    @property
    def keys(self) -> Float[Array, "B P D"]:
        """Keys `[B, P, D]` of the pool after RoPE; rotated on the fly if the pool holds them before RoPE."""
        return self.pool.k if self.by.rows is None else rolled(self.pool.k, self.by.rows)

    @property
    def end(self) -> Int[Array, "B K"]:
        """Pool row index of the first free row behind each segment."""
        return self.segments.start + self.segments.length


class Stepped(NamedTuple):
    """Result of one layer's step: hidden states, rows, output numbers, filter's choice.

    `out` is one number of each head's attention output, on which later writes can depend; `chosen` is a filter
    layer's choice.
    """

    stream: Stream
    rows: LayerRows
    out: Float[Array, "B K"]
    chosen: Chosen | None


def run_layers(
    blocks: Iterable[Block],
    spec: Spec,
    stream: Stream,
    layers: Iterable[LayerRows],
    new: NewTokens,
    chosen: Chosen | None = None,
) -> list[Stepped]:
    """Runs consecutive blocks over N new tokens, appends their rows; returns each block's `Stepped` in a list.

    `chosen` are the positions that sparse layers read below the first filter.
    A filter's choice goes to the sparse layers above it, and a shared pool from layer to layer.
    """
    done: list[Stepped] = []
    for block, rows in zip(blocks, layers, strict=True):
        if done and spec.layout.one_pool:
            rows = dataclasses.replace(rows, pool=done[-1].rows.pool)
        rows = dataclasses.replace(rows, chosen=chosen if rows.sparse else None)
        done.append(layer_step(block, spec, stream, rows, new))
        stream, chosen = done[-1].stream, done[-1].chosen or chosen
    return done


def layer_step(
    block: Block, spec: Spec, stream: Stream, rows: LayerRows, new: NewTokens
) -> Stepped:
    """Runs one block over N new tokens, appends their rows; returns `Stepped`: hidden states, rows, filter's choice."""
    rows, spec = dataclasses.replace(rows, window=block.spec.window), spec.at(block.spec)
    x, normed = attention_input(block, stream, spec)
    parts = None if rows.dealt is None else block.parts(normed)
    if parts is None:
        token = project(block, spec, normed[: new.count.shape[0]], rows.by.new)
    else:
        token = token_of_parts(*parts, rows.by.new, normed.dtype)
        token = dataclasses.replace(token, shaping=block.shaping)
    if spec.gate is not None:
        token = dataclasses.replace(
            token, begun=spec.gate.scores(rows.gate, normed[: new.count.shape[0]])
        )
    if rows.centre is not None:
        # What looks at a row itself comes before its transform.
        token = dataclasses.replace(token, begun=scores_of(token, spec)).transformed(rows.centre)
    # Rounded to the model's dtype before: a CPU holds the same numbers as float32.
    token = token.widened(rows.pool.dtype)
    if rows.ring is not None:
        rows = dataclasses.replace(rows, ring=remembered(rows.ring, token.q, new))
    paged = rows.pool.bounds is not None
    if paged and rows.sparse:
        rows = _choosing_pages(spec, token, rows, new)
    received = None
    if parts is not None and rows.dealt is not None:
        out, rows = _attend_fused(spec, token, rows, new, parts, rows.dealt)
    else:
        out, rows, received = attend(spec, token, rows, new)
        out = out.astype(normed.dtype)
    if paged:
        # Only now that the pages are chosen: a write beside that read would cost a copy of all bounds.
        pool = with_new_rows(rows.pool, rows.segments, new, out[: new.count.shape[0], :, 0, 0, 0])
        rows = dataclasses.replace(rows, pool=pool)
    # Read the pool after its update: a reader of the pool before it would cost a copy.
    asked = (rows.pool, rows.segments, token.q, rows.ring, new, token.shaping)
    chosen = chosen_at(spec, *asked) if rows.asks else None
    attended = out if rows.centre is None else transformed(out)
    stream = block_output(block, x, attended, spec)
    if received is not None:
        # Scores are not needed before all layers are done: depending on x, they do not take a core away from it.
        counts = behind(new.count > 0, stream.x[:, 0, 0])
        pool = with_received(rows.pool, received, rows.segments.start, counts)
        rows = dataclasses.replace(rows, pool=pool)
    return Stepped(stream, rows, out[: new.count.shape[0], :, 0, 0, 0], chosen)


def _choosing_pages(spec: Spec, token: Token, rows: LayerRows, new: NewTokens) -> LayerRows:
    """Chooses the pages that one new token reads; returns the layer's `LayerRows` with their rows in field `pages`."""
    bounds = rows.pool.bounds
    assert bounds is not None and new.candidates is not None
    length, budget = rows.segments.length, new.candidates.budget
    each = rows.pool.rows // token.q.shape[1]
    return dataclasses.replace(
        rows, pages=chosen_pages(spec, token.q[..., 0, :], bounds, length, budget, each)
    )


def attend(
    spec: Spec, token: Token, rows: LayerRows, new: NewTokens
) -> tuple[Float[Array, "B K G N D"], LayerRows, Received | None]:
    """Appends N new tokens' rows; returns attention output, rows, and attention still to add to scores or None."""
    if new.positions.shape[1] > 1:
        return *_attend_several(spec, token, rows, new), None
    alone = rows.loaded is None and rows.pages is None
    if alone and joins(spec, rows.pool):
        out, pool = attend_joining(
            spec, token, rows.pool, rows.segments, rows.window, new, rows.chosen
        )
        return out, dataclasses.replace(rows, pool=pool), None
    # A single token's row is appended first; attention then reads it like the others.
    pool = append(
        rows.pool, token.stored, token.v, new.positions, rows.end, new.count, scores_of(token, spec)
    )
    length = rows.segments.length + new.count[:, None]
    rows = dataclasses.replace(rows, pool=pool)
    if rows.chosen is not None:
        some = over_chosen(spec, token, pool, rows.segments, rows.chosen, rows.loaded)
        rest = over_rest(spec, token, pool, rows.segments, length)
        return attention.merge(*some, *rest), rows, None
    start = rows.segments.start
    if rows.pages is not None:
        read = over_pages(spec, token, pool, start, length, rows.pages)
        return read[0], rows, None
    if rows.window is not None:
        near = over_window(
            token.q, pool, *in_window(start, length, rows.window), spec, token.shaping
        )
        return near[0], rows, None
    if not spec.scored:
        every = pool_attention(token.q, rows.keys, pool.v, start, length, spec, token.shaping)
        return every[0], rows, None
    assert pool.score is not None
    out, scores = spec.backend.attend_scored(
        token.q[..., 0, :],
        rows.keys,
        pool.v,
        start,
        length,
        pool.score,
        new.count > 0,
        walk=spec.layout.walk,
        widest=spec.widest,
        shaping=token.shaping,
    )
    if isinstance(scores, Received):
        return out[..., None, :], rows, scores
    pool = dataclasses.replace(pool, score=scores)
    return out[..., None, :], dataclasses.replace(rows, pool=pool), None


def _attend_fused(
    spec: Spec,
    token: Token,
    rows: LayerRows,
    new: NewTokens,
    parts: tuple[Array, Array],
    dealt: Dealt,
) -> tuple[Float[Array, "M K G 1 D"], LayerRows]:
    """Appends one token's row and attends, in one kernel; returns output (padding from sequence B on), updated rows.

    `parts` are split-K partial sums of the token's queries, and of its keys and values.
    """
    pool, heads = rows.pool, rows.segments.start.shape[1]
    begun, angles = scores_of(token, spec), (rows.by.new.cos[:, 0], rows.by.new.sin[:, 0])
    if rows.centre is not None:
        # Rotated and transformed already: the kernel would do the former alone.
        parts = token.parts(parts[0].shape[1])
        angles = jnp.ones_like(angles[0]), jnp.zeros_like(angles[1])
    scored, picks = spec.scored and pool.score is not None and rows.window is None, None
    if rows.chosen is not None and dealt.picked is not None and dealt.rest is not None:
        places, held = picks_of(spec, pool, rows.segments, rows.chosen)
        picks = (places, dealt.picked, held, dealt.rest, dealt.start)
    elif rows.pages is not None and dealt.picked is not None and dealt.rest is not None:
        picks = (rows.pages.rows, dealt.picked, rows.pages.held, dealt.rest, dealt.start)
    out, k, v, pos, *score = spec.backend.decode_token(
        parts[0],
        parts[1],
        angles,
        new.positions[:, 0],
        new.count,
        (*pool.store.held, pool.pos),
        dealt.start,
        dealt.chunks,
        layer=rows.layer,
        score=pool.score if scored else None,
        begin=begun[..., 0] if scored and begun is not None else None,
        widest=pool.rows // heads if spec.layout is Layout.EQUAL else spec.widest,
        picks=picks,
        dtype=pool.store.dtype,
        shaping=token.shaping,
    )
    scores = score[0] if scored else pool.score
    if scores is not None and not scored:
        assert begun is not None
        end = jnp.where(new.count[:, None] > 0, rows.end, pool.rows)
        scores = put_cells(scores, end, begun[..., 0])
    pool = dataclasses.replace(pool, store=pool.store.holding(k, v), pos=pos, score=scores)
    return out[..., None, :], dataclasses.replace(rows, pool=pool)


def _attend_several(
    spec: Spec, token: Token, rows: LayerRows, new: NewTokens
) -> tuple[Array, LayerRows]:
    """Appends several tokens' rows; returns their attention to older rows and one another, and the updated rows.

    The two are merged by log-sum-exp.
    """
    pool, scores = rows.pool, scores_of(token, spec)
    if rows.window is not None:
        out = several_in_window(spec, token, pool, rows.segments, new.count, rows.window)
        return out, dataclasses.replace(
            rows,
            pool=append(pool, token.stored, token.v, new.positions, rows.end, new.count, scores),
        )
    # Several tokens choose among all earlier rows: none is left to be read without a choice, unless the chosen ones
    # come from host memory.
    out, lse = _over_older(spec, token, rows, rest=rows.loaded is not None)
    causal = partial(attention.causal, softcap=token.shaping.softcap)
    own = lax.map(lambda a: causal(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, token.v))
    own, own_lse = token.shaping.joined(*own)
    if spec.scored:
        assert pool.score is not None
        score, scores = _several_scores(
            spec, token, rows, new.count, jnp.logaddexp(lse, own_lse), pool.score
        )
        pool = dataclasses.replace(pool, score=score)
    pool = append(pool, token.stored, token.v, new.positions, rows.end, new.count, scores)
    return attention.merge(out, lse, own, own_lse), dataclasses.replace(rows, pool=pool)


def _several_scores(
    spec: Spec,
    token: Token,
    rows: LayerRows,
    count: Int[Array, " B"],
    lse: Float[Array, "B K G N"],
    score: Float[Array, "B P"],
) -> tuple[Float[Array, "B P"], Float[Array, "B K N"]]:
    """Scores `[B, P]` of older rows and `[B, K, N]` of new rows, attention received from the N new tokens included."""
    tokens, group = token.q.shape[3], token.q.shape[2]
    index = jnp.arange(tokens, dtype=jnp.int32)
    whole = jnp.where((index < count[:, None])[:, None, None], lse, jnp.inf)
    decay = decay_of(spec)
    if decay is not None and decay != 1:
        # exp(x - lse) * d = exp(x - (lse - log(d))): the decay d goes into the log-sum-exp, infinite for d = 0.
        later = jnp.maximum(count[:, None] - 1 - index, 0)
        whole = whole - jnp.log(decay ** later.astype(jnp.float32))[:, None, None]
    batch, heads, *_, dim = token.q.shape
    older = attention.pool_sums(
        token.q.reshape(batch, heads, group * tokens, dim),
        rows.keys,
        whole.reshape(batch, heads, group * tokens),
        rows.segments.start,
        rows.segments.length,
        score,
        walk=spec.layout.walk,
        weight=1 / group,
        softcap=token.shaping.softcap,
    )
    received = partial(attention.column_sums, softcap=token.shaping.softcap)
    sums = lax.map(lambda a: received(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, whole))
    return older, sums.mean(axis=2)


def _over_older(
    spec: Spec, token: Token, rows: LayerRows, *, rest: bool
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention to rows from before the step: output and log-sum-exp; sparse layers read only chosen rows.

    With `rest`, sparse layers read the rows that need no choice as well.
    """
    pool, segments = rows.pool, rows.segments
    # The sink logits are among the new tokens.
    older = dataclasses.replace(token, shaping=token.shaping.without_sinks)
    if rows.chosen is None:
        return pool_attention(
            token.q,
            *readable(spec, pool, rows.by.rows),
            segments.start,
            segments.length,
            spec,
            older.shaping,
        )
    some = over_chosen(spec, token, pool, segments, rows.chosen, rows.loaded)
    if not rest:
        return some
    return attention.merge_with_lse(*over_rest(spec, older, pool, segments, segments.length), *some)
