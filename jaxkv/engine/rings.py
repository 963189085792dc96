"""Rings of last queries, kept beside the cache for policies that score or choose rows while tokens are drawn."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.engine.hadamard import transformed
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes


@program(static=("rows", "transforms", "axes"))
def ring_of(
    q: Float[Array, "B K G w D"],
    length: Int[Array, " B"],
    *,
    rows: int,
    transforms: bool,
    axes: Axes | None,
) -> Float[Array, "B K G R D"]:
    """Compiled: float32 ring `[B, K, G, R, D]` of the prompt's last queries, position p at slot p % `rows`.

    With `transforms` they are transformed as keys are.
    """
    q = transformed(q) if transforms else q
    batch, heads, group, window, dim = q.shape
    position = (length - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
    slot = jnp.where(position >= 0, position % rows, rows)
    ring = jnp.zeros((batch, rows, heads, group, dim), jnp.float32)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(jnp.float32)
    return jnp.moveaxis(ring.at[index, slot].set(by_token, mode="drop", unique_indices=True), 1, 3)
