"""Ada-KV: the kv heads of a layer compete for its entries."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.head_budgets import AdaptiveHeads, ProtectedHeads
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register
from jaxkv.policies.wrapper import PolicyWrapper


@register
@frozen_dataclass
class AdaKV(PolicyWrapper):
    """Keep the base policy's best entries; a layer's kv heads compete for all but the share `alpha`, divided evenly.

    `AdaKV(budget=256)` is Ada-SnapKV; `AdaKV(base=PyramidKV(budget=256))` is Ada-Pyramid. Segments of different length
    share the layer's pool: the cache has the size of the base policy's.

    Attributes:
        base: the policy whose scores, window and layer budgets are used.
        heads: AdaptiveHeads (Algorithm 1 and its floor) or ProtectedHeads (kvpress' meaning of the floor).
        alpha: guaranteed share of the uniform budget, if `heads` is not given.
        capacity: on a mesh, most entries of a layer in the heads of one device, over their even share, if `heads` is
            not given. It sets the size of pools; entries beyond it go to other devices' heads, and are counted.

    References:
        Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference,
        arXiv:2407.11550, algorithms 1 and 2.
    """

    alpha: float = 0.2
    capacity: float = 1.5
    heads: AdaptiveHeads | ProtectedHeads | None = None

    paper = "Ada-KV, arXiv:2407.11550"

    usual = "snapkv"

    def replace_base_parts(self, base: Parts) -> Parts:
        """Return the base's `Parts` with `heads` (`AdaptiveHeads` if None); ValueError if base heads aren't uniform."""
        return self.replace_head_budgets(base, self.resolve_adaptive_heads(self.heads))
