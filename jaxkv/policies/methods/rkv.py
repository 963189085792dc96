"""R-KV: keep rows that the last queries attend to and whose keys other rows do not repeat, also while decoding."""

import dataclasses

from jaxkv.policies.attended import MaxPool, Pooling
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.redundant import Redundancy
from jaxkv.policies.registry import register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RKV(BudgetMethod):
    """Keeps the rows that the last queries attend to and whose keys others do not repeat, of prompt and answer alike.

    A prompt above the budget is compressed as well, where the paper compresses only while decoding. The released code
    differs in two points: `mix_lambda` is 0.07, and rows that resemble no other leave out the first row's cosine.

    Attributes:
        window: number of last tokens: their queries score the other rows, and they are always kept.
        sinks: first tokens that always stay.
        pooling: how attention spreads to neighbours.
        mix_lambda: weight of attention; that of redundancy is 1 minus it.
        threshold: cosine above which two keys resemble each other.
        every: compress again after this many more tokens, the paper's buffer: the cache never holds more than the
            budget and this many rows. None compresses the prompt only.

    References:
        Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv:2505.24133.
    """

    window: int = 8
    sinks: int = 0
    pooling: Pooling = MaxPool(7)
    mix_lambda: float = 0.1
    threshold: float = 0.5
    every: int | None = 128

    paper = "R-KV, arXiv:2505.24133"

    scored_by = Redundancy
