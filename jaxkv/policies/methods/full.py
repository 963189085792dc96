"""FullKV: no compression, the reference for every policy."""

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import register


@register(name="full")
@frozen_dataclass
class FullKV(Policy):
    """Keep every entry: the uncompressed reference."""

    paper = "Attention Is All You Need, arXiv:1706.03762"

    def build_policy_parts(self) -> Parts:
        """Return FullKV's `Parts`, without a scorer, so that every entry is kept."""
        return self.compose(scorer=None)
