"""Merging of attention over two disjoint sets of keys by log-sum-exps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_attention_outputs(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> Float[Array, "*n D"]:
    """Return attention output over the union of two disjoint key sets, from output and log-sum-exp of each.

    At most one set is empty, with a log-sum-exp of -inf.
    """
    share = jax.nn.sigmoid(lse - other_lse)[..., None]
    joined = out.astype(jnp.float32) * share + other.astype(jnp.float32) * (1 - share)
    return joined.astype(out.dtype)


def merge_attention_with_lse(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> tuple[Float[Array, "*n D"], Float[Array, "*n"]]:
    """Return attention output and log-sum-exp over the union of two disjoint key sets; -inf if both are empty."""
    both = jnp.logaddexp(lse, other_lse)
    nothing = jnp.isneginf(both)
    first = jnp.where(nothing, 0.0, lse)
    second = jnp.where(nothing, 0.0, other_lse)
    return merge_attention_outputs(out, first, other, second), both
