"""Ada-KV: the heads of a layer compete for its entries."""

import dataclasses

from jaxkv.policies.head_budgets import AdaptiveHeads, ProtectedHeads
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import Wrapper


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(Wrapper):
    """Keeps the base policy's best entries, with the kv heads of a layer competing for the layer's budget.

    `AdaKV(budget=256)` is Ada-SnapKV; `AdaKV(base=PyramidKV(budget=256))` is Ada-Pyramid. Segments of different length
    share the layer's pool, so the cache weighs as much as the base policy's.

    Attributes:
        base: the policy whose scores, window and layer budgets are used.
        heads: AdaptiveHeads (Algorithm 1 and its floor) or ProtectedHeads (kvpress' meaning of the floor).
        alpha: the guaranteed share of the uniform budget, when `heads` is left out.
        capacity: on a mesh, entries of a layer that the heads of one device may hold, over their even share, when
            `heads` is left out. Pools are sized by it; entries beyond it go to other devices' heads, and are counted.

    References:
        Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference,
        arXiv:2407.11550, algorithms 1 and 2.
    """

    alpha: float = 0.2
    capacity: float = 1.5
    heads: AdaptiveHeads | ProtectedHeads | None = None

    paper = "Ada-KV, arXiv:2407.11550"

    usual = "snapkv"

    def wrap(self, base: Parts) -> Parts:
        """Returns the base's `Parts` with `AdaptiveHeads` or the given safeguard: kv heads compete within a layer."""
        return self.with_heads(base, self.competing(self.heads))
