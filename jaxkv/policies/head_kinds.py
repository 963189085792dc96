"""Budgets of kv heads of two kinds: heads that keep every row, and heads that keep a fixed number of rows."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv._checks import ENDLESS, namespace
from jaxkv._errors import require
from jaxkv.models.config import Windows
from jaxkv.policies.heads import HeadBudgets, ScoredRows
from jaxkv.policies.layers import Counts, LayerBudgets, Table
from jaxkv.policies.of_model import OfModel
from jaxkv.policies.reading import without_window
from jaxkv.policies.topk import top


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadKinds(OfModel, LayerBudgets, HeadBudgets):
    """Layer and head budgets of DuoAttention: retrieval kv heads keep all rows, the others `reach` rows.

    A plan's rows per kv head are the mean over a layer's heads, rounded up.

    Attributes:
        pattern: a number for each layer and kv head; the heads of the largest keep every row and grow while decoding.
        reach: rows of the other heads, first and most recent ones together.
        sparsity: share of heads that are these others: streaming heads.
    """

    of_field = "pattern"
    wanted = "a number for each layer and kv head, a table [L][K] or the published folder"
    exact = False
    sets_rows = True
    needs_layer = True

    pattern: tuple[tuple[float, ...], ...]
    reach: int
    sparsity: float = 0.5

    @functools.cached_property
    def retrieval(self) -> Bool[np.ndarray, "L K"]:
        """Mask `[L, K]` of retrieval heads: all but the share `sparsity` of lowest numbers."""
        numbers, share = np.asarray(self.pattern or ((),)), Fraction(repr(self.sparsity))
        # `numpy.quantile` lies between two sorted numbers: those below it are streaming heads.
        few = numbers.size if share == 1 else math.ceil(share * (numbers.size - 1))
        kinds = np.ones(numbers.size, bool)
        kinds[np.lexsort((-np.arange(numbers.size), numbers.ravel()))[:few]] = False
        return kinds.reshape(numbers.shape)

    @property
    def layers(self) -> int:
        """Number of layers of the model; ValueError if `pattern` is empty."""
        require(bool(self.pattern), "pattern", None, f"give the model's: {self.wanted}")
        return len(self.pattern)

    @property
    def heads(self) -> int:
        """Number of kv heads of the model."""
        return len(self.pattern[0])

    def among(self, windows: Windows) -> "HeadKinds":
        """Copy with the kinds of the layers without a window alone: the share `sparsity` is one of their heads."""
        self.require_sizes(layers=len(windows))
        pattern = tuple(self.pattern[layer] for layer in without_window(windows))
        return dataclasses.replace(self, pattern=pattern)

    def rows(
        self,
        budget: Counts,
        length: Counts,
        forced: Counts,
        *,
        layers: int,
        window: int,
        weights: Any,
    ) -> Table:
        """Mean rows per kv head `[L, N]`, rounded up, whatever the budget; ValueError for another number of layers."""
        self.require_sizes(layers=layers)
        xp, heads = namespace(length), self.heads
        length = xp.asarray(length, xp.int64)
        few = xp.minimum(length, xp.maximum(xp.asarray(forced, xp.int64), self.reach))
        full = xp.asarray(self.retrieval.sum(axis=1, keepdims=True), xp.int64)
        return -(-(full * length + (heads - full) * few) // heads)

    def average(self, length: Counts, forced: Counts) -> Counts:
        """Mean rows per kv head `[N]` of each prompt over all layers and heads, rounded up."""
        layers = len(self.pattern)
        rows = self.rows(length, length, forced, layers=layers, window=0, weights=None)
        return -(-rows.sum(axis=0) // layers)

    @property
    def grows_to(self) -> int:
        """Rows that segments of the other heads grow to: `reach`."""
        return self.reach

    def unlimited(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Mask `[L]` of layers in which some kv head is a retrieval head, so that it keeps all new rows."""
        return np.asarray(self.retrieval.any(axis=1))

    def limits(self) -> Int[np.ndarray, "L K"]:
        """Rows `[L, K]` that each kv head's segment may grow to: 2**30 (no limit) in retrieval heads, else `reach`."""
        return np.where(self.retrieval, ENDLESS, self.reach)

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of rows to keep: all candidates in retrieval heads, in others the best `reach - forced`."""
        self.require_sizes(heads=rows.scores.shape[1])
        few = top(rows.keys, jnp.maximum(jnp.int32(self.reach) - rows.forced, 0)[:, None])
        return rows.candidates & (few | jnp.asarray(self.retrieval)[rows.layer][None, :, None])
