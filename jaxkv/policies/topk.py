"""Exact top-k masks by counting: one program for every count; ties go to the lowest index."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt


def encode_sort_keys(scores: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Return uint32 sort keys, all above 0, in the order of float32 scores; -0.0 counts as 0.0, NaN as -inf."""
    ordered = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), -jnp.inf, scores))
    bits = lax.bitcast_convert_type(ordered.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def compute_candidate_sort_keys(
    scores: Float[Array, "B K S"],
    candidates: Bool[Array, "B #K S"],  # noqa: F821
) -> UInt[Array, "B K S"]:
    """Return uint32 sort keys `[B, K, S]` of scores; 0, the lowest key, for entries that are not candidates."""
    return mask_sort_keys(encode_sort_keys(scores), candidates)


def mask_sort_keys(keys: UInt[Array, "*rows"], mask: Bool[Array, "*#rows"]) -> UInt[Array, "*rows"]:
    """Return sort keys where the mask is True, and 0, the key that is never chosen, elsewhere."""
    return jnp.where(mask, keys, jnp.uint32(0))


def count_true(mask: Bool[Array, "*rows S"]) -> Int[Array, "*rows"]:
    """Return the int32 number of True elements along the last axis."""
    return mask.sum(axis=-1, dtype=jnp.int32)


def kth_largest(
    keys: UInt[Array, "*rows S"], count: Int[Array, "*#rows"]
) -> UInt[Array, "*rows 1"]:
    """Return the `count`-th largest sort key along the last axis, of size 1 in the result; the largest uint32 for 0.

    Bisection on the bits takes 32 counts instead of a sort. The count may differ by array row, and is not a shape.
    """
    count = jnp.broadcast_to(count, keys.shape[:-1])[..., None]

    def narrow(step, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
        enough = (keys >= candidate).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, candidate, threshold)

    return lax.fori_loop(0, 32, narrow, jnp.zeros_like(keys[..., :1]))


def mask_top_k(keys: UInt[Array, "*rows S"], count: Int[Array, "*#rows"]) -> Bool[Array, "*rows S"]:
    """Return the boolean mask of the `count` largest sort keys along the last axis; ties go to the lowest index.

    A key of 0 marks an entry that cannot be chosen: `count` is at most the number of other keys. A threshold and a
    count let one compilation serve every budget.
    """
    threshold = kth_largest(keys, count)
    count = jnp.broadcast_to(count, keys.shape[:-1])[..., None]
    above = keys > threshold
    level = keys == threshold
    left = count - above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, axis=-1, dtype=jnp.int32) <= left))
