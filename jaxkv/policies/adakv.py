"""Ada-KV: the heads of a layer compete for its rows."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.policies.base import Policy
from jaxkv.policies.select import AdaptiveHeads, HeadBudgets, ProtectedHeads, TwoStageHeads, UniformHeads
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.wrapped import Wrapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(Wrapped):
    """Head-wise adaptive budgets over any policy that keeps the best rows.

    `AdaKV(budget=256)` is Ada-SnapKV; `AdaKV(base=PyramidKV(budget=256))` is Ada-Pyramid. Segments of different length
    share the layer's pool, so the cache weighs as much as the base policy's.

    Attributes:
        base: the policy whose scores, window and layer budgets are used.
        safeguard: AdaptiveHeads (Algorithm 1 and its floor) or ProtectedHeads (kvpress' meaning of the floor).
        alpha: the guaranteed share of the uniform budget, when `safeguard` is left out.

    References:
        Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference,
        arXiv:2407.11550, algorithms 1 and 2.
    """

    alpha: float = 0.2
    safeguard: AdaptiveHeads | ProtectedHeads | None = None

    paper: ClassVar[str] = "Ada-KV, arXiv:2407.11550"

    def __post_init__(self) -> None:
        if self.safeguard is None:
            object.__setattr__(self, "safeguard", AdaptiveHeads(alpha=self.alpha))
        super().__post_init__()

    def _default(self) -> Policy:
        return SnapKV() if self.budget is None else SnapKV(budget=self.budget)

    def _check(self, base: Policy) -> None:
        require(not isinstance(base, AdaKV), "base", base, "give a policy that drops rows, SnapKV() say")
        inner = base.heads.budgets if isinstance(base.heads, TwoStageHeads) else base.heads
        require(isinstance(inner, UniformHeads), "base", base, "its heads have budgets of their own already")
        require(not base.rolling, "base", base, "rolling positions need the same rows in every head")

    @property
    def heads(self) -> HeadBudgets:
        """The safeguarded competition, within the base's two stages if it has them."""
        assert self.safeguard is not None
        its = self._base.heads
        return dataclasses.replace(its, budgets=self.safeguard) if isinstance(its, TwoStageHeads) else self.safeguard
