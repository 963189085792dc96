"""Ada-KV: the heads of a layer compete for its rows."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.policies.heads import AdaptiveHeads, HeadBudgets, ProtectedHeads, TwoStageHeads, UniformHeads
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Wrapper

_ALPHA, _CAPACITY = 0.2, 1.5


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(Wrapper):
    """Head-wise adaptive budgets over any policy that keeps the best rows.

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
        given, mine = self.safeguard, AdaptiveHeads(alpha=self.alpha, capacity=self.capacity)
        spreads = isinstance(given, HeadBudgets) and not isinstance(given, type)
        require(given is None or spreads, "safeguard", given, "give AdaptiveHeads(...) or ProtectedHeads(...), or None")
        for name, usual in (("alpha", _ALPHA), ("capacity", _CAPACITY)):
            number = getattr(mine, name)
            object.__setattr__(self, name, number)
            same = given is None or number in (usual, getattr(given, name, usual))
            require(same, name, number, f"the safeguard is {given!r}: give it there only")
        super()._check()

    def check_base(self, base: Method, parts: Parts) -> None:
        """Heads compete where none of them has a budget of its own yet, and each may keep other rows."""
        require(not isinstance(base, AdaKV), "base", base, "give a policy that drops rows, SnapKV() say")
        inner = parts.heads.budgets if isinstance(parts.heads, TwoStageHeads) else parts.heads
        require(isinstance(inner, UniformHeads), "base", base, "its heads have budgets of their own already")
        require(not parts.rolling, "base", base, "rolling positions need the same rows in every head")

    def wrap(self, base: Parts) -> Parts:
        """The safeguarded competition of heads, within the base's two stages if it has them."""
        own = AdaptiveHeads(alpha=self.alpha, capacity=self.capacity)
        mine: HeadBudgets = own if self.safeguard is None else self.safeguard
        if isinstance(base.heads, TwoStageHeads):
            mine = dataclasses.replace(base.heads, budgets=mine)
        return dataclasses.replace(base, heads=mine)
