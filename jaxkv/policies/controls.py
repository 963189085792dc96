"""Controls: key norms and chance."""

import dataclasses
from typing import ClassVar

from jaxkv.policies.base import Policy
from jaxkv.policies.protocol import Scorer
from jaxkv.policies.scorers import KeyNorm, Uniform01


@dataclasses.dataclass(frozen=True, kw_only=True)
class KNorm(Policy):
    """The rows whose keys have the smallest L2 norm.

    References:
        Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv:2406.11430.
    """

    budget: int | float | None = 1024

    paper: ClassVar[str] = "L2 norm, arXiv:2406.11430"

    @property
    def scorer(self) -> Scorer:
        """Minus the key's norm."""
        return KeyNorm()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Rows drawn by chance, from the key given to `prefill` or `generate`."""

    budget: int | float | None = 1024

    paper: ClassVar[str] = "control"

    @property
    def scorer(self) -> Scorer:
        """Uniform draws."""
        return Uniform01()
