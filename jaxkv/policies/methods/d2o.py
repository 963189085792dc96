"""D2O: layer budgets by variance, eviction at every step, and evicted entries merged into similar kept ones."""

from typing import Any

from jaxkv._checks import is_strictly_equal, validate_bool, validate_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.folding import Merge, MergeDecision, MergeWeights, ThresholdScope
from jaxkv.policies.layer_budgets import LayerBudgets
from jaxkv.policies.merger import Merger
from jaxkv.policies.methods.heavy import HeavyHitterPolicy
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register
from jaxkv.policies.variance import OfficialVarianceLayers, VarianceLayers

# Values of the published code.
_OFFICIAL: dict[str, Any] = {
    "recent": 0.5,
    "merge": Merge(
        beta=0.5,
        weights=MergeWeights.SCATTER_MEAN,
        scope=ThresholdScope.LAYER,
        decision=MergeDecision.SHARED_POSITION,
    ),
    "layers": OfficialVarianceLayers(),
}


@register
@frozen_dataclass
class D2O(HeavyHitterPolicy):
    """Keep heavy hitters and recent tokens, layer budgets by attention variance; merge evicted entries into kept ones.

    Heavy hitters and recent tokens are 3:1, after four sinks. Layers of even attention get more entries.
    `D2O(merge=None)` evicts without merging, `D2O(layers=UniformLayers())` gives all layers as many entries: the
    ablations of the paper's Table 6. A prompt shorter than a budget in entries is not divided: all its layers may grow
    to that budget.

    Attributes:
        layers: layer budgets; those by variance share one pool, so that their sum is exact.
        official: use the published code's arithmetic, not the paper's. Three layers keep the prompt, sizes are
            truncated, and heavy hitters (including sinks) to recent tokens are 1:1. Merging has one threshold per layer
            with beta 0.5, decides for heads together, and weighs by cosines. Unlike that code, scores are per kv head,
            and compression follows the prompt instead of the first new token.

    References:
        Wan et al., D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
        Models, arXiv:2406.13035, sections 4.1 and 4.2.
    """

    sinks: int = 4
    recent: float = 0.25
    merge: Merger | None = Merge()
    layers: LayerBudgets = VarianceLayers()
    official: bool = False

    paper = "D2O, arXiv:2406.13035"

    def _check_fields(self) -> None:
        validate_field(self, "official", validate_bool)
        for name, value in _OFFICIAL.items():
            mine = getattr(self, name)
            same = is_strictly_equal(mine, getattr(D2O, name)) or is_strictly_equal(mine, value)
            require(same or not self.official, name, mine, "official=True sets it: leave it out")
        super()._check_fields()

    def build_policy_parts(self) -> Parts:
        """Return D2O's `Parts`: cumulative attention, layer budgets and merger; as published if `official`."""
        of = _OFFICIAL if self.official else vars(self)
        layers = of["layers"]
        merge = of["merge"]
        return self.compose_eviction_parts(recent=of["recent"], layers=layers, merge=merge)
