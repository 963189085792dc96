"""Sparse attention (OmniKV): filter layers select tokens by attention, and the layers above attend to these only."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.filters import FilterQuery, score_positions_by_row, score_positions_in_pool
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.cache import SegmentTables
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.tokens import NewTokens, SelectionBounds
from jaxkv.policies.reads import LayerReadConfig, QueryWeighting
from jaxkv.policies.topk import encode_sort_keys, mask_top_k

# Selected entries of one layer, loaded from host memory: keys and values, `[B, T, 2, K, D]`.
Loaded = Float[Array, "B T 2 K D"]


@jax.tree_util.register_dataclass
@frozen_dataclass
class SelectedPositions:
    """Token positions `[B, T]` selected by a filter layer (OmniKV), ascending; the first `count` of T are valid."""

    positions: Int[Array, "B T"]
    count: Int[Array, " B"]


def create_new_tokens(
    terms: DecodeAttentionConfig,
    tables: SegmentTables,
    count: Int[Array, " B"],
    tokens: int,
) -> NewTokens:
    """Return the `NewTokens` of a step: positions after those seen, valid counts, bounds of filter layers' selection.

    The candidates are all tokens so far in steps of several tokens and for policies that select generated tokens; else
    the prompt.
    """
    reading = terms.reading
    state = tables.state
    candidates = None
    if reading.has_sparse_layers:
        assert state is not None
        if tokens > 1:
            candidates = SelectionBounds(tables.seen, jnp.full_like(tables.seen, reading.width))
        else:
            candidates = SelectionBounds(
                tables.seen if reading.include_generated else state.prompt, state.budget
            )
    positions = tables.seen[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    return NewTokens(positions=positions, count=count, candidates=candidates)


def find_dense_offset(terms: DecodeAttentionConfig, tables: SegmentTables) -> Int[Array, "L B K"]:
    """Return the offset `i32[L, B, K]` in each segment from which on sparse layers attend to all entries."""
    reading = terms.reading
    state = tables.state
    assert state is not None and state.choosable is not None
    # If generated tokens must be selected too, no entry before the new one is exempt.
    return tables.length if reading.include_generated else state.choosable


def build_filter_query(
    q: Float[Array, "B K G N D"],
    query_buffer: Float[Array, "B K G R D"] | None,
    new: NewTokens,
    reading: LayerReadConfig,
    shaping: LogitShaping = PLAIN,
) -> FilterQuery:
    """Return a filter layer's `FilterQuery`: the queries that score positions, with positions and weights.

    A single token uses the query buffer, weighted by the selector. Without a buffer, or for several tokens, the new
    queries count equally. The buffer includes the new queries, that of position p in slot p % R.
    """
    tokens = new.positions.shape[1]
    if query_buffer is None or tokens > 1:
        real = jnp.arange(tokens, dtype=jnp.int32) < jnp.maximum(new.count, 1)[:, None]
        positions = jnp.where(real, new.positions, -1)
        weights = real.astype(jnp.float32)
        return FilterQuery(q=q, positions=positions, weights=weights, shaping=shaping)
    rows = query_buffer.shape[3]
    now = new.positions[:, :1]
    stands = now - jnp.arange(reading.window, dtype=jnp.int32)
    slot = jnp.where(stands < 0, 0, stands % rows)
    queries = jnp.take_along_axis(query_buffer, slot[:, None, None, :, None], axis=3)
    weights = jnp.broadcast_to(
        jnp.asarray(reading.selector.compute_query_weights(reading.window)), stands.shape
    )
    return FilterQuery(
        q=queries.astype(q.dtype), positions=stands, weights=weights, shaping=shaping
    )


def select_positions(
    terms: DecodeAttentionConfig,
    pool: EntryPool,
    start: Int[Array, "B K"],
    choosable: Int[Array, "B K"],
    q: Float[Array, "B K G N D"],
    query_buffer: Float[Array, "B K G R D"] | None,
    new: NewTokens,
    shaping: LogitShaping = PLAIN,
) -> SelectedPositions:
    """Select token positions by a filter layer's attention: one `SelectedPositions` for all heads and tokens."""
    reading = terms.reading
    assert new.candidates is not None
    query = build_filter_query(q, query_buffer, new, reading, shaping)
    below = new.candidates.below
    # Queries and keys of equal position attend to each other; padding and headroom are no candidates.
    if reading.every_entry:
        scores = score_positions_by_row(query, pool.k, below, terms.axes)
    else:
        scores = score_positions_in_pool(
            query, pool.k, pool.pos, start, choosable, reading.padded_len, terms.axes
        )
    now = new.positions[:, 0] if q.shape[3] == 1 else None
    few = terms.backend.can.few_launches
    return select_top_positions(scores, new.candidates, reading, now=now, by_sorting=few)


def select_top_positions(
    scores: Float[Array, "B S"],
    candidates: SelectionBounds,
    reading: LayerReadConfig,
    *,
    now: Int[Array, " B"] | None = None,
    by_sorting: bool = False,
) -> SelectedPositions:
    """Return `SelectedPositions` of `candidates.budget` positions: any window up to `now` first, then by score.

    OmniKV, equations 3 and 4. The window before `now`, the newest query's position, counts within the budget. It is
    omitted for the selector LAST, and if generated entries are selected as well. Ties go to the lowest position.
    `by_sorting` needs few launches on a GPU; a threshold is faster on a CPU.
    """
    position = jnp.arange(scores.shape[1], dtype=jnp.int32)
    known = position < candidates.below[:, None]
    keys = jnp.where(known, encode_sort_keys(scores), jnp.uint32(0))
    if (
        now is not None
        and reading.selector is not QueryWeighting.LAST
        and not reading.include_generated
    ):
        recent = known & (position > (now - reading.window)[:, None])
        keys = jnp.where(recent, jnp.uint32(0xFFFFFFFF), keys)
    count = jnp.minimum(candidates.budget, candidates.below)
    at = find_largest_keys(keys, count, min(reading.width, scores.shape[1]), by_sorting=by_sorting)
    return SelectedPositions(positions=jnp.minimum(at, scores.shape[1] - 1), count=count)


def find_largest_keys(
    keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int, *, by_sorting: bool
) -> Int[Array, "B T"]:
    """Return indices `[B, width]` of the `count` largest sort keys, ascending, then S; ties to the lowest."""
    return (_find_largest_by_sorting if by_sorting else _find_largest_by_threshold)(
        keys, count, width
    )


def _find_largest_by_threshold(
    keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int
) -> Int[Array, "B T"]:
    """Return indices `[B, width]` of the `count` largest sort keys, ascending, then S; by threshold, fast on CPUs."""
    running = jnp.cumsum(mask_top_k(keys, count), axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, width + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, method="scan"))(running).astype(
        jnp.int32
    )


def _find_largest_by_sorting(
    keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int
) -> Int[Array, "B T"]:
    """Return indices `[B, width]` of the `count` largest sort keys, ascending, then S; by sorting, for GPUs.

    A threshold needs a hundred GPU launches.
    """
    position = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    _, largest = lax.sort((~keys, position), dimension=1, is_stable=True, num_keys=1)
    inside = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    return lax.sort(jnp.where(inside, largest[:, :width], keys.shape[1]), dimension=1)


def find_pool_rows(
    chosen: SelectedPositions,
    pool: EntryPool,
    start: Int[Array, "B K"],
    kept: Int[Array, "B K"],
    reading: LayerReadConfig,
) -> tuple[Int[Array, "B K T"], Int[Array, "B K"]]:
    """Return pool rows `[B, K, T]` of selected positions in a head's first `kept` entries (or -1), and their number."""
    positions = chosen.positions[:, None]
    first = start[..., None]
    real = jnp.arange(positions.shape[-1], dtype=jnp.int32) < chosen.count[:, None, None]
    if reading.every_entry:
        rows = jnp.where(real, first + positions, -1)
        return rows, jnp.broadcast_to(chosen.count[:, None], start.shape)
    batch = start.shape[0]
    end = first + kept[..., None]
    shape = (*start.shape, positions.shape[-1])
    low = jnp.broadcast_to(first, shape)
    high = jnp.broadcast_to(end, shape)

    def position_at(row: Array) -> Array:
        flat = jnp.minimum(row, pool.row_count - 1).reshape(batch, -1)
        return jnp.take_along_axis(pool.pos, flat, axis=1).reshape(shape)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = position_at(middle) >= positions
        return jnp.where(enough | (low >= high), low, middle + 1), jnp.where(
            enough & (low < high), middle, high
        )

    # Entries of a segment ascend in position: bisect for each.
    row, _ = lax.fori_loop(0, pool.row_count.bit_length(), halve, (low, high))
    held = real & (row < end) & (position_at(row) == positions)
    order = jnp.argsort(~held, axis=-1, stable=True)
    return jnp.take_along_axis(jnp.where(held, row, -1), order, axis=-1), held.sum(
        axis=-1, dtype=jnp.int32
    )
