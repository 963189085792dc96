"""Quest: every entry is kept; each kv head attends to the pages of entries with the largest possible logits."""

from typing import ClassVar

import numpy as np
from jaxtyping import Int

from jaxkv._checks import validate_field, validate_int, validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache.layout import SegmentLayout
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import Budget, EntryBudget, Kept, ShareBudget
from jaxkv.policies.reads import (
    WHOLE,
    AttentionReads,
    LayerReadConfig,
    parse_token_budget,
    require_fewer_layers,
)
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import SparseReadPolicy

# Fewest pages that a layer attends to, in the published code.
_PAGES = 3


@frozen_dataclass
class TopPageReads(AttentionReads):
    """Reads of pages: per new token a kv head attends to the newest page and to those that may receive most attention.

    Fields are those of `RocketKV`; without `channels` pages compete by Quest's bounds of q.k.
    """

    chooses_per_layer: ClassVar[bool] = True

    page: int
    dense_layers: int
    budget: Kept | Budget
    channels: int | None = None

    def __post_init__(self) -> None:
        validate_optional_field(self, "channels", validate_int, "give 1 or more")
        for name, least in (("page", 1), ("dense_layers", 0)):
            validate_field(
                self, name, validate_int, f"give a number, at least {least}", least=least
            )
        object.__setattr__(
            self, "budget", parse_token_budget(self.budget, self._min_attended_entries)
        )

    @property
    def _min_attended_entries(self) -> int:
        """Fewest entries that a paged layer attends to: those of three pages, 3 * `page`."""
        return _PAGES * self.page

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if no full-attention layer of the model is left above the bottom `dense_layers` ones."""
        require_fewer_layers("dense_layers", self.dense_layers, config)

    def count_attended_tokens(
        self, lengths: Int[np.ndarray, " B"], layers: int
    ) -> Int[np.ndarray, " B"]:
        """Return how many entries `[B]`, new tokens' included, each kv head attends to per token in paged layers.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The budget in entries, or the share of each prompt rounded down; at least three pages of entries.
        """
        budget = self.budget
        if isinstance(budget, EntryBudget):
            return np.full_like(lengths, budget.value)
        assert isinstance(budget, ShareBudget)
        return np.maximum(budget.count_entries(lengths), self._min_attended_entries)

    def build_read_config(
        self, layers: int, padded_len: int, *, every_entry: bool
    ) -> LayerReadConfig:
        """Return `LayerReadConfig`: layers from `dense_layers` up choose pages, lower ones attend to all entries."""
        return LayerReadConfig(
            sources=tuple(WHOLE if layer < self.dense_layers else layer for layer in range(layers)),
            include_generated=True,
            every_entry=every_entry,
            padded_len=padded_len,
            width=int(self.count_attended_tokens(np.asarray([padded_len]), layers)[0]),
            page=self.page,
            channels=self.channels or 0,
        )


@register
@frozen_dataclass
class Quest(SparseReadPolicy):
    """Keep every entry, or those `base` keeps; at each new token a kv head attends to pages of highest bounds of q.k.

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

    read_by = TopPageReads

    def _check_fields(self) -> None:
        super()._check_fields()
        if self.base_policy is not None:
            equal = self.base_policy.composed.cache_layout is SegmentLayout.EQUAL
            remedy = "pages need equally many entries per head, and layers without scores: give SnapKV, for example"
            require(equal, "base", self.base_policy, remedy)
