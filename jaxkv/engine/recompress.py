"""Recompress a cache: its policy selects again among the entries of prompt and answer, in order of position."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv._checks import is_traced, select_array_module
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import LogitShaping
from jaxkv.cache import KVCache, SegmentTables
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.bookkeeping import select_layer_segments
from jaxkv.engine.compress import compress_layer_by_layer
from jaxkv.engine.hadamard import apply_hadamard, restore_original_keys
from jaxkv.engine.layer_sources import LayerEntrySource
from jaxkv.engine.lengths import (
    compute_layer_budgets,
    insert_sliding_window_counts,
    round_up_to_bucket,
)
from jaxkv.engine.moments import compute_last_query_moments, compute_query_pairs
from jaxkv.engine.observing import run_scorer
from jaxkv.engine.prefill_layer import compute_value_norms
from jaxkv.engine.progress import run_generator
from jaxkv.engine.segments import Segments
from jaxkv.engine.selection import Candidates, compute_entry_limits, keep_last_entries
from jaxkv.models.config import SlidingWindows
from jaxkv.models.rope import zero_rotated_channels
from jaxkv.models.split_decoder import DecoderGraphs, Leaves, SplitDecoder
from jaxkv.models.values import LayerSpec
from jaxkv.policies.head_budgets import HeadBudgets, get_device_capacity, multiply_rounding_down
from jaxkv.policies.parts import DecodingCompressionConfig, Parts
from jaxkv.policies.rank import ByNewScores, compute_entry_ranks
from jaxkv.policies.scorer import ExtraInputs, Scorer, ScorerInputs
from jaxkv.sharding.collectives import all_gather_shards, max_over_devices, slice_own_shard
from jaxkv.sharding.mesh import (
    ShardingMesh,
    copy_to_host,
    place_dataclass_on_mesh,
    place_host_array,
)
from jaxkv.sharding.sharded_program import sharded_jit

# L1 norms `[B, K, S]` of values `[B, K, S, D]` after the output projection.
Norms = Callable[[Float[Array, "B K S D"]], Float[Array, "B K S"]]


def reject_value_norms(v: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    """Raise TypeError in place of value norms: a model outside jaxkv has no known output projection."""
    raise TypeError("norms of values: output projection not known. Choose a policy without norms.")


def count_entries_over_limit(cache: KVCache) -> Any:
    """Return the most entries `[B]` by which any segment of a sequence exceeds its limit; negative below limits."""
    if is_traced(cache.length):
        return max_over_devices((cache.length - cache.limit).max(axis=(0, 2)), "K", cache.axes)
    return (copy_to_host(cache.length).astype(np.int64) - copy_to_host(cache.limit)).max(
        axis=(0, 2)
    )


def find_due_sequences(cache: KVCache) -> Any:
    """Return the mask `bool[B]` of sequences to recompress now; a host array unless the cache is traced.

    Their fullest segment exceeds its limit by at least `every` entries, or by any if each new entry evicts one.
    """
    parts = cache.policy.composed
    if not parts.decoding_compression.compresses:
        return np.zeros(cache.seen.shape, bool)
    return count_entries_over_limit(cache) >= (parts.recompression_interval or 1)


@frozen_dataclass
class FixedSizes:
    """Fixed pool sizes and segment length for the caches that `recompress` returns; needed for traced caches.

    Attributes:
        rows: size P of each pool; on a mesh, of one device's part.
        padded_len: maximum number of entries per segment.
    """

    rows: tuple[int, ...]
    padded_len: int


def recompress(
    flat: SplitDecoder,
    cache: KVCache,
    *,
    key: PRNGKeyArray,
    headroom: int | Int[np.ndarray, " L"],
    fixed: FixedSizes | None = None,
) -> KVCache:
    """Return a new `KVCache` with sequences over their limit by `every` entries recompressed, and the others copied.

    `cache` itself is unchanged; its policy must recompress after the prompt. Each pool is as small as its fullest
    sequence allows, with `headroom` free places behind every segment. If the cache's tables are traced, `fixed` sets
    the sizes.
    """
    parts = cache.policy.composed
    state = cache.state
    assert state is not None
    held = _CachedLayerSource(
        flat,
        cache,
        key,
        np.broadcast_to(np.asarray(headroom, np.int64), (len(cache.start),)),
        fixed,
    )
    now = place_host_array(find_due_sequences(cache), "B", flat.axes)
    compressed = run_generator(
        compress_layer_by_layer(held, parts, key=key, headroom=held.headroom, due=now)
    )
    target = compute_entry_limits(
        parts.heads, compressed.length, compressed.length, flat.axes, flat.config.sliding_windows
    )
    full = np.asarray([width is None for width in flat.config.sliding_windows])
    renewed = now[:, None] & full[:, None, None]
    if parts.heads.is_uniform:
        wants = select_array_module(held.kept_entries).broadcast_to(
            held.kept_entries[..., None], target.shape
        )
        target = place_host_array(wants, "L B K", flat.axes, jnp.int32)
    result = cache.replace_arrays(
        pools=tuple(
            dataclasses.replace(pool, residual=old.residual and old.residual.drop_sequences(now))
            for pool, old in zip(compressed.pools, cache.pools, strict=True)
        ),
        start=compressed.start,
        length=compressed.length,
        limit=jnp.where(renewed, target, cache.limit),
        state=dataclasses.replace(state, tau=compressed.tau),
        states=jax.tree.map(jnp.copy, cache.arrays.states),
    )
    # A head that competes with others may now hold more entries than the prompt has tokens.
    result = dataclasses.replace(
        result, tally=cache.tally.add_counts(compressed.tally), extended=not parts.heads.is_uniform
    )
    return place_dataclass_on_mesh(result, flat.axes)


@frozen_dataclass
class CachedLayerConfig:
    """Static config of the functions that take a cached layer's entries for recompression: policy parts, layout, sizes.

    Attributes:
        ongoing: what the policy does after the prompt.
        scorer: computes new scores where the policy has no rank.
        heads: how a layer's entries are divided among its heads.
        layout: layout of the pools.
        padded_len: maximum number of entries per segment.
        spec: static config of the layer.
        axes: axes of the mesh that programs run on; None without a mesh.
    """

    ongoing: DecodingCompressionConfig
    scorer: Scorer
    heads: HeadBudgets
    layout: SegmentLayout
    padded_len: int
    spec: LayerSpec
    axes: ShardingMesh | None = None

    @classmethod
    def from_parts(cls, parts: Parts, **given: Any) -> "CachedLayerConfig":
        """Build the `CachedLayerConfig` of a policy's parts; `given` sets the fields that the parts do not."""
        return cls(
            ongoing=parts.decoding_compression,
            scorer=parts.scorer,
            heads=parts.heads,
            layout=parts.cache_layout,
            **given,
        )


@jax.tree_util.register_dataclass
@frozen_dataclass
class CachedLayer:
    """Arrays of one cached layer: pool, tables of all layers, query buffer, index in tables and model, random key."""

    pool: EntryPool
    tables: SegmentTables
    query_buffer: Float[Array, "B K G R D"] | None
    row: Int[Array, ""]
    layer: Int[Array, ""]
    key: PRNGKeyArray

    @property
    def layer_segments(self) -> Segments:
        """`Segments` of one cached layer (start, length, limit, ...), sliced from the tables of all layers."""
        return select_layer_segments(self.tables.select_layer_tables(self.row[None]), 0)

    @property
    def key_centre(self) -> Float[Array, "B K D"] | None:
        """Vectors `[B, K, D]` subtracted from a cached layer's keys before the transform; None without."""
        return None if self.tables.centre is None else self.tables.centre[self.row]


class _CachedLayerSource(LayerEntrySource):
    """Layer source for recompression: gives the compressor the entries, scores and pool sizes of an existing cache."""

    def __init__(
        self,
        flat: SplitDecoder,
        cache: KVCache,
        key: PRNGKeyArray,
        headroom: Int[np.ndarray, " L"],
        fixed: FixedSizes | None,
    ):
        """Compute a cache's padded segment length and, per layer, how many entries and recent ones to keep."""
        parts = cache.policy.composed
        state = cache.state
        assert state is not None
        self.flat = flat
        self.cache = cache
        self.key = key
        self.headroom = headroom
        self.fixed = fixed
        self.indices = range(len(headroom))
        self.axes = flat.axes
        self.kept_entries, self.recents = recount_entries_to_keep(
            parts, cache.tables, flat.config.sliding_windows, flat.axes
        )
        self.sliding_windows = flat.config.sliding_windows
        self.dtype = cache.pools[0].dtype
        self.tables = dataclasses.replace(
            cache.tables, state=dataclasses.replace(state, query_buffers=())
        )
        if fixed is None:
            most = max(pool.row_count for pool in cache.pools) // cache.kv_shards
            # Upper bound from the text and the pool: independent of content, and rarely changed by growth.
            heads = cache.start.shape[2] // cache.kv_shards
            self.padded_len = min(
                round_up_to_bucket(int(copy_to_host(cache.seen).max())),
                cache.layout.get_max_segment_length(most, heads),
            )
        else:
            self.padded_len = fixed.padded_len
        self.parts = parts

    def get_layer_candidates(self, index: int) -> Candidates:
        """Return one layer's `Candidates`: masks, positions, and scores from the policy's rank or its scorer."""
        return _gather_candidates(
            self.flat.blocks[index],
            self._build_cached_layer(index),
            **self._build_static_arguments(index),
        )

    def compute_pool_size(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Return the new pool's size P in entries: fixed, or headroom plus the policy's target or bucketed `kept`."""
        if self.fixed is not None:
            return self.fixed.rows[self.cache.layout.get_pool_index(group[0])]
        part = slice(group[0], group[-1] + 1)
        kv_shards = self.cache.kv_shards
        capacity = get_device_capacity(self.parts.heads)
        heads = kept.shape[2] // kv_shards

        def bound_device_entries(rows: int) -> int:
            """Return the most entries that one device's heads may hold if their even share is `rows`."""
            return min(multiply_rounding_down(capacity, rows), kv_shards * rows)

        length = copy_to_host(kept).astype(np.int64)
        layout = self.cache.layout
        rows = bound_device_entries(
            -(-int(layout.count_required_pool_rows(length).max()) // kv_shards)
        )
        # A sequence that is not due may hold more entries if the cache comes from another mesh.
        rows = max(rows, layout.count_fullest_shard_rows(length, heads))
        target = bound_device_entries(int(heads * self.kept_entries[part].sum(axis=0).max()))
        size = heads * round_up_to_bucket(-(-rows // heads))
        # Pools of growing budgets have the sizes of buckets, for which programs are compiled once.
        exact = rows <= target and self.parts.growing_budget is None
        return (min(target, size) if exact else size) + heads * int(self.headroom[part].sum())

    def take_layer_entries(self, index: int) -> UnpackedEntries:
        """Return one layer's keys, values, positions and scores as `UnpackedEntries`, gathered from the pool."""
        rows = _gather_entries_to_pack(
            self.flat.blocks[index],
            self._build_cached_layer(index),
            **self._build_static_arguments(index),
        )
        # Merged entries are rounded to the model's dtype, too.
        return rows if self.parts.merge is None else rows.cast_to_dtype(jnp.dtype(self.cache.dtype))

    def _build_static_arguments(self, index: int) -> dict[str, Any]:
        """Return layer `index`'s static arguments as a dict: `graphs` and `static`, a `CachedLayerConfig`."""
        graphs = self.flat.get_layer_graphs(index)
        static = CachedLayerConfig.from_parts(
            self.parts, padded_len=self.padded_len, spec=graphs.spec, axes=self.axes
        )
        return {"graphs": graphs, "static": static}

    def _build_cached_layer(self, index: int) -> CachedLayer:
        """Return the `CachedLayer` of layer `index`: its pool, the tables, its query buffer and a random key."""
        cache = self.cache
        state = self.cache.state
        sliding_windows = self.flat.config.sliding_windows
        query_buffers = () if sliding_windows[index] or state is None else state.query_buffers
        return CachedLayer(
            pool=cache.pools[cache.layout.get_pool_index(index)],
            tables=self.tables,
            query_buffer=query_buffers[sliding_windows[:index].count(None)]
            if query_buffers
            else None,
            row=jnp.int32(index),
            layer=jnp.int32(index),
            key=self.key,
        )


def _copy_to_host_as_int64(table: Array) -> Any:
    """Return an int64 NumPy copy of a device array; return a traced array unchanged."""
    return table if is_traced(table) else copy_to_host(table).astype(np.int64)


def recount_entries_to_keep(
    parts: Parts,
    tables: SegmentTables,
    sliding_windows: SlidingWindows,
    axes: ShardingMesh | None = None,
) -> tuple[Any, Any]:
    """Return two counts `[L, B]` for recompression: entries to keep per kv head, and the most recent ones among them.

    The entries are the mean of a layer's limits, or come from the budget schedule for the current length.
    Sliding-window layers keep the entries of their windows.
    """
    state = tables.state
    seen = _copy_to_host_as_int64(tables.seen)
    assert state is not None
    always_kept = parts.keep.count_always_kept(seen, _copy_to_host_as_int64(state.prompt))
    xp = select_array_module(seen)
    by_limits = parts.evicts_while_decoding and parts.heads.get_segment_limits() is None
    # Segments under a threshold may hold fewer entries than their budget, so their limits give no budget.
    by_limits |= parts.layers.depends_on_scores and parts.score_threshold is None
    recent = _copy_to_host_as_int64(state.recent)
    growing = parts.growing_budget
    if growing is not None:
        now = xp.maximum(growing.count_entries(seen), always_kept)
        rows, recent = compute_layer_budgets(parts, now, seen, always_kept, sliding_windows)
    elif by_limits:
        limit = _copy_to_host_as_int64(tables.limit)[
            np.asarray([width is None for width in sliding_windows])
        ]
        # Heads may have different limits: average over a layer's heads, or over all layers if layers compete.
        of_all = all_gather_shards(limit, "K", 2, axes) if is_traced(limit) else limit
        over = (0, 2) if parts.layers.uses_joint_budget else (2,)
        rows = of_all.sum(axis=over, dtype=of_all.dtype) // math.prod(of_all.shape[i] for i in over)
        rows = xp.broadcast_to(rows, of_all.shape[:2])
        if not parts.evicts_while_decoding and not parts.layers.uses_joint_budget:
            # A prompt shorter than its always-kept entries grows until it has all of them.
            rows = xp.maximum(rows, always_kept)
        rows = insert_sliding_window_counts(rows, seen, sliding_windows)
    else:
        now = xp.maximum(xp.minimum(_copy_to_host_as_int64(state.budget), seen), always_kept)
        rows, _ = compute_layer_budgets(parts, now, seen, always_kept, sliding_windows)
    # Subtract the other protected entries of each layer from the most recent ones.
    left = xp.maximum(rows - (always_kept - parts.keep.window), parts.keep.window)
    # The recent entries of a prompt below its budget are a share of the budget: layers with a smaller budget hold
    # fewer.
    return rows, xp.minimum(recent, left)


def gather_layer_entries(layer: CachedLayer, static: CachedLayerConfig) -> UnpackedEntries:
    """Return a cached layer's `UnpackedEntries`: each segment sorted by position and padded to equal length."""
    pool = layer.pool
    segments = layer.layer_segments
    batch, heads = segments.start.shape
    padded_len = min(static.padded_len, static.layout.get_max_segment_length(pool.row_count, heads))
    index = jnp.arange(padded_len, dtype=jnp.int32)
    inside = index < segments.length[..., None]
    row = jnp.where(inside, segments.start[..., None] + index, 0).reshape(batch, heads * padded_len)
    last = jnp.iinfo(jnp.int32).max
    pos = jnp.where(inside, jnp.take_along_axis(pool.pos, row, axis=1).reshape(inside.shape), last)
    order = jnp.argsort(pos, axis=-1)
    row = jnp.take_along_axis(row.reshape(inside.shape), order, axis=-1).reshape(
        batch, heads * padded_len
    )
    k, v = pool.store.gather_entries(row).decode_entries()
    if pool.store.values_are_keys:
        v = zero_rotated_channels(v, static.spec.rope)
    score = (
        None
        if pool.score is None
        else jnp.take_along_axis(pool.score, row, axis=1).reshape(inside.shape)
    )
    return UnpackedEntries(
        k=k.reshape(*inside.shape, -1),
        v=v.reshape(*inside.shape, -1),
        inside=inside,
        score=score,
        positions=jnp.take_along_axis(pos, order, axis=-1),
        tau=segments.tau,
    )


def _undo_transform(rows: UnpackedEntries, layer: CachedLayer) -> UnpackedEntries:
    """Return entries with their keys and values before the transform; unchanged if the layer has no transform."""
    if layer.key_centre is None:
        return rows
    return rows._replace(
        k=restore_original_keys(rows.k, layer.key_centre), v=apply_hadamard(rows.v)
    )


@sharded_jit(static=("graphs", "static"), on="static")
def _gather_entries_to_pack(
    leaves: Leaves, layer: CachedLayer, *, graphs: DecoderGraphs, static: CachedLayerConfig
) -> UnpackedEntries:
    """Compiled: return a cached layer's `UnpackedEntries`, by `gather_entries_to_pack` with the model's value norms."""
    block = graphs.rebuild_block(leaves)
    return gather_entries_to_pack(
        layer, static, block.logits_shaping, partial(compute_value_norms, block)
    )


@sharded_jit(static=("graphs", "static"), on="static")
def _gather_candidates(
    leaves: Leaves, layer: CachedLayer, *, graphs: DecoderGraphs, static: CachedLayerConfig
) -> Candidates:
    """Compiled: run `gather_candidates` with the model's function for value norms; return a layer's `Candidates`."""
    block = graphs.rebuild_block(leaves)
    return gather_candidates(
        layer, static, block.logits_shaping, partial(compute_value_norms, block)
    )


def gather_entries_to_pack(
    layer: CachedLayer,
    static: CachedLayerConfig,
    shaping: LogitShaping,
    norms_of: Norms = reject_value_norms,
) -> UnpackedEntries:
    """Return a cached layer's `UnpackedEntries`, with new attention mass for mergers that do not compare entries."""
    rows = gather_layer_entries(layer, static)
    merge = static.ongoing.merge
    if merge is None or merge.compared_tensors:
        return rows
    mass = _rescore_entries(layer, _undo_transform(rows, layer), static, shaping, norms_of)[1]
    return rows._replace(mass=mass)


def gather_candidates(
    layer: CachedLayer,
    static: CachedLayerConfig,
    shaping: LogitShaping,
    norms_of: Norms = reject_value_norms,
) -> Candidates:
    """Return a cached layer's `Candidates`, scored by the policy's rank or scorer; unscored in sliding-window layers.

    A sliding-window layer keeps the entries of its window and has no scores. `norms_of` computes norms of values, for
    policies that need them.
    """
    rows = gather_layer_entries(layer, static)
    ongoing = static.ongoing
    window = static.spec.sliding_window
    pos = rows.positions
    segments = layer.layer_segments
    assert pos is not None
    candidates = Candidates(
        scores=None,
        inside=rows.inside,
        always_kept=ongoing.keep.mask_protected_positions(pos, segments.prompt[:, None, None]),
        positions=pos,
        seen=segments.seen,
    )
    if window is not None:
        return keep_last_entries(candidates, window)
    rows = _undo_transform(rows, layer)
    if isinstance(ongoing.rank, ByNewScores):
        scores, _ = _rescore_entries(layer, rows, static, shaping, norms_of)
        if ongoing.stores_scores:
            assert rows.score is not None
            scores = ongoing.rank.average_scores(rows.score, scores)
    else:
        score = jnp.zeros(pos.shape, jnp.float32) if rows.score is None else rows.score
        scores = compute_entry_ranks(ongoing.rank, score, segments.seen[:, None, None] - pos)
    needed = static.heads.needs_value_norms
    return dataclasses.replace(
        candidates, scores=scores, norms=norms_of(rows.v) if needed else None
    )


def _rescore_entries(
    layer: CachedLayer,
    rows: UnpackedEntries,
    static: CachedLayerConfig,
    shaping: LogitShaping,
    norms_of: Norms,
) -> tuple[Array, Array]:
    """Return two arrays `f32[B, K, S]`, new scores and attention mass, from a scorer and a layer's query buffer."""
    segments = layer.layer_segments
    scorer = static.scorer
    centre = layer.key_centre
    k = rows.k
    batch, heads = segments.length.shape
    needs = scorer.needs
    extras = ExtraInputs()
    window = needs.queries
    if needs.norms:
        extras["norms"], extras["norm_totals"] = _sum_value_norms(norms_of, rows, static.axes)
    if layer.query_buffer is not None:
        position = (segments.seen - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
        slot = position % layer.query_buffer.shape[3]
        remembered = jnp.take_along_axis(layer.query_buffer, slot[:, None, None, :, None], axis=3)
        # The transform is its own inverse.
        remembered = remembered if centre is None else apply_hadamard(remembered)
        extras["queries"] = remembered.astype(k.dtype)
        if needs.moments is not None:
            rope = static.spec.rope
            extras["moments"] = compute_last_query_moments(
                remembered, segments.seen, rope, needs.moments
            )
    if needs.pairs:
        extras["pairs"] = compute_query_pairs(
            extras.get("queries"),
            segments.seen,
            layer.layer,
            needs=needs.pairs,
            rope=static.spec.rope,
            heads=heads * static.axes.count_axis_shards("K") if static.axes else heads,
            axes=static.axes,
        )
    sinks = shaping.sink_logits
    # If heads hold different numbers of entries, the scorer sees each head as a sequence.
    fold = not static.heads.is_uniform

    def fold_heads(array: Array) -> Array:
        """Reshape `[B, K, ...]` to `[B * K, 1, ...]` if heads hold different entries; else return the array."""
        return array.reshape(batch * heads, 1, *array.shape[2:]) if fold else array

    length = segments.length.reshape(-1) if fold else segments.length[:, 0]
    seen = ScorerInputs(
        q_positions=(length - window)[:, None] + jnp.arange(window, dtype=jnp.int32),
        k=fold_heads(k),
        v=fold_heads(rows.v),
        length=length,
        layer=layer.layer,
        key=layer.key,
        extras=jax.tree.map(fold_heads, extras),
        sink_logits=None
        if sinks is None
        else fold_heads(jnp.broadcast_to(sinks, (batch, *sinks.shape))),
        softcap=shaping.softcap,
        axes=None if fold else static.axes,
        group_axes=static.axes,
    )
    scores, mass = run_scorer(scorer, seen, static.axes)
    return scores.reshape(k.shape[:3]), mass.reshape(k.shape[:3])


def _sum_value_norms(
    norms_of: Norms, rows: UnpackedEntries, axes: ShardingMesh | None
) -> tuple[Array, Array]:
    """Return each entry's L1 norm of its projected value, and all kv heads' sum at its position, each `[B, K, S]`."""
    assert rows.positions is not None
    norms = norms_of(rows.v)
    of_all = all_gather_shards(jnp.where(rows.inside, norms, 0.0), "K", 1, axes)
    where = all_gather_shards(rows.positions, "K", 1, axes)
    batch, heads, padded_len = of_all.shape
    # Sorting makes entries of one position adjacent; a head holds each position once.
    order = jnp.argsort(where.reshape(batch, -1), axis=-1, stable=True)
    place = jnp.take_along_axis(where.reshape(batch, -1), order, axis=-1)
    sums = value = jnp.take_along_axis(of_all.reshape(batch, -1), order, axis=-1)
    for shift in (step * side for step in range(1, heads) for side in (1, -1)):
        same = jnp.roll(place, shift, axis=-1) == place
        sums = sums + jnp.where(same, jnp.roll(value, shift, axis=-1), 0.0)
    back = jnp.argsort(order, axis=-1)
    totals = jnp.take_along_axis(sums, back, axis=-1).reshape(batch, heads, padded_len)
    return norms, slice_own_shard(totals, "K", 1, axes)
