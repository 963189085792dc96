"""The part `read` of a policy: filter layers choose the tokens that layers above them read; layers are offloaded."""

import dataclasses
import enum
from fractions import Fraction
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jaxkv._checks import choice, field, flag, real, several, whole
from jaxkv._errors import require
from jaxkv._values import ENDLESS, Value

# The source of a layer that reads everything.
WHOLE = -1
# The default budget.
_TOKENS = 1024


class Selector(enum.Enum):
    """Weights of the window's queries when filter layers choose tokens.

    LAST: the newest query alone. EXPONENTIAL: halved for every token of age. UNIFORM: equal weights.
    """

    LAST = "last"
    EXPONENTIAL = "exponential"
    UNIFORM = "uniform"

    def weights(self, window: int) -> Float[np.ndarray, " w"]:
        """Float32 weights of queries by age, the newest first.

        Args:
            window: number of queries; LAST has one.

        Returns:
            The weights.
        """
        match self:
            case Selector.LAST:
                return np.ones(1, np.float32)
            case Selector.EXPONENTIAL:
                return 0.5 ** np.arange(window, dtype=np.float32)
        return np.ones(window, np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Static config of decode programs: each layer's filter, or that it reads everything; offloaded layers.

    Attributes:
        filters: layers that choose, ascending.
        sources: for each layer the filter whose choice it reads, or WHOLE if it reads everything.
        selector: weights of a filter's queries.
        window: number of queries weighed, the newest included.
        include_generated: True if tokens after the prompt are read only if they are chosen.
        every_row: segments hold every position, so that a position's row is known.
        offloaded: layers whose prompt lies in host memory.
        ahead: offloaded layers that are loaded ahead of the one in use.
        slots: the prompts' bucket.
        width: largest number of chosen tokens, a shape.
        several: True if filters choose for several new tokens together; otherwise several tokens read everything.
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
        """Largest number of rows, summed over layers, that host memory sends at once; 0 without offloading."""
        if not self.offloaded:
            return 0
        if not self.filters:
            return self.slots * min(self.ahead + 1, len(self.offloaded))
        return self.width * max(self.sources.count(each) for each in self.filters)

    @property
    def ring(self) -> int:
        """Number of queries in the ring that filters remember; 0 if they look at the newest alone."""
        return 0 if self.selector is Selector.LAST else self.window


def whole_layers(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Layers that read everything, ascending: below the first filter, filters, and `adjacent` layers behind each.

    Hao et al., OmniKV, section 4.1: (2m + F0) / L of all layers for adjacent = 1 and filters apart.
    """
    anchors = [*range(filters[0]), *filters, layers]
    return tuple(layer for at, after in pairwise(anchors) for layer in range(at, min(at + adjacent + 1, after)))


def sources(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Filter whose choice each layer reads: the last one below it, or WHOLE for layers that read everything."""
    whole = set(whole_layers(filters, adjacent, layers))
    return tuple(WHOLE if layer in whole else max(f for f in filters if f < layer) for layer in range(layers))


@runtime_checkable
class Reads(Protocol):
    """Protocol of layers that read a part of the rows while tokens are drawn, or rows in host memory."""

    @property
    def queries(self) -> int:
        """Number of a prompt's last queries that the cache remembers."""

    @property
    def by_chunks(self) -> bool:
        """True if prompts run through the model chunk by chunk."""

    @property
    def whole_prompts(self) -> bool:
        """True if every row of a prompt must be kept, as rows wait in host memory or prompts come in chunks."""

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Number of tokens of each prompt read by a layer that does not read everything.

        Args:
            lengths: tokens of each prompt.
            layers: L.

        Returns:
            The numbers.
        """

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """Static config of which layers read what, for prompts of a bucket.

        Args:
            layers: L.
            slots: the prompts' bucket.
            every_row: True if all rows of a prompt are kept.

        Returns:
            The config.
        """

    def described(self) -> str:
        """Describes in words what is read, for people."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredReads(Value):
    """A few filter layers choose, for every new token, what those above them read; fields are `OmniKV`'s."""

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
        field(self, "selector", choice, Selector)
        given = self.filter_layers
        if given is not None:
            remedy = "give one or more layers, ascending, such as (2, 8, 18)"
            layers = tuple(
                whole("filter_layers", each, remedy, least=0) for each in several("filter_layers", given, remedy)
            )
            require(sorted(set(layers)) == list(layers), "filter_layers", given, remedy)
            object.__setattr__(self, "filter_layers", layers)
        for name, least in (("window", 1), ("adjacent", 0), ("prefill_chunk", 16)):
            field(self, name, whole, f"give a number, at least {least}", least=least)
        for name in ("include_generated", "offload"):
            field(self, name, flag)
        chunk = self.prefill_chunk
        blocks = chunk <= 256 or chunk % 256 == 0
        require(blocks, "prefill_chunk", chunk, "give at most 256, or a multiple of it")
        if self.prefill_ratio is not None:
            remedy = "give chosen tokens per token of a chunk, such as 2, or None for full attention"
            field(self, "prefill_ratio", real, remedy, high=1e9, open_low=True)
        generated, offload = self.include_generated, self.offload
        remedy = "rows after the prompt stay on the device and are always read there: leave one out"
        require(not (generated and offload), "include_generated", generated, remedy)
        self._check_budget()

    def _check_budget(self) -> None:
        """Refuses `mem` beside a budget, and budgets below the window; stores the default budget."""
        mem, budget = self.mem, self.budget
        require(mem is None or budget is None, "mem", mem, f"it solves for the budget, which is {budget!r}: give one")
        if mem is not None:
            remedy = "give the share of the cache that stays at hand, in (0, 1]"
            field(self, "mem", real, remedy, high=1.0, open_low=True)
            return
        budget = _TOKENS if budget is None else budget
        if isinstance(budget, int):
            remedy = f"below the window, whose {self._least} tokens are always read"
            require(budget >= self._least, "budget", budget, remedy)
            budget = min(budget, ENDLESS)
        object.__setattr__(self, "budget", budget)

    @property
    def _least(self) -> int:
        """Number of tokens that are always read: the window's."""
        return 1 if self.selector is Selector.LAST else self.window

    @property
    def queries(self) -> int:
        """Number of a prompt's last queries that the cache remembers: the window's; 0 with `Selector.LAST`."""
        return 0 if self.selector is Selector.LAST else self.window

    @property
    def by_chunks(self) -> bool:
        """True if prompts run through the model chunk by chunk: with a `prefill_ratio`."""
        return self.prefill_ratio is not None

    @property
    def whole_prompts(self) -> bool:
        """True if every row of a prompt must be kept: with `offload` or chunks."""
        return self.offload or self.by_chunks

    def described(self) -> str:
        """Describes in words the budget, the selector and where unread rows wait."""
        tokens = f"mem={self.mem}" if self.budget is None else f"budget={self.budget!r}"
        chosen = f"{tokens}, chosen by the {Selector(self.selector).value} selector in filter layers"
        return chosen + ("; the rest waits in host memory" if self.offload else "")

    def check(self, layers: int) -> None:
        """Refuses a model that lacks the filter layers, or layers that read their choice.

        Args:
            layers: L.

        Raises:
            ValueError: naming the filter layers.
        """
        filters, whole = self._filters, self.whole(layers)
        require(filters[-1] < layers, "filter_layers", filters, f"the model's layers are 0 to {layers - 1}")
        remedy = f"no layer is left to read what they choose: all {layers} read all, with adjacent={self.adjacent}"
        require(len(whole) < layers, "filter_layers", filters, remedy)
        self._share(layers)

    @property
    def _filters(self) -> tuple[int, ...]:
        """The filter layers; refuses None."""
        remedy = "give them, such as (2, 8, 18); `generate` and `prefill` take those found for the model"
        require(self.filter_layers is not None, "filter_layers", None, remedy)
        return self.filter_layers or ()

    def whole(self, layers: int) -> tuple[int, ...]:
        """Layers that read everything, ascending.

        Args:
            layers: L.

        Returns:
            Their indices.
        """
        return whole_layers(self._filters, self.adjacent, layers)

    def _share(self, layers: int) -> Fraction:
        """Share of a prompt's tokens that is read, from `mem` or from a budget that is a share."""
        if self.mem is None:
            return Fraction(repr(float(self.budget or 0)))
        whole, mem = Fraction(len(self.whole(layers)), layers), Fraction(repr(self.mem))
        remedy = f"layers that read everything hold {float(whole):.4g} of the cache: give more, or lower filter layers"
        require(mem > whole, "mem", self.mem, remedy)
        return (mem - whole) / (1 - whole)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Number of tokens of each prompt that a layer reads of a filter's choice, later tokens left out.

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
        # Where later tokens have to be chosen as well, a budget in tokens is no smaller for a short prompt.
        grows = self.include_generated and isinstance(self.budget, int)
        return np.maximum(wanted, self._least) if grows else np.minimum(np.maximum(wanted, self._least), lengths)

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """Static config of which layers read what, for prompts of a bucket. See `Reads`."""
        filters, whole = self._filters, self.whole(layers)
        return Reading(
            filters=filters,
            sources=sources(filters, self.adjacent, layers),
            selector=Selector(self.selector),
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
    """Every layer reads everything, the upper ones from host memory; fields are `BrutalOffload`'s."""

    resident_layers: int
    ahead: int

    queries = 0
    by_chunks = False
    whole_prompts = True

    def __post_init__(self) -> None:
        for name, least in (("resident_layers", 1), ("ahead", 0)):
            field(self, name, whole, f"give a number, at least {least}", least=least)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Number of tokens of each prompt that a layer reads: all."""
        return np.asarray(lengths, np.int64)

    def reading(self, layers: int, slots: int, *, every_row: bool) -> Reading:
        """Static config of which layers read what, for prompts of a bucket. See `Reads`."""
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
        """Describes in words which layers wait in host memory."""
        return f"everything; layers from {self.resident_layers} on wait in host memory, loaded {self.ahead} ahead"
