"""ExpectedAttention: keep the entries that queries after the prompt are expected to attend to."""

import dataclasses

from jaxkv._checks import field, whole
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import FutureAttention


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(BudgetMethod):
    """Keep the entries that future queries are expected to attend to most.

    Expectations follow from the prompt's query statistics.

    `AdaKV(base=ExpectedAttention(budget=0.25, epsilon=0.01))` lets heads compete for entries, as its authors recommend.

    Attributes:
        sinks: number of first tokens, always kept; their queries are left out of the statistics.
        future: number of positions after the prompt over which the rotation (RoPE) of queries is averaged.
        covariance: use the covariance of the queries as well as their mean.
        value_norms: multiply by the L2 norm of the value.
        epsilon: added to the expected attention before this product.
        remembered: number of last queries whose statistics are used for recompression (`every`); the cache then holds
            4 * remembered * D bytes per query head and layer.

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
        # The scorer checks the other fields, under the same names.
        field(self, "future", whole, "average over at least 1 position")
        field(self, "remembered", whole, "give at least 1 query")

    def scoring(self) -> FutureAttention:
        """Return the scorer by expected attention, with a query buffer if the cache is recompressed."""
        remembered = 0 if self.every is None else self.remembered
        return self.part(FutureAttention, positions=self.future, remembered=remembered)
