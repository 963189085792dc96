"""SimLayerKV's parts: budgets that fill up the layers that look far back, and recency beside the last queries."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import field, namespace, whole
from jaxkv.attention.columns import mean_over_window
from jaxkv.policies.layers import Counts, LayerBudgets, Table, finite
from jaxkv.policies.scorer import Needs, Observed
from jaxkv.policies.unseen import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyLayers(LayerBudgets):
    """SimLayerKV's layer budgets: layers that look back furthest keep every row until the budget is spent; exact sum.

    A layer is the lazier, the more of the last queries' attention falls on its first and most recent rows. Once the
    budget is used up, layers keep the forced rows alone; the layer that uses it up keeps as many more as are left.

    Attributes:
        sinks: number of first rows.
        recent: number of most recent rows.
    """

    from_scores = True
    needs_queries = True

    sinks: int = 4
    recent: int = 1024

    def __post_init__(self) -> None:
        field(self, "sinks", whole, "give 0 or more first rows", least=0)
        field(self, "recent", whole, "give at least 1 recent row")

    def of_heads(
        self, scores: Float[Array, "B K S"], candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K G"]:
        """Mean attention `[B, K, G]` of the last queries, by query head, on all rows but first and most recent ones."""

        def reduce(
            p: Float[Array, "G w S"], position: Int[Array, " w"], length: Int[Array, ""]
        ) -> Float[Array, " G"]:
            index = jnp.arange(p.shape[-1], dtype=jnp.int32)
            between = (index >= self.sinks) & (index < length - self.recent)
            return jnp.where(between, mean_over_window(p, position), 0.0).sum(axis=-1)

        length = jnp.broadcast_to(seen.length[:, None], seen.k.shape[:2])
        return seen.window_mass(reduce, length)

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
        """Rows per kv head `[L, N]`: all in layers of largest weight while the budget lasts, else the forced rows."""
        weights = finite(weights)
        xp = namespace(weights)
        order = xp.argsort(-weights, axis=0, stable=True)
        rank, beside = xp.argsort(order, axis=0, stable=True), xp.asarray(length, xp.int64) - forced
        total = layers * (xp.asarray(budget, xp.int64) - forced)
        return forced + xp.clip(total - rank * beside, 0, beside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recency(Position):
    """SimLayerKV's scorer: later rows score higher; it requests the last `window` queries for `LazyLayers`.

    Attributes:
        window: number of the prompt's last queries.
    """

    looks_at_end: ClassVar[bool] = False

    window: int = 32

    @property
    def needs(self) -> Needs:
        """What layer budgets read: the last `window` queries."""
        return Needs(queries=self.window)
