"""A few new tokens at once on top of a cache: a question, or the one token of a decode step."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention import Heard
from jaxkv.attention.xla import Form
from jaxkv.cache import Pool, append
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.models.evict import Segments
from jaxkv.models.limits import decay_of, faded, likely_keys, scores_of, segments_of, with_heard, within_limits
from jaxkv.models.moving import Live, Program
from jaxkv.models.sparse import chosen_and_own, chosen_at
from jaxkv.models.tokens import Token, pool_attention, project, rolled, step_angles
from jaxkv.rope import Angles


def over_rows(
    program: Program,
    new: Token,
    pool: Pool,
    segments: Segments,
    count: Int[Array, " B"],
    positions: Int[Array, "B N"],
    other: Float[Array, "B K D"] | None = None,
    by_place: Angles | None = None,
) -> tuple[Float[Array, "B K G N D"], Pool, Heard | None]:
    """One layer's attention of N new tokens, which join its pool.

    Args:
        program: what is static.
        new: the tokens.
        pool: the layer's pool, with room for N rows behind every segment.
        segments: the layer's segments before these tokens.
        count: how many of the N are real.
        positions: their positions in the text.
        other: keys of likely rows, if the program looks ahead.
        by_place: angles of places within the cache, if positions are those.

    Returns:
        The attention's output, the pool, and what `attention.add_heard` makes its scores of, if they are not yet.
    """
    start, end, tokens = segments.start, segments.start + segments.length, positions.shape[1]
    if tokens > 1:
        out, scores = _several(program, new, pool, segments, count, by_place)
        own = None
        if scores is not None:
            pool, own = dataclasses.replace(pool, score=scores[0]), scores[1]
        own = scores_of(new.stored, new.v, program) if own is None else own
        return out, append(pool, new.stored, new.v, positions, end, count, own), None
    # A single token simply joins the rows before it is its turn to look at them.
    begun = scores_of(new.stored, new.v, program)
    after, rows = append(pool, new.stored, new.v, positions, end, count, begun), segments.length + count[:, None]
    keys = after.k if by_place is None else rolled(after.k, by_place)
    if not program.scored:
        out, _ = pool_attention(new.q, keys, after.v, start, rows, program)
        return out, after, None
    assert after.score is not None
    out, scores = attention.over_pool_scored(
        new.q[..., 0, :],
        keys,
        after.v,
        start,
        rows,
        after.score,
        count > 0,
        form=program.form,
        widest=program.widest,
        other=other,
        implementation=program.implementation,
    )
    if isinstance(scores, Heard):
        return out[..., None, :], after, scores
    return out[..., None, :], dataclasses.replace(after, score=scores), None


def _several(program: Program, new: Token, pool: Pool, segments: Segments, count: Array, by_place: Angles | None):
    """Attention of several tokens to older rows and to one another; and the scores of both, if they go on."""
    start, length = segments.start, segments.length
    keys = pool.k if by_place is None else rolled(pool.k, by_place)
    out, lse = pool_attention(new.q, keys, pool.v, start, length, program)
    own, own_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, new.v))
    joined = attention.merge(out, lse, own, own_lse)
    if not program.scored:
        return joined, None
    assert pool.score is not None
    tokens, group = new.q.shape[3], new.q.shape[2]
    index = jnp.arange(tokens, dtype=jnp.int32)
    whole = jnp.where((index < count[:, None])[:, None, None], jnp.logaddexp(lse, own_lse), jnp.inf)
    decay = decay_of(program)
    if decay is not None and decay != 1:
        # A probability times a share is one over a sum that much larger: in logarithms, and infinitely so for none.
        behind = jnp.maximum(count[:, None] - 1 - index, 0)
        whole = whole - jnp.log(decay ** behind.astype(jnp.float32))[:, None, None]
    flat = lambda a: a.reshape(*a.shape[:2], group * tokens, *a.shape[4:])  # noqa: E731
    score = attention.pool_sums(
        flat(new.q), keys, flat(whole), start, length, pool.score, form=program.form, weight=1 / group
    )
    sums = lax.map(lambda a: attention.column_sums(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, whole))
    return joined, (score, sums.mean(axis=2))


def step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    live: Live,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    program: Program,
) -> tuple[Float[Array, "B V"], Live]:
    """Runs N new tokens per sequence through the model.

    Args:
        ends: parameters before and after the blocks.
        blocks: one tuple of parameters per block.
        live: the cache's moving part, with room for N rows behind every segment.
        tokens: ids, padded on the right.
        count: how many of the N are real; 0 leaves a sequence's cache as it is.
        program: what is static.

    Returns:
        Float32 logits of each sequence's last real token, and the moving part with the new rows.
    """
    outer = program.graphs.ends(ends)
    x = outer.embed(tokens)
    positions = live.seen[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    pools, outs, products, rings = list(faded(live.pools, count, program)), [], [], []
    others = likely_keys(live)
    if others is not None:
        # Rows are written behind everything that reads them, see `evict`.
        x = jnp.where(jnp.isnan(others.sum(axis=(0, 2, 3)))[:, None, None], jnp.nan, x)
    chosen = None
    turned = step_angles(live, positions, program)
    for index, leaves in enumerate(blocks):
        at = 0 if program.form is Form.SHARED else index
        block = program.graphs.block(leaves)
        new = project(block, program, x, turned[index].new)
        ring = None if live.state is None else program.ring_of(index)
        if ring is not None:
            assert live.state is not None
            rings.append(remembered(live.state.rings[ring], new.q, positions, count))
        if program.sparse(index, tokens.shape[1]):
            assert chosen is not None
            out, pools[at] = chosen_and_own(new, pools[at], live, index, chosen, None, positions, count, program)
            heard = None
        else:
            mine, other = segments_of(live, index), None if others is None else others[index]
            out, pools[at], heard = over_rows(
                program, new, pools[at], mine, count, positions, other, turned[index].rows
            )
        if program.chooses(index, tokens.shape[1]):
            # From the pool as it is now: a reader of what it was before would cost a copy.
            queries = None if ring is None else rings[-1]
            chosen = chosen_at(live, index, pools[at], new.q, queries, positions, count, program)
        x = block.finish(x, out)
        outs.append(out[:, :, 0, 0, 0])
        if heard is not None:
            # Nothing waits for scores before all layers are done: looking at x, they do not keep a core from it.
            counts = (count > 0) & ~jnp.isnan(x[:, 0, 0])
            pools[at] = with_heard(pools[at], heard, live.start[index], counts)
            products += [] if heard.products is None else [heard.products]
    last = jnp.maximum(count - 1, 0)
    logits = outer.logits(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])
    state = None if live.state is None else dataclasses.replace(live.state, rings=tuple(rings))
    seen, length = live.seen + count, live.length + count[:, None]
    live = dataclasses.replace(live, pools=tuple(pools), length=length, seen=seen, state=state)
    if program.evicts and tokens.shape[1] == 1:
        live = within_limits(live, outs, products, program)
    return logits, live


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


@partial(jax.jit, static_argnames=("program",), donate_argnames=("pools",))
def _extend(ends, blocks, pools, rest, tokens, count, *, program):
    logits, live = step(ends, blocks, dataclasses.replace(rest, pools=pools), tokens, count, program=program)
    return logits, live.pools, dataclasses.replace(live, pools=())


def extend(
    flat: Flat, live: Live, tokens: Int[Array, "B N"], count: Int[Array, " B"], *, program: Program
) -> tuple[Float[Array, "B V"], Live]:
    """`step`, compiled; the pools given are consumed.

    Args:
        flat: the decoder's parameters.
        live: as for `step`; its pools are donated.
        tokens: as for `step`.
        count: as for `step`.
        program: what is static.

    Returns:
        As `step`.
    """
    rest = dataclasses.replace(live, pools=())
    logits, pools, rest = _extend(flat.ends, flat.blocks, live.pools, rest, tokens, count, program=program)
    return logits, dataclasses.replace(rest, pools=pools)
