"""Largest attention that a chunk's entries receive from queries of a second pass (KVzip), in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.xla import MASKED, apply_softcap, compute_logit_divisor, multiply_transposed


def max_attention_per_key(
    q: Float[Array, "B K G N D"],
    own_lse: Float[Array, "B K G N"],
    keys: Float[Array, "B K m D"],
    count: Int[Array, " B"],
    inside: Bool[Array, "B m"],
    weights: tuple[Float[Array, "B N"], Float[Array, "B K G m"]] | None = None,
    *,
    softcap: float | None,
) -> Float[Array, "B K m"]:
    """Return the largest attention times `weights`, `f32[B, K, m]`, to each of m entries over N queries and G heads.

    The softmax covers these entries and the queries' own tokens, whose log-sum-exp is `own_lse`. Memory holds the
    logits of all queries of one head at a time.

    Args:
        q: rotated queries, padded on the right.
        own_lse: log-sum-exp of the queries' logits among their own tokens.
        keys: rotated keys of the entries.
        count: number of real queries of each sequence.
        inside: mask of the entries.
        weights: factors of attention by query, and by query head and entry; None for none.
        softcap: cap of the logits, see `xla.capped`.

    Returns:
        The largest attention; 0 outside the mask, and for a sequence without queries.
    """
    batch, heads, group, tokens, dim = q.shape
    rows = keys.shape[2]
    scale = 1.0 / compute_logit_divisor(dim)
    by_query, by_row = weights or (
        jnp.ones((batch, tokens), jnp.float32),
        jnp.ones((batch, heads, group, rows)),
    )

    def max_head_attention_per_key(inputs: tuple[Array, ...]) -> Array:
        """Return each entry's largest weighted attention `f32[m]` from a query of the kv head's group; 0 if masked."""
        queries, lse, key, row_weight, real, present, query_weight = inputs
        logits = (
            multiply_transposed(queries.reshape(group * tokens, dim), key).reshape(
                group, tokens, rows
            )
            * scale
        )
        logits = jnp.where(present, apply_softcap(logits, softcap), MASKED)
        whole = jnp.logaddexp(jax.nn.logsumexp(logits, axis=-1), lse) - jnp.log(query_weight)
        # exp is monotonic: one exponential per entry instead of one per logit.
        off = jnp.where(jnp.arange(tokens, dtype=jnp.int32) < real, whole, jnp.inf)
        most = (logits - off[..., None]).max(axis=1) + jnp.log(row_weight)
        return jnp.where(present, jnp.exp(most.max(axis=0)), 0.0)

    spread = tuple(jnp.repeat(each, heads, axis=0) for each in (count, inside, by_query))
    flat = tuple(
        each.reshape(batch * heads, *each.shape[2:]) for each in (q, own_lse, keys, by_row)
    )
    return lax.map(max_head_attention_per_key, (*flat, *spread)).reshape(batch, heads, rows)
