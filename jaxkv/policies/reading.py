"""What a policy may do that drops nothing: let some layers choose the tokens that the layers above them read."""

import dataclasses
import enum
from fractions import Fraction
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jaxkv._errors import require
from jaxkv._values import ENDLESS, Value, choice, count, flag, is_whole, plain, real

WHOLE = -1
_TOKENS = 1024


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


@runtime_checkable
class Reads(Protocol):
    """What a policy's layers read while tokens are drawn, where that is not everything, or not at hand."""

    @property
    def queries(self) -> int:
        """Last queries of a prompt that the cache remembers."""

    @property
    def by_chunks(self) -> bool:
        """Whether prompts run through the model chunk by chunk."""

    @property
    def whole_prompts(self) -> bool:
        """Whether it takes prompts of which every row is kept, as they wait in host memory or come in chunks."""

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Tokens of each prompt that a layer reads which does not read everything."""

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """Which layers read what, for prompts of a bucket.

        Args:
            layers: L.
            slots: the prompts' bucket.
            every_row: all rows of a prompt are kept.
        """

    def described(self) -> str:
        """In words, for people to read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredReads(Value):
    """A few filter layers choose, for every new token, what those above them read. `OmniKV` has the defaults."""

    filter_layers: tuple[int, ...] | None
    budget: int | float | None
    mem: float | None
    selector: Selector | str
    window: int
    adjacent: int
    include_generated: bool
    offload: bool
    prefill_ratio: int | float | None
    prefill_chunk: int

    def __post_init__(self) -> None:
        choice(self, "selector", Selector)
        given = self.filter_layers
        if given is not None:
            layers = tuple(plain(layer) for layer in given) if isinstance(given, (tuple, list, np.ndarray)) else ()
            ascending = bool(layers) and all(map(is_whole, layers)) and sorted(set(layers)) == list(layers)
            require(ascending, "filter_layers", given, "give one or more layers, ascending, such as (2, 8, 18)")
            object.__setattr__(self, "filter_layers", layers)
        for name, least in (("window", 1), ("adjacent", 0), ("prefill_chunk", 16)):
            count(self, name, least, f"give a number, at least {least}")
        for name in ("include_generated", "offload"):
            flag(self, name)
        chunk = self.prefill_chunk
        blocks = chunk <= 256 or chunk % 256 == 0
        require(blocks, "prefill_chunk", chunk, "give at most 256, or a multiple of it")
        if self.prefill_ratio is not None:
            remedy = "give chosen tokens per token of a chunk, such as 2, or None for full attention"
            real(self, "prefill_ratio", remedy, low=0, high=1e9, above=True)
        generated, offload = self.include_generated, self.offload
        remedy = "rows after the prompt stay on the device and are always read there: leave one out"
        require(not (generated and offload), "include_generated", generated, remedy)
        self._check_budget()

    def _check_budget(self) -> None:
        mem, budget = self.mem, self.budget
        require(mem is None or budget is None, "mem", mem, f"it solves for the budget, which is {budget!r}: give one")
        if mem is not None:
            real(self, "mem", "give the share of the cache that stays at hand, in (0, 1]", low=0, high=1, above=True)
            return
        budget = _TOKENS if budget is None else budget
        if isinstance(budget, int):
            require(
                budget >= self._least, "budget", budget, f"below the window, whose {self._least} tokens are always read"
            )
            budget = min(budget, ENDLESS)
        object.__setattr__(self, "budget", budget)

    @property
    def _least(self) -> int:
        """Tokens that are always read."""
        return 1 if self.selector is Selector.LAST else self.window

    @property
    def queries(self) -> int:
        """Those of the window, where they choose."""
        return 0 if self.selector is Selector.LAST else self.window

    @property
    def by_chunks(self) -> bool:
        """With a `prefill_ratio`."""
        return self.prefill_ratio is not None

    @property
    def whole_prompts(self) -> bool:
        """With either of both."""
        return self.offload or self.by_chunks

    def described(self) -> str:
        """How many tokens are read, who chooses them, and where the others wait."""
        tokens = f"mem={self.mem}" if self.budget is None else f"budget={self.budget!r}"
        assert isinstance(self.selector, Selector)
        chosen = f"{tokens}, chosen by the {self.selector.value} selector in filter layers"
        return chosen + ("; the rest waits in host memory" if self.offload else "")

    def check(self, layers: int) -> None:
        """Refuses a model without the layers that this takes.

        Args:
            layers: L.

        Raises:
            ValueError: naming the filter layers.
        """
        whole = self.whole(layers)
        assert self.filter_layers is not None
        top = self.filter_layers[-1]
        require(top < layers, "filter_layers", self.filter_layers, f"the model's layers are 0 to {layers - 1}")
        some = len(whole) < layers
        require(
            some,
            "filter_layers",
            self.filter_layers,
            f"no layer is left to read what they choose: all {layers} read all, with adjacent={self.adjacent}",
        )
        self._share(layers)

    def whole(self, layers: int) -> tuple[int, ...]:
        """Layers that read everything, of a model of so many."""
        if self.filter_layers is None:
            remedy = "give them, such as (2, 8, 18); `generate` and `prefill` take those found for the model"
            require(False, "filter_layers", None, remedy)
        assert self.filter_layers is not None
        return whole_layers(self.filter_layers, self.adjacent, layers)

    def _share(self, layers: int) -> Fraction:
        """The share of a prompt's tokens that is read, where it is one."""
        if self.mem is None:
            return Fraction(repr(float(self.budget or 0)))
        whole, mem = Fraction(len(self.whole(layers)), layers), Fraction(repr(self.mem))
        remedy = f"layers that read everything hold {float(whole):.4g} of the cache: give more, or lower filter layers"
        require(mem > whole, "mem", self.mem, remedy)
        return (mem - whole) / (1 - whole)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Tokens that a layer reads which reads what was chosen, those after the prompt left out.

        Args:
            lengths: tokens of each prompt.
            layers: L.

        Returns:
            The budget, or the share's whole number of each prompt; at least the window, or 1, at most the prompt.

        References:
            OmniKV, section 5: Mem% = whole + share * (1 - whole).
        """
        lengths = np.asarray(lengths, np.int64)
        if isinstance(self.budget, int):
            wanted = np.full_like(lengths, self.budget)
        else:
            share = self._share(layers)
            wanted = np.asarray([n * share.numerator // share.denominator for n in lengths.tolist()], np.int64)
        # Where later tokens have to be chosen, too, a budget in tokens is no smaller for a short prompt.
        grows = self.include_generated and isinstance(self.budget, int)
        return np.maximum(wanted, self._least) if grows else np.minimum(np.maximum(wanted, self._least), lengths)

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """See `Reads.reading`."""
        whole = self.whole(layers)
        assert self.filter_layers is not None and isinstance(self.selector, Selector)
        return Reading(
            filters=self.filter_layers,
            sources=sources(self.filter_layers, self.adjacent, layers),
            selector=self.selector,
            window=self._least,
            include_generated=self.include_generated,
            every_row=every_row,
            offloaded=tuple(sorted(set(range(layers)) - set(whole))) if self.offload else (),
            ahead=1,
            slots=slots,
            width=int(self.tokens(np.asarray([slots]), layers)[0]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedReads(Value):
    """Every layer reads everything, the upper ones from host memory. Fields are `BrutalOffload`'s."""

    resident_layers: int
    ahead: int

    queries = 0
    by_chunks = False
    whole_prompts = True

    def __post_init__(self) -> None:
        for name, least in (("resident_layers", 1), ("ahead", 0)):
            count(self, name, least, f"give a number, at least {least}")

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """All of them; see `Reads.tokens`."""
        return np.asarray(lengths, np.int64)

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """See `Reads.reading`."""
        return Reading(
            filters=(),
            sources=(WHOLE,) * layers,
            selector=Selector.LAST,
            window=1,
            include_generated=False,
            every_row=True,
            offloaded=tuple(range(self.resident_layers, layers)),
            ahead=self.ahead,
            slots=slots,
            width=slots,
        )

    def described(self) -> str:
        """Which layers wait."""
        return f"everything; layers from {self.resident_layers} on wait in host memory, loaded {self.ahead} ahead"
