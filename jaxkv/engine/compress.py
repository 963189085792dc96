"""Compression in one function: observe, select, merge, pack. Prompts, caches and users' arrays use it.

A source provides the entries of one layer at a time. If layers share a pool, all are scored before the first one is
packed. The function is a generator over layers: its caller may run other programs in between.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._checks import require_instance, require_shape_and_dtype
from jaxkv.attention import Implementation
from jaxkv.cache.arrays import EntryOverflowCounts
from jaxkv.cache.packing import (
    UnpackedEntries,
    compute_all_segment_starts,
    make_empty_pool,
    pack_into_shared_pool,
    pack_layer_entries,
    truncate_pools,
)
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.layer_sources import LayerEntrySource
from jaxkv.engine.progress import Walk
from jaxkv.engine.selection import Candidates, select_entries
from jaxkv.policies.merger import UNSET, Merged, Merger, build_axes_argument
from jaxkv.policies.parts import Parts
from jaxkv.policies.rank import ByNewScores
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit

# Pools cut by one program: one program per pool would compile longer, one for all pools would hold all wide pools.
_CUT_TOGETHER = 4


class CompressionResult(NamedTuple):
    """Result of compressing layers: pools; segments' first rows, lengths, merge thresholds; overflow counts."""

    pools: tuple[EntryPool, ...]
    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]
    tau: Float[Array, "L B K n"] | None
    tally: EntryOverflowCounts


def compress_layer_by_layer(
    source: LayerEntrySource,
    parts: Parts,
    *,
    key: PRNGKeyArray,
    headroom: Int[np.ndarray, " L"] | None = None,
    due: Bool[Array, " B"] | None = None,
    implementation: Implementation = Implementation.XLA,
) -> Walk[CompressionResult]:
    """Generator: score, select, merge and pack a source's entries layer by layer; return `CompressionResult`.

    Args:
        source: layer source.
        parts: parts of the policy.
        key: random key for mergers that sample.
        headroom: free places behind each layer's segments in a shared pool, `[L]`; by default the rest of it, evenly.
        due: mask of sequences to compress; the others are copied. All if None.
        implementation: attention implementation, which determines how entries are packed.

    Yields:
        1 after each scored layer, 0 after each packed layer.

    Returns:
        The new pools and tables.
    """
    parts = parts.restrict_to_full_attention(source.sliding_windows)
    layout = parts.cache_layout
    axes = source.axes
    pools = list[EntryPool]()
    starts = list[Array]()
    lengths = list[Array]()
    packed = list[EntryPool]()
    sizes = list[int]()
    whole = True
    taus = list[Array]()
    below = None
    tally = EntryOverflowCounts()
    under_way = deque[EntryPool]()
    ongoing = parts.decoding_compression
    for group in layout.group_layers_by_pool(source.indices):
        chosen = yield from _score_and_select_entries(source, group, parts, below, due)
        masks, below = chosen.masks, chosen.below
        tally = tally.add_counts(chosen.tally)
        kept = _count_kept_entries(masks)
        size = source.compute_pool_size(group, kept)
        pool = None
        start = None
        wide = size
        if layout.uses_shared_pool:
            behind = None if headroom is None else tuple(headroom.tolist())
            start = compute_all_segment_starts(
                kept, layout=layout, rows=size, headroom=behind, axes=axes
            )
        for at, index in enumerate(group):
            rows = source.take_layer_entries(index)
            if chosen.judged and chosen.with_scores[at]:
                assert rows.score is not None
                score = _renew_stored_scores(
                    chosen.judged[at], rows.score, due, queries=ongoing.queries, axes=axes
                )
                rows = rows._replace(score=score)
            if parts.merge is not None:
                if chosen.with_scores[at]:
                    rows = merge_evicted_entries(
                        rows,
                        masks[at],
                        jax.random.fold_in(key, index),
                        due,
                        merge=parts.merge,
                        axes=axes,
                    )
                else:
                    # Entries outside a window are not visible to later tokens, so they are not merged.
                    rows = add_merging_thresholds(rows, parts.merge, axes)
                taus += [] if rows.tau is None else [rows.tau]
            rows = rows.cast_to_dtype(source.dtype)
            if start is None:
                wide = source.compute_packing_size(index, size)
                pool, first = pack_layer_entries(
                    rows,
                    masks[at],
                    jnp.int32(size),
                    rows=wide,
                    layout=layout,
                    store=parts.store,
                    implementation=implementation,
                    axes=axes,
                )
                starts.append(first)
            else:
                if pool is None:
                    # The first layer may have a sliding window, and no scores.
                    of = parts.store
                    batch = rows.k.shape[0]
                    dim = rows.k.shape[-1]
                    pool = make_empty_pool(
                        batch,
                        size,
                        dim,
                        rows.k.dtype,
                        scored=parts.stores_scores,
                        store=of,
                        axes=axes,
                    )
                pool = pack_into_shared_pool(pool, rows, masks[at], start[at], axes=axes)
            # Dispatch runs ahead of the device: without a wait, all layers' keys and values could be alive together.
            under_way.append(pool)
            # A shared pool is donated to the next layer's packing.
            while len(under_way) > (0 if layout.uses_shared_pool else source.ahead):
                wait_for_pool(under_way.popleft())
            del rows
            yield 0.0
        assert pool is not None
        packed.append(pool)
        sizes.append(size)
        whole = whole and wide == size
        if len(packed) == _CUT_TOGETHER or group[-1] == source.indices[-1]:
            pools += (
                packed if whole else truncate_pools(tuple(packed), rows=tuple(sizes), axes=axes)
            )
            packed = []
            sizes = []
            whole = True
        lengths.append(kept)
        starts += [] if start is None else [start]
    tau = jnp.stack(taus) if taus else None
    return CompressionResult(
        tuple(pools), jnp.concatenate(starts), jnp.concatenate(lengths), tau, tally
    )


def wait_for_pool(pool: EntryPool) -> None:
    """Block until the device has computed a pool's arrays; return immediately while tracing."""
    if not isinstance(pool.pos, jax.core.Tracer):
        jax.block_until_ready(pool)


@jax.jit
def _count_kept_entries(masks: list[Bool[Array, "B K S"]]) -> Int[Array, "n B K"]:
    """Compiled: return the number of kept entries per segment, `i32[n, B, K]`, from the masks of n layers."""
    return jnp.stack([mask.sum(axis=-1, dtype=jnp.int32) for mask in masks])


class _GroupSelection(NamedTuple):
    """Selection of a layer group's entries: a mask and whether it follows from scores, per layer; overflow counts.

    Attributes:
        masks: mask of kept entries of each layer.
        with_scores: True for layers with scores.
        tally: overflow counts.
        below: mask `[B, S]` of the positions that the highest layer kept, for nested policies.
        judged: candidates of each layer whose scores the next compression averages with new ones; else empty.
    """

    masks: list[Array]
    with_scores: list[bool]
    tally: EntryOverflowCounts
    below: Array | None
    judged: list[Candidates]


def _score_and_select_entries(
    source: LayerEntrySource,
    group: Sequence[int],
    parts: Parts,
    below: Array | None,
    due: Array | None,
) -> Walk[_GroupSelection]:
    """Generator: score and select a layer group's entries; return their `_GroupSelection`.

    Layers without scores, such as sliding-window layers, keep their candidates and compete with no other layer. A
    nested policy selects from the positions `below` that the layer below kept, and returns those for the layer above.
    """
    seen = list[Candidates]()
    for index in group:
        seen.append(source.get_layer_candidates(index))
        yield 1.0
    rows, recent = source.count_entries_to_keep(group, [layer.claim for layer in seen])
    with_scores = [layer.scores is not None for layer in seen]
    rank = parts.decoding_compression.rank
    judged = [*seen] if isinstance(rank, ByNewScores) and rank.stores_scores else []
    masks = list[Array]()
    tally = EntryOverflowCounts()
    if parts.layers.uses_joint_budget and any(with_scores):
        of = with_scores.index(True)
        heads = parts.heads
        compete = [layer for layer in seen if layer.scores is not None]
        choice = select_entries(
            compete, rows[of], recent[of], due=due, heads=heads, axes=source.axes
        )
        best = iter(choice.masks)
        masks = [next(best) if layer.scores is not None else layer.inside for layer in seen]
        return _GroupSelection(masks, with_scores, choice.tally, below, judged)
    for at, index in enumerate(group):
        # Free a layer's scores as soon as its entries have been selected.
        one = [seen.pop(0)]
        of = source.sliding_windows[:index].count(None)
        heads = parts.heads
        axes = source.axes
        choice = select_entries(
            one, rows[at], recent[at], below, due, heads=heads, axes=axes, index=of
        )
        masks += choice.masks
        tally = tally.add_counts(choice.tally)
        if parts.nested and with_scores[at]:
            below = masks[-1][:, 0]
    return _GroupSelection(masks, with_scores, tally, below, judged)


@sharded_jit(static=("queries", "axes"))
def _renew_stored_scores(
    layer: Candidates,
    older: Float[Array, "B K S"],
    due: Bool[Array, " B"] | None,
    *,
    queries: int,
    axes: ShardingMesh | None,
) -> Float[Array, "B K S"]:
    """Compiled: return scores to store: a layer's new ones in `due` sequences; NaN for the last `queries` entries.

    The last queries' attention to their own entries is no measure of these.
    """
    assert layer.scores is not None
    judges = layer.positions >= layer.seen[:, None, None] - queries
    score = jnp.where(judges, jnp.nan, layer.scores)
    return score if due is None else jnp.where(due[:, None, None], score, older)


def merge_evicted_entries(
    rows: UnpackedEntries,
    kept: Bool[Array, "B K S"],
    key: PRNGKeyArray,
    due: Bool[Array, " B"] | None = None,
    *,
    merge: Merger,
    axes: ShardingMesh | None = None,
) -> UnpackedEntries:
    """Return a layer's entries and thresholds with evicted entries merged into kept ones in `due` sequences.

    Sequences that are not `due`, by default none, are unchanged. Raise TypeError if the merger's results do not have
    the entries' shapes and dtypes.
    """
    rows = add_merging_thresholds(rows, merge, axes)
    # Exclude arrays that mergers do not use from the compiled program.
    read = rows._replace(score=None, positions=None)
    k, v, tau = _run_merger(read, kept, key, due, merge=merge, axes=axes)
    return rows._replace(k=k, v=v, tau=tau, seen=None)


def add_merging_thresholds(
    rows: UnpackedEntries, merge: Merger, axes: ShardingMesh | None
) -> UnpackedEntries:
    """Return one layer's entries with initial merging thresholds, if the merger needs these and none are set."""
    if rows.tau is not None or not merge.threshold_count:
        return rows
    return rows._replace(
        tau=_make_initial_thresholds(rows.k, count=merge.threshold_count, axes=axes)
    )


@sharded_jit(static=("count", "axes"))
def _make_initial_thresholds(
    k: Float[Array, "B K S D"], *, count: int, axes: ShardingMesh | None
) -> Float[Array, "B K n"]:
    """Compiled: return one layer's merging thresholds `f32[B, K, count]`, at their value before any eviction."""
    return jnp.full((*k.shape[:2], count), UNSET, jnp.float32)


@sharded_jit(static=("merge", "axes"))
def _run_merger(
    rows: UnpackedEntries,
    kept: Bool[Array, "B K S"],
    key: PRNGKeyArray,
    due: Bool[Array, " B"] | None,
    *,
    merge: Merger,
    axes: ShardingMesh | None,
) -> Merged:
    """Compiled: run a merger on a layer's `due` sequences; return its checked `Merged`: keys, values, thresholds."""
    k = rows.k
    v = rows.v
    tau = rows.tau
    inside = jnp.broadcast_to(rows.inside, kept.shape)
    mass = jnp.zeros(kept.shape, jnp.float32) if rows.mass is None else rows.mass
    given = build_axes_argument(merge, axes) | (
        {"seen": rows.seen} if merge.reference_count else {}
    )
    returned = merge.merge_evicted_entries(k, v, kept, inside, mass, tau, key, **given)
    name = f"{type(merge).__name__}.merge"
    result: Merged = require_instance(name, returned, Merged, "return Merged(k, v, tau)")
    for name, new, old in (("k", result.k, k), ("v", result.v, v)):
        require_shape_and_dtype(
            merge, f"merge.{name}", new, old.shape, "number of each entry, [B, K, S, D]", old.dtype
        )
    if tau is not None:
        level = require_shape_and_dtype(
            merge, "merge.tau", result.tau, tau.shape, "threshold of each kv head, [B, K, n]"
        )
        result = result._replace(
            tau=level if due is None else jnp.where(due[:, None, None], level, tau)
        )
    if due is None:
        return result
    now = due[:, None, None, None]
    return result._replace(k=jnp.where(now, result.k, k), v=jnp.where(now, result.v, v))
