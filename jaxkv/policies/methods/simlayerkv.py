"""SimLayerKV: layers that look far back keep every row, lazy ones the first and the most recent rows."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv import attention
from jaxkv._checks import field, whole
from jaxkv._errors import require
from jaxkv._values import Value, namespace
from jaxkv.attention.columns import mean_over_window
from jaxkv.policies.keep import Keep
from jaxkv.policies.layers import Counts, LayerBudgets, Table, finite
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Observed
from jaxkv.policies.unseen import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyLayers(LayerBudgets, Value):
    """SimLayerKV's layer budgets: one layer after the other keeps every row, the least lazy first; exact sum.

    A layer is the lazier, the more of the last queries' attention falls on its first and most recent rows. Once the
    budget is used up, layers keep the forced rows alone; the layer that uses it up keeps as many more as are left.

    Attributes:
        sinks: number of first rows.
        recent: number of most recent rows.
    """

    from_scores: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = True

    sinks: int = 4
    recent: int = 1024

    def __post_init__(self) -> None:
        field(self, "sinks", whole, "give 0 or more first rows", least=0)
        field(self, "recent", whole, "give at least 1 recent row")

    def of_heads(
        self, scores: Float[Array, "B K S"], candidates: Bool[Array, "B 1 S"], seen: Observed
    ) -> Float[Array, "B K G"]:
        """Attention `[B, K, G]` of each query head on the rows between the first and the most recent ones."""

        def reduce(p: Float[Array, "G w S"], position: Int[Array, " w"], length: Int[Array, ""]) -> Float[Array, " G"]:
            index = jnp.arange(p.shape[-1], dtype=jnp.int32)
            between = (index >= self.sinks) & (index < length - self.recent)
            return jnp.where(between, mean_over_window(p, position), 0.0).sum(axis=-1)

        length = jnp.broadcast_to(seen.length[:, None], seen.k.shape[:2])
        return attention.window_mass(seen.q, seen.k, seen.q_positions, reduce, length)

    def rows(self, budget: Counts, length: Counts, forced: Counts, *, layers: int, window: int, weights: Any) -> Table:
        """Rows per kv head `[L, N]`: the forced rows, and all others of as many layers as the budget has room for."""
        weights = finite(weights)
        xp = namespace(weights)
        order = xp.argsort(-weights, axis=0, stable=True)
        rank, beside = xp.argsort(order, axis=0, stable=True), xp.asarray(length, xp.int64) - forced
        total = layers * (xp.asarray(budget, xp.int64) - forced)
        return forced + xp.clip(total - rank * beside, 0, beside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recency(Position):
    """SimLayerKV's scorer: later rows score higher; the last queries are at hand for `LazyLayers`.

    Attributes:
        window: number of the prompt's last queries.
    """

    looks_at_end: ClassVar[bool] = False

    window: int = 32

    @property
    def queries(self) -> int:
        """Number of last queries that layer budgets read: `window`."""
        return self.window


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimLayerKV(Method):
    """Keeps every row in layers that look far back; in lazy layers, which do not, the first and most recent rows.

    The published method compares each layer with a threshold, so that the text decides how large a cache becomes. Here
    the budget decides how many layers are lazy, and the comparison which ones. All layers' rows are held until the last
    one has been looked at. Tokens after the prompt are appended.

    Attributes:
        window: number of the prompt's last queries by whose attention layers are compared.
        sinks: first tokens that stay in every layer.
        recent: most recent tokens that stay in every layer.

    References:
        Zhang et al., SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, arXiv:2410.13846.
    """

    budget: int | float | None = 0.5
    window: int = 32
    sinks: int = 4
    recent: int = 1024

    paper: ClassVar[str] = "SimLayerKV, arXiv:2410.13846"

    def _check(self) -> None:
        field(self, "window", whole, "give at least 1 last query")
        self._adopt(LazyLayers(sinks=self.sinks, recent=self.recent), "sinks", "recent")
        least = self.sinks + self.recent
        enough = not isinstance(self.budget, int) or self.budget >= least
        require(enough, "budget", self.budget, f"below sinks + recent = {least}: give at least that, or fewer recent")

    def parts(self) -> Parts:
        """Returns `Parts` that score rows by recency; as many layers keep all of theirs as there is room."""
        keep, layers = Keep(sinks=self.sinks, window=self.recent), LazyLayers(sinks=self.sinks, recent=self.recent)
        return self.compose(scorer=Recency(window=self.window), keep=keep, layers=layers)
