"""What a policy may do that drops nothing: let some layers choose the tokens that the layers above them read."""

import dataclasses
import enum
from itertools import pairwise

import numpy as np
from jaxtyping import Float

WHOLE = -1


class Selector(enum.Enum):
    """How much each query of the window counts when tokens are chosen.

    LAST: only the newest one. EXPONENTIAL: half as much for every token of age. UNIFORM: all of them alike.
    """

    LAST = "last"
    EXPONENTIAL = "exponential"
    UNIFORM = "uniform"

    def weights(self, window: int) -> Float[np.ndarray, " w"]:
        """By age, the newest query first, float32; LAST has no window."""
        match self:
            case Selector.LAST:
                return np.ones(1, np.float32)
            case Selector.EXPONENTIAL:
                return 0.5 ** np.arange(window, dtype=np.float32)
        return np.ones(window, np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Which layers read everything and which read what another has chosen; static in decode programs.

    Attributes:
        filters: layers that choose, ascending.
        sources: for each layer the filter whose choice it reads, or WHOLE if it reads everything.
        selector: how a filter's queries are weighed.
        window: queries that it weighs, itself included.
        include_generated: whether tokens after the prompt have to be chosen like the prompt's.
        every_row: segments hold every position, so that a position's row is known.
        offloaded: layers whose prompt lies in host memory.
        ahead: whole layers of those that are on their way beside the one in use.
        slots: the prompts' bucket.
        width: tokens chosen at most, a shape.
        several: choices are made for several new tokens together as well as for one; otherwise several read everything.
    """

    filters: tuple[int, ...]
    sources: tuple[int, ...]
    selector: Selector
    window: int
    include_generated: bool
    every_row: bool
    offloaded: tuple[int, ...]
    ahead: int
    slots: int
    width: int
    several: bool = False

    @property
    def loaded(self) -> int:
        """Rows of one layer each that host memory sends at once, at most: a stage's, or whole layers'."""
        if not self.offloaded:
            return 0
        if not self.filters:
            return self.slots * min(self.ahead + 1, len(self.offloaded))
        return self.width * max(self.sources.count(each) for each in self.filters)

    @property
    def ring(self) -> int:
        """Queries that filters remember beside the newest one's; 0 if that is all they look at."""
        return 0 if self.selector is Selector.LAST else self.window


def whole_layers(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Layers that read everything.

    Args:
        filters: layers that choose, ascending.
        adjacent: layers behind each that do not wait for its choice.
        layers: L.

    Returns:
        All layers below the first filter, the filters, and those behind each of them, ascending.

    References:
        Hao et al., OmniKV, section 4.1; the count is (2m + F0) / L of all layers for adjacent = 1 and filters apart.
    """
    anchors = [*range(filters[0]), *filters, layers]
    return tuple(layer for at, after in pairwise(anchors) for layer in range(at, min(at + adjacent + 1, after)))


def sources(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """For each layer the filter whose choice it reads, the last one below it, or WHOLE."""
    whole = set(whole_layers(filters, adjacent, layers))
    below = lambda layer: max(f for f in filters if f < layer)  # noqa: E731
    return tuple(WHOLE if layer in whole else below(layer) for layer in range(layers))
