"""Pages of a layer's entries (Quest): updates of their bounds, and how many pages a step attends to."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache.page_bounds import compute_page_bounds, list_appended_page_rows
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.segments import order_after_read
from jaxkv.engine.tokens import NewTokens
from jaxkv.policies.reads import WHOLE, LayerReadConfig
from jaxkv.sharding.mesh import ShardingMesh


def add_page_bounds(
    pools: tuple[EntryPool, ...],
    length: Int[Array, "L B K"],
    reading: LayerReadConfig,
    axes: ShardingMesh | None,
) -> tuple[EntryPool, ...]:
    """Return the pools, with page bounds (min/max keys, Quest) computed for layers that select pages and have none."""
    if not reading.page:
        return pools
    updated = list(pools)
    for layer, (pool, source) in enumerate(zip(pools, reading.sources, strict=True)):
        if source != WHOLE and pool.bounds is None:
            bounds = compute_page_bounds(pool.store, length[layer], page=reading.page, axes=axes)
            updated[layer] = dataclasses.replace(pool, bounds=bounds)
    return tuple(updated)


def update_page_bounds(
    pool: EntryPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    new: NewTokens,
    read: Float[Array, "B K"],
) -> EntryPool:
    """Return a pool with page bounds (min/max keys) recomputed for the pages that the step's new entries join.

    `length` are the entries before the step; the bounds are written after `read` has been computed.
    """
    bounds = pool.bounds
    assert bounds is not None
    offset = list_appended_page_rows(length, new.positions.shape[1], bounds.page)
    row = jnp.minimum(start[..., None] + offset, pool.row_count - 1)
    keys, _ = pool.store.gather_entries(row.reshape(row.shape[0], -1)).decode_entries()
    keys = order_after_read(keys.reshape(*row.shape, -1), read[..., None, None])
    return dataclasses.replace(
        pool, bounds=bounds.recompute_appended_pages(keys, length, new.count)
    )


def find_newest_page(length: Int[Array, "*n"], page: int) -> Int[Array, "*n"]:
    """Return per segment the offset at which its newest page begins, the page that the next entry joins."""
    return length // page * page


def count_full_pages(
    length: Int[Array, "*n"], budget: Int[Array, "*#n"], page: int
) -> Int[Array, "*n"]:
    """Return per segment how many full pages a step attends to: as many as fit the budget with the newest."""
    newest = length + 1 - find_newest_page(length, page)
    return jnp.clip((budget - newest) // page, 0, length // page)
