"""What runs on a mesh, and what is refused there by name."""

from jaxkv._errors import require
from jaxkv.policies.merging import Decision, Merge, Scope
from jaxkv.policies.policy import Method
from jaxkv.policies.scorers import CumulativeAttention, KeyNorm, LastAttention, Position, Uniform01, WindowAttention
from jaxkv.policies.select import AdaptiveHeads, ProtectedHeads, SharedHeads, TwoStageHeads, UniformHeads

_YET = "not on a mesh yet: give another, or a model without a mesh"
_SCORERS = (WindowAttention, CumulativeAttention, LastAttention, Position, KeyNorm, Uniform01)
_HEADS = (UniformHeads, SharedHeads, AdaptiveHeads, ProtectedHeads)


def require_known(policy: Method) -> None:
    """Refuses what would not be right on a mesh.

    Args:
        policy: the compression.

    Raises:
        ValueError: naming what it is.
    """
    parts = policy.parts()
    require(parts.read is None, "policy.read", parts.read, _YET)
    merge = parts.merge
    apart = type(merge) is Merge and (merge.scope, merge.decision) == (Scope.HEAD, Decision.TOKEN)
    require(merge is None or apart, "policy.merge", merge, _YET)
    known = parts.scorer is None or type(parts.scorer) in _SCORERS
    require(known, "policy.scorer", parts.scorer, _YET)
    heads = parts.heads.budgets if isinstance(parts.heads, TwoStageHeads) else parts.heads
    require(type(heads) in _HEADS, "policy.heads", heads, _YET)
