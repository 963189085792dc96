"""SimLayerKV: layers that look far back keep every entry, lazy layers the first and the most recent entries."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import field, whole
from jaxkv.attention.columns import mean_over_window
from jaxkv.policies.checks import Budget
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import Division, LayerBudgets, Table, finite
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Needs, Observed, Scores
from jaxkv.policies.unseen import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyLayers(LayerBudgets):
    """SimLayerKV's layer budgets: the least lazy layers keep every entry until the budget is spent; exact sum.

    A layer is lazier the more of the last queries' attention goes to its first and most recent entries. When the budget
    is spent, further layers keep only the always-kept entries; the layer that spends it keeps the remaining entries.

    Attributes:
        sinks: number of first entries.
        recent: number of most recent entries.
    """

    from_scores = True
    needs_queries = True

    sinks: int = 4
    recent: int = 1024

    def __post_init__(self) -> None:
        field(self, "sinks", whole, "give 0 or more first entries", least=0)
        field(self, "recent", whole, "give at least 1 recent entry")

    def of_heads(
        self, scores: Scores, candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K G"]:
        """Return the last queries' mean attention `[B, K, G]` to all entries except the first and most recent ones."""

        def reduce(
            p: Float[Array, "G w S"], position: Int[Array, " w"], length: Int[Array, ""]
        ) -> Float[Array, " G"]:
            index = jnp.arange(p.shape[-1], dtype=jnp.int32)
            between = (index >= self.sinks) & (index < length - self.recent)
            return jnp.where(between, mean_over_window(p, position), 0.0).sum(axis=-1)

        length = jnp.broadcast_to(seen.length[:, None], seen.k.shape[:2])
        return seen.window_mass(reduce, length)

    def rows(self, of: Division) -> Table:
        """Return entries per kv head `[L, N]`: all in layers of largest weight while the budget lasts."""
        xp, order = of.xp, of.xp.argsort(-finite(of.weights), axis=0, stable=True)
        rank = xp.argsort(order, axis=0, stable=True)
        beside = of.length - of.always_kept
        return of.always_kept + xp.clip(of.layers * of.base - rank * beside, 0, beside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recency(Position):
    """SimLayerKV's scorer: later entries score higher; it requests the last `window` queries for `LazyLayers`.

    Attributes:
        window: number of the prompt's last queries.
    """

    looks_at_end = False

    window: int = 32

    @property
    def needs(self) -> Needs:
        """`Needs` of the layer budgets: the last `window` queries."""
        return Needs(queries=self.window)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimLayerKV(BudgetMethod):
    """Keep every entry in some layers, sinks and recent tokens in lazy layers.

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

    scored_by = Recency

    def _check(self) -> None:
        field(self, "window", whole, "give at least 1 last query")

    def parts(self) -> Parts:
        """Return `Parts`: layers that look back furthest keep all entries, others sinks and recent entries only."""
        keep = Keep(sinks=self.sinks, window=self.recent)
        layers = self.part(LazyLayers)
        return self.observed(keep=keep, layers=layers)
