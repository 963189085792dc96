"""`FullAttentionCacheLayer`: new tokens attend to every entry of each segment; base of all other layer views."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.shaping import PLAIN, LogitShaping
from jaxkv.attention.steps import GatheredEntries, NewEntries, WorkTable
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.layers.step import AttentionResult, StepState
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.tokens import TokenProjections, attend_in_blocks, compute_first_scores

# Attention output and its log-sum-exp.
Read = tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]


@frozen_dataclass
class FullAttentionCacheLayer:
    """One layer's cache in a decode step: an object that appends new tokens' entries and attends to all entries.

    Attributes:
        terms: static config.
        pool: entries, with free places behind every segment for new ones.
        start: first pool row of each segment.
        length: number of entries per segment before the step.
        shaping: sink logits and soft cap of the layer's logits.
        index: index of the layer in the step's work table.
        rotated: function that rotates keys before attention; None if the pool holds rotated keys.
    """

    scored: ClassVar[bool] = False

    terms: DecodeAttentionConfig
    pool: EntryPool
    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    shaping: LogitShaping = PLAIN
    index: int = 0
    rotated: Callable[[Array], Array] | None = None

    def get_attended_range(self, length: Int[Array, "B K"]) -> SegmentRanges:
        """Return the `SegmentRanges` of entries attended to without selection: the first `length` of each segment."""
        return self.make_attended_range(self.start, length, self.terms.layout.segment_read_mode)

    def make_attended_range(
        self, start: Int[Array, "B K"], length: Int[Array, "B K"], walk: SegmentReadMode
    ) -> SegmentRanges:
        """Return the `SegmentRanges` of segments of `length` entries from pool row `start`, read in the mode `walk`."""
        return SegmentRanges(
            start=start,
            length=length,
            walk=walk,
            widest=self.terms.widest,
            shared=self.terms.layout.uses_shared_pool,
            rotated=self.rotated,
        )

    def append_tokens_and_attend(self, token: TokenProjections, step: StepState) -> AttentionResult:
        """Append new tokens' entries to a layer's pool and attend to its entries; return output and pool.

        Args:
            token: queries, keys and values, in the pool's dtype.
            step: state shared by the step's layers.

        Returns:
            Attention output, and the pool with the new entries.
        """
        new = NewEntries(
            k=token.stored,
            v=token.v,
            positions=step.new.positions,
            count=step.new.count,
            end=self.start + self.length,
            score=compute_first_scores(token, self.terms.ongoing),
        )
        if step.has_several_tokens:
            return self.attend_several_tokens(token, new, step)
        return self.attend_single_token(token, new, step)

    def attend_single_token(
        self, token: TokenProjections, new: NewEntries, step: StepState
    ) -> AttentionResult:
        """Append a single token's entry and attend to all entries, including this one; return output and pool."""
        table = step.work or WorkTable(None, self.start[None])
        out, pool = self.terms.backend.compute_decode_attention(
            token.q[..., 0, :],
            token.split,
            new,
            self.pool,
            self.get_attended_range(self.length + new.count[:, None]),
            self.fill_work_table(step, table._replace(layer=self.index if step.work else 0)),
            scored=self.scored,
            shaping=self.shaping,
        )
        return AttentionResult(out[..., None, :], pool)

    def attend_several_tokens(
        self, token: TokenProjections, new: NewEntries, step: StepState
    ) -> AttentionResult:
        """Attend from new tokens to older entries and causally to new ones; append; return output, pool."""
        older = self.attend_older_entries(token.q, step)
        causal = partial(attention.compute_causal_attention, softcap=self.shaping.softcap)
        own = lax.map(lambda a: causal(a[0], a[1], a[2], jnp.int32(0)), (token.q, token.k, token.v))
        own = self.shaping.include_sink_logits(*own)
        pool, new = self.update_scores(token, new, older, own)
        return AttentionResult(
            attention.merge_attention_outputs(*older, *own), pool.append_entries(new)
        )

    def attend_older_entries(self, q: Float[Array, "B K G N D"], step: StepState) -> Read:
        """Return several tokens' attention output and log-sum-exp over the entries from before the step."""
        return self.attend_entries(q, self.pool.store, self.get_attended_range(self.length))

    def attend_entries(
        self, q: Float[Array, "B K G N D"], store: Any, reach: SegmentRanges
    ) -> Read:
        """Return attention output and log-sum-exp over the entries in `reach` of a store, without sink logits."""
        attend = partial(
            self.terms.backend.attend_to_segments, shaping=self.shaping.without_sink_logits
        )
        return attend_in_blocks(lambda part: attend(part, store, reach), q)

    def update_scores(
        self, token: TokenProjections, new: NewEntries, older: Read, own: Read
    ) -> tuple[EntryPool, NewEntries]:
        """Return pool and new entries with scores updated by a step of several tokens; here both unchanged."""
        return self.pool, new

    def fill_work_table(self, step: StepState, work: WorkTable) -> WorkTable:
        """Return a single token's work table with the entries that the layer selects; here the table unchanged."""
        return work

    def attend_gathered_entries(
        self,
        q: Float[Array, "B K G N D"],
        k: Float[Array, "B n D"],
        v: Float[Array, "B n D"],
        count: Int[Array, "B K"],
    ) -> Read:
        """Return attention output and log-sum-exp over the first `count` of each head's gathered entries."""
        reach = SegmentRanges.make_strided_ranges(count, k.shape[1] // count.shape[1])
        return self.attend_entries(q, GatheredEntries(k, v), reach)
