"""One layer's attention to chosen tokens, and to all that came after those that can be chosen."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention.xla import Walk
from jaxkv.cache import Tables
from jaxkv.cache.pools import Pool
from jaxkv.engine.filters import Chosen, asking, choose, gathered, over_gathered, rows_of
from jaxkv.engine.segments import Segments
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import NewTokens, in_blocks

# One layer's chosen rows of the prompt as they come from host memory: keys and values, `[B, T, 2, K, D]`.
Loaded = Float[Array, "B T 2 K D"]


def candidates_of(spec: Spec, tables: Tables, tokens: int) -> tuple[Int[Array, " B"], Int[Array, " B"]] | None:
    """What filter layers choose from in a step.

    Args:
        spec: what is static.
        tables: before the new tokens.
        tokens: new ones at a time.

    Returns:
        Tokens at positions below which can be chosen, and how many are: the prompt's, and the policy's; all so far
        where generated ones have to be chosen, or a prompt comes in chunks. None where nobody chooses.
    """
    reading, state = spec.reading, tables.state
    if reading is None or state is None:
        return None
    if tokens > 1:
        return tables.seen, jnp.full_like(tables.seen, reading.width)
    return (tables.seen if reading.include_generated else state.prompt), state.budget


def chosen_at(
    spec: Spec,
    pool: Pool,
    segments: Segments,
    q: Float[Array, "B K G N D"],
    ring: Float[Array, "B K G R D"] | None,
    new: NewTokens,
) -> Chosen:
    """What a filter layer chooses for new tokens.

    Args:
        spec: what is static.
        pool: the filter's.
        segments: where its rows lie before the step.
        q: its queries.
        ring: its last queries, the new one's included, if they count.
        new: what is known of the tokens.

    Returns:
        The choice.
    """
    reading, choosable = spec.reading, segments.choosable
    assert reading is not None and new.candidates is not None and choosable is not None
    asked = asking(q, ring, new.positions, new.count, reading)
    of = (segments.start, choosable, *new.candidates, new.positions[:, 0])
    return choose(
        asked, pool, *of, reading, windowed=q.shape[3] == 1, axes=spec.axes, implementation=spec.implementation
    )


def rest_of(spec: Spec, tables: Tables) -> Int[Array, "L B K"]:
    """For each segment the row, counted from its first, from which on all are read, chosen or not."""
    reading, state = spec.reading, tables.state
    assert reading is not None and state is not None and state.choosable is not None
    # All rows before the new one have to be chosen where generated ones do.
    return tables.length if reading.include_generated else state.choosable


def picks_of(
    spec: Spec, pool: Pool, segments: Segments, chosen: Chosen
) -> tuple[Int[Array, "B k T"], Int[Array, "B k"]]:
    """What was chosen as rows of segments, for a kernel that reads them where they lie.

    Args:
        spec: what is static.
        pool: the layer's.
        segments: where its rows lie before the step.
        chosen: the choice.

    Returns:
        Rows, counted from a segment's first, those that it holds before others, and how many it holds; k is 1 where all
        heads hold the same.
    """
    reading, choosable = spec.reading, segments.choosable
    assert reading is not None and choosable is not None
    if reading.every_row:
        return chosen.positions[:, None], chosen.count[:, None]
    rows, held = rows_of(chosen, pool, segments.start, choosable, reading)
    return rows - segments.start[..., None], held


def over_chosen(
    spec: Spec,
    q: Float[Array, "B K G N D"],
    pool: Pool,
    segments: Segments,
    chosen: Chosen,
    loaded: Loaded | None,
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention of new tokens to what was chosen for them.

    Args:
        spec: what is static.
        q: their queries.
        pool: the layer's.
        segments: where its rows lie before the step.
        chosen: the choice.
        loaded: the chosen rows, if they do not lie in the pool.

    Returns:
        The output, and its log-sum-exp.
    """
    reading, choosable = spec.reading, segments.choosable
    assert reading is not None and choosable is not None
    if loaded is None:
        rows, count = rows_of(chosen, pool, segments.start, choosable, reading)
        k, v = gathered(pool, rows, spec.implementation)
    else:
        batch, _, _, heads, dim = loaded.shape
        k, v = (jnp.swapaxes(loaded[:, :, each], 1, 2).reshape(batch, -1, dim) for each in (0, 1))
        count = jnp.broadcast_to(chosen.count[:, None], (batch, heads))
    return in_blocks(lambda part: over_gathered(part, k, v, count, spec.implementation), q)


def over_rest(
    spec: Spec,
    q: Float[Array, "B K G N D"],
    pool: Pool,
    segments: Segments,
    length: Int[Array, "B K"],
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention of new tokens to rows of the pool that need not be chosen.

    Args:
        spec: what is static.
        q: their queries.
        pool: the layer's.
        segments: where its rows lie before the step.
        length: rows of each segment, those included that the tokens have added.

    Returns:
        The output, and its log-sum-exp.
    """
    reading, choosable = spec.reading, segments.choosable
    assert reading is not None and choosable is not None
    first = segments.length if reading.include_generated else choosable
    # Few rows at a place that data decides: a walk reads them and no others.
    attend = partial(spec.backend.attend, walk=Walk.WINDOWS)
    return in_blocks(lambda part: attend(part, pool.k, pool.v, segments.start + first, length - first), q)
