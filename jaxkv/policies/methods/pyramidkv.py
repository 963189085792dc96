"""PyramidKV: many entries in lower layers, few in upper ones."""

from typing import Literal

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.layer_budgets import LayerBudgets, LinearLayers
from jaxkv.policies.methods.snapkv import ObservationWindowPolicy
from jaxkv.policies.registry import register


@register
@frozen_dataclass
class PyramidKV(ObservationWindowPolicy):
    """Keep entries by window attention (SnapKV), with layer budgets that by default fall from bottom to top layers.

    The average over layers is exactly the budget.

    Attributes:
        layers: schedule of layer budgets: LinearLayers (the paper's), GeometricLayers, ExponentialLayers,
            EntropyLayers, GiniLayers, or OfficialLayers and KVPressLayers, which reproduce published arithmetic.

    References:
        Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv:2406.02069,
        section 4.2.
    """

    window: int | Literal["question"] = 8
    layers: LayerBudgets = LinearLayers(beta=20.0)

    paper = "PyramidKV, arXiv:2406.02069"
