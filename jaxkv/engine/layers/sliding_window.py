"""`SlidingWindowLayer`: new tokens attend to the last rows alone."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention.steps import NewRows
from jaxkv.attention.xla import Reach, Walk, masked
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.step import Attended, Step
from jaxkv.engine.segments import in_window, window_mask
from jaxkv.engine.tokens import Token


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowLayer(DenseLayer):
    """Rows of a layer whose tokens attend to the last `window` tokens, their own included."""

    window: int

    def reach(self, length: Int[Array, "B K"]) -> Reach:
        """The window's rows. They begin anywhere, no longer at strides: a walk in windows reads these alone."""
        return self.reaching(*in_window(self.start, length, self.window), Walk.WINDOWS)

    def several(self, token: Token, new: NewRows, step: Step) -> Attended:
        """Several tokens: each attends to the last rows up to its own; then their rows."""
        out = self._each(token, new.count)
        return Attended(out, self.with_pool(self.pool.appended(new)))

    def _each(self, token: Token, count: Int[Array, " B"]) -> Float[Array, "B K G N D"]:
        """Attention of N new tokens, the first `count` of them real, to the last rows up to their own."""
        q, (k, v), tokens = token.q, self.pool.store.view(), token.q.shape[3]
        start, length = in_window(self.start, self.length, self.window)
        size = min(self.window, k.shape[1])
        offset = jnp.arange(size, dtype=jnp.int32)
        index = jnp.arange(-size, tokens, dtype=jnp.int32)
        seen = window_mask(0, tokens, size, tokens, self.window)
        rows = jnp.clip((start + length)[..., None] + offset - size, 0, k.shape[1] - 1)

        def of_head(given: tuple[Any, ...], real: Array, k: Array, v: Array) -> Array:
            """Output `[G, N, D]` of one kv head of one sequence."""
            q, k_new, v_new, at, held, shaping = given
            keys, values = (
                jnp.concatenate([old[at], new]) for old, new in ((k, k_new), (v, v_new))
            )
            there = jnp.where(index < 0, index >= -held, index < jnp.maximum(real, 1))
            return masked(q, keys, values, seen & there, shaping)

        def of_sequence(given: tuple[Array, ...]) -> Array:
            """Output `[K, G, N, D]` of one sequence, kv head by kv head."""
            q, k_new, v_new, at, held, real, k, v = given
            heads = (q, k_new, v_new, at, held, self.shaping)
            return lax.map(lambda each: of_head(each, real, k, v), heads)

        return lax.map(of_sequence, (q, token.k, token.v, rows, length, count, k, v))
