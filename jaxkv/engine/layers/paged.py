"""`PagedLayer`: a single new token attends to selected pages (Quest); several tokens attend to all entries."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention.filters import by_page
from jaxkv.attention.steps import WorkTable
from jaxkv.attention.xla import Reach, Walk
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.step import Attended, Step
from jaxkv.engine.pages import full_pages, rest_from, with_new_rows
from jaxkv.engine.segments import heads_of
from jaxkv.engine.sparse import largest
from jaxkv.engine.tokens import Token
from jaxkv.policies.topk import sortable


class PageRows(NamedTuple):
    """Offsets of the entries of selected pages in their segments, by kv head.

    Attributes:
        rows: offsets of entries, ascending; of T entries the first `held` are valid.
        held: number of valid entries.
        rest: first entry of the page that the new token's entry joins, always attended to.
    """

    rows: Int[Array, "B K T"]
    held: Int[Array, "B K"]
    rest: Int[Array, "B K"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedLayer(DenseLayer):
    """Entries of a layer in pages, with bounds of each page's keys.

    Attributes:
        pages: entries of the pages that a single token attends to; None before selection, and for several tokens.
    """

    pages: PageRows | None = None

    def reach(self, length: Int[Array, "B K"]) -> Reach:
        """Return the entries attended to without a selection: the newest page's, or all for several tokens."""
        if self.pages is None:
            return super().reach(length)
        first = self.pages.rest
        newest = self.reaching(self.start + first, length - first, Walk.WINDOWS)
        return dataclasses.replace(newest, widest=self.terms.reading.page)

    def attended(self, token: Token, step: Step) -> Attended:
        """Select pages, append, attend, and update the bounds of pages.

        Bounds are written after the selection: a write that overlaps the read would cost a copy of all bounds.
        """
        layer = self
        if not step.several:
            assert step.new.candidates is not None
            pages = self.chosen_pages(token.q[..., 0, :], step.new.candidates.budget)
            layer = dataclasses.replace(self, pages=pages)
        result = super(PagedLayer, layer).attended(token, step)
        out = heads_of(result.out, len(step.new.count))
        pool = with_new_rows(result.pool, self.start, self.length, step.new, out)
        return Attended(result.out, pool)

    def chosen_pages(self, q: Float[Array, "B K G D"], budget: Int[Array, " B"]) -> PageRows:
        """Select per kv head the full pages of largest q.k bound for one new token, within a budget.

        Tang et al., Quest, algorithm 1. A page's bound is the maximum over its kv head's query heads; ties go to the
        lowest page.
        """
        bounds, reading, length = self.pool.bounds, self.terms.reading, self.length
        assert bounds is not None
        page, (batch, heads) = reading.page, length.shape
        count = full_pages(length, budget[:, None], page)
        scores = by_page(q, bounds.low, bounds.high, self.terms.axes)
        pages = scores.shape[2]
        full = jnp.arange(pages, dtype=jnp.int32) < (length // page)[..., None]
        keys = jnp.where(full, sortable(scores), jnp.uint32(0)).reshape(-1, pages)
        width = max(1, min(pages, (reading.width - 1) // page))
        few = self.terms.backend.can.few_launches
        at = largest(keys, count.reshape(-1), width, by_sorting=few).reshape(batch, heads, width)
        rows = at[..., None] * page + jnp.arange(page, dtype=jnp.int32)
        rows = jnp.minimum(rows.reshape(batch, heads, -1), self.pool.rows // heads - 1)
        return PageRows(rows=rows, held=count * page, rest=rest_from(length, page))

    def work(self, step: Step, work: WorkTable) -> WorkTable:
        """Return the work table of a single token, which also attends to the entries of the selected pages."""
        assert self.pages is not None
        return work._replace(rows=self.pages.rows, held=self.pages.held)
