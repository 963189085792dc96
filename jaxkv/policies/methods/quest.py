"""Quest: every entry is kept; each kv head reads the pages of entries whose keys promise it the largest logits."""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from jaxkv._checks import field, whole
from jaxkv._errors import require
from jaxkv.cache.layout import Layout
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import Budget, Kept, Share, Tokens
from jaxkv.policies.reads import WHOLE, Reading, Reads, as_tokens, require_fewer
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Reader

# Least number of pages that a layer reads, in the published code.
_PAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedReads(Reads):
    """Quest's page config: at each new token a kv head reads the pages of largest bounds of q.k, and the last page.

    Fields are those of `Quest`.
    """

    by_layer: ClassVar[bool] = True

    page: int
    dense_layers: int
    budget: Kept | Budget

    def __post_init__(self) -> None:
        for name, least in (("page", 1), ("dense_layers", 0)):
            field(self, name, whole, f"give a number, at least {least}", least=least)
        object.__setattr__(self, "budget", as_tokens(self.budget, self._least))

    @property
    def _least(self) -> int:
        """Least number of entries that a layer reads: those of three pages."""
        return _PAGES * self.page

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if all layers of the model that attend to the whole prompt are dense ones."""
        require_fewer("dense_layers", self.dense_layers, config)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Number `[B]` of entries, new tokens' included, that each kv head reads per token in layers that read pages.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The budget in entries, or the share's whole number of each prompt; at least three pages of entries.
        """
        budget = self.budget
        if isinstance(budget, Tokens):
            return np.full_like(lengths, budget.value)
        assert isinstance(budget, Share)
        return np.maximum(budget.rows(lengths), self._least)

    def reading(self, layers: int, padded_len: int, *, every_entry: bool) -> Reading:
        """Static config `Reading`: layers from `dense_layers` up read pages that each chooses, others every entry."""
        return Reading(
            sources=tuple(WHOLE if layer < self.dense_layers else layer for layer in range(layers)),
            include_generated=True,
            every_entry=every_entry,
            padded_len=padded_len,
            width=int(self.tokens(np.asarray([padded_len]), layers)[0]),
            page=self.page,
        )


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Reader):
    """Keeps every entry; at each sampled token every kv head reads only the pages of entries with the largest bound of q.k.

    Entries of a kv head are in pages of `page` consecutive entries, each with the element-wise minimum and maximum of its
    keys as they are cached, after RoPE. The bound of a page for a query head is the sum over channels of
    max(q * minimum, q * maximum); the query heads of a kv head share its pages, by the largest of their bounds. The
    page of the newest row is always read. Prompts, and questions on top of a cache, attend to all entries.

    Attributes:
        budget: int: entries that a kv head reads of a layer's cache at each sampled token, those after the prompt included.
            float in (0, 1]: that share of each sequence's own prompt. By default 1024. Whole pages are read, as many
            as the budget has room for: of 3 pages at least, so that a smaller number is rejected, and a smaller share
            of a short prompt becomes 3 pages.
        page: entries of a page.
        dense_layers: number of layers from the bottom that read every entry; layers with a window, which read theirs,
            do not count.
        base: a policy (or its name or class) that compresses the prompt first, equally in all heads of a layer, and
            then appends; pages are pages of the entries that it keeps.

    References:
        Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, ICML 2024 (2406.10774),
        algorithm 1; least pages and dense layers of its code, in which every query head has pages of its own.
    """

    page: int = 16
    dense_layers: int = 2

    paper = "Quest, arXiv:2406.10774"

    read_by = PagedReads

    def _check(self) -> None:
        super()._check()
        if self.inner is not None:
            equal = self.inner.composed.layout is Layout.EQUAL
            remedy = "heads of unequal entries, and layers whose entries depend on the text, have no pages: give SnapKV, say"
            require(equal, "base", self.inner, remedy)
