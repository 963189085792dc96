"""GlobalBudget: one budget for the kv heads of all layers, around any policy that keeps the best entries."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.head_budgets import get_competing_budgets
from jaxkv.policies.layer_budgets import GlobalLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import PolicyWrapper


@register
@frozen_dataclass
class GlobalBudget(PolicyWrapper):
    """Keep the base policy's best entries; the kv heads of all layers compete for one budget.

    One top-k selects them, and the sum over layers is exact. `GlobalBudget(base=DefensiveKV(budget=0.25))` is
    LayerDefensiveKV. Entries that can no longer win are evicted as later layers run: prefill takes the memory of the
    budget's entries of all layers, twice while they are packed, and of one full layer. Prefill holds the full cache for
    bases that merge evicted entries or run over the prompt twice. The same holds on a mesh if `alpha` or two stages
    meet a `capacity` below the number of kv devices.

    Attributes:
        base: the policy whose scores and window are used, and its heads' guaranteed share and capacity.
        alpha: for a base with equal head budgets, the guaranteed share of each head's even part.
        capacity: for such a base, most entries in the heads of one device on a mesh, over their even share.

    References:
        DefensiveKV, arXiv:2510.13334 (LayerDefensiveKV); KVzip, arXiv:2505.23416, section 3.
    """

    alpha: float = 0.0
    capacity: float = 1.5

    paper = "LayerDefensiveKV, arXiv:2510.13334"

    usual = "expectedattention"

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base's `Parts` with `GlobalLayers`, and with `AdaptiveHeads` unless its heads compete already."""
        own = get_competing_budgets(base.heads)
        heads = self.resolve_adaptive_heads(own)
        mine = self.replace_head_budgets(base, heads) if own is None else base
        return self.replace_layer_budgets(mine, GlobalLayers())
