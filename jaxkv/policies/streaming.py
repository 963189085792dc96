"""StreamingLLM and the local window: what is recent, with or without the first tokens."""

import dataclasses
from typing import ClassVar

from jaxkv._errors import require
from jaxkv._values import count, flag
from jaxkv.policies.base import Policy
from jaxkv.policies.protocol import Scorer
from jaxkv.policies.scorers import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
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

    def __post_init__(self) -> None:
        count(self, "sinks", 0, "give 0 or more first tokens")
        flag(self, "rolling_positions")
        flag(self, "slide")
        require(
            not (self.slide and self.rolling_positions),
            "slide",
            self.slide,
            "rolling positions move in steps: every=64",
        )
        super().__post_init__()

    @property
    def evicts(self) -> bool:
        """When sliding."""
        return self.slide

    @property
    def kept_first(self) -> int:
        """The sinks."""
        return self.sinks

    @property
    def kept_last(self) -> int:
        """The newest token, without which the next one could not go on."""
        return 1

    @property
    def scorer(self) -> Scorer:
        """Recency."""
        return Position()

    @property
    def rolling(self) -> bool:
        """Whether positions are those within the cache."""
        return self.rolling_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalWindow(Policy):
    """The most recent tokens alone: the control that shows what sinks are worth."""

    budget: int | float | None = 1024

    paper: ClassVar[str] = "Longformer's sliding window, arXiv:2004.05150"

    @property
    def scorer(self) -> Scorer:
        """Recency."""
        return Position()
