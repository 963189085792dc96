"""ExpectedAttention: keep the entries that queries after the prompt are expected to attend to."""

from jaxkv._checks import validate_field, validate_int
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import FutureAttention


@register
@frozen_dataclass
class ExpectedAttention(BudgetMethod):
    """Keep entries by the attention expected from queries after the prompt, by default times the value's norm.

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

    def _check_fields(self) -> None:
        # The scorer checks the other fields, under the same names.
        validate_field(self, "future", validate_int, "average over at least 1 position")
        validate_field(self, "remembered", validate_int, "give at least 1 query")

    def create_scorer(self) -> FutureAttention:
        """Return a `FutureAttention` scorer, which requests `remembered` last queries if the policy recompresses."""
        remembered = 0 if self.every is None else self.remembered
        return self.create_part(FutureAttention, positions=self.future, remembered=remembered)
