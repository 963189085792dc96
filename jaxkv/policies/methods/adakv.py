"""Ada-KV: the heads of a layer compete for its rows."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.policies.heads import (
    AdaptiveHeads,
    HeadBudgets,
    ProtectedHeads,
    UniformHeads,
    inner_budgets,
    within_stages,
)
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Wrapper

_ALPHA, _CAPACITY = 0.2, 1.5


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(Wrapper):
    """Keeps the base policy's best rows, with the kv heads of a layer competing for the layer's budget.

    `AdaKV(budget=256)` is Ada-SnapKV; `AdaKV(base=PyramidKV(budget=256))` is Ada-Pyramid. Segments of different length
    share the layer's pool, so the cache weighs as much as the base policy's.

    Attributes:
        base: the policy whose scores, window and layer budgets are used.
        safeguard: AdaptiveHeads (Algorithm 1 and its floor) or ProtectedHeads (kvpress' meaning of the floor).
        alpha: the guaranteed share of the uniform budget, when `safeguard` is left out.
        capacity: on a mesh, rows of a layer that the heads of one device may hold, over their even share, when
            `safeguard` is left out. Pools are sized by it; rows beyond it go to other devices' heads, and are counted.

    References:
        Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference,
        arXiv:2407.11550, algorithms 1 and 2.
    """

    alpha: float = _ALPHA
    capacity: float = _CAPACITY
    safeguard: AdaptiveHeads | ProtectedHeads | None = None

    paper: ClassVar[str] = "Ada-KV, arXiv:2407.11550"

    usual: ClassVar[str] = "snapkv"

    def _check(self) -> None:
        given, usual = self.safeguard, {"alpha": _ALPHA, "capacity": _CAPACITY}
        self._adopt(AdaptiveHeads(alpha=self.alpha, capacity=self.capacity), *usual)
        for name, default in usual.items():
            mine = getattr(self, name)
            same = given is None or mine in (default, getattr(given, name, default))
            require(same, name, mine, f"the safeguard is {given!r}: give it there only")
        super()._check()

    def check_base(self, base: Method, parts: Parts) -> None:
        """Checks the base policy; raises ValueError if its kv heads have unequal budgets or must keep the same rows."""
        uniform = isinstance(inner_budgets(parts.heads), UniformHeads)
        require(uniform, "base", base, "its heads have budgets of their own already")

    def wrap(self, base: Parts) -> Parts:
        """Returns the base's `Parts` with `AdaptiveHeads` or the given safeguard: kv heads compete within a layer."""
        own = AdaptiveHeads(alpha=self.alpha, capacity=self.capacity)
        mine: HeadBudgets = own if self.safeguard is None else self.safeguard
        return base.replace(heads=within_stages(base.heads, mine))
