"""Ada-KV: the heads of a layer compete for its rows."""

import dataclasses

from jaxkv.policies.heads import AdaptiveHeads, ProtectedHeads
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Wrapper


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

    alpha: float = 0.2
    capacity: float = 1.5
    safeguard: AdaptiveHeads | ProtectedHeads | None = None

    paper = "Ada-KV, arXiv:2407.11550"

    usual = "snapkv"

    def wrap(self, base: Parts) -> Parts:
        """Returns the base's `Parts` with `AdaptiveHeads` or the given safeguard: kv heads compete within a layer."""
        return self.with_heads(base, self.competing(self.safeguard))
