"""Buffers of the last R tokens' vectors, residuals and queries: that of position p at index p % R."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def write_last_tokens(
    buffer: Shaped[Array, "B h n R d"],
    new: Shaped[Array, "B h n N d"],
    positions: Int[Array, "B N"],
    count: Int[Array, " B"],
) -> Shaped[Array, "B h n R d"]:
    """Return a buffer with the last R of `count` valid tokens' vectors written in, that of position p at p % R."""
    rows = buffer.shape[3]
    offset = jnp.arange(positions.shape[1], dtype=jnp.int32)
    # If there are more tokens than places, only the last ones count.
    real = (offset < count[:, None]) & (offset >= count[:, None] - rows)
    slot = jnp.where(real, positions % rows, rows)
    index = jnp.arange(len(count), dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(new, 3, 1).astype(buffer.dtype)
    return buffer.at[index, :, :, slot].set(by_token, mode="drop", unique_indices=True)
