"""Pages of a layer's entries (Quest): when their bounds are computed, which kv heads choose, and attention to these."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache.page_bounds import bounds_of, joined_rows
from jaxkv.cache.pools import Pool
from jaxkv.engine.segments import behind
from jaxkv.engine.tokens import NewTokens
from jaxkv.policies.reads import WHOLE, Reading
from jaxkv.sharding.mesh import Axes


def with_bounds(
    pools: tuple[Pool, ...], length: Int[Array, "L B K"], reading: Reading, axes: Axes | None
) -> tuple[Pool, ...]:
    """Tuple of pools, with page bounds (min/max keys, Quest) computed in layers that choose pages and lack them."""
    if not reading.page:
        return pools
    made = list(pools)
    for layer, (pool, source) in enumerate(zip(pools, reading.sources, strict=True)):
        if source != WHOLE and pool.bounds is None:
            bounds = bounds_of(pool.store, length[layer], page=reading.page, axes=axes)
            made[layer] = dataclasses.replace(pool, bounds=bounds)
    return tuple(made)


def with_new_rows(
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    new: NewTokens,
    read: Float[Array, "B K"],
) -> Pool:
    """Copy of a pool, its page bounds (min/max keys) recomputed for the pages that the step's appended entries join.

    `length` are the entries before the new ones, `read` numbers behind whose computation the bounds are written.
    """
    bounds = pool.bounds
    assert bounds is not None
    offset = joined_rows(length, new.positions.shape[1], bounds.page)
    row = jnp.minimum(start[..., None] + offset, pool.rows - 1)
    keys, _ = pool.store.take(row.reshape(row.shape[0], -1)).view()
    keys = behind(keys.reshape(*row.shape, -1), read[..., None, None])
    return dataclasses.replace(pool, bounds=bounds.renewed(keys, length, new.count))


def rest_from(length: Int[Array, "*n"], page: int) -> Int[Array, "*n"]:
    """Index in its segment (int array) of the first row of the page that the next row, number `length`, joins."""
    return length // page * page


def full_pages(length: Int[Array, "*n"], budget: Int[Array, "*#n"], page: int) -> Int[Array, "*n"]:
    """Number of full pages to read (int array): as many as fit an entry budget beside the newest page, at most all."""
    newest = length + 1 - rest_from(length, page)
    return jnp.clip((budget - newest) // page, 0, length // page)
