"""StreamingLLM: the first tokens and the most recent ones."""

import dataclasses

from jaxkv._checks import field, flag
from jaxkv.policies.keep import Keep
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.rank import ByAge
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import Position


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingLLM(BudgetMethod):
    """Keeps the first tokens (attention sinks) and the most recent ones.

    Attributes:
        sinks: first tokens that always stay; the rest of the budget goes to the last ones.
        rolling_positions: number entries by their place in the cache, as the paper does, instead of their place in the
            text: keys are kept before RoPE and rotated at every read.
        slide: drop the oldest row after the sinks for every new token, instead of appending.

    References:
        Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453, section 3.2.
    """

    sinks: int = 4
    rolling_positions: bool = False
    slide: bool = False

    paper = "StreamingLLM, arXiv:2309.17453"

    def _check(self) -> None:
        field(self, "rolling_positions", flag)
        field(self, "slide", flag)

    def parts(self) -> Parts:
        """Config `Parts`: scores by position; sinks and newest token stay; `slide` evicts an entry per new token."""
        keep, evict = Keep(sinks=self.sinks, window=1), ByAge() if self.slide else None
        return self.compose(
            scorer=Position(), keep=keep, evict=evict, rolling=self.rolling_positions
        )
