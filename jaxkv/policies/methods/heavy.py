"""Policies that live on the attention each row receives: H2O, RoCo and TOVA. They drop a row for every new token."""

import dataclasses
import enum
from typing import Any, ClassVar

from jaxkv._values import choice, count, flag, real
from jaxkv.policies.attended import CumulativeAttention, LastAttention
from jaxkv.policies.heads import SharedHeads, UniformHeads
from jaxkv.policies.parts import Keep, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.scorer import Scorer


class Mode(enum.Enum):
    """STREAMING drops a row for every token drawn beyond the budget; PREFILL compresses the prompt and then appends."""

    STREAMING = "streaming"
    PREFILL = "prefill"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Streaming(Method):
    """What these policies share.

    Attributes:
        mode: `Mode`, or its value.
        sinks: first tokens that always stay, within the budget.
    """

    budget: int | float | None = 1024
    mode: Mode | str = Mode.STREAMING
    sinks: int = 0

    def _check(self) -> None:
        choice(self, "mode", Mode)
        count(self, "sinks", 0, "give 0 or more first tokens")

    def attended(self, scorer: Scorer, *, recent: float = 0.0, **parts: Any) -> Parts:
        """Scores by attention, which go on while tokens are drawn; of the newest token nothing is known yet."""
        keep = Keep(sinks=self.sinks, window=1, recent=recent)
        evict = scorer.rank if self.mode is Mode.STREAMING else None
        return self.compose(scorer=scorer, keep=keep, evict=evict, **parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyMethod(_Streaming):
    """Heavy hitters by cumulative attention, and the most recent tokens.

    Attributes:
        recent: the recent tokens' share of what sinks leave of the budget; the rest goes to heavy hitters.
    """

    recent: float = 0.5

    def _check(self) -> None:
        real(self, "recent", "give a share between 0 and 1", low=0, high=1)
        super()._check()

    def parts(self) -> Parts:
        """Attention received so far."""
        return self.attended(CumulativeAttention(), recent=self.recent)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(HeavyMethod):
    """Heavy hitters and recent tokens, half and half; one row goes for each that comes.

    References:
        Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models,
        arXiv:2306.14048, algorithm 1; kv heads take the mean of their query heads' scores.
    """

    paper: ClassVar[str] = "H2O, arXiv:2306.14048"


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoCo(HeavyMethod):
    """H2O by mean attention: what a row received, over the number of queries that could see it.

    References:
        Ren and Zhu, On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference,
        arXiv:2402.06262, the mean attention score; rows are protected by recency, not by their deviation.
    """

    paper: ClassVar[str] = "RoCo, arXiv:2402.06262"

    def parts(self) -> Parts:
        """Mean attention received."""
        return self.attended(CumulativeAttention(mean=True), recent=self.recent)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TOVA(_Streaming):
    """Whatever the latest token attends to least goes, the same position in all heads of a layer.

    Attributes:
        per_head: let each kv head drop its own.

    References:
        Oren et al., Transformers are Multi-State RNNs, arXiv:2401.06104, section 4.
    """

    per_head: bool = False

    paper: ClassVar[str] = "TOVA, arXiv:2401.06104"

    def _check(self) -> None:
        flag(self, "per_head")
        super()._check()

    def parts(self) -> Parts:
        """The last token's attention; one set of rows for all heads, unless they choose alone."""
        return self.attended(LastAttention(), heads=UniformHeads() if self.per_head else SharedHeads())
