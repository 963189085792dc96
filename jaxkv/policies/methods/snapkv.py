"""SnapKV: keep what the end of the prompt attends to; `ObservationWindowPolicy`, base of methods with such a window."""

from typing import Any, Literal

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.attended import (
    GroupReduce,
    MaxPool,
    ObservationWindowAttention,
    Pooling,
    PoolOrder,
)
from jaxkv.policies.layer_budgets import LayerBudgets, UniformLayers
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register


@frozen_dataclass
class ObservationWindowPolicy(BudgetMethod):
    """Base of SnapKV-like policies: the prompt's last `window` queries score the entries before them.

    Attributes:
        window: number of the prompt's last tokens: their queries score the other entries, and they are always kept.
            "question": in `generate` and engines, those of what follows the last blank line of the last message, with
            the turn's end; rounded up to a power of two, at most 128, equal for all prompts of a call.
        sinks: number of first tokens, always kept.
        pooling: pooling of scores over neighbours.
        group: `GroupReduce`, or its value: reduction of query heads' scores to their kv head's.
        order: pooling after the means (published code) or before them (Ada-KV's Algorithm 2).
        layers: layer budgets.
    """

    window: int | Literal["question"] = 32
    sinks: int = 0
    pooling: Pooling = MaxPool(7)
    group: GroupReduce | str = GroupReduce.MEAN
    order: PoolOrder | str = PoolOrder.LAST
    layers: LayerBudgets = UniformLayers()

    scored_by = ObservationWindowAttention

    def compose_with_scorer(self, **parts: Any) -> Parts:
        """Return `Parts` with this policy's scorer, always-kept entries and layer budgets; `parts` overrides fields."""
        return super().compose_with_scorer(**({"layers": self.layers} | parts))


@register
@frozen_dataclass
class SnapKV(ObservationWindowPolicy):
    """Keep the entries that the prompt's last queries attend to most, equally many in each kv head of a layer.

    Scores are pooled over neighbours. All kv heads of a layer keep the same number of entries.

    References:
        Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv:2404.14469.
    """

    paper = "SnapKV, arXiv:2404.14469"
