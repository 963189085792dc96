"""`reshard`: copy a cache between meshes or devices."""

import dataclasses

import numpy as np
from jax.sharding import Mesh

from jaxkv._checks import settled
from jaxkv.arguments import as_cache
from jaxkv.cache import KVCache, Layout, laid_out
from jaxkv.cache.host_store import committed
from jaxkv.engine.lengths import bucket
from jaxkv.machine import hosts
from jaxkv.policies.head_budgets import capacity_of, most_rows
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.parameters import model_mesh


@settled
def reshard(cache: KVCache, mesh: Mesh | None) -> KVCache:
    """Return a cache on another mesh or on one device, with pools of equal rows: a copy, or itself if unchanged.

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
    given = as_cache(cache)
    assert given is not None
    hosts.require_same("jaxkv.reshard", None, mesh, made_by=given.policy)
    return cache_on(given, None if mesh is None else Axes(mesh=model_mesh(mesh, given.config)))


def cache_on(cache: KVCache, axes: Axes | None) -> KVCache:
    """Return a cache on the mesh of `axes`, or on the default device for None: a copy, or itself if unchanged."""
    if axes == cache.axes:
        return cache
    moved = laid_out(
        cache, axes, rows=_pool_rows(cache, 1 if axes is None else axes.size("K"))
    ).held_here()
    if moved.host_store is None:
        return moved
    return dataclasses.replace(
        committed(dataclasses.replace(moved, host_store=None)), host_store=moved.host_store
    )


def _pool_rows(cache: KVCache, kv_shards: int) -> list[int]:
    """List each pool's rows per device: an even share times `capacity`, or the fullest device's number of entries."""
    layout, capacity = cache.layout, capacity_of(cache.policy.composed.heads)
    kept = cache.kept.astype(np.int64)
    layers, _, heads = kept.shape
    mine, out = heads // kv_shards, list[int]()
    for pool, part in zip(cache.pools, layout.parts(layers), strict=True):
        if layout is Layout.EQUAL:
            out.append(mine * (pool.rows // heads))
            continue
        length = kept[part]
        most = int(layout.takes(length).max())
        share = min(most_rows(capacity, -(-most // kv_shards)), most)
        fullest = layout.fullest(length, mine)
        out.append(share if fullest <= share else mine * bucket(-(-fullest // mine)))
    return out
