"""LU-KV: head budgets by curves from a file, which give each head's evicted share for each total share."""

from jaxkv._checks import validate_optional_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.checks import ShareBudget
from jaxkv.policies.head_budgets import unwrap_head_budgets
from jaxkv.policies.head_scores import load_eviction_curves
from jaxkv.policies.head_shares import CurveBudgets
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import PolicyWrapper

# Number of shares in a curve: 1 % to 99 %.
_SHARES = 99


@register
@frozen_dataclass
class LUKV(PolicyWrapper):
    """Keep the base policy's best entries, with layer and head budgets from the model's measured curves, if given.

    Curves belong to one model and one scorer. The curve nearest to the budget is used, and its shares are scaled to the
    budget: sums over heads are exact. Entries that a head cannot use go to the layer's other heads, by score.
    Always-kept entries, such as the base's sinks, come first: the shares are of the others.

    Attributes:
        curves: share of entries that each kv head evicts if all together evict 1 %, 2 %, to 99 %: a .npy file of
            `[99, L, K]` numbers in [0, 1], as published, or such a table; None: all heads alike. L counts every layer
            of the model; curves of sliding-window layers are ignored.
        base: the policy whose scores are used, and its budget, a share; by default ExpectedAttention. The published
            curves are for `base=ExpectedAttention(budget=..., epsilon=0.02)`.

    References:
        LU-KV, arXiv:2602.08585; curves as kvpress reads them.
    """

    curves: str | tuple[tuple[tuple[float, ...], ...], ...] | None = None

    paper = "LU-KV, arXiv:2602.08585"

    usual = "expectedattention"

    def _check_fields(self) -> None:
        validate_optional_field(self, "curves", load_eviction_curves, _SHARES)
        super()._check_fields()

    def check_base_policy(self, base: Policy, parts: Parts) -> None:
        """Raise ValueError if the base policy's budget is not a share and curves are given."""
        remedy = "curves are for shares: give a share of the prompt, such as 0.25"
        require(
            self.curves is None or isinstance(parts.budget, ShareBudget),
            "budget",
            parts.budget,
            remedy,
        )

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base's `Parts`, uniform layer and head budgets replaced by the curve nearest its share, if any."""
        heads = unwrap_head_budgets(base.heads)
        layers = base.layers
        if self.curves is not None and isinstance(base.budget, ShareBudget):
            nearest = round((1 - base.budget.value) * (_SHARES + 1))
            dropped = self.curves[min(max(nearest, 1), _SHARES) - 1]
            assert not isinstance(dropped, str)
            kept = tuple(tuple(1 - each for each in of_layer) for of_layer in dropped)
            heads = layers = CurveBudgets(scores=kept)
        return self.replace_layer_budgets(self.replace_head_budgets(base, heads), layers)
