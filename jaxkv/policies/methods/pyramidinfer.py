"""PyramidInfer: fewer entries from layer to layer, each layer's chosen among those of the layer below."""

import dataclasses

from jaxkv._errors import require
from jaxkv.policies.attended import NoPool, Pooling
from jaxkv.policies.head_budgets import SharedHeads
from jaxkv.policies.layer_budgets import LayerBudgets, LinearLayers
from jaxkv.policies.methods.snapkv import WindowPolicy
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class PyramidInfer(WindowPolicy):
    """Keep entries by window attention, each layer a subset of the one below.

    All heads of a layer keep the same positions.

    Prefill attends to the whole prompt: hidden states of evicted tokens run through all layers. This saves the paper's
    memory, not its prefill time.

    Attributes:
        layers: schedule of layer budgets; it must not grow.

    References:
        Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference, arXiv:2405.12532,
        section 3.3; recent tokens count equally.
    """

    pooling: Pooling = NoPool()
    layers: LayerBudgets = LinearLayers(beta=20.0)

    paper = "PyramidInfer, arXiv:2405.12532"

    def parts(self) -> Parts:
        """Return `Parts`: scores by the window's attention; heads share a subset of the lower layer's entries."""
        parts = self.observed(heads=SharedHeads(), nested=True)
        remedy = "give a schedule, such as LinearLayers()"
        require(not parts.layers.from_scores, "layers", self.layers, remedy)
        return parts
