"""CaM: values of tokens on the way out fold into those of the tokens behind them."""

import dataclasses
from typing import Any, ClassVar

from jaxkv._errors import require
from jaxkv._values import count
from jaxkv.policies.merging import ValueMerge
from jaxkv.policies.protocol import Settings
from jaxkv.policies.scorers import NoPool, Pooling
from jaxkv.policies.snapkv import WindowPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaM(WindowPolicy):
    """SnapKV's choice without pooling, from rows whose values were folded forward first.

    Attributes:
        start: first share of the prompt that keeps its values to itself.
        expected: fold the expected part of each value instead of drawing by the call's key.

    References:
        Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024; in the form of
        KVCache-Factory, on a copy of the values.
    """

    budget: int | float | None = 1024
    pooling: Pooling = NoPool()
    start: float = 0.1
    expected: bool = False

    paper: ClassVar[str] = "CaM, ICML 2024"

    def __post_init__(self) -> None:
        count(self, "window", 1, "observe at least 1 query")
        mine = self._merge
        for name in ("start", "expected"):
            object.__setattr__(self, name, getattr(mine, name))
        require(self.merge is None or self.merge == mine, "merge", self.merge, f"CaM has its own, {mine}: leave it out")
        super().__post_init__()

    @property
    def _merge(self) -> ValueMerge:
        return ValueMerge(window=self.window, start=self.start, expected=self.expected)

    @property
    def settings(self) -> Settings:
        """With its own way of merging."""
        return dataclasses.replace(super().settings, merge=self._merge)

    def meaning(self) -> dict[str, Any]:
        """Its own way of merging follows from other fields."""
        return super().meaning() | {"merge": None}
