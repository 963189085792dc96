"""One layer's step: new tokens are projected, attend to the rows before them, join these, and the block is finished.

It stands once; its drivers differ: a loop over tokens (`loop`), with rows beside pools that are only read where the
program says so, several tokens at once (`decode`), and stretches of layers around transfers (`staged`).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention import Heard
from jaxkv.attention.xla import Form
from jaxkv.cache import Pool, append
from jaxkv.models.choosing import Chosen
from jaxkv.models.decoder import Block
from jaxkv.models.evict import Segments
from jaxkv.models.moving import Program
from jaxkv.models.sparse import Candidates, Loaded, chosen_at, over_chosen, over_rest
from jaxkv.models.tokens import StepAngles, Token, pool_attention, project, rolled
from jaxkv.policies.protocol import Carry
from jaxkv.rope import angles, rotate


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
class LayerRows:
    """What one layer reads in a step, and writes.

    Attributes:
        pool: its pool; with room for the new rows behind every segment, unless they go to the tail.
        segments: where its rows lie before the step.
        tail: rows beside the pool, which then is only read; None if rows join the pool.
        ring: the queries that the layer remembers, if any.
        likely: keys of the rows likely to go, if the program looks ahead.
    """

    pool: Pool
    segments: Segments
    tail: Tail | None = None
    ring: Float[Array, "B K G R D"] | None = None
    likely: Float[Array, "B K D"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """What all layers of a step know of its N tokens.

    Attributes:
        positions: theirs in the text.
        count: how many of the N are real; 0 leaves a sequence's rows as they are.
        index: rows of the tails in use, where there are tails.
        candidates: what filter layers choose from, where there are filters.
    """

    positions: Int[Array, "B N"]
    count: Int[Array, " B"]
    index: Int[Array, ""] | None = None
    candidates: Candidates | None = None


class Attended(NamedTuple):
    """What attention gives.

    Attributes:
        out: its output.
        rows: the layer's, the new ones among them.
        heard: what `attention.add_heard` makes the rows' scores of, if they are not yet.
    """

    out: Float[Array, "B K G N D"]
    rows: LayerRows
    heard: Heard | None = None


class Stepped(NamedTuple):
    """What a layer's step gives.

    Attributes:
        x: hidden states for the next layer.
        rows: the layer's, the new ones among them.
        out: one number of each head's attention output, for what must come after it.
        heard: as in `Attended`.
        chosen: what the layers above read, if a filter has chosen.
    """

    x: Float[Array, "B N E"]
    rows: LayerRows
    out: Float[Array, "B K"]
    heard: Heard | None
    chosen: Chosen | None


def layer_step(
    block: Block,
    program: Program,
    x: Float[Array, "B N E"],
    rows: LayerRows,
    new: NewTokens,
    by: StepAngles,
    *,
    sparse: bool = False,
    chooses: bool = False,
    chosen: Chosen | None = None,
    loaded: Loaded | None = None,
) -> Stepped:
    """Runs one block over N new tokens, on top of the rows it has had.

    Args:
        block: the layer's parameters.
        program: what is static.
        x: hidden states.
        rows: what the layer has had before.
        new: what is known of the tokens.
        by: the angles of their places.
        sparse: read only what was chosen, and what need not be.
        chooses: this is a filter: choose what the layers above it read.
        chosen: what the last filter chose.
        loaded: the chosen rows, if they do not lie in the pool.

    Returns:
        Hidden states and rows after the step, and what is known from now on.
    """
    assert chosen is not None or not sparse
    token = project(block, program, x, by.new)
    ring = None if rows.ring is None else remembered(rows.ring, token.q, new.positions, new.count)
    rows = dataclasses.replace(rows, ring=ring)
    out, rows, heard = attend(program, token, rows, new, by, chosen if sparse else None, loaded)
    if chooses:
        # From the pool as it is now: a reader of what it was before would cost a copy.
        chosen = chosen_at(program, rows.pool, rows.segments, token.q, ring, new.positions, new.count, new.candidates)
    return Stepped(block.finish(x, out), rows, out[:, :, 0, 0, 0], heard, chosen)


def attend(
    program: Program,
    token: Token,
    rows: LayerRows,
    new: NewTokens,
    by: StepAngles,
    chosen: Chosen | None = None,
    loaded: Loaded | None = None,
) -> Attended:
    """One layer's attention of N new tokens, whose rows join its own.

    Args:
        program: what is static.
        token: the tokens as the layer sees them.
        rows: what it has had before.
        new: what is known of the tokens.
        by: the angles of their places, and of the rows' if keys are rotated when they are read.
        chosen: the tokens that are read; None for all.
        loaded: the chosen rows, if they do not lie in the pool.

    Returns:
        The output, and the layer's rows after the step.
    """
    if rows.tail is not None:
        return _beside(program, token, rows, new, by, chosen)
    if new.positions.shape[1] > 1:
        return _several(program, token, rows, new, by, chosen, loaded)
    # A single token simply joins the rows before it is its turn to look at them.
    segments, count = rows.segments, new.count
    pool = append(rows.pool, token.stored, token.v, new.positions, segments.start + segments.length, count)
    after, length = dataclasses.replace(rows, pool=pool), segments.length + count[:, None]
    if chosen is not None:
        some = over_chosen(program, token.q, pool, segments, chosen, loaded)
        return Attended(attention.merge(*some, *over_rest(program, token.q, pool, segments, length)), after)
    keys = pool.k if by.rows is None else rolled(pool.k, by.rows)
    if not program.scored:
        return Attended(pool_attention(token.q, keys, pool.v, segments.start, length, program)[0], after)
    assert pool.score is not None
    out, scores = attention.over_pool_scored(
        token.q[..., 0, :],
        keys,
        pool.v,
        segments.start,
        length,
        pool.score,
        count > 0,
        form=program.form,
        widest=program.widest,
        other=rows.likely,
        implementation=program.implementation,
    )
    if isinstance(scores, Heard):
        return Attended(out[..., None, :], after, scores)
    return Attended(out[..., None, :], dataclasses.replace(rows, pool=dataclasses.replace(pool, score=scores)))


def _several(
    program: Program,
    token: Token,
    rows: LayerRows,
    new: NewTokens,
    by: StepAngles,
    chosen: Chosen | None,
    loaded: Loaded | None,
) -> Attended:
    """Several tokens attend to older rows and to one another; the scores of both go on, if any do."""
    pool, segments = rows.pool, rows.segments
    # Together they choose among all that came before; only what lies elsewhere leaves something to be read here.
    rest = chosen is None or loaded is not None
    out, lse = _older(program, token, rows, by, chosen, loaded, rest=rest)
    own, own_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, token.v))
    joined, scores = attention.merge(out, lse, own, own_lse), None
    if program.scored:
        whole = jnp.logaddexp(lse, own_lse)
        score, scores = _scores(program, token, pool, segments, new.count, by, whole)
        pool = dataclasses.replace(pool, score=score)
    end = segments.start + segments.length
    pool = append(pool, token.stored, token.v, new.positions, end, new.count, scores)
    return Attended(joined, dataclasses.replace(rows, pool=pool))


def _scores(
    program: Program,
    token: Token,
    pool: Pool,
    segments: Segments,
    count: Int[Array, " B"],
    by: StepAngles,
    lse: Float[Array, "B K G N"],
) -> tuple[Float[Array, "B P"], Float[Array, "B K N"]]:
    """Scores of older rows and of the new ones, after attention whose log-sum-exp is known."""
    assert program.upkeep is not None and pool.score is not None
    tokens, group = token.q.shape[3], token.q.shape[2]
    index = jnp.arange(tokens, dtype=jnp.int32)
    counts = index < count[:, None]
    if program.upkeep.carry is Carry.LAST:
        counts = counts & (index == count[:, None] - 1)
    whole = jnp.where(counts[:, None, None], lse, jnp.inf)
    flat = lambda a: a.reshape(*a.shape[:2], group * tokens, *a.shape[4:])  # noqa: E731
    score = attention.pool_sums(
        flat(token.q),
        pool.k if by.rows is None else rolled(pool.k, by.rows),
        flat(whole),
        segments.start,
        segments.length,
        pool.score,
        form=program.form,
        weight=1 / group,
    )
    sums = lax.map(lambda a: attention.column_sums(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, whole))
    return score, sums.mean(axis=2)


def _beside(
    program: Program, token: Token, rows: LayerRows, new: NewTokens, by: StepAngles, chosen: Chosen | None
) -> Attended:
    """A token's row joins the tail, and the token attends to the pool and to the tail."""
    tail, index, length = rows.tail, new.index, rows.segments.length
    assert tail is not None and index is not None
    put = lambda leaf, row: lax.dynamic_update_slice(leaf, row.astype(leaf.dtype), (0, 0, index, 0))  # noqa: E731
    # Without the barrier the update is fused into its reader as well as into the loop's state: done twice, by copies.
    tail = lax.optimization_barrier(Tail(k=put(tail.k, token.stored), v=put(tail.v, token.v)))
    batch, heads, size, dim = tail.k.shape
    keys = tail.k
    if by.rows is not None:
        config, places = program.config, length[:, :1] + jnp.arange(size, dtype=jnp.int32)
        keys = rotate(keys, angles(places, config.rope, config.head_dim))
    out, lse = _older(program, token, rows, by, chosen, None, rest=True)
    flat = lambda a: a.reshape(batch, heads * size, dim)  # noqa: E731
    first = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32) * size, (batch, heads))
    drawn = jnp.broadcast_to(index + 1, (batch, heads))
    equal = dataclasses.replace(program, form=Form.EQUAL)
    own, own_lse = pool_attention(token.q.astype(tail.k.dtype), flat(keys), flat(tail.v), first, drawn, equal)
    return Attended(attention.merge(out, lse, own, own_lse), dataclasses.replace(rows, tail=tail))


def _older(
    program: Program,
    token: Token,
    rows: LayerRows,
    by: StepAngles,
    chosen: Chosen | None,
    loaded: Loaded | None,
    *,
    rest: bool,
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention to rows of before the step: to all, or to the chosen ones and the rest that need not be chosen."""
    pool, segments = rows.pool, rows.segments
    if chosen is None:
        keys = pool.k if by.rows is None else rolled(pool.k, by.rows)
        return pool_attention(token.q, keys, pool.v, segments.start, segments.length, program)
    some = over_chosen(program, token.q, pool, segments, chosen, loaded)
    if not rest:
        return some
    return attention.merge_with_lse(*over_rest(program, token.q, pool, segments, segments.length), *some)


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
