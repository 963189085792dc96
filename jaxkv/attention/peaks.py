"""Largest attention that rows of a chunk receive from queries that read the chunk again (KVzip), in plain XLA."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.xla import MASKED, logit_divisor, rows_dot

# Queries whose logits are in memory at a time.
_BLOCK = 256


def chunk_peaks(
    q: Float[Array, "B K G N D"],
    own: Float[Array, "B K N D"],
    sinks: Float[Array, "B K n D"],
    rows: Float[Array, "B K C D"],
    count: Int[Array, " B"],
    inside: Bool[Array, "B m"],
    weights: tuple[Float[Array, "B N"], Float[Array, "B K G C"]] | None = None,
) -> Float[Array, "B K C"]:
    """Largest attention `f32[B, K, C]` that each row of a chunk receives from N queries and a kv head's query heads.

    The softmax runs over the sinks, the chunk's rows and the queries' own keys, causally among these alone.

    Args:
        q: rotated queries of the tokens that read the chunk again, padded on the right.
        own: rotated keys of the same tokens.
        sinks: rotated keys of the prompt's first rows.
        rows: rotated keys of the chunk.
        count: number of real queries of each sequence.
        inside: mask of the sinks, and behind them of the chunk's rows, that exist; m = n + C.
        weights: factors of attention by query, and by query head and row; None for none.

    Returns:
        0 for rows that do not exist, and where a sequence has no query.
    """
    batch, heads, group, tokens, dim = q.shape
    size = min(tokens, _BLOCK)
    few, chunk = sinks.shape[2], rows.shape[2]
    scale = 1.0 / logit_divisor(dim)
    index = jnp.arange(tokens, dtype=jnp.int32)

    def head(inputs: tuple[Array, ...]) -> Array:
        """Largest attention `f32[C]` on the rows of one kv head of one sequence."""
        queries, keys, count, there, by_query, by_row = inputs

        def step(at: Array, peaks: Array) -> Array:
            """Loop body: `peaks` with the attention of one more block of queries."""
            first = at * size
            part = lax.dynamic_slice_in_dim(queries, first, size, axis=1)
            token = first + jnp.arange(size, dtype=jnp.int32)
            causal = jnp.broadcast_to(index <= token[:, None], (size, tokens))
            seen = jnp.concatenate([jnp.broadcast_to(there, (size, few + chunk)), causal], axis=1)
            logits = rows_dot(part.reshape(group * size, dim), keys).reshape(group, size, -1) * scale
            logits = jnp.where(seen, logits, MASKED)
            most = logits.max(axis=-1, keepdims=True)
            weight = jnp.exp(logits - most)
            p = weight[..., few : few + chunk] / weight.sum(axis=-1, keepdims=True)
            p = p * by_row[:, None] * lax.dynamic_slice_in_dim(by_query, first, size)[:, None]
            real = (token < count)[:, None] & there[few:]
            return jnp.maximum(peaks, jnp.where(real, p, 0.0).max(axis=(0, 1)))

        blocks = (count + size - 1) // size
        return lax.fori_loop(0, blocks, step, jnp.zeros((chunk,), jnp.float32))

    by_query, by_row = weights or (jnp.ones((batch, tokens), jnp.float32), jnp.ones((batch, heads, group, chunk)))
    spread = tuple(jnp.repeat(each, heads, axis=0) for each in (count, inside, by_query))
    flat = tuple(each.reshape(batch * heads, *each.shape[2:]) for each in (q, jnp.concatenate([sinks, rows, own], 2)))
    peaks = lax.map(head, (*flat, *spread, by_row.reshape(batch * heads, group, chunk)))
    return peaks.reshape(batch, heads, chunk)
