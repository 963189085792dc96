"""Attention of new tokens within a window layer's window, over its pool and one another."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention.shaping import Shaping
from jaxkv.attention.xla import masked
from jaxkv.cache.layout import Layout
from jaxkv.cache.pools import Pool
from jaxkv.engine.segments import Segments, in_window, window_mask
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import Token, pool_attention, readable


def over_window(
    q: Float[Array, "B K G N D"],
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    spec: Spec,
    shaping: Shaping,
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention to the rows of a pool's segments from any first row on: output and log-sum-exp."""
    # Segments begin where their window does, no longer at strides; a walk in windows reads these rows alone.
    return pool_attention(
        q,
        *readable(spec, pool),
        start,
        length,
        dataclasses.replace(spec, layout=Layout.SHARED),
        shaping,
    )


def several_in_window(
    spec: Spec, token: Token, pool: Pool, segments: Segments, count: Int[Array, " B"], window: int
) -> Float[Array, "B K G N D"]:
    """Attention of N new tokens, the first `count` of them real, to the last `window` rows up to their own."""
    q, (k, v), tokens = token.q, pool.store.view(), token.q.shape[3]
    start, length = in_window(segments.start, segments.length, window)
    size = min(window, k.shape[1])
    offset = jnp.arange(size, dtype=jnp.int32)
    index, seen = (
        jnp.arange(-size, tokens, dtype=jnp.int32),
        window_mask(0, tokens, size, tokens, window),
    )
    rows = jnp.clip((start + length)[..., None] + offset - size, 0, k.shape[1] - 1)

    def of_head(given: tuple[Any, ...], real: Array, k: Array, v: Array) -> Float[Array, "G N D"]:
        """Output of one kv head of one sequence."""
        q, k_new, v_new, at, held, shaping = given
        keys, values = (jnp.concatenate([old[at], new]) for old, new in ((k, k_new), (v, v_new)))
        there = jnp.where(index < 0, index >= -held, index < jnp.maximum(real, 1))
        return masked(q, keys, values, seen & there, shaping)

    def of_sequence(given: tuple[Array, ...]) -> Float[Array, "K G N D"]:
        """Output of one sequence, kv head by kv head."""
        q, k_new, v_new, at, held, real, k, v = given
        return lax.map(
            lambda each: of_head(each, real, k, v), (q, k_new, v_new, at, held, token.shaping)
        )

    return lax.map(of_sequence, (q, token.k, token.v, rows, length, count, k, v))
