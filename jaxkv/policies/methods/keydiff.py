"""KeyDiff: keep the keys that differ most from the others."""

import dataclasses

from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import KeyDifference


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiff(BudgetMethod):
    """Keeps the entries whose keys are least like the mean of their head's unit keys; equally many per layer and head.

    It looks at keys alone: no question has to be known, and no attention is computed. The paper reads prompts in blocks
    of 128 tokens and evicts behind each; prefill reads them whole, and `Session.extend` in blocks of `every` tokens.

    References:
        Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
        Resource-Constrained Environments, arXiv:2504.15364.
    """

    paper = "KeyDiff, arXiv:2504.15364"

    scored_by = KeyDifference
