"""Quest: every row is kept; each kv head reads the pages of rows whose keys promise it the largest logits."""

import dataclasses
import functools
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.cache.layout import Layout
from jaxkv.policies.checks import store_class
from jaxkv.policies.paging import PagedReads
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import as_policy, register
from jaxkv.policies.wrapper import check_shared


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Method):
    """Keeps every row; at each drawn token every kv head reads only the pages of rows with the largest bound of q.k.

    Rows of a kv head lie in pages of `page` consecutive rows, each with the element-wise minimum and maximum of its
    keys as they are cached, after RoPE. The bound of a page for a query head is the sum over channels of
    max(q * minimum, q * maximum); the query heads of a kv head share its pages, by the largest of their bounds. The
    page of the newest row is always read. Prompts, and questions on top of a cache, attend to all rows.

    Attributes:
        budget: int: rows that a kv head reads of a layer's cache at each drawn token, those after the prompt included.
            float in (0, 1]: that share of each sequence's own prompt. By default 1024. Whole pages are read, as many
            as the budget has room for: of 3 pages at least, so that a smaller number is refused, and a smaller share
            of a short prompt becomes 3 pages.
        page: rows of a page.
        dense_layers: number of layers from the bottom that read every row; layers with a window, which read theirs,
            do not count.
        base: a policy (or its name or class) that compresses the prompt first, equally in all heads of a layer, and
            then appends; pages are pages of the rows that it keeps.

    References:
        Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, ICML 2024 (2406.10774),
        algorithm 1; least pages and dense layers of its code, in which every query head has pages of its own.
    """

    page: int = 16
    dense_layers: int = 2
    base: Method | type[Method] | str | None = None

    paper: ClassVar[str] = "Quest, arXiv:2406.10774"

    def _check(self) -> None:
        self._adopt(self._reads, "page", "dense_layers")
        base = self.inner
        own = ("budget", "store") if base is None else ("budget",)
        check_shared(self, base, "Quest drops nothing: give it to the base, if any", but=own)
        if base is None:
            return
        parts = base.composed
        require(
            parts.read is None,
            "base",
            base,
            "give a policy that drops rows, and then reads all it keeps",
        )
        require(parts.scorer is not None, "base", base, "it compresses nothing: leave it out")
        require(
            parts.ongoing is None,
            "base",
            base,
            "it goes on compressing: give one that then appends",
        )
        require(
            not parts.rolling,
            "base",
            base,
            "positions within the cache change: leave rolling positions out",
        )
        uneven = (
            "layers' rows depend on the text"
            if parts.heads.uniform
            else "heads keep unequal numbers of rows"
        )
        remedy = f"its {uneven}, which have no pages: give one of equal heads and planned layers, SnapKV say"
        require(parts.layout is Layout.EQUAL, "base", base, remedy)

    @property
    def _reads(self) -> PagedReads:
        """Makes `PagedReads`, the config of reading pages of rows while decoding, of this policy's fields."""
        return PagedReads(page=self.page, dense_layers=self.dense_layers, budget=self.budget)

    @functools.cached_property
    def inner(self) -> Method | None:
        """Base policy as an instance, cached; made of its name or class if so given, None without a base."""
        return None if self.base is None else as_policy(self.base, field="base")

    def parts(self) -> Parts:
        """Returns the base's `Parts` (or keep-all `Parts`) with `read`: each kv head reads pages chosen per token."""
        base = Parts(store=store_class(self.store)) if self.inner is None else self.inner.composed
        return dataclasses.replace(base, read=self._reads)

    def for_model(self, layers: int, found: tuple[int, ...] | None) -> "Quest":
        """Returns this policy with its base's model-dependent fields filled in, such as a gate's; itself without."""
        its = None if self.inner is None else self.inner.for_model(layers, found)
        return self if its is self.inner else dataclasses.replace(self, base=its)
