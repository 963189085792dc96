"""`PagedLayer`: one new token reads the pages that it chooses (Quest); several read all entries."""

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
    """Entries that kv heads read: offsets of chosen pages' entries, their number, first row always read.

    Attributes:
        rows: ascending; of T entries the first `held` are valid.
        held: number of valid entries.
        rest: first row of the page that the new token's row joins.
    """

    rows: Int[Array, "B K T"]
    held: Int[Array, "B K"]
    rest: Int[Array, "B K"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedLayer(DenseLayer):
    """Entries of a layer in pages, with bounds of each page's keys.

    Attributes:
        pages: entries of the pages that one token reads; None before the choice, and for several tokens.
    """

    pages: PageRows | None = None

    def reach(self, length: Int[Array, "B K"]) -> Reach:
        """The entries that are read without a choice: the newest page's, which begins anywhere; all for several tokens."""
        if self.pages is None:
            return super().reach(length)
        first = self.pages.rest
        newest = self.reaching(self.start + first, length - first, Walk.WINDOWS)
        return dataclasses.replace(newest, widest=self.terms.reading.page)

    def attended(self, token: Token, step: Step) -> Attended:
        """Chooses pages, appends, attends, and brings bounds of pages up to date.

        Only after the choice: a write beside that read would cost a copy of all bounds.
        """
        layer = self
        if not step.several:
            assert step.new.candidates is not None
            pages = self.chosen_pages(token.q[..., 0, :], step.new.candidates.budget)
            layer = dataclasses.replace(self, pages=pages)
        made = super(PagedLayer, layer).attended(token, step)
        out = heads_of(made.out, len(step.new.count))
        pool = with_new_rows(made.pool, self.start, self.length, step.new, out)
        return Attended(made.out, pool)

    def chosen_pages(self, q: Float[Array, "B K G D"], budget: Int[Array, " B"]) -> PageRows:
        """Chooses per kv head the full pages of largest q.k bound for one new token, within a budget (Quest).

        Tang et al., Quest, algorithm 1; a page's bound is the largest of its kv head's query heads, ties go to the
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
        """One token's work: it reads entries of the chosen pages, too."""
        assert self.pages is not None
        return work._replace(rows=self.pages.rows, held=self.pages.held)
