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


def compare_with_kth_largest(
    keys: UInt[Array, "*rows S"], count: Int[Array, "*#rows"]
) -> tuple[Bool[Array, "*rows S"], Bool[Array, "*rows S"]]:
    """Return two masks of sort keys: not below the `count`-th largest along the last axis, and above it; none for 0.

    Bisection on the bits takes 32 counts instead of a sort. The count may differ by array row, and is not a shape.
    """

    def narrow(step, carry):
        threshold, reached, above = carry
        candidate = threshold | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
        at_least = keys >= candidate
        enough = (count_true(at_least) >= count)[..., None]
        return (
            jnp.where(enough, candidate, threshold),
            jnp.where(enough, at_least, reached),
            jnp.where(enough, above, at_least),
        )

    # Both masks come from the loop: behind it, a larger program may compute keys anew, and round them otherwise.
    every = keys >= jnp.uint32(0)
    return lax.fori_loop(0, 32, narrow, (jnp.zeros_like(keys[..., :1]), every, ~every))[1:]


def mask_top_k(keys: UInt[Array, "*rows S"], count: Int[Array, "*#rows"]) -> Bool[Array, "*rows S"]:
    """Return the boolean mask of the `count` largest sort keys along the last axis; ties go to the lowest index.

    A key of 0 marks an entry that cannot be chosen: `count` is at most the number of other keys. A threshold and a
    count let one compilation serve every budget.
    """
    reached, above = compare_with_kth_largest(keys, count)
    level = reached & ~above
    left = (count - count_true(above))[..., None]
    return above | (level & (jnp.cumsum(level, axis=-1, dtype=jnp.int32) <= left))
