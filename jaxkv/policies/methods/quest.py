"""Quest: every entry is kept; each kv head attends to the pages of entries with the largest possible logits."""

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

# Fewest pages that a layer attends to, in the published code.
_PAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedReads(Reads):
    """Quest's reads: at each new token a kv head attends to the pages of largest bounds of q.k, and the last page.

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
        """Fewest entries that a layer attends to: those of three pages."""
        return _PAGES * self.page

    def require_fits(self, config: ModelConfig) -> None:
        """Raise ValueError if all layers of the model that attend to the whole prompt are dense ones."""
        require_fewer("dense_layers", self.dense_layers, config)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Return the entries `[B]`, new tokens' included, that each kv head attends to per token in paged layers.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The budget in entries, or the share of each prompt rounded down; at least three pages of entries.
        """
        budget = self.budget
        if isinstance(budget, Tokens):
            return np.full_like(lengths, budget.value)
        assert isinstance(budget, Share)
        return np.maximum(budget.rows(lengths), self._least)

    def reading(self, layers: int, padded_len: int, *, every_entry: bool) -> Reading:
        """Return `Reading`, the static config: layers from `dense_layers` up choose their pages, others use all."""
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
    """Keep every entry; each head attends to the pages of highest q.k bound.

    A page is `page` consecutive entries of a kv head, with the element-wise minimum and maximum of their cached keys,
    after RoPE. The bound of a page for a query head is the sum over channels of max(q * minimum, q * maximum). The
    query heads of a kv head share its pages, by the largest of their bounds. The page of the newest entry is always
    included. Prompts, and questions on top of a cache, attend to all entries.

    Attributes:
        budget: int: entries of a layer's cache that a kv head attends to at each token, generated ones included. float
            in (0, 1]: share of each sequence's own prompt. Default 1024. Pages are used whole, as many as the budget
            allows, at least 3: smaller numbers are rejected, and smaller shares of short prompts become 3 pages.
        page: entries per page.
        dense_layers: number of layers from the bottom that attend to every entry; sliding-window layers do not count.
        base: a policy (or its name or class) that compresses the prompt first, equally in all heads of a layer, and
            then appends; pages are of the entries that it keeps.

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
            remedy = "pages need equally many entries per head, and layers without scores: give SnapKV, for example"
            require(equal, "base", self.inner, remedy)
