"""`SlidingWindowCacheLayer`: new tokens attend to the last entries only."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import LogitShaping
from jaxkv.attention.steps import NewEntries
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode, attend_masked_keys
from jaxkv.engine.layers.dense import FullAttentionCacheLayer
from jaxkv.engine.layers.step import AttentionResult, StepState
from jaxkv.engine.segments import build_window_mask, restrict_to_window
from jaxkv.engine.tokens import TokenProjections


@frozen_dataclass
class SlidingWindowCacheLayer(FullAttentionCacheLayer):
    """One layer's cache in a decode step: each new token attends to the last `window` tokens, its own included."""

    window: int

    def get_attended_range(self, length: Int[Array, "B K"]) -> SegmentRanges:
        """Return the `SegmentRanges` of the last `window` entries in segments of `length` entries."""
        return self.make_attended_range(
            *restrict_to_window(self.start, length, self.window), SegmentReadMode.WINDOWS
        )

    def attend_several_tokens(
        self, token: TokenProjections, new: NewEntries, step: StepState
    ) -> AttentionResult:
        """Attend from each token to the last `window` ones up to its own, append the entries; return output, pool."""
        rows = self.pool.store.decode_entries()
        size = min(self.window, self.pool.row_count)
        arguments = (
            token.q,
            (token.k, token.v),
            new.count,
            rows,
            self.get_attended_range(self.length),
        )
        out = attend_sliding_window(*arguments, size=size, window=self.window, shaping=self.shaping)
        return AttentionResult(out, self.pool.append_entries(new))


def attend_sliding_window(
    q: Float[Array, "B K G n D"],
    new: tuple[Float[Array, "B K N D"], Float[Array, "B K N D"]],
    count: Int[Array, " B"],
    rows: tuple[Float[Array, "B P D"], Float[Array, "B P D"]],
    reach: SegmentRanges,
    *,
    size: int,
    window: int,
    shaping: LogitShaping,
    first: Any = 0,
) -> Float[Array, "B K G n D"]:
    """Return the attention output of n queries to the last `window` tokens up to their own, in segments and new tokens.

    `count` of the N new tokens are valid; the queries are n of them, from index `first` on. The last `size` entries of
    each segment are attended to, at most as many as the window.
    """
    k, v = rows
    tokens = new[0].shape[2]
    offset = jnp.arange(size, dtype=jnp.int32)
    index = jnp.arange(-size, tokens, dtype=jnp.int32)
    seen = build_window_mask(first, q.shape[3], size, tokens, window)
    last = jnp.clip((reach.start + reach.length)[..., None] + offset - size, 0, k.shape[1] - 1)

    # A gradient computes a head's weights again, so that those of all heads do not wait for it.
    @jax.checkpoint
    def attend_one_head(given: tuple[Any, ...], real: Array, k: Array, v: Array) -> Array:
        """Return the attention output `[G, n, D]` of one kv head of one sequence."""
        q, k_new, v_new, at, held, shape = given
        keys, values = (jnp.concatenate([old[at], new]) for old, new in ((k, k_new), (v, v_new)))
        valid = jnp.where(index < 0, index >= -held, index < jnp.maximum(real, 1))
        return attend_masked_keys(q, keys, values, seen & valid, shape)

    def attend_one_sequence(given: tuple[Array, ...]) -> Array:
        """Return the attention output `[K, G, n, D]` of one sequence, computed kv head by kv head."""
        q, k_new, v_new, at, held, real, k, v = given
        heads = (q, k_new, v_new, at, held, shaping)
        return lax.map(lambda each: attend_one_head(each, real, k, v), heads)

    return lax.map(attend_one_sequence, (q, *new, last, reach.length, count, k, v))
