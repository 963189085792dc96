"""Packing of a layer's kept entries into its own pool, or into the pool that all layers share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention import Implementation, get_attention_backend
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.pools import EntryPool, map_rows_to_segments
from jaxkv.cache.stores import DenseStore, Store, write_pool_rows
from jaxkv.sharding.mesh import ShardingMesh, get_array_sharding, is_inside_shard_map
from jaxkv.sharding.sharded_program import sharded_jit


class UnpackedEntries(NamedTuple):
    """Named tuple of a layer's entries before packing, S per head: keys, values, mask, scores, positions, merge data.

    Attributes:
        k: `[B, K, S, D]` keys as the pool stores them.
        v: `[B, K, S, D]` values.
        inside: `bool[B, K|1, S]` mask of the indices that hold an entry.
        score: `f32[B, K, S]` score of each entry, for pools that keep scores.
        positions: `i32[B, K, S]` positions of the entries; None for 0 to S - 1.
        mass: `f32[B, K, S]` attention mass that each entry received, for mergers.
        tau: `f32[B, K, n]` running merging thresholds; None before the first merging.
        seen: `ScorerInputs` of the layer with reference queries, for mergers that read these.
    """

    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    inside: Bool[Array, "B #K S"]  # noqa: F821
    score: Float[Array, "B K S"] | None = None
    positions: Int[Array, "B K S"] | None = None
    mass: Float[Array, "B K S"] | None = None
    tau: Float[Array, "B K n"] | None = None
    seen: Any = None

    def cast_to_dtype(self, dtype: jnp.dtype | None) -> "UnpackedEntries":
        """Return the entries with keys and values cast to `dtype`; unchanged if `dtype` is None."""
        return (
            self if dtype is None else self._replace(k=self.k.astype(dtype), v=self.v.astype(dtype))
        )


@sharded_jit(static=("rows", "layout", "store", "implementation", "axes"))
def pack_layer_entries(
    layer: UnpackedEntries,
    mask: Bool[Array, "B K S"],
    size: Int[Array, ""],
    *,
    rows: int,
    layout: SegmentLayout,
    store: type[Store] = DenseStore,
    implementation: Implementation = Implementation.XLA,
    axes: ShardingMesh | None = None,
) -> tuple[EntryPool, Int[Array, "n B K"]]:
    """Copy a layer's entries in `mask` to a new pool of P = `rows`; return the pool and segments' first rows; compiled.

    Entries keep their order. Spare places are spread evenly behind the segments, as in a pool of `size`, which is at
    most P: `truncate_pools` makes pools of that size. On a mesh P is that of one device's heads. First rows have a
    leading axis of one layer.
    """
    batch, heads, padded_len, _ = layer.k.shape
    length = mask.sum(axis=-1, dtype=jnp.int32)
    first = layout.compute_segment_starts(length[None], size)
    start = first[0]
    segment = map_rows_to_segments(start, rows)
    offset = jnp.arange(rows, dtype=jnp.int32) - jnp.take_along_axis(start, segment, axis=1)
    real = offset < jnp.take_along_axis(length, segment, axis=1)
    # The offset-th selected entry of a segment is the first whose running count exceeds the offset: bisect for it.
    count = jnp.cumsum(mask, axis=-1, dtype=jnp.int32).reshape(batch, heads * padded_len)
    low = jnp.zeros_like(offset)
    high = jnp.full_like(offset, padded_len - 1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = jnp.take_along_axis(count, segment * padded_len + middle, axis=1) > offset
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    position, _ = lax.fori_loop(0, max(1, (padded_len - 1).bit_length()), halve, (low, high))
    source = jnp.where(real, segment * padded_len + position, -1)
    packed_k, packed_v, pos = get_attention_backend(implementation).pack_kept_entries(
        layer.k, layer.v, source
    )

    def cells(a: Array, empty: int | float) -> Array:
        return jnp.where(
            real,
            jnp.take_along_axis(a.reshape(batch, heads * padded_len), jnp.maximum(source, 0), 1),
            empty,
        )

    if layer.positions is not None:
        pos = cells(layer.positions, -1)
    score = None if layer.score is None else cells(layer.score, 0.0)
    return EntryPool(store=store.encode_entries(packed_k, packed_v), pos=pos, score=score), first


@sharded_jit(static=("rows", "axes"))
def truncate_pools(
    pools: tuple[EntryPool, ...], *, rows: tuple[int, ...], axes: ShardingMesh | None = None
) -> tuple[EntryPool, ...]:
    """Return pools cut to their first rows, `rows[i]` for pool i, on a mesh in each device's shard; compiled."""
    each = zip(pools, rows, strict=True)
    return tuple(jax.tree.map(lambda leaf, size=size: leaf[:, :size], pool) for pool, size in each)


@sharded_jit(static=("layout", "rows", "headroom", "axes"))
def compute_all_segment_starts(
    length: Int[Array, "n B K"],
    *,
    layout: SegmentLayout,
    rows: int,
    headroom: tuple[int, ...] | None = None,
    axes: ShardingMesh | None = None,
) -> Int[Array, "n B K"]:
    """Return segments' first rows `[n, B, K]` in a pool of `rows`, on a mesh in a device's shard; compiled."""
    return layout.compute_segment_starts(
        length, rows, None if headroom is None else np.asarray(headroom, np.int32)
    )


@sharded_jit(static=("axes",), donate=("pool",))
def pack_into_shared_pool(
    pool: EntryPool,
    layer: UnpackedEntries,
    mask: Bool[Array, "B K S"],
    start: Int[Array, "B K"],
    *,
    axes: ShardingMesh | None = None,
) -> EntryPool:
    """Write a layer's entries in `mask` to the donated shared pool, each segment from `start`; return it; compiled."""
    batch, heads, padded_len, dim = layer.k.shape
    rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    row = jnp.where(mask, start[..., None] + rank, pool.row_count).reshape(
        batch, heads * padded_len
    )
    positions = layer.positions
    if positions is None:
        positions = jnp.broadcast_to(
            jnp.arange(padded_len, dtype=jnp.int32), (batch, heads, padded_len)
        )
    k, v = (a.reshape(batch, heads * padded_len, dim) for a in (layer.k, layer.v))
    score = pool.score
    if score is not None and layer.score is not None:
        score = write_pool_rows(score, row, layer.score.reshape(row.shape))
    return EntryPool(
        store=pool.store.overwrite_entries((row, k), (row, v)),
        pos=write_pool_rows(pool.pos, row, positions.reshape(row.shape)),
        score=score,
    )


def make_empty_pool(
    batch: int,
    rows: int,
    dim: int,
    dtype: jnp.dtype,
    *,
    scored: bool,
    store: type[Store] = DenseStore,
    axes: ShardingMesh | None = None,
) -> EntryPool:
    """Return a pool of P = `rows` (on a mesh, per device) without entries: zeros, positions -1; scores if `scored`."""
    axes = None if is_inside_shard_map() else axes
    cells = (batch, rows if axes is None else rows * axes.count_axis_shards("K"))
    wide = get_array_sharding("B P D", (*cells, dim), axes)
    narrow = get_array_sharding("B P", cells, axes)
    k = jnp.zeros((*cells, dim), dtype, device=wide)
    # Two arrays, because both are written in place.
    v = k if store.values_are_keys else jnp.zeros_like(k)
    return EntryPool(
        store=store.encode_entries(k, v),
        pos=jnp.full(cells, -1, jnp.int32, device=narrow),
        score=jnp.zeros(cells, jnp.float32, device=narrow) if scored else None,
    )
