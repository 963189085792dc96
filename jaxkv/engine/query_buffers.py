"""Buffers of last queries, stored with the cache for policies that score or select entries during decoding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.engine.hadamard import apply_hadamard
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit


@sharded_jit(static=("rows", "transforms", "axes"))
def fill_query_buffer(
    q: Float[Array, "B K G w D"],
    length: Int[Array, " B"],
    *,
    rows: int,
    transforms: bool,
    axes: ShardingMesh | None,
) -> Float[Array, "B K G R D"]:
    """Compiled: return the float32 query buffer `[B, K, G, R, D]` of prompts' last queries, position p at index p % R.

    With `transforms`, queries are transformed like keys.
    """
    q = apply_hadamard(q) if transforms else q
    batch, heads, group, window, dim = q.shape
    position = (length - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
    slot = jnp.where(position >= 0, position % rows, rows)
    query_buffer = jnp.zeros((batch, rows, heads, group, dim), jnp.float32)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(jnp.float32)
    return jnp.moveaxis(
        query_buffer.at[index, slot].set(by_token, mode="drop", unique_indices=True), 1, 3
    )
