"""ExpectedAttention: keep the entries that queries after the prompt are expected to attend to."""

import dataclasses

from jaxkv._checks import field, whole
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import FutureAttention


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(BudgetMethod):
    """Keeps the entries that queries after the prompt are expected to attend to most, by the prompt's query statistics.

    `AdaKV(base=ExpectedAttention(budget=0.25, epsilon=0.01))` lets heads compete for entries, as its authors recommend.

    Attributes:
        sinks: first tokens that always stay; their queries are left out of the statistics.
        future: positions after the prompt over which the rotation (RoPE) of queries is averaged.
        covariance: count the covariance of the queries as well as their mean.
        value_norms: multiply by the L2 norm of the value.
        epsilon: added to the expected attention before that.
        remembered: last queries whose statistics count where entries are chosen again (`every`); the cache then holds
            4 * remembered * D bytes for each query head and layer.

    References:
        Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
        Distribution, arXiv:2510.00636.
    """

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norms: bool = True
    epsilon: float = 0.0
    remembered: int = 256

    paper = "Expected Attention, arXiv:2510.00636"

    def _check(self) -> None:
        # The other fields are checked where the scorer is made of them, under the same names.
        field(self, "future", whole, "average over at least 1 position")
        field(self, "remembered", whole, "remember at least 1 query")

    def scoring(self) -> FutureAttention:
        """Scorer by expected attention, which remembers queries if the cache is recompressed."""
        remembered = 0 if self.every is None else self.remembered
        return self.part(FutureAttention, positions=self.future, remembered=remembered)
