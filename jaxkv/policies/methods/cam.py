"""CaM: values of tokens that may be evicted are added to those of the following tokens."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.policies.attended import NoPool, Pooling
from jaxkv.policies.folding import ValueMerge
from jaxkv.policies.methods.snapkv import ObservationWindowPolicy
from jaxkv.policies.parts import Parts
from jaxkv.policies.registry import register


@register
@frozen_dataclass
class CaM(ObservationWindowPolicy):
    """Keep entries by unpooled window attention; by chance, add 1 / `window` of a value to each of the next `window`.

    Scores are not pooled. Each value adds shares to the values of the following tokens.

    Attributes:
        start: first share of the prompt whose values are not merged.
        expected: add the expected part of each value instead of sampling by the call's key.

    References:
        Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024; in the form of
        KVCache-Factory, on a copy of the values.
    """

    pooling: Pooling = NoPool()
    start: float = 0.1
    expected: bool = False

    paper = "CaM, ICML 2024"

    def build_policy_parts(self) -> Parts:
        """Return `Parts`: scores by window attention, and merger `ValueMerge`; ValueError if `merge` is another one."""
        mine = self.create_part(ValueMerge)
        remedy = f"CaM has its own, {mine}: leave it out"
        require(self.merge in (None, mine), "merge", self.merge, remedy)
        return self.compose_with_scorer(merge=mine)
