"""D2O: budgets of layers by variance, eviction at every step, and dropped rows merged into those they resemble."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from jaxkv._errors import require
from jaxkv._values import flag, typed
from jaxkv.policies.budgets import LayerBudgets
from jaxkv.policies.heavy import HeavyPolicy
from jaxkv.policies.merging import Decision, Merge, Merger, Scope, Weights
from jaxkv.policies.protocol import Settings
from jaxkv.policies.variance import OfficialVarianceLayers, VarianceLayers, checked

# The published code's.
_RECENT = 0.5
_MERGE = Merge(beta=0.5, weights=Weights.SCATTER_MEAN, scope=Scope.LAYER, decision=Decision.SHARED_POSITION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class D2O(HeavyPolicy):
    """Heavy hitters to recent tokens 3:1 behind four sinks; more rows for layers of even attention; merging.

    `D2O(merge=None)` drops without merging, `D2O(allocation=UniformLayers())` gives all layers as many rows: the
    ablations of the paper's Table 6. A prompt shorter than a budget in rows has nothing to divide yet: its layers may
    all grow to that budget.

    Attributes:
        allocation: budgets of the layers; those by variance share one pool, so that their sum is exact.
        official: the published code's arithmetic instead of the paper's: three layers keep the prompt, sizes are cut
            to integers, one threshold per layer with beta 0.5, heads' dropped rows judged together, cosines as
            weights, heavy hitters (sinks among them) to recent tokens 1:1. Scores stay those of kv heads, and
            compression happens after the prompt instead of at the first new token.

    References:
        Wan et al., D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
        Models, arXiv:2406.13035, sections 4.1 and 4.2.
    """

    sinks: int = 4
    recent: float = 0.25
    merge: Merger | None = Merge()
    allocation: LayerBudgets = VarianceLayers()
    official: bool = False

    paper: ClassVar[str] = "D2O, arXiv:2406.13035"

    def __post_init__(self) -> None:
        flag(self, "official")
        if self.official:
            preset = {"recent": _RECENT, "merge": _MERGE, "allocation": OfficialVarianceLayers()}
            defaults = {field.name: field.default for field in dataclasses.fields(D2O)}
            for name, value in preset.items():
                mine = getattr(self, name)
                same = typed(mine) in (typed(defaults[name]), typed(value))
                require(same, name, mine, "official=True sets it: leave it out")
        budgets = isinstance(self.allocation, LayerBudgets) and not isinstance(self.allocation, type)
        require(budgets, "allocation", self.allocation, "give budgets over layers, VarianceLayers() say")
        super().__post_init__()

    def meaning(self) -> dict[str, Any]:
        """What the published code sets, however it was given."""
        mine = {"recent": self.recent_share, "merge": self.settings.merge, "allocation": self.layers}
        return super().meaning() | mine

    @property
    def settings(self) -> Settings:
        """With the published code's way of merging, if that is asked for."""
        given = super().settings
        return dataclasses.replace(given, merge=_MERGE) if self.official else given

    @property
    def recent_share(self) -> float:
        """As given, or the published code's."""
        return _RECENT if self.official else float(self.recent)

    @property
    def layers(self) -> LayerBudgets:
        """The allocation, or the published code's."""
        return OfficialVarianceLayers() if self.official else self.allocation

    def recents(
        self,
        rows: Int[np.ndarray, "L B"],
        length: Int[np.ndarray, " B"],
        forced: Int[np.ndarray, " B"],
        weights: Float[np.ndarray, "L B"] | None = None,
    ) -> Int[np.ndarray, "L B"]:
        """See `Policy.recents`; the published code cuts their number to an integer on its own."""
        recents = super().recents(rows, length, forced, weights)
        layers = self.layers
        if isinstance(layers, OfficialVarianceLayers) and weights is not None:
            budget = self.budgets(length, np.asarray(forced), strict=False)
            sizes = [
                layers.sizes(int(c), int(n), stat)[1]
                for c, n, stat in zip(budget, length, checked(weights).T, strict=True)
            ]
            most = np.maximum(rows - (np.asarray(forced) - self.kept_last), self.kept_last)
            recents = np.clip(np.stack(sizes, axis=1), self.kept_last, most)
        return recents
