"""HeadKV: head budgets by each head's measured importance, the same for every prompt."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.head_shares import ImportanceBudgets
from jaxkv.policies.layer_budgets import UniformLayers
from jaxkv.policies.methods.snapkv import ObservationWindowPolicy
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register


@register
@frozen_dataclass
class HeadKV(ObservationWindowPolicy):
    """Keep entries by window attention (SnapKV); heads' measured importance, if given, sets layer and head budgets.

    All layers and heads share one budget.

    Attributes:
        scores: importance of each layer's query or kv heads, `[L][H]`, or a JSON file of it; None: all alike. One row
            for every layer of the model; those of sliding-window layers are ignored.
        beta: the share 1/beta of entries is divided by the scores, the rest evenly: larger is more even.

    References:
        Fu et al., Not All Heads Matter, arXiv:2410.19258; a kv head gets the sum of its query heads' shares.
    """

    scores: str | tuple[tuple[float, ...], ...] | None = None
    beta: int | float = 1.2

    paper = "HeadKV, arXiv:2410.19258"

    def build_policy_parts(self) -> Parts:
        """Return SnapKV's `Parts`; heads' `scores`, if given, set all budgets (ValueError with `layers`)."""
        if self.scores is None:
            # All heads are alike: `beta` is checked, but has no effect.
            self.create_part(ImportanceBudgets, scores=((1.0,),))
            return self.compose_with_scorer()
        remedy = "scores set the layer budgets: leave it out"
        require(self.layers == UniformLayers(), "layers", self.layers, remedy)
        budgets = self.create_part(ImportanceBudgets)
        return self.compose_with_scorer(layers=budgets, heads=budgets)
