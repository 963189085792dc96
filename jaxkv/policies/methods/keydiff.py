"""KeyDiff: keep the keys that differ most from the others."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import KeyDifference


@register
@frozen_dataclass
class KeyDiff(BudgetMethod):
    """Keep the entries whose keys have the lowest cosine similarity to the mean of the kv head's normalised keys.

    The mean is that of a head's unit keys. All layers and heads keep the same number of entries. Scores use keys only:
    the question need not be known, and no attention is computed. The paper evicts after every block of 128 prompt
    tokens; prefill compresses whole prompts, and `Session.extend` blocks of `every` tokens.

    References:
        Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
        Resource-Constrained Environments, arXiv:2504.15364.
    """

    paper = "KeyDiff, arXiv:2504.15364"

    scored_by = KeyDifference
