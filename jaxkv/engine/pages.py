"""Pages of a layer's entries (Quest): updates of their bounds, and how many pages a step attends to."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache.page_bounds import bounds_of, joined_rows
from jaxkv.cache.pools import Pool
from jaxkv.engine.segments import after_read
from jaxkv.engine.tokens import NewTokens
from jaxkv.policies.reads import WHOLE, Reading
from jaxkv.sharding.mesh import Axes


def with_bounds(
    pools: tuple[Pool, ...], length: Int[Array, "L B K"], reading: Reading, axes: Axes | None
) -> tuple[Pool, ...]:
    """Return the pools, with page bounds (min/max keys, Quest) added where layers select pages and have none."""
    if not reading.page:
        return pools
    updated = list(pools)
    for layer, (pool, source) in enumerate(zip(pools, reading.sources, strict=True)):
        if source != WHOLE and pool.bounds is None:
            bounds = bounds_of(pool.store, length[layer], page=reading.page, axes=axes)
            updated[layer] = dataclasses.replace(pool, bounds=bounds)
    return tuple(updated)


def with_new_rows(
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    new: NewTokens,
    read: Float[Array, "B K"],
) -> Pool:
    """Recompute a pool's page bounds (min/max keys) for the pages that the step's new entries join.

    `length` are the entries before the step; the bounds are written after `read` has been computed.
    """
    bounds = pool.bounds
    assert bounds is not None
    offset = joined_rows(length, new.positions.shape[1], bounds.page)
    row = jnp.minimum(start[..., None] + offset, pool.rows - 1)
    keys, _ = pool.store.take(row.reshape(row.shape[0], -1)).view()
    keys = after_read(keys.reshape(*row.shape, -1), read[..., None, None])
    return dataclasses.replace(pool, bounds=bounds.renewed(keys, length, new.count))


def rest_from(length: Int[Array, "*n"], page: int) -> Int[Array, "*n"]:
    """Return the offset of the first entry of the page that the next entry, number `length`, joins."""
    return length // page * page


def full_pages(length: Int[Array, "*n"], budget: Int[Array, "*#n"], page: int) -> Int[Array, "*n"]:
    """Return the number of full pages to attend to: as many as fit the entry budget with the newest page."""
    newest = length + 1 - rest_from(length, page)
    return jnp.clip((budget - newest) // page, 0, length // page)
