"""HeadKV: budgets of kv heads by how important each was found to be, the same for every prompt."""

import dataclasses

from jaxkv._errors import require
from jaxkv.policies.head_shares import Importance
from jaxkv.policies.layer_budgets import UniformLayers
from jaxkv.policies.methods.snapkv import WindowPolicy
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadKV(WindowPolicy):
    """Keeps entries as SnapKV does, more in heads found important for retrieval, under one budget over all layers.

    Attributes:
        scores: importance of each layer's query or kv heads, `[L][H]`, or a JSON file of it; None: all alike. One row
            for every layer of the model; those of layers with a window are ignored.
        beta: 1/beta of the entries go by the scores, the rest evenly: larger is more even.

    References:
        Fu et al., Not All Heads Matter, arXiv:2410.19258; a kv head takes the sum of its query heads' shares.
    """

    scores: str | tuple[tuple[float, ...], ...] | None = None
    beta: int | float = 1.2

    paper = "HeadKV, arXiv:2410.19258"

    def parts(self) -> Parts:
        """Returns SnapKV's `Parts`; if `scores` of head importance are given, with layer and head budgets by them."""
        if self.scores is None:
            # All heads are alike: `beta` is checked, and changes nothing.
            self.part(Importance, scores=((1.0,),))
            return self.observed()
        remedy = "leave it out: scores say it"
        require(self.layers == UniformLayers(), "layers", self.layers, remedy)
        budgets = self.part(Importance)
        return self.observed(layers=budgets, heads=budgets)
