"""CriticalKV: choose half of a head's entries by score alone, the others by score and value."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.head_budgets import (
    SelectionOrder,
    TwoStageHeads,
    add_score_threshold,
    get_score_threshold,
    heads_share_positions,
    remove_score_threshold,
)
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import PolicyWrapper


@register
@frozen_dataclass
class CriticalKV(PolicyWrapper):
    """Keep the share `first` of a head's entries by the base's score, the rest by score times value norm.

    Half of each head's entries follow the score alone. The value norm is the L1 norm after the output projection.

    `CriticalKV(base=AdaKV(budget=256))` and `AdaKV(base=CriticalKV(budget=256))` both let heads compete for entries
    first.

    Attributes:
        first: share chosen by score alone.
        epsilon: added to scores in the second stage.

    References:
        Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
        arXiv:2502.03805, algorithm 1.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    paper = "CriticalKV, arXiv:2502.03805"

    usual = "snapkv"
    once = True

    def check_base_policy(self, base: Policy, parts: Parts) -> None:
        """Raise ValueError if the base's head budgets read value norms already, or keep whole chunks of entries."""
        require(not parts.heads.needs_value_norms, "base", base, "it reads value norms already")
        chunks = parts.heads.selection_order is SelectionOrder.OTHER and heads_share_positions(
            parts.heads
        )
        remedy = (
            "it keeps whole chunks, not the best entries: give a policy that chooses single entries"
        )
        require(not chunks, "base", base, remedy)

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base's `Parts`, head budgets wrapped in `TwoStageHeads`: by score, then score * value norm."""
        heads = self.create_part(TwoStageHeads, budgets=remove_score_threshold(base.heads))
        return base.replace(heads=add_score_threshold(heads, get_score_threshold(base.heads)))
