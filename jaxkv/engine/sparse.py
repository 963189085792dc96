"""Sparse attention (OmniKV): filter layers select tokens by attention, and the layers above attend to these only."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxkv.attention.filters import FilterQuery, by_position, by_row
from jaxkv.attention.shaping import PLAIN, Shaping
from jaxkv.cache import Tables
from jaxkv.cache.pools import Pool
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.tokens import Choosable, NewTokens
from jaxkv.policies.reads import Reading, Selector
from jaxkv.policies.topk import sortable, top

# Selected entries of one layer, loaded from host memory: keys and values, `[B, T, 2, K, D]`.
Loaded = Float[Array, "B T 2 K D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """Token positions `[B, T]` selected by a filter layer (OmniKV), ascending; the first `count` of T are valid."""

    positions: Int[Array, "B T"]
    count: Int[Array, " B"]


def new_tokens(
    terms: Terms,
    tables: Tables,
    count: Int[Array, " B"],
    tokens: int,
) -> NewTokens:
    """Return the `NewTokens` of a step: positions of N tokens, and positions that filter layers select from.

    The candidates are all tokens so far in steps of several tokens and for policies that select generated tokens; else
    the prompt.
    """
    reading, state, candidates = terms.reading, tables.state, None
    if reading.chooses:
        assert state is not None
        if tokens > 1:
            candidates = Choosable(tables.seen, jnp.full_like(tables.seen, reading.width))
        else:
            candidates = Choosable(
                tables.seen if reading.include_generated else state.prompt, state.budget
            )
    positions = tables.seen[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    return NewTokens(positions=positions, count=count, candidates=candidates)


def rest_of(terms: Terms, tables: Tables) -> Int[Array, "L B K"]:
    """Return the offset `i32[L, B, K]` in each segment from which sparse layers attend to all entries."""
    reading, state = terms.reading, tables.state
    assert state is not None and state.choosable is not None
    # If generated tokens must be selected too, no entry before the new one is exempt.
    return tables.length if reading.include_generated else state.choosable


def filter_query(
    q: Float[Array, "B K G N D"],
    query_buffer: Float[Array, "B K G R D"] | None,
    new: NewTokens,
    reading: Reading,
    shaping: Shaping = PLAIN,
) -> FilterQuery:
    """Return the queries by which a filter layer selects, with positions and weights.

    A single token uses the query buffer, weighted by the selector. Without a buffer, or for several tokens, the new
    queries count equally. The buffer includes the new queries, that of position p in slot p % R.
    """
    tokens = new.positions.shape[1]
    if query_buffer is None or tokens > 1:
        real = jnp.arange(tokens, dtype=jnp.int32) < jnp.maximum(new.count, 1)[:, None]
        positions, weights = jnp.where(real, new.positions, -1), real.astype(jnp.float32)
        return FilterQuery(q=q, positions=positions, weights=weights, shaping=shaping)
    rows, now = query_buffer.shape[3], new.positions[:, :1]
    stands = now - jnp.arange(reading.window, dtype=jnp.int32)
    slot = jnp.where(stands < 0, 0, stands % rows)
    queries = jnp.take_along_axis(query_buffer, slot[:, None, None, :, None], axis=3)
    weights = jnp.broadcast_to(jnp.asarray(reading.selector.weights(reading.window)), stands.shape)
    return FilterQuery(
        q=queries.astype(q.dtype), positions=stands, weights=weights, shaping=shaping
    )


def chosen_at(
    terms: Terms,
    pool: Pool,
    start: Int[Array, "B K"],
    choosable: Int[Array, "B K"],
    q: Float[Array, "B K G N D"],
    query_buffer: Float[Array, "B K G R D"] | None,
    new: NewTokens,
    shaping: Shaping = PLAIN,
) -> Chosen:
    """Select positions by a filter layer's attention: one set per sequence, for all heads and tokens."""
    reading = terms.reading
    assert new.candidates is not None
    query, below = filter_query(q, query_buffer, new, reading, shaping), new.candidates.below
    # Queries and keys of equal position attend to each other; padding and headroom are no candidates.
    if reading.every_entry:
        scores = by_row(query, pool.k, below, terms.axes)
    else:
        scores = by_position(
            query, pool.k, pool.pos, start, choosable, reading.padded_len, terms.axes
        )
    now = new.positions[:, 0] if q.shape[3] == 1 else None
    few = terms.backend.can.few_launches
    return choose(scores, new.candidates, reading, now=now, by_sorting=few)


def choose(
    scores: Float[Array, "B S"],
    candidates: Choosable,
    reading: Reading,
    *,
    now: Int[Array, " B"] | None = None,
    by_sorting: bool = False,
) -> Chosen:
    """Select `candidates.budget` positions: with `now`, the window before it first, then by highest score.

    OmniKV, equations 3 and 4. The window before `now`, the newest query's position, counts within the budget. It is
    omitted for the selector LAST, and if generated entries are selected as well. Ties go to the lowest position.
    `by_sorting` needs few launches on a GPU; a threshold is faster on a CPU.
    """
    position = jnp.arange(scores.shape[1], dtype=jnp.int32)
    known = position < candidates.below[:, None]
    keys = jnp.where(known, sortable(scores), jnp.uint32(0))
    if now is not None and reading.selector is not Selector.LAST and not reading.include_generated:
        recent = known & (position > (now - reading.window)[:, None])
        keys = jnp.where(recent, jnp.uint32(0xFFFFFFFF), keys)
    count = jnp.minimum(candidates.budget, candidates.below)
    at = largest(keys, count, min(reading.width, scores.shape[1]), by_sorting=by_sorting)
    return Chosen(positions=jnp.minimum(at, scores.shape[1] - 1), count=count)


def largest(
    keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int, *, by_sorting: bool
) -> Int[Array, "B T"]:
    """Return the indices of the `count` largest sort keys, ascending, ties to the lowest; T is `width`."""
    return (_sorted if by_sorting else _counted)(keys, count, width)


def _counted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Return the indices of the `count` largest sort keys, ascending, found by a threshold; for CPUs."""
    running = jnp.cumsum(top(keys, count), axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, width + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, method="scan"))(running).astype(
        jnp.int32
    )


def _sorted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Return the indices of the `count` largest sort keys, ascending, found by two sorts; for GPUs.

    A threshold needs a hundred GPU launches.
    """
    position = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    _, largest = lax.sort((~keys, position), dimension=1, is_stable=True, num_keys=1)
    inside = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    return lax.sort(jnp.where(inside, largest[:, :width], keys.shape[1]), dimension=1)


def rows_of(
    chosen: Chosen, pool: Pool, start: Int[Array, "B K"], kept: Int[Array, "B K"], reading: Reading
) -> tuple[Int[Array, "B K T"], Int[Array, "B K"]]:
    """Return pool rows `[B, K, T]` of chosen positions in each head's first `kept` entries, -1 beyond; their count."""
    positions, first = chosen.positions[:, None], start[..., None]
    real = jnp.arange(positions.shape[-1], dtype=jnp.int32) < chosen.count[:, None, None]
    if reading.every_entry:
        rows = jnp.where(real, first + positions, -1)
        return rows, jnp.broadcast_to(chosen.count[:, None], start.shape)
    batch, end = start.shape[0], first + kept[..., None]
    shape = (*start.shape, positions.shape[-1])
    low, high = jnp.broadcast_to(first, shape), jnp.broadcast_to(end, shape)

    def position_at(row: Array) -> Array:
        flat = jnp.minimum(row, pool.rows - 1).reshape(batch, -1)
        return jnp.take_along_axis(pool.pos, flat, axis=1).reshape(shape)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = position_at(middle) >= positions
        return jnp.where(enough | (low >= high), low, middle + 1), jnp.where(
            enough & (low < high), middle, high
        )

    # Entries of a segment ascend in position: bisect for each.
    row, _ = lax.fori_loop(0, pool.rows.bit_length(), halve, (low, high))
    held = real & (row < end) & (position_at(row) == positions)
    order = jnp.argsort(~held, axis=-1, stable=True)
    return jnp.take_along_axis(jnp.where(held, row, -1), order, axis=-1), held.sum(
        axis=-1, dtype=jnp.int32
    )
