"""No compression: the reference every policy is held against."""

import dataclasses

from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register


@register(name="full")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FullKV(Method):
    """Keeps every row: the reference without compression."""

    paper = "Attention Is All You Need, arXiv:1706.03762"

    def parts(self) -> Parts:
        """Config `Parts` without a scorer, so that every row is kept."""
        return self.compose(scorer=None)
