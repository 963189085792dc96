"""Policies by received attention: H2O, RoCo and TOVA. Each new token evicts an entry."""

import dataclasses
import enum
from typing import Any

from jaxkv._checks import choice, field, flag, real
from jaxkv.policies.attended import CumulativeAttention, LastAttention
from jaxkv.policies.head_budgets import SharedHeads, UniformHeads
from jaxkv.policies.keep import Keep
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register


class Mode(enum.Enum):
    """When to evict: STREAMING at each new token beyond the budget; PREFILL in the prompt only, then append."""

    STREAMING = "streaming"
    PREFILL = "prefill"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Streaming(BudgetMethod):
    """Base of policies that evict by received attention: at every new token, or in the prompt only (`Mode.PREFILL`).

    Attributes:
        mode: `Mode`, or its value.
        sinks: number of first tokens, always kept, within the budget.
    """

    mode: Mode | str = Mode.STREAMING
    sinks: int = 0

    def _check(self) -> None:
        field(self, "mode", choice, Mode)

    def attended(self, *, recent: float = 0.0, **parts: Any) -> Parts:
        """Return `Parts` that keep sinks and the newest token; streaming evicts by the scorer's rank."""
        scorer = self.scoring()
        keep = Keep(sinks=self.sinks, window=1, recent=recent)
        evict = scorer.rank if self.mode is Mode.STREAMING else None
        return self.compose(scorer=scorer, keep=keep, evict=evict, **parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeavyMethod(_Streaming):
    """Base of policies that keep heavy hitters by cumulative attention, and the most recent tokens.

    Attributes:
        recent: share of the most recent tokens in the budget without sinks; heavy hitters get the rest.
    """

    recent: float = 0.5

    scored_by = CumulativeAttention

    def _check(self) -> None:
        field(self, "recent", real, "give a share between 0 and 1", high=1.0)
        super()._check()

    def parts(self) -> Parts:
        """Return `Parts`: scores by cumulative attention; recent tokens get the share `recent` without sinks."""
        return self.attended(recent=self.recent)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(HeavyMethod):
    """Keep heavy hitters by cumulative attention, and the most recent tokens.

    Heavy hitters and recent tokens are 1:1. Each new token evicts an entry.

    References:
        Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models,
        arXiv:2306.14048, algorithm 1; kv heads use the mean of their query heads' scores.
    """

    paper = "H2O, arXiv:2306.14048"


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoCo(HeavyMethod):
    """Keep entries by mean attention per query, and the most recent tokens.

    As H2O, but received attention is divided by the number of queries that saw the entry.

    References:
        Ren and Zhu, On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference,
        arXiv:2402.06262, the mean attention score; entries are protected by recency, not by their deviation.
    """

    paper = "RoCo, arXiv:2402.06262"

    def scoring(self) -> CumulativeAttention:
        """Return the scorer by mean attention per query that could see the entry."""
        return CumulativeAttention(mean=True)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TOVA(_Streaming):
    """Keep the entries that the last token attends to most.

    All heads keep the same positions. Each new token evicts an entry.

    Attributes:
        per_head: let each kv head evict an entry of its own.

    References:
        Oren et al., Transformers are Multi-State RNNs, arXiv:2401.06104, section 4.
    """

    per_head: bool = False

    paper = "TOVA, arXiv:2401.06104"

    scored_by = LastAttention

    def _check(self) -> None:
        field(self, "per_head", flag)
        super()._check()

    def parts(self) -> Parts:
        """Return `Parts`: scores by the last token's attention; heads keep the same entries unless `per_head`."""
        return self.attended(heads=UniformHeads() if self.per_head else SharedHeads())
