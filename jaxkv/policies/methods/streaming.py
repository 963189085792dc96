"""StreamingLLM: the first tokens and the most recent ones."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv._values import count, flag
from jaxkv.policies.parts import Keep, Parts
from jaxkv.policies.policy import Method
from jaxkv.policies.rank import ByAge
from jaxkv.policies.registry import register
from jaxkv.policies.unseen import Position


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Attention sinks and the most recent tokens.

    Attributes:
        sinks: first tokens that always stay; the rest of the budget goes to the last ones.
        rolling_positions: number rows by their place in the cache, as the paper does, instead of their place in the
            text: keys are kept before RoPE and rotated at every read.
        slide: drop the oldest row behind the sinks for every new token, instead of appending.

    References:
        Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453, section 3.2.
    """

    budget: int | float | None = 1024
    sinks: int = 4
    rolling_positions: bool = False
    slide: bool = False

    paper: ClassVar[str] = "StreamingLLM, arXiv:2309.17453"

    def _check(self) -> None:
        count(self, "sinks", 0, "give 0 or more first tokens")
        flag(self, "rolling_positions")
        flag(self, "slide")
        both = self.slide and self.rolling_positions
        require(not both, "slide", self.slide, "rolling positions move in steps: every=64")

    def parts(self) -> Parts:
        """Recency; the newest token always stays, for without it the next one could not go on."""
        keep, evict = Keep(sinks=self.sinks, window=1), ByAge() if self.slide else None
        return self.compose(scorer=Position(), keep=keep, evict=evict, rolling=self.rolling_positions)
