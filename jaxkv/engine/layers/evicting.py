"""`ScoredCacheLayer`: entries whose scores include the attention they receive, for eviction after the step."""

import dataclasses
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from jaxkv import attention
from jaxkv.attention.steps import NewEntries
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.layers.dense import FullAttentionCacheLayer, Read
from jaxkv.engine.tokens import TokenProjections


class ScoredCacheLayer(FullAttentionCacheLayer):
    """One layer's cache in a decode step: appends entries, attends to all, and adds the attention to their scores."""

    scored: ClassVar[bool] = True

    def update_scores(
        self, token: TokenProjections, new: NewEntries, older: Read, own: Read
    ) -> tuple[EntryPool, NewEntries]:
        """Return the pool and several new entries, with scores that include the new tokens' attention."""
        pool = self.pool
        decay = self.terms.score_decay
        assert pool.score is not None
        batch, heads, group, tokens, dim = token.q.shape
        count = new.count
        index = jnp.arange(tokens, dtype=jnp.int32)
        real = (index < count[:, None])[:, None, None]
        lse = jnp.where(real, jnp.logaddexp(older[1], own[1]), jnp.inf)
        if decay != 1:
            # exp(x - lse) * d = exp(x - (lse - log(d))): fold the decay d into the log-sum-exp, infinite for d = 0.
            later = jnp.maximum(count[:, None] - 1 - index, 0)
            lse = lse - jnp.log(decay ** later.astype(jnp.float32))[:, None, None]
        reach = self.get_attended_range(self.length)
        cap = self.shaping.softcap
        score = attention.add_attention_to_scores(
            token.q.reshape(batch, heads, group * tokens, dim),
            reach.decode_rotated_entries(pool.store)[0],
            lse.reshape(batch, heads, group * tokens),
            reach,
            pool.score,
            weight=1 / group,
            softcap=cap,
        )
        received = partial(attention.sum_attention_per_key, softcap=cap)
        arrays = (token.q, token.k, lse)
        sums = lax.map(lambda a: received(a[0], a[1], a[2], jnp.int32(0)), arrays)
        return dataclasses.replace(pool, score=score), dataclasses.replace(
            new, score=sums.mean(axis=2)
        )
