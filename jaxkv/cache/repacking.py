"""Copies of a cache in new buffers with more headroom, or for more sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv._errors import require
from jaxkv.cache.kv_cache import KVCache
from jaxkv.cache.layout import SegmentLayout, flatten_layers_and_heads
from jaxkv.cache.pools import EntryPool, map_rows_to_segments
from jaxkv.sharding.mesh import (
    ShardingMesh,
    copy_to_host,
    count_padding_sequences,
    list_leaves_with_axes,
    place_dataclass_on_mesh,
)
from jaxkv.sharding.sharded_program import sharded_jit


@sharded_jit(static=("layout", "rows", "headroom", "axes"))
def _copy_pool_with_headroom(
    pool: EntryPool,
    start: Int[Array, "n B K"],
    length: Int[Array, "n B K"],
    *,
    layout: SegmentLayout,
    rows: int,
    headroom: tuple[int, ...],
    axes: ShardingMesh | None,
) -> tuple[EntryPool, Int[Array, "n B K"]]:
    """Copy a pool to a new one of P = `rows` with `headroom` per segment; return it and first rows `[n, B, K]`."""
    placed = layout.compute_segment_starts(length, rows, np.asarray(headroom, np.int32))
    start, length, new_start = (
        flatten_layers_and_heads(table) for table in (start, length, placed)
    )
    segment = map_rows_to_segments(new_start, rows)
    first, held, begin = (
        jnp.take_along_axis(a, segment, axis=1) for a in (start, length, new_start)
    )
    offset = jnp.arange(rows, dtype=jnp.int32) - begin
    real = offset < held
    source = jnp.where(real, first + offset, 0)
    pos = jnp.where(real, jnp.take_along_axis(pool.pos, source, axis=1), -1)
    score = (
        None
        if pool.score is None
        else jnp.where(real, jnp.take_along_axis(pool.score, source, axis=1), 0.0)
    )
    # Segments of pools with pages have equal sizes, and entries keep their places within them.
    bounds = None if pool.bounds is None else pool.bounds.resize_page_bounds(rows // start.shape[1])
    return EntryPool(
        store=pool.store.gather_entries(source, real),
        pos=pos,
        score=score,
        bounds=bounds,
        residual=pool.residual,
    ), placed


def _delete_copied_pool(pool: EntryPool, copy: EntryPool) -> None:
    """Wait until `copy` is complete, then delete the original pool's arrays to free their memory."""
    jax.block_until_ready(copy)
    for leaf in jax.tree.leaves(pool):
        leaf.delete()


def repack_cache(
    cache: KVCache,
    *,
    headroom: int | Int[np.ndarray, " L"],
    batch: int | None = None,
    release: bool = False,
    sizes: tuple[int, ...] | None = None,
) -> KVCache:
    """Copy a cache with more `headroom`, cut to sliding windows; `batch` repeats a sequence, `release` frees old pools.

    `headroom` is one number, or one per layer. Segments of sliding-window layers keep only the entries of their
    windows, with at least as much headroom.

    `batch` repeats a cache of one sequence that many times, and on a mesh pads to complete groups; ValueError if the
    cache holds several. `release` invalidates the cache: pools are copied and deleted one by one, to limit peak memory;
    pools without more `headroom` move to the new cache. `sizes` are P of sliding-window layers' new pools (on a mesh,
    of a device's shard), one per layer, instead of the P that their `headroom` implies.
    """
    copies = 0
    padding = cache.padding
    if batch is not None and batch != cache.batch:
        require(
            cache.batch == 1,
            "cache",
            f"{cache.batch} sequences",
            f"give {cache.batch} prompts, or a cache of one sequence",
        )
        padding = count_padding_sequences(batch, cache.axes)
        copies = batch + padding

    def repeat_first_sequence(leaf: Array, axis: int = 0) -> Array:
        """Repeat an array's first sequence `copies` times along `axis`; return the array itself if `copies` is 0."""
        if not copies:
            return leaf
        # Sequences that pad a mesh's groups are stale: only the first one is copied.
        one = lax.slice_in_dim(leaf, 0, 1, axis=axis) if cache.padding else leaf
        return jnp.repeat(one, copies, axis=axis)

    rest = dataclasses.replace(cache.replace_arrays(pools=()), host_store=None)
    leaves = [
        repeat_first_sequence(leaf, logical_axes.split().index("B"))
        for _, logical_axes, leaf in list_leaves_with_axes(rest)
    ]
    rest = jax.tree.unflatten(jax.tree.structure(rest), leaves)
    start = rest.start
    length = rest.length
    layers, _, heads = start.shape
    headrooms = np.broadcast_to(np.asarray(headroom, np.int32), (layers,))
    pools = []
    placed = []
    lengths = length
    kv_shards = cache.kv_shards
    for pool, of in zip(cache.pools, cache.layout.slice_layers_by_pool(layers), strict=True):
        headroom_of = tuple(headrooms[of].tolist())
        widths = cache.config.sliding_windows[of]
        unchanged = not any(headroom_of) if sizes is None else not any(widths)
        if release and not copies and unchanged:
            # Unchanged pools move to the new cache.
            pools.append(pool)
            placed.append(start[of])
            continue
        first = start[of]
        held = length[of]
        rows = pool.row_count + heads * sum(headroom_of)
        if any(widths):
            most = np.asarray(
                [np.iinfo(np.int32).max if width is None else width for width in widths], np.int32
            )
            held = jnp.minimum(held, most[:, None, None])
            first = first + length[of] - held
            lengths = lengths.at[of].set(held)
            if sizes is None:
                least = cache.layout.count_fullest_shard_rows(
                    copy_to_host(held), heads // kv_shards
                )
                rows = max(pool.row_count, kv_shards * least + heads * sum(headroom_of))
            else:
                rows = kv_shards * sizes[of.start]
        copied, first = _copy_pool_with_headroom(
            jax.tree.map(repeat_first_sequence, pool),  # A user's store need not name its axes.
            first,
            held,
            layout=cache.layout,
            rows=rows // kv_shards,
            headroom=headroom_of,
            axes=cache.axes,
        )
        pools.append(copied)
        placed.append(first)
        if release:
            _delete_copied_pool(pool, copied)
    # States are donated with the pools; repeated ones are new.
    states = rest.arrays.states if release or copies else jax.tree.map(jnp.copy, rest.arrays.states)
    copy = dataclasses.replace(rest, padding=padding).replace_arrays(
        pools=tuple(pools), start=jnp.concatenate(placed), length=lengths, states=states
    )
    return dataclasses.replace(
        place_dataclass_on_mesh(copy, cache.axes), host_store=cache.host_store
    )


def drop_outside_sliding_windows(cache: KVCache, rows: tuple[int, ...]) -> KVCache:
    """Return the cache, sliding-window layers' entries cut to windows in new pools of `rows[l]`; delete the old pools.

    `rows` has one size per layer (on a mesh, of a device's shard). Old pools are deleted; layers without a sliding
    window are unchanged.
    """
    return repack_cache(cache, headroom=0, release=True, sizes=rows)
