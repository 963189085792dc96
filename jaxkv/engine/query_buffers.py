"""Buffers of last queries, stored with the cache for policies that score or select entries during decoding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.engine.hadamard import transformed
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.sharded_program import sharded_jit


@sharded_jit(static=("rows", "transforms", "axes"))
def fill_query_buffer(
    q: Float[Array, "B K G w D"],
    length: Int[Array, " B"],
    *,
    rows: int,
    transforms: bool,
    axes: Axes | None,
) -> Float[Array, "B K G R D"]:
    """Compiled: return the float32 query buffer of a prompt's last queries, position p at slot p % `rows`.

    With `transforms`, queries are transformed like keys.
    """
    q = transformed(q) if transforms else q
    batch, heads, group, window, dim = q.shape
    position = (length - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
    slot = jnp.where(position >= 0, position % rows, rows)
    query_buffer = jnp.zeros((batch, rows, heads, group, dim), jnp.float32)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(jnp.float32)
    return jnp.moveaxis(
        query_buffer.at[index, slot].set(by_token, mode="drop", unique_indices=True), 1, 3
    )
