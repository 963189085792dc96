"""One layer's attention to chosen tokens, and to all that came after those that can be chosen."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention.xla import Form
from jaxkv.cache import Pool, append
from jaxkv.models.choosing import Chosen, asking, choose, gathered, over_gathered, rows_of
from jaxkv.models.moving import Live, Program
from jaxkv.models.tokens import Token, in_blocks

# One layer's chosen rows of the prompt as they come from host memory: keys and values, `[B, T, 2, K, D]`.
Loaded = Float[Array, "B T 2 K D"]


def candidates_of(live: Live, program: Program, tokens: int) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Tokens that can be chosen, those at positions below a number, and how many are.

    Args:
        live: the cache's moving part before the new tokens.
        program: what is static.
        tokens: new ones at a time.

    Returns:
        The prompt's and the policy's; all so far where generated ones have to be chosen, or a prompt comes in chunks.
    """
    assert live.state is not None and program.reading is not None
    if tokens > 1:
        return live.seen, jnp.full_like(live.seen, program.reading.width)
    return (live.seen if program.reading.include_generated else live.state.prompt), live.state.budget


def chosen_at(
    live: Live,
    layer: int,
    pool: Pool,
    q: Float[Array, "B K G N D"],
    ring: Float[Array, "B K G R D"] | None,
    positions: Int[Array, "B N"],
    count: Int[Array, " B"],
    program: Program,
) -> Chosen:
    """What a filter layer chooses for new tokens.

    Args:
        live: the cache's moving part before them.
        layer: the filter.
        pool: its pool before them.
        q: its queries.
        ring: its last queries, the new one's included, if they count.
        positions: the tokens' positions.
        count: how many are real.
        program: what is static.

    Returns:
        The choice.
    """
    reading = program.reading
    assert reading is not None
    asked = asking(q, ring, positions, count, reading)
    known, budget = candidates_of(live, program, q.shape[3])
    of = (live.start[layer], live.limit[layer], known, budget, positions[:, 0])
    return choose(asked, pool, *of, reading, windowed=q.shape[3] == 1)


def over_chosen(
    q: Float[Array, "B K G N D"],
    pool: Pool,
    live: Live,
    layer: int,
    chosen: Chosen,
    loaded: Loaded | None,
    program: Program,
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention of new tokens to what was chosen for them.

    Args:
        q: their queries.
        pool: the layer's.
        live: the cache's moving part before them.
        layer: whose attention it is.
        chosen: the choice.
        loaded: the chosen rows, if they do not lie in the pool.
        program: what is static.

    Returns:
        The output, and its log-sum-exp.
    """
    reading = program.reading
    assert reading is not None
    if loaded is None:
        rows, count = rows_of(chosen, pool, live.start[layer], live.limit[layer], reading)
        k, v = gathered(pool, rows, program.implementation)
    else:
        batch, _, _, heads, dim = loaded.shape
        k, v = (jnp.swapaxes(loaded[:, :, each], 1, 2).reshape(batch, -1, dim) for each in (0, 1))
        count = jnp.broadcast_to(chosen.count[:, None], (batch, heads))
    return in_blocks(lambda part: over_gathered(part, k, v, count, program.implementation), q)


def over_rest(
    q: Float[Array, "B K G N D"],
    pool: Pool,
    live: Live,
    layer: int,
    length: Int[Array, "B K"],
    program: Program,
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention of new tokens to rows of the pool that need not be chosen.

    Args:
        q: their queries.
        pool: the layer's.
        live: the cache's moving part before them.
        layer: whose attention it is.
        length: rows of each segment, those included that the tokens have added.
        program: what is static.

    Returns:
        The output, and its log-sum-exp.
    """
    reading = program.reading
    assert reading is not None
    # The prompt's rows that lie here can be chosen, and all rows before the new one where they all have to be.
    first = live.length[layer] if reading.include_generated else live.limit[layer]
    # Few rows at a place that data decides: a walk reads them and no others.
    attend = partial(attention.over_pool, form=Form.SHARED, implementation=program.implementation)
    return in_blocks(lambda part: attend(part, pool.k, pool.v, live.start[layer] + first, length - first), q)


def chosen_and_own(
    new: Token,
    pool: Pool,
    live: Live,
    layer: int,
    chosen: Chosen,
    loaded: Loaded | None,
    positions: Int[Array, "B N"],
    count: Int[Array, " B"],
    program: Program,
) -> tuple[Float[Array, "B K G N D"], Pool]:
    """Attention of new tokens to what was chosen and to what need not be; they join the pool.

    Args:
        new: the tokens.
        pool: the layer's, with room for them.
        live: the cache's moving part before them.
        layer: whose attention it is.
        chosen: the choice.
        loaded: the chosen rows, if they do not lie in the pool.
        positions: the tokens' positions.
        count: how many are real.
        program: what is static.

    Returns:
        The output, and the pool.
    """
    tokens, length = positions.shape[1], live.length[layer]
    after = append(pool, new.stored, new.v, positions, live.start[layer] + length, count)
    if tokens == 1:
        out, lse = over_chosen(new.q, after, live, layer, chosen, loaded, program)
        rest, rest_lse = over_rest(new.q, after, live, layer, length + count[:, None], program)
        return attention.merge(out, lse, rest, rest_lse), after
    out, lse = over_chosen(new.q, pool, live, layer, chosen, loaded, program)
    if loaded is not None:
        rest, rest_lse = over_rest(new.q, pool, live, layer, length, program)
        out, lse = attention.merge_with_lse(rest, rest_lse, out, lse)
    own, own_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, new.v))
    return attention.merge(out, lse, own, own_lse), after
