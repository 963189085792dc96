"""`QuestCacheLayer`: a single new token attends to selected pages (Quest); several tokens attend to all entries."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.filters import average_page_shares, bound_page_logits
from jaxkv.attention.steps import WorkTable
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode
from jaxkv.engine.layers.dense import FullAttentionCacheLayer
from jaxkv.engine.layers.step import AttentionResult, StepState
from jaxkv.engine.pages import count_full_pages, find_newest_page, update_page_bounds
from jaxkv.engine.segments import take_number_per_head
from jaxkv.engine.sparse import find_largest_keys
from jaxkv.engine.tokens import TokenProjections
from jaxkv.policies.topk import encode_sort_keys


class SelectedPageEntries(NamedTuple):
    """Entries of the selected pages, per kv head: offsets in the segment, their number, first entry of the newest page.

    Attributes:
        rows: offsets of entries, ascending; of T entries the first `held` are valid.
        held: number of valid entries.
        rest: first entry of the page that the new token's entry joins, always attended to.
    """

    rows: Int[Array, "B K T"]
    held: Int[Array, "B K"]
    rest: Int[Array, "B K"]


@frozen_dataclass
class QuestCacheLayer(FullAttentionCacheLayer):
    """One layer's cache in a decode step: a single token attends to few pages, chosen by bounds of their keys (Quest).

    Attributes:
        pages: entries of the pages that a single token attends to; None before selection, and for several tokens.
    """

    pages: SelectedPageEntries | None = None

    def get_attended_range(self, length: Int[Array, "B K"]) -> SegmentRanges:
        """Return the `SegmentRanges` of entries that need no selection: the newest page, or all for several tokens."""
        if self.pages is None:
            return super().get_attended_range(length)
        first = self.pages.rest
        newest = self.make_attended_range(
            self.start + first, length - first, SegmentReadMode.WINDOWS
        )
        return dataclasses.replace(newest, widest=self.terms.reading.page)

    def append_tokens_and_attend(self, token: TokenProjections, step: StepState) -> AttentionResult:
        """Select pages for a single token, append, attend, and update the bounds of pages; return output and pool.

        Bounds are written after the selection: a write that overlaps the read would cost a copy of all bounds.
        """
        layer = self
        if not step.has_several_tokens:
            assert step.new.candidates is not None
            pages = self.select_pages(token.q[..., 0, :], step.new.candidates.budget)
            layer = dataclasses.replace(self, pages=pages)
        result = super(QuestCacheLayer, layer).append_tokens_and_attend(token, step)
        out = take_number_per_head(result.out, len(step.new.count))
        pool = update_page_bounds(result.pool, self.start, self.length, step.new, out)
        return AttentionResult(result.out, pool)

    def select_pages(
        self, q: Float[Array, "B K G D"], budget: Int[Array, " B"]
    ) -> SelectedPageEntries:
        """Select per kv head a token's best full pages within `budget`; return `SelectedPageEntries`.

        Best are those of the largest q.k bound over the kv head's query heads (Tang et al., Quest, algorithm 1), with
        `channels` those of the largest shares of attention (RocketKV). Ties go to the lowest page.
        """
        bounds = self.pool.bounds
        reading = self.terms.reading
        length = self.length
        assert bounds is not None
        page = reading.page
        batch, heads = length.shape
        count = count_full_pages(length, budget[:, None], page)
        pages = bounds.low.shape[2]
        full = jnp.arange(pages, dtype=jnp.int32) < (length // page)[..., None]
        of = (q, bounds.low, bounds.high)
        scores = (
            average_page_shares(*of, full, reading.channels, self.terms.axes)
            if reading.channels
            else bound_page_logits(*of, self.terms.axes)
        )
        keys = jnp.where(full, encode_sort_keys(scores), jnp.uint32(0)).reshape(-1, pages)
        width = max(1, min(pages, (reading.width - 1) // page))
        few = self.terms.backend.can.few_launches
        at = find_largest_keys(keys, count.reshape(-1), width, by_sorting=few).reshape(
            batch, heads, width
        )
        rows = at[..., None] * page + jnp.arange(page, dtype=jnp.int32)
        rows = jnp.minimum(rows.reshape(batch, heads, -1), self.pool.row_count // heads - 1)
        return SelectedPageEntries(
            rows=rows, held=count * page, rest=find_newest_page(length, page)
        )

    def fill_work_table(self, step: StepState, work: WorkTable) -> WorkTable:
        """Return a single token's work table with the entries of the selected pages."""
        assert self.pages is not None
        return work._replace(rows=self.pages.rows, held=self.pages.held)
