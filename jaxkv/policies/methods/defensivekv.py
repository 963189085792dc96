"""DefensiveKV: keep entries that any query of the window may need; heads of a layer, or of all layers, compete."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.head_budgets import AdaptiveHeads
from jaxkv.policies.layer_budgets import GlobalLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import WorstAttention


@register
@frozen_dataclass
class DefensiveKV(BudgetMethod):
    """Keep entries by the largest attention of any window query times value norm; a layer's kv heads compete.

    Worst-case attention is the largest of any query in the window.

    Attributes:
        window: number of the prompt's last tokens: their queries score the other entries, and they are always kept.
        sinks: number of first tokens, always kept.
        kernel: number of neighbours over which attention is averaged.
        stage: a first stage of entries kept at any score: "mass", those of most attention that with the window
            hold 90 % of it; "published", the released code's arithmetic; or "none".
        capacity: on a mesh, most entries in the heads of one device, over their even share.

    References:
        DefensiveKV, arXiv:2510.13334.
    """

    window: int = 32
    sinks: int = 0
    kernel: int = 5
    stage: str = "none"
    capacity: float = 1.5

    paper = "DefensiveKV, arXiv:2510.13334"

    scored_by = WorstAttention

    def build_policy_parts(self) -> Parts:
        """Return DefensiveKV's `Parts`: largest attention times value norm; kv heads of a layer compete."""
        heads = self.create_part(AdaptiveHeads, alpha=0.0)
        return self.compose_with_scorer(heads=heads)


@register
@frozen_dataclass
class LayerDefensiveKV(DefensiveKV):
    """Keep entries by largest window attention times value norm (DefensiveKV); one budget for all layers' kv heads.

    Entries that can no longer win are evicted as later layers run: prefill takes the memory of the budget's entries of
    all layers, twice while they are packed, and of one full layer.

    References:
        DefensiveKV, arXiv:2510.13334.
    """

    paper = "LayerDefensiveKV, arXiv:2510.13334"

    def build_policy_parts(self) -> Parts:
        """Return DefensiveKV's `Parts` with one budget, for which the kv heads of all layers compete."""
        return super().build_policy_parts().replace(layers=GlobalLayers())
