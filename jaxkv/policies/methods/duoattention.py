"""DuoAttention: retrieval heads keep every entry, streaming heads the first and the most recent entries."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv._checks import ENDLESS, validate_field, validate_float, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.head_budgets import HeadBudgets, ScoredEntries
from jaxkv.policies.head_scores import load_duoattention_pattern
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import Counts, LayerBudgetInputs, LayerBudgets, Table
from jaxkv.policies.of_model import ModelSpecificValue
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.rank import ByAge
from jaxkv.policies.reads import list_full_attention_layers
from jaxkv.policies.registry import register
from jaxkv.policies.topk import mask_top_k
from jaxkv.policies.unseen import PositionScores


@frozen_dataclass
class RetrievalHeadBudgets(ModelSpecificValue, LayerBudgets, HeadBudgets):
    """Layer and head budgets of DuoAttention: retrieval kv heads keep all entries, streaming heads `reach` entries.

    A plan's entries per kv head are the mean over a layer's heads, rounded up.

    Attributes:
        pattern: a number for each layer and kv head; heads of high numbers keep every entry, also while decoding.
        reach: entries of streaming heads, first and most recent ones together.
        sparsity: share of streaming heads.
    """

    of_field = "pattern"
    wanted = "a number for each layer and kv head, a table [L][K] or the published folder"
    has_exact_sum = False
    sets_entry_count = True
    needs_layer_index = True

    pattern: tuple[tuple[float, ...], ...]
    reach: int
    sparsity: float = 0.5

    @functools.cached_property
    def retrieval_head_mask(self) -> Bool[np.ndarray, "L K"]:
        """Numpy mask `[L, K]` of retrieval heads: all but the share `sparsity` with the lowest `pattern` numbers."""
        numbers = np.asarray(self.pattern or ((),))
        share = Fraction(repr(self.sparsity))
        # `numpy.quantile` falls between two sorted numbers: heads below it are streaming heads.
        few = numbers.size if share == 1 else math.ceil(share * (numbers.size - 1))
        kinds = np.ones(numbers.size, bool)
        kinds[np.lexsort((-np.arange(numbers.size), numbers.ravel()))[:few]] = False
        return kinds.reshape(numbers.shape)

    @property
    def layers(self) -> int:
        """Number of layers in DuoAttention's `pattern`, a number per layer and head; ValueError if empty."""
        require(bool(self.pattern), "pattern", None, f"give the model's: {self.wanted}")
        return len(self.pattern)

    @property
    def heads(self) -> int:
        """Number of kv heads per layer in DuoAttention's `pattern`, the same in all layers."""
        return len(self.pattern[0])

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "RetrievalHeadBudgets":
        """Return DuoAttention's budgets for full-attention layers; `sparsity` is a share of their heads."""
        self.require_model_sizes(layers=len(sliding_windows))
        pattern = tuple(
            self.pattern[layer] for layer in list_full_attention_layers(sliding_windows)
        )
        return dataclasses.replace(self, pattern=pattern)

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]`: each layer's mean over retrieval and streaming heads, rounded up."""
        self.require_model_sizes(layers=of.layers)
        xp = of.array_module
        heads = self.heads
        few = xp.minimum(of.length, xp.maximum(of.always_kept, self.reach))
        full = xp.asarray(self.retrieval_head_mask.sum(axis=1, keepdims=True), xp.int64)
        return -(-(full * of.length + (heads - full) * few) // heads)

    def compute_average_entries(self, length: Counts, always_kept: Counts) -> Counts:
        """Return entries per kv head `[N]` of each prompt: mean of the layers' rounded-up means, itself rounded up."""
        layers = len(self.pattern)
        rows = self.compute_layer_entries(LayerBudgetInputs(length, length, always_kept, layers))
        return -(-rows.sum(axis=0) // layers)

    @property
    def growth_limit(self) -> int:
        """Entries per segment to which shorter prompts grow while decoding, in streaming heads: `reach`."""
        return self.reach

    def mask_layers_without_eviction(self, layers: int) -> Bool[np.ndarray, " L"]:
        """Return the mask `[L]` of layers with a retrieval head, which keeps all new entries."""
        return np.asarray(self.retrieval_head_mask.any(axis=1))

    def get_segment_limits(self) -> Int[np.ndarray, "L K"]:
        """Return entries `[L, K]` to which each kv head may grow: 2**30 (no limit) in retrieval heads, else `reach`."""
        return np.where(self.retrieval_head_mask, ENDLESS, self.reach)

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of kept candidates: all in retrieval heads, else best `reach - always_kept`."""
        self.require_model_sizes(heads=rows.scores.shape[1])
        few = mask_top_k(
            rows.sort_keys, jnp.maximum(jnp.int32(self.reach) - rows.always_kept, 0)[:, None]
        )
        return rows.candidates & (
            few | jnp.asarray(self.retrieval_head_mask)[rows.layer][None, :, None]
        )


@register
@frozen_dataclass
class DuoAttention(Policy):
    """Keep every entry in retrieval kv heads; only sinks and the most recent tokens in streaming heads.

    The pattern sets the number of entries: there is no budget. Each new entry in a streaming head evicts the oldest one
    after the sinks. Prefill attends to all entries in all heads, as in kvpress. Headroom for new entries is the same
    behind streaming heads as behind retrieval heads.

    Attributes:
        pattern: need of each layer's kv heads for all entries, `[L][K]` numbers from 0 to 1, or the published folder;
            one row for every layer of the model, those of sliding-window layers are ignored.
        sparsity: share of kv heads that are streaming heads: those of the lowest numbers. Heads of sliding-window
            layers do not count.
        sinks: number of first tokens always kept; None: that of config.json in the pattern's folder, or 64.
        window: number of most recent tokens kept in streaming heads; entries of `protect` replace the oldest of these.
            None: that of config.json, or 256.

    References:
        Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
        arXiv:2410.10819, sections 2.2 and 2.3.
    """

    pattern: str | tuple[tuple[float, ...], ...] | None = None
    sparsity: float = 0.5
    sinks: int | None = None
    window: int | None = None

    paper = "DuoAttention, arXiv:2410.10819"

    def _check_fields(self) -> None:
        config: dict[str, Any] = {}
        if self.pattern is not None:
            table, config = load_duoattention_pattern("pattern", self.pattern)
            object.__setattr__(self, "pattern", table)
        for name, key, usual, least in (
            ("sinks", "sink_size", 64, 0),
            ("window", "recent_size", 256, 1),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, config.get(key, usual))
            remedy = f"give {least} or more tokens, or None for the pattern's own"
            validate_field(self, name, validate_int, remedy, least=least)
        validate_field(
            self,
            "sparsity",
            validate_float,
            "give the share of streaming heads, between 0 and 1",
            high=1.0,
        )

    def build_policy_parts(self) -> Parts:
        """Return DuoAttention's `Parts`: retrieval heads keep all; others sinks and newest, evicting by age."""
        assert self.sinks is not None and self.window is not None
        assert not isinstance(self.pattern, str)
        reach = self.sinks + self.window
        pattern = self.pattern or ()
        kinds = RetrievalHeadBudgets(pattern=pattern, reach=reach, sparsity=self.sparsity)
        keep = Keep(sinks=self.sinks, window=1)
        return self.compose(
            scorer=PositionScores(), keep=keep, evict=ByAge(), layers=kinds, heads=kinds
        )
