"""`Row`, one policy of the policy table: how it is made, its oracle, and which promises it gives."""

import dataclasses
from collections.abc import Callable

from table_oracles import Oracle

from jaxkv import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One policy of the table.

    Attributes:
        name: for test ids.
        make: from a budget to the policy; keywords go to where budgets are given (the base, for AdaKV).
        oracle: independent arithmetic of the same selection.
        sinks: first positions that must stay.
        window: last positions that must stay.
        protect: spans that must stay.
        uniform: every head of a layer keeps as many rows.
        level: every layer keeps as many rows.
        exact: rows over all layers sum to L times the budget.
        rolling: keys are stored before RoPE.
        keeps_all: there is no budget.
        evicts: a row goes for every new one beyond the budget.
        merges: kept rows are not the prompt's own.
        like: a row that leaves pools of the same kind; tests of what happens after prefill need only that one.
    """

    name: str
    make: Callable[..., Policy]
    oracle: Oracle
    sinks: int = 0
    window: int = 0
    protect: tuple[tuple[int, int], ...] = ()
    uniform: bool = True
    level: bool = True
    exact: bool = True
    rolling: bool = False
    keeps_all: bool = False
    evicts: bool = False
    merges: bool = False
    like: str = ""

    def policy(self, budget: int | float) -> Policy:
        """The policy at this budget; ratios that come out too small are raised to what must stay."""
        return self.make(budget, min_budget="clamp" if isinstance(budget, float) else "raise")
