"""Merges attention over two disjoint sets of keys, and with learned sink logits, by log-sum-exps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    out: Float[Array, "*n D"],
    lse: Float[Array, "*n"],
    other: Float[Array, "*n D"],
    other_lse: Float[Array, "*n"],
) -> Float[Array, "*n D"]:
    """Attention output over the union of two disjoint sets of keys, from output and log-sum-exp over each set.

    At most one set is empty, with a log-sum-exp of -inf.
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
    """Attention output and log-sum-exp over the union of two disjoint key sets; log-sum-exp -inf if both are empty."""
    both = jnp.logaddexp(lse, other_lse)
    nothing = jnp.isneginf(both)
    first, second = jnp.where(nothing, 0.0, lse), jnp.where(nothing, 0.0, other_lse)
    return merge(out, first, other, second), both


def with_sinks(
    out: Float[Array, "B K G N D"],
    lse: Float[Array, "B K G N"],
    sink_logits: Float[Array, "K G"] | None,
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention output and log-sum-exp with a learned logit per query head in the softmax, whose value is zero.

    Both are unchanged where there are no such logits. Of several disjoint sets of keys exactly one is given them.
    """
    if sink_logits is None:
        return out, lse
    both = jnp.logaddexp(lse, sink_logits.astype(jnp.float32)[..., None])
    return (out.astype(jnp.float32) * jnp.exp(lse - both)[..., None]).astype(out.dtype), both
