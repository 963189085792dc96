"""SnapKV: keep what the end of the prompt looks at."""

import dataclasses
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv._values import choice, count
from jaxkv.policies.attended import GroupReduce, MaxPool, Pooling, PoolOrder, WindowAttention
from jaxkv.policies.layers import LayerBudgets, UniformLayers
from jaxkv.policies.parts import Keep, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowMethod(Method):
    """What SnapKV and its descendants share: an observation window that scores the rows before it.

    Attributes:
        window: last tokens of the prompt; they observe and always stay.
        sinks: first tokens that always stay.
        pooling: how scores spread to neighbours.
        group: from query heads to kv head.
        order: pooling after the means (published code) or before them (Ada-KV's Algorithm 2).
        allocation: budgets of the layers.
    """

    window: int = 32
    sinks: int = 0
    pooling: Pooling = MaxPool(7)
    group: GroupReduce | str = GroupReduce.MEAN
    order: PoolOrder | str = PoolOrder.LAST
    allocation: LayerBudgets = UniformLayers()

    def _check(self) -> None:
        count(self, "window", 1, "observe at least 1 query")
        count(self, "sinks", 0, "give 0 or more first tokens")
        choice(self, "group", GroupReduce)
        choice(self, "order", PoolOrder)
        pools = callable(self.pooling) and not isinstance(self.pooling, type)
        require(pools, "pooling", self.pooling, "give MaxPool(7), AvgPool(5) or NoPool()")
        budgets = isinstance(self.allocation, LayerBudgets) and not isinstance(self.allocation, type)
        require(budgets, "allocation", self.allocation, "give budgets over layers, LinearLayers() say")

    def observed(self, **parts: Any) -> Parts:
        """Scores by the attention of the window's queries, and the parts that differ between methods."""
        scorer = WindowAttention(window=self.window, pooling=self.pooling, group=self.group, order=self.order)
        keep = Keep(sinks=self.sinks, window=self.window)
        return self.compose(scorer=scorer, keep=keep, layers=self.allocation, **parts)

    def parts(self) -> Parts:
        """The window's scores, with the same number of rows in each head."""
        return self.observed()


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(WindowMethod):
    """The rows that the prompt's last queries attend to most, the same number in every layer and head.

    References:
        Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, arXiv:2404.14469.
    """

    budget: int | float | None = 1024

    paper: ClassVar[str] = "SnapKV, arXiv:2404.14469"
