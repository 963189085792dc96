"""DuoAttention: kv heads of two kinds: some keep every entry, the others the first and the most recent ones."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv._checks import ENDLESS, field, real, whole
from jaxkv._errors import require
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.head_budgets import HeadBudgets, ScoredRows
from jaxkv.policies.head_scores import as_pattern
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import Counts, Division, LayerBudgets, Table
from jaxkv.policies.of_model import OfModel
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.rank import ByAge
from jaxkv.policies.reads import without_window
from jaxkv.policies.registry import register
from jaxkv.policies.topk import top
from jaxkv.policies.unseen import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadKinds(OfModel, LayerBudgets, HeadBudgets):
    """Layer and head budgets of DuoAttention: retrieval kv heads keep all entries, the others `reach` entries.

    A plan's entries per kv head are the mean over a layer's heads, rounded up.

    Attributes:
        pattern: a number for each layer and kv head; the heads of the largest keep every entry and grow while decoding.
        reach: entries of the other heads, first and most recent ones together.
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

    def among(self, sliding_windows: SlidingWindows) -> "HeadKinds":
        """Copy with the kinds of the layers without a window alone: the share `sparsity` is one of their heads."""
        self.require_sizes(layers=len(sliding_windows))
        pattern = tuple(self.pattern[layer] for layer in without_window(sliding_windows))
        return dataclasses.replace(self, pattern=pattern)

    def rows(self, of: Division) -> Table:
        """Mean entries per kv head `[L, N]`, rounded up, whatever the budget; ValueError for another number of layers."""
        self.require_sizes(layers=of.layers)
        xp, heads = of.xp, self.heads
        few = xp.minimum(of.length, xp.maximum(of.always_kept, self.reach))
        full = xp.asarray(self.retrieval.sum(axis=1, keepdims=True), xp.int64)
        return -(-(full * of.length + (heads - full) * few) // heads)

    def average(self, length: Counts, always_kept: Counts) -> Counts:
        """Mean entries per kv head `[N]` of each prompt over all layers and heads, rounded up."""
        layers = len(self.pattern)
        rows = self.rows(Division(length, length, always_kept, layers))
        return -(-rows.sum(axis=0) // layers)

    @property
    def grows_to(self) -> int:
        """Entries that segments of the other heads grow to: `reach`."""
        return self.reach

    def unlimited(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Mask `[L]` of layers in which some kv head is a retrieval head, so that it keeps all new entries."""
        return np.asarray(self.retrieval.any(axis=1))

    def limits(self) -> Int[np.ndarray, "L K"]:
        """Entries `[L, K]` that each kv head's segment may grow to: 2**30 (no limit) in retrieval heads, else `reach`."""
        return np.where(self.retrieval, ENDLESS, self.reach)

    def choose(self, rows: ScoredRows) -> Bool[Array, "B K S"]:
        """Mask `[B, K, S]` of entries to keep: all candidates in retrieval heads, in others the best `reach - always_kept`."""
        self.require_sizes(heads=rows.scores.shape[1])
        few = top(rows.keys, jnp.maximum(jnp.int32(self.reach) - rows.always_kept, 0)[:, None])
        return rows.candidates & (few | jnp.asarray(self.retrieval)[rows.layer][None, :, None])


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class DuoAttention(Policy):
    """Keeps every entry in retrieval heads, the first and most recent ones in other kv heads, also while decoding.

    How many entries stay follows from the pattern: there is no budget. For each new entry the oldest one after the sinks of
    a streaming head goes. Prompts are read by full attention in all heads, as in kvpress, and room for new entries is as
    large behind streaming heads as behind retrieval heads.

    Attributes:
        pattern: how much each layer's kv heads need all entries, `[L][K]` numbers from 0 to 1, or the published folder;
            one entry for every layer of the model, those of layers with a window are ignored.
        sparsity: share of kv heads that are streaming heads: those of the lowest numbers. Heads of layers with a
            window do not count.
        sinks: first tokens that always stay; None: config.json's in the pattern's folder, 64 without one.
        window: most recent tokens that stay in streaming heads, where entries of `protect` take the places of its oldest;
            None: config.json's, 256 without one.

    References:
        Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
        arXiv:2410.10819, sections 2.2 and 2.3.
    """

    pattern: str | tuple[tuple[float, ...], ...] | None = None
    sparsity: float = 0.5
    sinks: int | None = None
    window: int | None = None

    paper = "DuoAttention, arXiv:2410.10819"

    def _check(self) -> None:
        config: dict[str, Any] = {}
        if self.pattern is not None:
            table, config = as_pattern("pattern", self.pattern)
            object.__setattr__(self, "pattern", table)
        for name, key, usual, least in (
            ("sinks", "sink_size", 64, 0),
            ("window", "recent_size", 256, 1),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, config.get(key, usual))
            remedy = f"give {least} or more tokens, or None for the pattern's own"
            field(self, name, whole, remedy, least=least)
        field(
            self, "sparsity", real, "give the share of streaming heads, between 0 and 1", high=1.0
        )

    def parts(self) -> Parts:
        """Config `Parts`: retrieval heads keep all entries; others keep sinks and recent entries and evict by age."""
        assert self.sinks is not None and self.window is not None
        assert not isinstance(self.pattern, str)
        reach, pattern = self.sinks + self.window, self.pattern or ()
        kinds = HeadKinds(pattern=pattern, reach=reach, sparsity=self.sparsity)
        keep = Keep(sinks=self.sinks, window=1)
        return self.compose(scorer=Position(), keep=keep, evict=ByAge(), layers=kinds, heads=kinds)
