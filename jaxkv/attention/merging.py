"""Attention over two sets of keys, joined by their log-sum-exps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> Float[Array, "*n D"]:
    """Joins attention over two disjoint sets of keys: each part weighs as its share of the softmax's sum.

    Args:
        out: output over the first set, any float dtype.
        lse: its log-sum-exp, float32; -inf for an empty set.
        other: output over the second set; not both are empty.
        other_lse: its log-sum-exp.

    Returns:
        The output over both sets, in out's dtype.
    """
    share = jax.nn.sigmoid(lse - other_lse)[..., None]
    joined = out.astype(jnp.float32) * share + other.astype(jnp.float32) * (1 - share)
    return joined.astype(out.dtype)


def merge_with_lse(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> tuple[Float[Array, "*n D"], Float[Array, "*n"]]:
    """`merge` where both sets may be empty, with the log-sum-exp over both.

    Args:
        out: as for `merge`.
        lse: its log-sum-exp.
        other: as for `merge`.
        other_lse: its log-sum-exp.

    Returns:
        The output, and its log-sum-exp, -inf where both sets are empty.
    """
    both = jnp.logaddexp(lse, other_lse)
    nothing = jnp.isneginf(both)
    first, second = jnp.where(nothing, 0.0, lse), jnp.where(nothing, 0.0, other_lse)
    return merge(out, first, other, second), both
