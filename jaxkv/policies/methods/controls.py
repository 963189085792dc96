"""Controls that other policies are held against: recency, key norms and chance."""

import dataclasses
from typing import ClassVar

from jaxkv.policies.checks import Budget
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import KeyNorm, Position, Uniform01


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalWindow(Method):
    """Keeps the most recent tokens only, without sinks: a control."""

    budget: Budget = 1024

    paper: ClassVar[str] = "Longformer's sliding window, arXiv:2004.05150"

    def parts(self) -> Parts:
        """Config `Parts` with the scorer `Position`: later rows score higher."""
        return self.compose(scorer=Position())


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class KNorm(Method):
    """Keeps the rows whose keys have the smallest L2 norms.

    References:
        Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv:2406.11430.
    """

    budget: Budget = 1024

    paper: ClassVar[str] = "L2 norm, arXiv:2406.11430"

    def parts(self) -> Parts:
        """Config `Parts` with the scorer `KeyNorm`: minus the L2 norm of a row's key."""
        return self.compose(scorer=KeyNorm())


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Keeps rows drawn at random with the key given to `prefill` or `generate`: a control."""

    budget: Budget = 1024

    paper: ClassVar[str] = "control"

    def parts(self) -> Parts:
        """Config `Parts` with the scorer `Uniform01`: uniform random numbers."""
        return self.compose(scorer=Uniform01())
