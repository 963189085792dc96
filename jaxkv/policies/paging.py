"""The part `read` of Quest: each kv head of a layer reads the pages of rows whose keys promise the largest logits."""

import dataclasses

import numpy as np
from jaxtyping import Int

from jaxkv._checks import field, whole
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig
from jaxkv.policies.checks import Budget, Kept, Share, Tokens
from jaxkv.policies.reading import WHOLE, Reading, Reads, as_tokens

# Least number of pages that a layer reads, in the published code.
_PAGES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedReads(Reads):
    """Quest's page config: at each new token a kv head reads the pages of largest bounds of q.k, and the last page.

    Fields are those of `Quest`.
    """

    page: int
    dense_layers: int
    budget: Kept | Budget

    def __post_init__(self) -> None:
        for name, least in (("page", 1), ("dense_layers", 0)):
            field(self, name, whole, f"give a number, at least {least}", least=least)
        object.__setattr__(self, "budget", as_tokens(self.budget, self._least))

    @property
    def _least(self) -> int:
        """Least number of rows that a layer reads: those of three pages."""
        return _PAGES * self.page

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if all layers of the model that attend to the whole prompt are dense ones."""
        layers = config.windows.count(None)
        remedy = f"no layer is left to read pages, the model has {layers}{' without a window' * any(config.windows)}"
        require(
            self.dense_layers < layers, "dense_layers", self.dense_layers, f"{remedy}: give fewer"
        )

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Number `[B]` of rows, new tokens' included, that each kv head reads per token in layers that read pages.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The budget in rows, or the share's whole number of each prompt; at least three pages of rows.
        """
        lengths, budget = np.asarray(lengths, np.int64), self.budget
        if isinstance(budget, Tokens):
            return np.full_like(lengths, budget.value)
        assert isinstance(budget, Share)
        return np.maximum(budget.rows(lengths), self._least)

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """Static config `Reading`: layers from `dense_layers` up read pages that each chooses, others every row."""
        return Reading(
            sources=tuple(WHOLE if layer < self.dense_layers else layer for layer in range(layers)),
            include_generated=True,
            every_row=every_row,
            slots=slots,
            width=int(self.tokens(np.asarray([slots]), layers)[0]),
            page=self.page,
        )
