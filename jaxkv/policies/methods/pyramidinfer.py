"""PyramidInfer: fewer entries from layer to layer, each layer's chosen among those of the layer below."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.attended import NoPool, Pooling
from jaxkv.policies.head_budgets import SharedHeads
from jaxkv.policies.layer_budgets import LayerBudgets, LinearLayers
from jaxkv.policies.methods.snapkv import ObservationWindowPolicy
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register


@register
@frozen_dataclass
class PyramidInfer(ObservationWindowPolicy):
    """Keep entries by window attention, the same in all kv heads; each layer keeps a subset of the layer below's.

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

    def build_policy_parts(self) -> Parts:
        """Return `Parts`: heads keep one subset of the layer below's; ValueError if layer budgets depend on scores."""
        parts = self.compose_with_scorer(heads=SharedHeads(), nested=True)
        remedy = "give a schedule, such as LinearLayers()"
        require(not parts.layers.depends_on_scores, "layers", self.layers, remedy)
        return parts
