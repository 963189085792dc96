"""`reshard`: copy a cache between meshes or devices."""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from jaxkv._checks import settled
from jaxkv.arguments import validate_cache
from jaxkv.cache import KVCache, SegmentLayout, repack_through_host
from jaxkv.cache.host_store import commit_to_device
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.machine import hosts
from jaxkv.policies.head_budgets import get_device_capacity, multiply_rounding_down
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.parameters import make_model_mesh


@settled
def reshard(cache: KVCache, mesh: Mesh | None) -> KVCache:
    """Return a copy of a cache on another mesh or the default device; the cache itself if it is there already.

    Entries that the policy's `capacity` moved to other heads are not moved back, and no others are moved. A device
    whose heads hold more entries gets a larger pool.

    Args:
        cache: from `prefill` or `generate`; it is not changed.
        mesh: mesh with the axes "data" and "model"; None for the default device.

    Returns:
        The cache on these devices; the same object if it is there already. Segments of equal size keep their headroom,
        others have none.

    Raises:
        TypeError: for an object that is not a cache, or a `mesh` that is not a mesh.
        ValueError: for a mesh with other axes, or with axes that do not divide the model; for a cache with donated
            arrays.
    """
    if cache is None:
        raise TypeError("cache=None: not a cache. Pass one from prefill or generate")
    given = validate_cache(cache)
    assert given is not None
    hosts.require_same_arguments("jaxkv.reshard", None, mesh, made_by=given.policy)
    return move_cache_to_mesh(
        given, None if mesh is None else ShardingMesh(mesh=make_model_mesh(mesh, given.config))
    )


def move_cache_to_mesh(cache: KVCache, axes: ShardingMesh | None) -> KVCache:
    """Return a cache's copy on mesh `axes` (None: default device), in its devices' dtype; the cache itself if there."""
    if axes == cache.axes:
        return cache
    moved = repack_through_host(
        cache,
        axes,
        rows=_compute_pool_rows(cache, 1 if axes is None else axes.count_axis_shards("K")),
    ).cast_for_devices()
    if moved.host_store is None:
        return moved
    return dataclasses.replace(
        commit_to_device(dataclasses.replace(moved, host_store=None)), host_store=moved.host_store
    )


def _compute_pool_rows(cache: KVCache, kv_shards: int) -> list[int]:
    """Return new pools' rows per device: EQUAL segments keep their size, others fit the fullest device."""
    layout = cache.layout
    capacity = get_device_capacity(cache.policy.composed.heads)
    kept = cache.kept.astype(np.int64)
    layers, _, heads = kept.shape
    mine = heads // kv_shards
    out = list[int]()
    for pool, part in zip(cache.pools, layout.slice_layers_by_pool(layers), strict=True):
        if layout is SegmentLayout.EQUAL:
            out.append(mine * (pool.row_count // heads))
            continue
        length = kept[part]
        most = int(layout.count_required_pool_rows(length).max())
        share = min(multiply_rounding_down(capacity, -(-most // kv_shards)), most)
        fullest = layout.count_fullest_shard_rows(length, mine)
        out.append(share if fullest <= share else mine * round_up_to_bucket(-(-fullest // mine)))
    return out
