"""CaM: values of tokens on the way out fold into those of the tokens behind them."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.policies.merging import ValueMerge
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
        require(self.merge is None or isinstance(self.merge, ValueMerge), "merge", self.merge, "CaM has its own")
        object.__setattr__(self, "merge", ValueMerge(window=self.window, start=self.start, expected=self.expected))
        super().__post_init__()
