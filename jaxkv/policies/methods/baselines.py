"""Baselines for comparison with other policies: recency, key norms and chance."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import KeyNorm, PositionScores, UniformRandomScores


@register
@frozen_dataclass
class LocalWindow(BudgetMethod):
    """Keep the most recent entries only, as many as the budget: a baseline without sinks."""

    paper = "Longformer's sliding window, arXiv:2004.05150"

    scored_by = PositionScores


@register
@frozen_dataclass
class KNorm(BudgetMethod):
    """Keep the entries whose keys have the smallest L2 norms.

    References:
        Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv:2406.11430.
    """

    paper = "L2 norm, arXiv:2406.11430"

    scored_by = KeyNorm


@register(name="random")
@frozen_dataclass
class RandomKV(BudgetMethod):
    """Keep entries of the highest random scores, uniform for each layer, kv head and position: a baseline.

    They are sampled with the key given to `prefill` or `generate`.
    """

    paper = "control"

    scored_by = UniformRandomScores
