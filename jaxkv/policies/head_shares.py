"""Layer and head budgets in proportion to shares measured on one model: HeadKV's and LU-KV's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkv._checks import validate_field, validate_float
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.head_budgets import HeadBudgets, ScoredEntries
from jaxkv.policies.head_scores import load_head_scores
from jaxkv.policies.layer_budgets import (
    LayerBudgetInputs,
    LayerBudgets,
    Table,
    round_by_largest_remainder,
)
from jaxkv.policies.of_model import ModelSpecificValue
from jaxkv.policies.topk import count_true, mask_top_k

_PARTS = 1 << 15  # parts of a layer; kv heads get an integer number of them: exact in int32


@frozen_dataclass
class ImportanceBudgets(ModelSpecificValue, LayerBudgets, HeadBudgets):
    """HeadKV's layer and head budgets: entries in proportion to each head's share by importance `scores`; exact sums.

    A layer gets the sum of its heads' shares, in integer entries per kv head. A kv head gets the sum of its query
    heads' shares, in parts of 1/32768 of the layer. Entries that a head cannot use go to the layer's other heads, by
    score. The published code budgets query heads one by one, rounds the part by scores down, and discards unused
    entries.
    `scores` are of all layers of the model; those of sliding-window layers, which have no budget, are ignored.
    """

    of_field = "scores"
    wanted = "a score for each layer and kv head, or query head"
    needs_layer_index = True

    scores: str | tuple[tuple[float, ...], ...]
    beta: int | float = 1.2

    def __post_init__(self) -> None:
        validate_field(self, "scores", load_head_scores)
        validate_field(
            self,
            "beta",
            validate_float,
            "give at least 1 (all entries by the scores)",
            low=1.0,
            high=1e30,
        )

    def compute_head_shares(self) -> Float[np.ndarray, "L H"]:
        """Return each head's share of all entries `[L, H]`, of sum 1: 1/beta by scores, the rest evenly."""
        scores = np.asarray(self.scores)
        return (1 - 1 / self.beta) / scores.size + scores / scores.sum() / self.beta

    @property
    def layers(self) -> int:
        """Number of layers with scores: the model's, or only its full-attention layers in a restricted copy."""
        return len(self.scores)

    @property
    def heads(self) -> int:
        """Number of heads with a score in each layer: the model's kv heads or query heads."""
        return len(self.scores[0])

    def accepts_model_size(self, name: str, size: int) -> bool:
        """Return True if `scores` has `size` layers or, for the name "heads", a number of heads divisible by `size`."""
        return self.heads % size == 0 if name == "heads" else self.layers == size

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError unless each layer has a score per kv or query head, not all 0 in full-attention layers."""
        self.require_model_sizes(layers=config.layers)
        if any(config.sliding_windows):
            self.restrict_to_full_attention(config.sliding_windows)
        remedy = f"the model has {config.kv_heads} kv heads and {config.heads} query heads: give {self.wanted}"
        require(
            self.heads in (config.kv_heads, config.heads),
            self.of_field,
            f"{self.heads} heads",
            remedy,
        )

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "ImportanceBudgets":
        """Return these budgets with scores of full-attention layers only; ValueError if all 0 or L differs."""
        self.require_model_sizes(layers=len(sliding_windows))
        assert not isinstance(self.scores, str)
        scores = tuple(
            row for row, width in zip(self.scores, sliding_windows, strict=True) if width is None
        )
        remedy = "all are 0 in the layers without a sliding window: raise one of them"
        require(any(map(any, scores)), self.of_field, f"of {len(scores)} layers", remedy)
        return dataclasses.replace(self, scores=scores)

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]`: always-kept ones, and the layer's share of the rest of the budget."""
        self.require_model_sizes(layers=of.layers)
        return of.divide_by_shares(
            of.array_module.asarray(self.compute_head_shares().sum(axis=1)[:, None])
        )

    def choose_entries(self, rows: ScoredEntries) -> Bool[Array, "B K S"]:
        """Return the mask `[B, K, S]` of each head's best candidates: its share of layer entries, or all it has."""
        shares = self.compute_head_shares()
        heads = rows.scores.shape[1]
        self.require_model_sizes(heads=heads)
        each = (
            shares.reshape(len(shares), heads, -1).sum(axis=-1).T + 1e-300
        )  # even shares in a layer without any
        parts = jnp.asarray(
            round_by_largest_remainder(each / each.sum(axis=0) * _PARTS, _PARTS, _PARTS).T,
            jnp.int32,
        )[rows.layer]
        total = heads * rows.base[:, None]
        rest = total % _PARTS * parts
        each = total // _PARTS * parts + total % _PARTS * parts // _PARTS
        more = mask_top_k(
            (rest % _PARTS + 1).astype(jnp.uint32), total[:, 0] - each.sum(axis=-1, dtype=jnp.int32)
        )
        each = each + more.astype(jnp.int32)
        keys = rows.sort_keys
        return mask_top_k(keys, jnp.minimum(each, count_true(keys > 0)))


@frozen_dataclass
class CurveBudgets(ImportanceBudgets):
    """LU-KV's layer and head budgets: entries in proportion to the share that each kv head keeps by its curve."""

    of_field = "curves"
    wanted = "curves for each layer and kv head of this model"

    beta: int | float = 1.0

    # Curves are of kv heads only.
    accepts_model_size = ModelSpecificValue.accepts_model_size
    require_fits_model = ModelSpecificValue.require_fits_model
