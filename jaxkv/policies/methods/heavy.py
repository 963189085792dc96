"""Policies by received attention: H2O, RoCo and TOVA. Each new token evicts an entry."""

import enum
from typing import Any

from jaxkv._checks import validate_bool, validate_enum, validate_field, validate_float
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.attended import CumulativeAttention, LastAttention
from jaxkv.policies.head_budgets import SharedHeads, UniformHeads
from jaxkv.policies.keep import Keep
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register


class EvictionMode(enum.Enum):
    """Enum of when to evict: STREAMING at each new token beyond the budget; PREFILL in the prompt only, then append."""

    STREAMING = "streaming"
    PREFILL = "prefill"


@frozen_dataclass
class _AttentionEvictionPolicy(BudgetMethod):
    """Base of policies that evict by received attention: at every new token, or in the prompt only (`EvictionMode`).

    Attributes:
        mode: `EvictionMode`, or its value.
        sinks: number of first tokens, always kept, within the budget.
    """

    mode: EvictionMode | str = EvictionMode.STREAMING
    sinks: int = 0

    def _check_fields(self) -> None:
        validate_field(self, "mode", validate_enum, EvictionMode)

    def compose_eviction_parts(self, *, recent: float = 0.0, **parts: Any) -> Parts:
        """Return `Parts`: sinks, newest token, share `recent` always kept; STREAMING: each new token evicts by rank."""
        scorer = self.create_scorer()
        keep = Keep(sinks=self.sinks, window=1, recent=recent)
        evict = scorer.eviction_rank if self.mode is EvictionMode.STREAMING else None
        return self.compose(scorer=scorer, keep=keep, evict=evict, **parts)


@frozen_dataclass
class HeavyHitterPolicy(_AttentionEvictionPolicy):
    """Base of policies that keep heavy hitters by cumulative attention, and the most recent tokens.

    Attributes:
        recent: share of the most recent tokens in the budget without sinks; heavy hitters get the rest.
    """

    recent: float = 0.5

    scored_by = CumulativeAttention

    def _check_fields(self) -> None:
        validate_field(self, "recent", validate_float, "give a share between 0 and 1", high=1.0)
        super()._check_fields()

    def build_policy_parts(self) -> Parts:
        """Return `Parts`: scores by cumulative attention; recent tokens get share `recent` of the budget less sinks."""
        return self.compose_eviction_parts(recent=self.recent)


@register
@frozen_dataclass
class H2O(HeavyHitterPolicy):
    """Keep heavy hitters by cumulative attention, and the most recent tokens; by default each new token evicts one.

    Heavy hitters and recent tokens are 1:1. Each new token evicts an entry.

    References:
        Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models,
        arXiv:2306.14048, algorithm 1; kv heads use the mean of their query heads' scores.
    """

    paper = "H2O, arXiv:2306.14048"


@register
@frozen_dataclass
class RoCo(HeavyHitterPolicy):
    """Keep entries by attention per query that could see them, and recent tokens; by default each new token evicts one.

    As H2O, but received attention is divided by the number of queries that saw the entry.

    References:
        Ren and Zhu, On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference,
        arXiv:2402.06262, the mean attention score; entries are protected by recency, not by their deviation.
    """

    paper = "RoCo, arXiv:2402.06262"

    def create_scorer(self) -> CumulativeAttention:
        """Return a `CumulativeAttention` scorer that divides by the number of queries that could see the entry."""
        return CumulativeAttention(mean=True)


@register
@frozen_dataclass
class TOVA(_AttentionEvictionPolicy):
    """Keep the entries that the newest token attends to most; by default each new token evicts the least attended one.

    All heads keep the same positions. Each new token evicts an entry.

    Attributes:
        per_head: let each kv head evict an entry of its own.

    References:
        Oren et al., Transformers are Multi-State RNNs, arXiv:2401.06104, section 4.
    """

    per_head: bool = False

    paper = "TOVA, arXiv:2401.06104"

    scored_by = LastAttention

    def _check_fields(self) -> None:
        validate_field(self, "per_head", validate_bool)
        super()._check_fields()

    def build_policy_parts(self) -> Parts:
        """Return TOVA's `Parts`: the last token's attention; heads share positions unless `per_head`."""
        return self.compose_eviction_parts(heads=UniformHeads() if self.per_head else SharedHeads())
