"""Ada-KV: the heads of a layer compete for its rows."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.policies.base import Policy, Scorer
from jaxkv.policies.budgets import LayerBudgets
from jaxkv.policies.full import FullKV
from jaxkv.policies.select import AdaptiveHeads, HeadBudgets, ProtectedHeads, UniformHeads
from jaxkv.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(Policy):
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

    base: Policy | None = None
    alpha: float = 0.2
    safeguard: AdaptiveHeads | ProtectedHeads | None = None

    paper: ClassVar[str] = "Ada-KV, arXiv:2407.11550"

    def __post_init__(self) -> None:
        base = self.base
        if base is None:
            base = SnapKV() if self.budget is None else SnapKV(budget=self.budget)
            object.__setattr__(self, "base", base)
        require(not isinstance(base, (AdaKV, FullKV)), "base", base, "give a policy that drops rows, SnapKV() say")
        require(isinstance(base.heads, UniformHeads), "base", base, "its heads have budgets of their own already")
        require(not base.rolling, "base", base, "rolling positions need the same rows in every head")
        for name in ("budget", "protect", "min_budget"):
            mine, its = getattr(self, name), getattr(base, name)
            default = {f.name: f.default for f in dataclasses.fields(Policy)}[name]
            require(mine in (default, its), name, mine, f"the base says {its!r}: give it there only")
            object.__setattr__(self, name, its)
        if self.safeguard is None:
            object.__setattr__(self, "safeguard", AdaptiveHeads(alpha=self.alpha))
        super().__post_init__()

    @property
    def _base(self) -> Policy:
        assert self.base is not None
        return self.base

    @property
    def kept_first(self) -> int:
        """The base's sinks."""
        return self._base.kept_first

    @property
    def kept_last(self) -> int:
        """The base's window."""
        return self._base.kept_last

    @property
    def scorer(self) -> Scorer | None:
        """The base's scorer."""
        return self._base.scorer

    @property
    def layers(self) -> LayerBudgets:
        """The base's layer budgets."""
        return self._base.layers

    @property
    def heads(self) -> HeadBudgets:
        """The safeguarded competition."""
        assert self.safeguard is not None
        return self.safeguard
