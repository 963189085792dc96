"""One layer's step: new tokens are projected, attend to the rows before them, join these, and the block is finished.

It stands once; its drivers differ: a loop over tokens (`loop`), with rows beside pools that are only read where the
spec says so, several tokens at once (`decode`), and stretches of layers around transfers (`staged`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention import Received
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool, append, append_norms
from jaxkv.cache.stores import put_cells
from jaxkv.engine.bookkeeping import decay_of, scores_of, with_received
from jaxkv.engine.filters import Chosen
from jaxkv.engine.ordering import behind
from jaxkv.engine.segments import Segments
from jaxkv.engine.sparse import Loaded, chosen_at, over_chosen, over_rest, picks_of
from jaxkv.engine.spec import Spec
from jaxkv.engine.stream import Stream, entered, left
from jaxkv.engine.tokens import NewTokens, StepAngles, Token, pool_attention, project, rolled, whole_token
from jaxkv.models.decoder import Block
from jaxkv.models.rope import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """One layer's rows drawn since the pool was last written, for programs that only read it while drawing.

    Attributes:
        k: `f32[B, K, T, D]` keys as the pool stores them.
        v: `f32[B, K, T, D]` values.
    """

    k: Float[Array, "B K T D"]
    v: Float[Array, "B K T D"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dealt:
    """One layer's share of a decode step's table of chunks.

    Attributes:
        chunks: of all layers.
        start: first rows of all layers' segments.
        layer: which of them.
        widest: the most rows that a segment has with the token, if that is known.
        picked: rows that chunks have been dealt for of what was chosen; None where the layer reads all.
        rest: of all layers' segments the row from which on all are read, likewise.
    """

    chunks: Any
    start: Int[Array, "L B K"]
    layer: int
    widest: int | None
    picked: Int[Array, " B"] | None = None
    rest: Int[Array, "L B K"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRows:
    """What one layer reads in a step, and writes.

    Attributes:
        pool: its pool; with room for the new rows behind every segment, unless they go to the tail.
        segments: where its rows lie before the step.
        by: the angles of the new tokens' places, and of the rows' if keys are rotated when they are read.
        tail: rows beside the pool, which then is only read; None if rows join the pool.
        ring: the queries that the layer remembers, if any.
        likely: keys of the rows likely to go, if the program looks ahead.
        norms: `f32[B, P]` length of each key, if the program keeps them.
        chosen: the tokens of before that are read, beside those that need not be chosen; None for all.
        loaded: the chosen rows, if they do not lie in the pool.
        dealt: who reads what, where a kernel rotates, appends and attends.
    """

    pool: Pool
    segments: Segments
    by: StepAngles
    tail: Tail | None = None
    ring: Float[Array, "B K G R D"] | None = None
    likely: Float[Array, "B K D"] | None = None
    norms: Float[Array, "B P"] | None = None
    chosen: Chosen | None = None
    loaded: Loaded | None = None
    dealt: Dealt | None = None

    @property
    def keys(self) -> Float[Array, "B P D"]:
        """The pool's keys as queries meet them."""
        return self.pool.k if self.by.rows is None else rolled(self.pool.k, self.by.rows)

    @property
    def end(self) -> Int[Array, "B K"]:
        """The first free row of each segment."""
        return self.segments.start + self.segments.length


class Stepped(NamedTuple):
    """What a layer's step gives.

    Attributes:
        stream: hidden states for the next layer.
        rows: the layer's, the new ones among them.
        out: one number of each head's attention output, for what must come after it.
        products: of the keys with those of the rows likely to go, see `Received`, if the program looks ahead.
        chosen: what the layers above read, if this one is a filter.
    """

    stream: Stream
    rows: LayerRows
    out: Float[Array, "B K"]
    products: Float[Array, "B K n"] | None
    chosen: Chosen | None


def layer_step(
    block: Block, spec: Spec, stream: Stream, rows: LayerRows, new: NewTokens, *, chooses: bool = False
) -> Stepped:
    """Runs one block over N new tokens, on top of the rows it has had.

    Args:
        block: the layer's parameters.
        spec: what is static.
        stream: hidden states.
        rows: what the layer has had before.
        new: what is known of the tokens.
        chooses: this is a filter: choose what the layers above it read.

    Returns:
        Hidden states and rows after the step, and what is known from now on.
    """
    x, normed = entered(block, stream, spec)
    parts = None if rows.dealt is None else block.parts(normed)
    if parts is None:
        token = project(block, spec, normed[: new.count.shape[0]], rows.by.new)
    else:
        token = whole_token(*parts, rows.by.new, normed.dtype)
    if rows.ring is not None:
        rows = dataclasses.replace(rows, ring=remembered(rows.ring, token.q, new.positions, new.count))
    out, rows, received = attend(spec, token, rows, new) if parts is None else join(spec, token, rows, new, parts)
    chosen = None
    if chooses:
        # From the pool as it is now: a reader of what it was before would cost a copy.
        chosen = chosen_at(spec, rows.pool, rows.segments, token.q, rows.ring, new)
    stream, products = left(block, x, out, spec), None
    if received is not None:
        # Nothing waits for scores before all layers are done: looking at x, they do not keep a core from it.
        counts = behind(new.count > 0, stream.x[:, 0, 0])
        pool = with_received(rows.pool, received, rows.segments.start, counts)
        rows = dataclasses.replace(rows, pool=pool)
        products = received.products
    return Stepped(stream, rows, out[: new.count.shape[0], :, 0, 0, 0], products, chosen)


def attend(
    spec: Spec, token: Token, rows: LayerRows, new: NewTokens
) -> tuple[Float[Array, "B K G N D"], LayerRows, Received | None]:
    """One layer's attention of N new tokens, whose rows join its own.

    Args:
        spec: what is static.
        token: the tokens as the layer sees them.
        rows: what it has had before.
        new: what is known of the tokens.

    Returns:
        The output; the layer's rows, the new ones among them; and what `attention.add_received` makes their scores of,
        if they are not yet.
    """
    if rows.tail is not None:
        return *_beside(spec, token, rows, new), None
    if new.positions.shape[1] > 1:
        return *_several(spec, token, rows, new), None
    # A single token simply joins the rows before it is its turn to look at them.
    begun = scores_of(token.stored, token.v, spec)
    pool = append(rows.pool, token.stored, token.v, new.positions, rows.end, new.count, begun)
    norms = rows.norms
    if norms is not None:
        norms = append_norms(norms, token.stored.astype(pool.k.dtype), rows.end, new.count)
    rows, length = dataclasses.replace(rows, pool=pool, norms=norms), rows.segments.length + new.count[:, None]
    if rows.chosen is not None:
        rest = over_rest(spec, token.q, pool, rows.segments, length)
        return attention.merge(*_over_chosen(spec, token, rows), *rest), rows, None
    start = rows.segments.start
    if not spec.scored:
        return pool_attention(token.q, rows.keys, pool.v, start, length, spec)[0], rows, None
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
        other=rows.likely,
    )
    if isinstance(scores, Received):
        return out[..., None, :], rows, scores
    pool = dataclasses.replace(pool, score=scores)
    return out[..., None, :], dataclasses.replace(rows, pool=pool), None


def join(
    spec: Spec, token: Token, rows: LayerRows, new: NewTokens, parts: tuple[Array, Array]
) -> tuple[Float[Array, "M K G 1 D"], LayerRows, None]:
    """`attend` for one token, by a kernel that rotates it, writes its row and attends.

    Args:
        spec: what is static.
        token: the token; of it only what the policy asks for is made.
        rows: what the layer has had before.
        new: what is known of the token.
        parts: of its queries, and of its keys and values.

    Returns:
        The output, undefined behind B sequences; the layer's rows, the new ones among them; and no scores to be added.
    """
    pool, dealt = rows.pool, rows.dealt
    assert dealt is not None
    begun = scores_of(token.stored, token.v, spec)
    scored = spec.scored and pool.score is not None
    picks = None
    if rows.chosen is not None and dealt.picked is not None and dealt.rest is not None:
        places, held = picks_of(spec, pool, rows.segments, rows.chosen)
        picks = (places, dealt.picked, held, dealt.rest, dealt.start)
    out, k, v, pos, *score = spec.backend.decode_token(
        *parts,
        (rows.by.new.cos[:, 0], rows.by.new.sin[:, 0]),
        new.positions[:, 0],
        new.count,
        (pool.k, pool.v, pool.pos),
        dealt.start,
        dealt.chunks,
        layer=dealt.layer,
        score=pool.score if scored else None,
        begin=begun[..., 0] if scored and begun is not None else None,
        widest=dealt.widest,
        picks=picks,
    )
    scores = score[0] if scored else pool.score
    if scores is not None and not scored:
        assert begun is not None
        end = jnp.where(new.count[:, None] > 0, rows.end, pool.rows)
        scores = put_cells(scores, end, begun[..., 0])
    pool = dataclasses.replace(pool, store=pool.store.of(k, v), pos=pos, score=scores)
    return out[..., None, :], dataclasses.replace(rows, pool=pool), None


def _several(spec: Spec, token: Token, rows: LayerRows, new: NewTokens) -> tuple[Array, LayerRows]:
    """Several tokens attend to older rows and to one another; the scores of both go on, if any do."""
    pool, scores = rows.pool, scores_of(token.stored, token.v, spec)
    # Together they choose among all that came before; only what lies elsewhere leaves something to be read here.
    out, lse = _over_older(spec, token, rows, rest=rows.loaded is not None)
    own, own_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, token.v))
    if spec.scored:
        score, scores = _scores(spec, token, rows, new.count, jnp.logaddexp(lse, own_lse))
        pool = dataclasses.replace(pool, score=score)
    pool = append(pool, token.stored, token.v, new.positions, rows.end, new.count, scores)
    return attention.merge(out, lse, own, own_lse), dataclasses.replace(rows, pool=pool)


def _scores(
    spec: Spec, token: Token, rows: LayerRows, count: Int[Array, " B"], lse: Float[Array, "B K G N"]
) -> tuple[Float[Array, "B P"], Float[Array, "B K N"]]:
    """Scores of older rows and of the new ones, after attention whose log-sum-exp is known."""
    pool, segments = rows.pool, rows.segments
    assert pool.score is not None
    tokens, group = token.q.shape[3], token.q.shape[2]
    index = jnp.arange(tokens, dtype=jnp.int32)
    whole = jnp.where((index < count[:, None])[:, None, None], lse, jnp.inf)
    decay = decay_of(spec)
    if decay is not None and decay != 1:
        # A probability times a share is one over a sum that much larger: in logarithms, and infinitely so for none.
        behind = jnp.maximum(count[:, None] - 1 - index, 0)
        whole = whole - jnp.log(decay ** behind.astype(jnp.float32))[:, None, None]
    flat = lambda a: a.reshape(*a.shape[:2], group * tokens, *a.shape[4:])  # noqa: E731
    of = (flat(token.q), rows.keys, flat(whole), segments.start, segments.length, pool.score)
    score = attention.pool_sums(*of, walk=spec.layout.walk, weight=1 / group)
    sums = lax.map(lambda a: attention.column_sums(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, whole))
    return score, sums.mean(axis=2)


def _beside(spec: Spec, token: Token, rows: LayerRows, new: NewTokens) -> tuple[Array, LayerRows]:
    """A token's row joins the tail, and the token attends to the pool and to the tail."""
    tail, written = rows.tail, new.written
    assert tail is not None and written is not None
    # A sequence that has ended writes nothing, and has a row to read all the same: no softmax over none.
    batch, heads, size, dim = tail.k.shape
    at, held = jnp.where(new.count > 0, written, size), jnp.maximum(written + new.count, 1)
    each = jnp.arange(batch, dtype=jnp.int32)
    put = lambda leaf, row: leaf.at[each, :, at].set(  # noqa: E731
        row[:, :, 0].astype(leaf.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )
    # Without the barrier the update is fused into its reader as well as into the loop's state: done twice, by copies.
    tail = lax.optimization_barrier(Tail(k=put(tail.k, token.stored), v=put(tail.v, token.v)))
    keys = tail.k
    if rows.by.tail is not None:
        keys = rotate(keys, rows.by.tail)
    flat = lambda a: a.reshape(batch, heads * size, dim)  # noqa: E731
    first = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32) * size, (batch, heads))
    drawn = jnp.broadcast_to(held[:, None], (batch, heads))
    equal = dataclasses.replace(spec, layout=Layout.EQUAL)
    own = pool_attention(token.q.astype(tail.k.dtype), flat(keys), flat(tail.v), first, drawn, equal)
    older = _over_older(spec, token, rows, rest=True)
    return attention.merge(*older, *own), dataclasses.replace(rows, tail=tail)


def _over_older(
    spec: Spec, token: Token, rows: LayerRows, *, rest: bool
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention to rows of before the step: all; or those chosen, and the rest that need not be if it counts."""
    pool, segments = rows.pool, rows.segments
    if rows.chosen is None:
        return pool_attention(token.q, rows.keys, pool.v, segments.start, segments.length, spec)
    some = _over_chosen(spec, token, rows)
    if not rest:
        return some
    return attention.merge_with_lse(*over_rest(spec, token.q, pool, segments, segments.length), *some)


def _over_chosen(spec: Spec, token: Token, rows: LayerRows) -> tuple[Array, Array]:
    assert rows.chosen is not None
    return over_chosen(spec, token.q, rows.pool, rows.segments, rows.chosen, rows.loaded)


def remembered(
    ring: Float[Array, "B K G R D"],
    q: Float[Array, "B K G N D"],
    positions: Int[Array, "B N"],
    count: Int[Array, " B"],
) -> Float[Array, "B K G R D"]:
    """A ring with N new queries, of which `count` are real, in the slots of their positions."""
    batch, rows, tokens = ring.shape[0], ring.shape[3], q.shape[3]
    offset = jnp.arange(tokens, dtype=jnp.int32)
    # Of more queries than the ring holds only the last ones count.
    real = (offset < count[:, None]) & (offset >= count[:, None] - rows)
    slot = jnp.where(real, positions % rows, rows)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(ring.dtype)
    return ring.at[index, :, :, slot].set(by_token, mode="drop", unique_indices=True)
