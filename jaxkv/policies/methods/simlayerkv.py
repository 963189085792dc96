"""SimLayerKV: layers that look far back keep every entry, lazy layers the first and the most recent entries."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import validate_field, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.columns import average_over_queries
from jaxkv.policies.checks import Budget
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import (
    LayerBudgetInputs,
    LayerBudgets,
    Table,
    require_finite_weights,
)
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Needs, ScorerInputs, Scores
from jaxkv.policies.unseen import PositionScores


@frozen_dataclass
class LazyLayerBudgets(LayerBudgets):
    """SimLayerKV's layer budgets: all entries in the least lazy layers till the budget is spent, then always-kept ones.

    A layer is lazier the more of the last queries' attention goes to its first and most recent entries. When the budget
    is spent, further layers keep only the always-kept entries; the layer that spends it keeps the remaining entries.

    Attributes:
        sinks: number of first entries.
        recent: number of most recent entries.
    """

    depends_on_scores = True
    needs_last_queries = True

    sinks: int = 4
    recent: int = 1024

    def __post_init__(self) -> None:
        validate_field(self, "sinks", validate_int, "give 0 or more first entries", least=0)
        validate_field(self, "recent", validate_int, "give at least 1 recent entry")

    def compute_head_statistic(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: ScorerInputs
    ) -> Float[Array, "B K G"]:
        """Return last queries' mean attention per head `[B, K, G]` outside first and most recent entries."""

        def reduce(
            p: Float[Array, "G w S"], position: Int[Array, " w"], length: Int[Array, ""]
        ) -> Float[Array, " G"]:
            index = jnp.arange(p.shape[-1], dtype=jnp.int32)
            between = (index >= self.sinks) & (index < length - self.recent)
            return jnp.where(between, average_over_queries(p, position), 0.0).sum(axis=-1)

        length = jnp.broadcast_to(seen.length[:, None], seen.k.shape[:2])
        return seen.reduce_window_attention(reduce, length)

    def compute_layer_entries(self, of: LayerBudgetInputs) -> Table:
        """Return entries per kv head `[L, N]`: all in least lazy layers until the budget is spent, then always-kept."""
        xp = of.array_module
        order = of.array_module.argsort(-require_finite_weights(of.weights), axis=0, stable=True)
        rank = xp.argsort(order, axis=0, stable=True)
        beside = of.length - of.always_kept
        return of.always_kept + xp.clip(
            of.layers * of.mean_entries_to_choose - rank * beside, 0, beside
        )


@frozen_dataclass
class RecencyScorer(PositionScores):
    """SimLayerKV's scorer: later entries score higher; it requests last queries, which `LazyLayerBudgets` reads.

    Attributes:
        window: number of the prompt's last queries.
    """

    follows_last_queries = False

    window: int = 32

    @property
    def needs(self) -> Needs:
        """`Needs` of the scorer: the last `window` queries, which only the layer budgets read."""
        return Needs(queries=self.window)


@register
@frozen_dataclass
class SimLayerKV(BudgetMethod):
    """Keep every entry in layers that look far back; only sinks and recent tokens in lazy layers.

    A layer is lazy if its attention goes to the first and most recent entries. The published method compares each layer
    with a threshold, so that the text sets the size of the cache. Here the budget sets the number of lazy layers, and
    the comparison selects them. All layers' entries are held until the last layer has run. Tokens after the prompt are
    appended.

    A prompt of at most `sinks` + `recent` tokens is kept whole under any share.

    Attributes:
        window: number of the prompt's last queries whose attention is compared between layers.
        sinks: number of first tokens kept in every layer.
        recent: number of most recent tokens kept in every layer.

    References:
        Zhang et al., SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, arXiv:2410.13846.
    """

    budget: Budget = 0.5
    window: int = 32
    sinks: int = 4
    recent: int = 1024

    paper = "SimLayerKV, arXiv:2410.13846"

    scored_by = RecencyScorer

    def _check_fields(self) -> None:
        validate_field(self, "window", validate_int, "give at least 1 last query")

    def build_policy_parts(self) -> Parts:
        """Return SimLayerKV's `Parts`: least lazy layers keep all entries, others sinks and recent ones."""
        keep = Keep(sinks=self.sinks, window=self.recent)
        layers = self.create_part(LazyLayerBudgets)
        return self.compose_with_scorer(keep=keep, layers=layers)
