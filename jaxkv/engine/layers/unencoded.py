"""`ResidualCacheLayer`: the last appended entries are attended to as they were before they were encoded."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention.steps import NewEntries
from jaxkv.engine.layers.dense import FullAttentionCacheLayer, Read
from jaxkv.engine.layers.step import AttentionResult, StepState
from jaxkv.engine.tokens import TokenProjections


class ResidualCacheLayer(FullAttentionCacheLayer):
    """One layer's cache in a decode step: attends to the pool's residual, and to the codes of older entries."""

    def attend_single_token(
        self, token: TokenProjections, new: NewEntries, step: StepState
    ) -> AttentionResult:
        """Append a single token's entry and attend to all entries, including this one; return output and pool."""
        pool = self.pool.append_entries(new)
        after = dataclasses.replace(self, pool=pool, length=self.length + new.count[:, None])
        read = after.attend_entries_below(token.q, step.new.positions[:, 0] + new.count)
        return AttentionResult(self.shaping.include_sink_logits(*read)[0], pool)

    def attend_older_entries(self, q: Float[Array, "B K G N D"], step: StepState) -> Read:
        """Return several tokens' attention output and log-sum-exp over the entries from before the step."""
        return self.attend_entries_below(q, step.new.positions[:, 0])

    def attend_entries_below(self, q: Float[Array, "B K G N D"], seen: Int[Array, " B"]) -> Read:
        """Return attention output and log-sum-exp over all entries, the last of which has position `seen` - 1."""
        assert self.pool.residual is not None
        exact, count = self.pool.residual.take_entries(seen)
        held = jnp.broadcast_to(count[:, None], self.length.shape)
        return attention.merge_attention_with_lse(
            *self.attend_entries(q, self.pool.store, self.get_attended_range(self.length - held)),
            *self.attend_gathered_entries(q, *exact, held),
        )
