"""Sparse reads (OmniKV): filter layers choose tokens by attention, and the layers above them attend to these alone."""

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

# Chosen entries of one layer as they come from host memory: keys and values, `[B, T, 2, K, D]`.
Loaded = Float[Array, "B T 2 K D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """Token positions `[B, T]` that a filter layer chose (OmniKV), ascending; the first `count` of T are valid."""

    positions: Int[Array, "B T"]
    count: Int[Array, " B"]


def new_tokens(
    terms: Terms,
    tables: Tables,
    count: Int[Array, " B"],
    tokens: int,
) -> NewTokens:
    """Makes the `NewTokens` of a step: positions of N tokens, and positions that filter layers may choose from.

    Several tokens at once, and policies that choose among generated tokens, have all tokens so far as candidates;
    otherwise the prompt's.
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
    """Offset in each segment, `i32[L, B, K]`, of the entry from which on sparse layers read all entries, chosen or not."""
    reading, state = terms.reading, tables.state
    assert state is not None and state.choosable is not None
    # If generated tokens must be chosen too, no entry before the new one is read without being chosen.
    return tables.length if reading.include_generated else state.choosable


def filter_query(
    q: Float[Array, "B K G N D"],
    query_buffer: Float[Array, "B K G R D"] | None,
    new: NewTokens,
    reading: Reading,
    shaping: Shaping = PLAIN,
) -> FilterQuery:
    """Makes `FilterQuery`: queries (of the query buffer, or new) by which a filter layer chooses, with positions and weights.

    For one token the query buffer's, weighted by the selector; without a query buffer, or for several tokens, the new ones equally.
    The query buffer holds the new queries, too, that of position p in slot p % R; it is None if only the new ones count.
    """
    tokens = new.positions.shape[1]
    if query_buffer is None or tokens > 1:
        real = jnp.arange(tokens, dtype=jnp.int32) < jnp.maximum(new.count, 1)[:, None]
        positions, weights = jnp.where(real, new.positions, -1), real.astype(jnp.float32)
        return FilterQuery(q=q, positions=positions, weights=weights, shaping=shaping)
    rows, now = query_buffer.shape[3], new.positions[:, :1]
    stands = now - jnp.arange(reading.window, dtype=jnp.int32)
    slot = jnp.where(stands < 0, 0, stands % rows)
    mine = jnp.take_along_axis(query_buffer, slot[:, None, None, :, None], axis=3)
    weights = jnp.broadcast_to(jnp.asarray(reading.selector.weights(reading.window)), stands.shape)
    return FilterQuery(q=mine.astype(q.dtype), positions=stands, weights=weights, shaping=shaping)


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
    """Positions (`Chosen`) that a filter layer chooses by attention: one set a sequence, for all heads and tokens."""
    reading = terms.reading
    assert new.candidates is not None
    asked, below = filter_query(q, query_buffer, new, reading, shaping), new.candidates.below
    # Queries and keys of equal position see each other, as in attention; padding and room are no candidates.
    if reading.every_entry:
        scores = by_row(asked, pool.k, below, terms.axes)
    else:
        scores = by_position(
            asked, pool.k, pool.pos, start, choosable, reading.padded_len, terms.axes
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
    """Picks `candidates.budget` positions as `Chosen`: with `now` the window before it first, then by highest score.

    OmniKV, equations 3 and 4. The window before `now`, the newest query's position, counts within the budget; it is
    left out for the selector LAST, and where generated entries are chosen as well. Ties go to the lowest position.
    `by_sorting` takes few launches on a GPU; a threshold is faster on a CPU.
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
    """Indices of the `count` largest sort keys, ascending, ties to the lowest; T = `width`, later ones unused."""
    return (_sorted if by_sorting else _counted)(keys, count, width)


def _counted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Indices of the `count` largest sort keys, ascending, found by a threshold and not by sorting; for a CPU."""
    running = jnp.cumsum(top(keys, count), axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, width + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, method="scan"))(running).astype(
        jnp.int32
    )


def _sorted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Indices of the `count` largest sort keys, ascending, found by two sorts; for a GPU.

    A threshold costs a hundred GPU launches.
    """
    position = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    _, largest = lax.sort((~keys, position), dimension=1, is_stable=True, num_keys=1)
    inside = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    return lax.sort(jnp.where(inside, largest[:, :width], keys.shape[1]), dimension=1)


def rows_of(
    chosen: Chosen, pool: Pool, start: Int[Array, "B K"], kept: Int[Array, "B K"], reading: Reading
) -> tuple[Int[Array, "B K T"], Int[Array, "B K"]]:
    """Pair: pool rows `[B, K, T]` of chosen positions among each head's first `kept` entries, then -1, and their count."""
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
