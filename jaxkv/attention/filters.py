"""Scores of entries to read: positions by attention received (OmniKV), pages by keys' bounds (Quest, RocketKV)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.xla import (
    MASKED,
    apply_softcap,
    compute_head_logits,
    exact_einsum,
    mask_segment_rows,
    scale_queries,
)
from jaxkv.sharding.collectives import max_over_devices, sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh

# Maximum number of logits in memory at a time while positions are scored.
_LOGITS = 1 << 24


@jax.tree_util.register_dataclass
@frozen_dataclass
class FilterQuery:
    """Queries of a filter layer with positions and weights, whose attention scores token positions (OmniKV).

    Attributes:
        q: `[B, K, G, w, D]` rotated queries, in any order.
        positions: `i32[B, w]` positions of the queries; negative ones are padding and attend to nothing.
        weights: `f32[B, w]` weight of each query in the sum.
        shaping: softcap and sink logits of the layer.
    """

    q: Float[Array, "B K G w D"]
    positions: Int[Array, "B w"]
    weights: Float[Array, "B w"]
    shaping: LogitShaping = PLAIN

    @property
    def expanded_sink_logits(self) -> Float[Array, "K G one one"] | None:
        """Sink logits `f32[K, G, 1, 1]`, with axes for queries and keys; None without sink logits."""
        sinks = self.shaping.sink_logits
        return None if sinks is None else sinks.astype(jnp.float32)[..., None, None]


def score_positions_by_row(
    query: FilterQuery,
    k: Float[Array, "B P D"],
    candidates: Int[Array, " B"],
    axes: ShardingMesh | None,
) -> Float[Array, "B n"]:
    """Return scores `f32[B, n]` where segment row p is position p: attention, maximum over heads, weighted query sum.

    Row p of each head's segment holds position p. Positions from `candidates` on score 0. On a mesh the maximum is over
    all devices' heads.
    """
    batch, heads, group, window, dim = query.q.shape
    keys = k.reshape(batch, heads, -1, dim)
    rows = keys.shape[2]
    queries = scale_queries(query.q).reshape(batch, heads, group * window, dim)

    def compute_logits_and_mask(part: Array, first: Array | int) -> tuple[Array, Array]:
        """Return logits `[B, K, G, w, n]` over keys `part` from row `first` on, and a mask of causal candidates."""
        logits = apply_softcap(compute_head_logits(queries, part), query.shaping.softcap)
        row = first + jnp.arange(part.shape[2], dtype=jnp.int32)
        seen = (row <= query.positions[..., None]) & (row < candidates[:, None, None])
        return logits.reshape(batch, heads, group, window, -1), seen[:, None, None]

    block = max(1, _LOGITS // (batch * heads * group * window))
    if block >= rows:
        return _reduce_attention_to_scores(
            _compute_masked_softmax(*compute_logits_and_mask(keys, 0), query.expanded_sink_logits),
            query,
            axes,
        )
    # Two passes over the keys for any number of queries: the softmax's sums, then the scores.
    trips = -(-candidates.max() // block)

    def slice_key_block(index: Array) -> tuple[Array, Array]:
        """Return first row and keys of block `index` of all segments; the last block begins earlier, to stay inside."""
        first = jnp.minimum(index * block, rows - block)
        return first, lax.dynamic_slice_in_dim(keys, first, block, axis=2)

    def update_softmax_sums(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """Loop body: update the softmax's running maximum and sum of each query by one more block of keys."""
        highest, total = sums
        first, part = slice_key_block(index)
        logits, seen = compute_logits_and_mask(part, first)
        fresh = seen & (first + jnp.arange(block, dtype=jnp.int32) >= index * block)
        logits = jnp.where(fresh, logits, MASKED)
        above = jnp.maximum(highest, logits.max(axis=-1))
        more = jnp.where(fresh, jnp.exp(logits - above[..., None]), 0.0).sum(axis=-1)
        return above, total * jnp.exp(highest - above) + more

    def write_block_scores(index: Array, scores: Array) -> Array:
        """Loop body: write the scores of one more block of positions to the scores `f32[B, n]`."""
        first, part = slice_key_block(index)
        logits, seen = compute_logits_and_mask(part, first)
        shares = (
            jnp.where(seen, jnp.exp(logits - highest[..., None]), 0.0)
            / jnp.maximum(total, 1e-30)[..., None]
        )
        return lax.dynamic_update_slice_in_dim(
            scores, _reduce_attention_to_scores(shares, query, axes), first, axis=1
        )

    shape = (batch, heads, group, window)
    begun = (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape))
    if query.expanded_sink_logits is not None:
        begun = (jnp.broadcast_to(query.expanded_sink_logits[..., 0], shape), jnp.ones(shape))
    highest, total = lax.fori_loop(0, trips, update_softmax_sums, begun)
    return lax.fori_loop(0, trips, write_block_scores, jnp.zeros((batch, rows), jnp.float32))


def score_positions_in_pool(
    query: FilterQuery,
    k: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    start: Int[Array, "B K"],
    kept: Int[Array, "B K"],
    padded_len: int,
    axes: ShardingMesh | None,
) -> Float[Array, "B S"]:
    """Return scores `f32[B, S]` by position of `kept` entries: attention, maximum over heads, weighted sum of queries.

    `pos` is -1 in free places. `kept` entries of each segment are scored; `padded_len` exceeds all positions.
    """
    batch, heads, group, window, dim = query.q.shape
    inside = mask_segment_rows(jnp.arange(pos.shape[1], dtype=jnp.int32), start, kept)
    column = jnp.where(pos < 0, padded_len, pos)[:, None]
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    scaled = scale_queries(query.q)
    # Blocks of queries, not of keys, because such pools are small.
    most = max(1, _LOGITS // (batch * heads * group * pos.shape[1]))
    size = next(each for each in range(min(window, most), 0, -1) if window % each == 0)

    def score_by_query_block(index: Array | int) -> Array:
        """Return scores `f32[B, S]` of positions from one block of queries: maximum over heads, weighted sum."""

        def slice_query_block(a: Array, axis: int) -> Array:
            """Return block `index`, `size` queries long, of an array's axis `axis`."""
            return lax.dynamic_slice_in_dim(a, index * size, size, axis)

        queries = slice_query_block(scaled, 3).reshape(batch, -1, dim)
        positions = slice_query_block(query.positions, 1)
        logits = lax.dot_general(
            queries, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        logits = apply_softcap(logits.reshape(batch, heads, group, size, -1), query.shaping.softcap)
        seen = inside[:, :, None, None] & (
            pos[:, None, None, None] <= positions[:, None, None, :, None]
        )
        by_row = _compute_masked_softmax(logits, seen, query.expanded_sink_logits).max(axis=(1, 2))
        row = jnp.arange(size, dtype=jnp.int32)[:, None]
        by_position = jnp.zeros((batch, size, padded_len), jnp.float32)
        by_position = by_position.at[sequence, row, column].max(by_row, mode="drop")
        by_position = max_over_devices(by_position, "H", axes)
        return (by_position * slice_query_block(query.weights, 1)[..., None]).sum(axis=1)

    first = score_by_query_block(0)
    return (
        first
        if size == window
        else lax.fori_loop(
            1, window // size, lambda i, total: total + score_by_query_block(i), first
        )
    )


def bound_page_logits(
    q: Float[Array, "B K G D"],
    low: Float[Array, "B K p D"],
    high: Float[Array, "B K p D"],
    axes: ShardingMesh | None,
) -> Float[Array, "B K p"]:
    """Return an upper bound `f32[B, K, p]` of q.k for the keys of each page, maximum over a kv head's query heads.

    Tang et al., Quest, algorithm 1: sum over channels of max(q * low, q * high). `low` and `high` are the element-wise
    minimum and maximum of the keys of p pages of each kv head. On a mesh the maximum is over all devices' heads. A
    softcap does not change the order.
    """
    wide = q.astype(jnp.float32)

    def multiply_queries_by_bound(part: Array, of: Array) -> Array:
        """Return float32 products `[B, K, G, p]` of one signed part of the queries with all pages' minima or maxima."""
        return exact_einsum("bkgd,bkpd->bkgp", part, of.astype(jnp.float32))

    # A channel's larger product is with the maximum where q is positive, with the minimum elsewhere.
    bound = multiply_queries_by_bound(jnp.maximum(wide, 0), high) + multiply_queries_by_bound(
        jnp.minimum(wide, 0), low
    )
    return max_over_devices(bound.max(axis=2), "G", axes)


def average_page_shares(
    q: Float[Array, "B K G D"],
    low: Float[Array, "B K p D"],
    high: Float[Array, "B K p D"],
    full: Bool[Array, "B K p"],
    channels: int,
    axes: ShardingMesh | None,
) -> Float[Array, "B K p"]:
    """Return shares of attention `f32[B, K, p]` that pages may receive, summed over a kv head's query heads.

    RocketKV, hybrid sparse attention: per channel one of a page's bounds stands for its keys, by the sign of the
    queries' sum, and of the channels only those of largest mean |q|. The softmax is over the pages in mask `full`.
    """
    wide = q.astype(jnp.float32)
    upward = sum_over_devices(wide.sum(axis=2), axes, "G") > 0
    bound = jnp.where(upward[:, :, None], high, low).astype(jnp.float32)
    size = jnp.abs(wide)
    _, best = lax.top_k(sum_over_devices(size.sum(axis=2), axes, "G"), min(channels, q.shape[-1]))
    chosen = jax.nn.one_hot(best, q.shape[-1], dtype=jnp.float32).sum(axis=-2)[:, :, None]
    logits = exact_einsum("bkgd,bkpd->bkgp", wide * chosen, bound)
    # The published temperature: fewer channels have smaller products.
    part = (size * chosen).sum(axis=-1) / jnp.maximum(size.sum(axis=-1), 1e-30)
    logits = logits / jnp.sqrt(jnp.maximum(q.shape[-1] * part, 1e-30))[..., None]
    shares = _compute_masked_softmax(logits, full[:, :, None], None)
    return sum_over_devices(shares.sum(axis=2), axes, "G")


def _reduce_attention_to_scores(
    shares: Float[Array, "B K G w n"], query: FilterQuery, axes: ShardingMesh | None
) -> Float[Array, "B n"]:
    """Reduce attention probabilities to scores `f32[B, n]`: maximum over all heads, then weighted sum over queries."""
    most = max_over_devices(shares.max(axis=(1, 2)), "H", axes)
    return (most * query.weights[..., None]).sum(axis=1)


def _compute_masked_softmax(
    logits: Float[Array, "*n P"], seen: Bool[Array, "*#n P"], sinks: Float[Array, "*#n one"] | None
) -> Float[Array, "*n P"]:
    """Return the softmax of logits in mask `seen`, last axis, 0 elsewhere; sink logits only in the denominator."""
    logits = jnp.where(seen, logits, MASKED)
    highest = logits.max(axis=-1, keepdims=True)
    highest = highest if sinks is None else jnp.maximum(highest, sinks)
    weights = jnp.where(seen, jnp.exp(logits - highest), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - highest)
    return weights / jnp.maximum(total, 1e-30)
