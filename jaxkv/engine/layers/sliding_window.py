"""`SlidingWindowLayer`: new tokens attend to the last entries only."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention import Shaping
from jaxkv.attention.steps import NewEntries
from jaxkv.attention.xla import Reach, Walk, masked
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.step import Attended, Step
from jaxkv.engine.segments import in_window, window_mask
from jaxkv.engine.tokens import Token


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindowLayer(DenseLayer):
    """Entries of a layer whose tokens attend to the last `window` tokens, including themselves."""

    window: int

    def reach(self, length: Int[Array, "B K"]) -> Reach:
        """Return the `Reach` (first rows, lengths, walk by row blocks) of the sliding window's entries."""
        return self.reaching(*in_window(self.start, length, self.window), Walk.WINDOWS)

    def several(self, token: Token, new: NewEntries, step: Step) -> Attended:
        """Attend from each token to the last entries up to its own; then append the entries."""
        rows, size = self.pool.store.view(), min(self.window, self.pool.rows)
        arguments = (token.q, (token.k, token.v), new.count, rows, self.reach(self.length))
        out = over_window(*arguments, size=size, window=self.window, shaping=self.shaping)
        return Attended(out, self.pool.appended(new))


def over_window(
    q: Float[Array, "B K G n D"],
    new: tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]],
    count: Int[Array, " B"],
    rows: tuple[Float[Array, "B P D"], Float[Array, "B P D"]],
    reach: Reach,
    *,
    size: int,
    window: int,
    shaping: Shaping,
    first: Any = 0,
) -> Float[Array, "B K G n D"]:
    """Return attention of n queries to the last `window` tokens up to their own, in segments and new tokens.

    `count` of the N new tokens are valid; the queries are n of them, from index `first` on. The last `size` entries of
    each segment are attended to, at most as many as the window.
    """
    (k, v), tokens = rows, new[0].shape[2]
    offset = jnp.arange(size, dtype=jnp.int32)
    index = jnp.arange(-size, tokens, dtype=jnp.int32)
    seen = window_mask(first, q.shape[3], size, tokens, window)
    last = jnp.clip((reach.start + reach.length)[..., None] + offset - size, 0, k.shape[1] - 1)

    def of_head(given: tuple[Any, ...], real: Array, k: Array, v: Array) -> Array:
        """Return the output `[G, n, D]` of one kv head of one sequence."""
        q, k_new, v_new, at, held, shape = given
        keys, values = (jnp.concatenate([old[at], new]) for old, new in ((k, k_new), (v, v_new)))
        valid = jnp.where(index < 0, index >= -held, index < jnp.maximum(real, 1))
        return masked(q, keys, values, seen & valid, shape)

    def of_sequence(given: tuple[Array, ...]) -> Array:
        """Return the output `[K, G, n, D]` of one sequence, kv head by kv head."""
        q, k_new, v_new, at, held, real, k, v = given
        heads = (q, k_new, v_new, at, held, shaping)
        return lax.map(lambda each: of_head(each, real, k, v), heads)

    return lax.map(of_sequence, (q, *new, last, reach.length, count, k, v))
