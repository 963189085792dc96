"""Exact top-k by counting: one program for every count, ties in order of index."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt


def sortable(scores: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Float32 scores as unsigned integers of the same order; 0 is left for rows that are no candidates.

    Args:
        scores: float32; minus zero counts as zero, what is not a number as the least of all.

    Returns:
        uint32 keys: a < b exactly where the scores are.
    """
    ordered = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    bits = lax.bitcast_convert_type(ordered.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def kth_largest(keys: UInt[Array, "*rows S"], count: Int[Array, "*#rows"]) -> UInt[Array, "*rows 1"]:
    """The `count`-th largest key of each row.

    Bisection on the bits: 32 counts instead of a sort, with a count that may differ by row and is no shape.

    Args:
        keys: from `sortable`.
        count: which, from 1.

    Returns:
        The largest number that at least `count` keys reach; for 0 the largest there is.
    """
    count = jnp.broadcast_to(count, keys.shape[:-1])[..., None]

    def narrow(step, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
        enough = (keys >= candidate).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, candidate, threshold)

    return lax.fori_loop(0, 32, narrow, jnp.zeros_like(keys[..., :1]))


def top(keys: UInt[Array, "*rows S"], count: Int[Array, "*#rows"]) -> Bool[Array, "*rows S"]:
    """The `count` largest keys of each row; among equals the lowest index first.

    By a threshold and a count, so one compilation serves every budget.

    Args:
        keys: from `sortable`; 0 marks a row that cannot be chosen.
        count: how many, at most the non-zero keys of the row.

    Returns:
        The mask.
    """
    threshold = kth_largest(keys, count)
    count = jnp.broadcast_to(count, keys.shape[:-1])[..., None]
    above = keys > threshold
    level = keys == threshold
    left = count - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, axis=-1, dtype=jnp.int32) <= left))
