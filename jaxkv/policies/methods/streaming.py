"""StreamingLLM: the first tokens and the most recent ones."""

from jaxkv._checks import validate_bool, validate_field
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.policies.keep import Keep
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import BudgetMethod
from jaxkv.policies.rank import ByAge
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import PositionScores


@register
@frozen_dataclass
class StreamingLLM(BudgetMethod):
    """Keep attention sinks and the most recent tokens.

    Attributes:
        sinks: number of first tokens, always kept; the rest of the budget goes to the last ones.
        rolling_positions: count positions within the cache, as the paper does, not in the text: keys are stored before
            RoPE and rotated on each read.
        slide: evict the oldest entry after the sinks for every new token, instead of appending.

    References:
        Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453, section 3.2.
    """

    sinks: int = 4
    rolling_positions: bool = False
    slide: bool = False

    paper = "StreamingLLM, arXiv:2309.17453"

    def _check_fields(self) -> None:
        validate_field(self, "rolling_positions", validate_bool)
        validate_field(self, "slide", validate_bool)

    def build_policy_parts(self) -> Parts:
        """Return StreamingLLM's `Parts`: position scores, sinks kept; rolling, eviction by age if set."""
        keep = Keep(sinks=self.sinks, window=1)
        evict = ByAge() if self.slide else None
        return self.compose(
            scorer=PositionScores(), keep=keep, evict=evict, rolling=self.rolling_positions
        )
