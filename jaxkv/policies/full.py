"""No compression: the reference every policy is held against."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv.policies.base import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullKV(Policy):
    """Keeps every row."""

    paper: ClassVar[str] = "Attention Is All You Need, arXiv:1706.03762"

    def __post_init__(self) -> None:
        require(self.budget is None, "budget", self.budget, "FullKV keeps everything: leave it out, or choose a policy")
        super().__post_init__()
