"""The part `read` of a policy: filter layers choose the tokens that layers above them read; layers are offloaded."""

import dataclasses
import enum
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxkv._checks import choice, field, flag, optional, real, several, whole
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.checks import Budget, Kept, Share, Tokens, as_budget
from jaxkv.policies.phases import After, Append, Evict, Select

# The source of a layer that reads everything.
WHOLE = -1


class Selector(enum.Enum):
    """Enum of how filter layers weigh the last queries to choose tokens: the LAST only, EXPONENTIAL by age, or UNIFORM.

    LAST: the newest query alone. EXPONENTIAL: halved for every token of age. UNIFORM: equal weights.
    """

    LAST = "last"
    EXPONENTIAL = "exponential"
    UNIFORM = "uniform"

    def weights(self, window: int) -> Float[np.ndarray, " w"]:
        """Float32 weights `[w]` of the last queries, the newest first: halved by age, all 1, or a single 1 for LAST.

        Args:
            window: number of queries; LAST has one.

        Returns:
            The weights.
        """
        if self is Selector.LAST:
            return np.ones(1, np.float32)
        base = 0.5 if self is Selector.EXPONENTIAL else 1.0
        return base ** np.arange(window, dtype=np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Static config of which entries layers read while decoding: each layer's source, offloaded layers, sizes.

    Attributes:
        filters: layers that choose, ascending.
        sources: for each layer the filter whose choice it reads, or WHOLE if it reads everything.
        selector: weights of a filter's queries.
        window: number of queries weighed, the newest included.
        include_generated: True if tokens after the prompt are read only if they are chosen.
        every_entry: segments hold every position, so that a position's row is known.
        offloaded: layers whose prompt is in host memory.
        ahead: offloaded layers that are loaded ahead of the one in use.
        padded_len: the prompts' bucket; 0 where nothing is chosen or offloaded.
        width: largest number of chosen tokens, or of entries in the pages read; a shape; 0 as well.
        several: True if filters choose for several new tokens together; otherwise several tokens read everything.
        page: number of entries of the pages that each sparse layer chooses itself (Quest), whose source is the layer's own
            index; 0 where filter layers choose.
    """

    sources: tuple[int, ...]
    every_entry: bool
    padded_len: int = 0
    width: int = 0
    filters: tuple[int, ...] = ()
    selector: Selector = Selector.LAST
    window: int = 1
    include_generated: bool = False
    offloaded: tuple[int, ...] = ()
    ahead: int = 0
    several: bool = False
    page: int = 0

    @property
    def chooses(self) -> bool:
        """True if some layers read chosen entries only: filter layers', or their own pages'."""
        return bool(self.filters or self.page)

    @property
    def loaded(self) -> int:
        """Largest number of entries per kv head, summed over layers, loaded from host memory at a time; 0 if none is."""
        if not self.offloaded:
            return 0
        if not self.filters:
            return self.padded_len * min(self.ahead + 1, len(self.offloaded))
        return self.width * max(self.sources.count(each) for each in self.filters)

    @property
    def query_buffer(self) -> int:
        """Number of last queries that each filter layer stores in a query buffer buffer; 0 with `Selector.LAST`."""
        return 0 if self.selector is Selector.LAST else self.window

    def beside(self, sliding_windows: SlidingWindows) -> "Reading":
        """Config of all layers of a model, of that of its layers without a window; sliding-window layers read all they hold.

        `sliding_windows` are `ModelConfig.sliding_windows`.
        """
        if not any(sliding_windows):
            return self
        index, sources = without_window(sliding_windows), [WHOLE] * len(sliding_windows)
        for layer, source in zip(index, self.sources, strict=True):
            sources[layer] = source if source == WHOLE else index[source]
        filters, offloaded = (
            tuple(index[layer] for layer in layers) for layers in (self.filters, self.offloaded)
        )
        return dataclasses.replace(
            self, filters=filters, sources=tuple(sources), offloaded=offloaded
        )


def without_window(sliding_windows: SlidingWindows) -> tuple[int, ...]:
    """Tuple of the indices of a model's layers that attend to the whole prompt, from `ModelConfig.sliding_windows`."""
    return tuple(layer for layer, width in enumerate(sliding_windows) if width is None)


def whole_layers(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Tuple of layers that read every entry: all below the first filter, the filters, `adjacent` above each filter.

    Hao et al., OmniKV, section 4.1: (2m + F0) / L of all layers for adjacent = 1 and filters apart.
    """
    anchors = [*range(filters[0]), *filters, layers]
    return tuple(
        layer
        for at, after in pairwise(anchors)
        for layer in range(at, min(at + adjacent + 1, after))
    )


def sources(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Tuple, by layer, of the index of the filter layer whose choice it reads; WHOLE (-1) if it reads every entry."""
    whole = set(whole_layers(filters, adjacent, layers))
    return tuple(
        WHOLE if layer in whole else max(f for f in filters if f < layer) for layer in range(layers)
    )


class Reads:
    """Base of a policy's config `read`: which entries layers read while decoding, and which are in host memory."""

    @property
    def everything(self) -> bool:
        """True if every layer reads all kept entries, which stay where they are."""
        return False

    @property
    def by_layer(self) -> bool:
        """True if each layer chooses for itself what it reads, of entries that stay on the device."""
        return self.everything

    @property
    def rolling(self) -> bool:
        """True if positions are those within the cache: keys are stored before RoPE and rotated on read."""
        return False

    @property
    def queries(self) -> int:
        """Number of a prompt's last queries that the cache stores for filter layers."""
        return 0

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, where prompts are prefilled chunk by chunk; 0 where they are read at once."""
        return 0

    @property
    def whole_prompts(self) -> bool:
        """True if no entry of a prompt may be dropped, since entries are offloaded or prompts prefilled in chunks."""
        return self.chunk > 0

    def check_over(self, select: Select, after: After) -> None:
        """Raises ValueError where entries that a selection keeps, and goes on with as told, cannot be read in this way."""
        remedy = "entries that wait in host memory, or come in chunks, are whole prompts: leave the scorer out"
        require(not self.whole_prompts, "read", self, remedy)
        remedy = (
            "tokens are chosen of entries that stay where they are: give a policy that then appends"
        )
        require(isinstance(after, Append), "read", self, remedy)

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for a model that this is not made for; passes by default."""

    def among(self, sliding_windows: SlidingWindows) -> "Reads":
        """Config whose layers are counted among those without a window (`ModelConfig.sliding_windows`); by default the same."""
        return self

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Integers `[B]`: number of each prompt's tokens that a sparse layer reads per step while decoding.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The numbers; by default all of them.
        """
        return lengths

    def reading(self, layers: int, padded_len: int, *, every_entry: bool) -> Reading:
        """Returns `Reading`, the static config of which entries each layer reads, for prompts padded to `padded_len`.

        Args:
            layers: number of layers that attend to the whole prompt; indices count these.
            padded_len: the prompts' bucket.
            every_entry: True if all entries of a prompt are kept.

        Returns:
            The config.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadAll(Reads):
    """Config of reads of every kept entry, in every layer.

    Attributes:
        rolling: positions are those within the cache: keys are stored before RoPE and rotated on read.
    """

    everything = True

    rolling: bool = False

    def __post_init__(self) -> None:
        field(self, "rolling", flag)

    def check_over(self, select: Select, after: After) -> None:
        """Raises ValueError where rolling positions do not go with how a selection keeps entries, and goes on."""
        if not self.rolling:
            return
        remedy = "keys before RoPE are not compared: leave rolling positions out"
        require(select.merge is None, "merge", select.merge, remedy)
        remedy = "heads and layers need segments of equal size: use UniformHeads() or SharedHeads(), and a schedule"
        equal = select.heads.uniform and not select.layers.from_scores
        require(equal, "rolling", self.rolling, remedy)
        remedy = "rolling positions move in steps: give every=64, say"
        require(not isinstance(after, Evict), "after", after, remedy)

    def reading(self, layers: int, padded_len: int, *, every_entry: bool) -> Reading:
        """Returns `Reading`, the static config: every layer reads every entry; the same for prompts of any bucket."""
        return Reading(sources=(WHOLE,) * layers, every_entry=every_entry)


def as_tokens(given: Any, least: int) -> Tokens | Share:
    """Budget of tokens that a layer reads, 1024 by default; ValueError below the `least` that it always reads."""
    budget = as_budget(1024 if given is None else given)
    fits = isinstance(budget, Share) or isinstance(budget, Tokens) and budget.value >= least
    require(
        fits, "budget", budget, f"give at least {least} tokens, which are always read, or a share"
    )
    assert isinstance(budget, Tokens | Share)
    return budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredReads(Reads):
    """Config of OmniKV's reads: filter layers choose, for every new token, the tokens that layers above them read.

    Fields are those of `OmniKV`.
    """

    filter_layers: tuple[int, ...] | None
    budget: Kept | Budget
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
                whole("filter_layers", each, remedy, least=0)
                for each in several("filter_layers", given, remedy)
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
        remedy = "give chosen tokens per token of a chunk, such as 2, or None for full attention"
        optional(self, "prefill_ratio", real, remedy, high=1e9, open_low=True)
        generated, offload = self.include_generated, self.offload
        remedy = (
            "entries after the prompt stay on the device and are always read there: leave one out"
        )
        require(not (generated and offload), "include_generated", generated, remedy)
        self._check_budget()

    def _check_budget(self) -> None:
        """Raises ValueError for bad `mem`, `mem` and a budget, or too small a budget; stores the default budget."""
        mem, budget = self.mem, self.budget
        remedy = f"it solves for the budget, which is {budget!r}: give one"
        require(None in (mem, budget), "mem", mem, remedy)
        remedy = "give the share of the cache that stays at hand, in (0, 1]"
        optional(self, "mem", real, remedy, high=1.0, open_low=True)
        if mem is None:
            object.__setattr__(self, "budget", as_tokens(budget, self._least))

    @property
    def _least(self) -> int:
        """Least number of tokens that a layer reads: `window`, or 1 with `Selector.LAST`."""
        return max(1, self.queries)

    @property
    def queries(self) -> int:
        """Number of a prompt's last queries that the cache stores: `window`, or 0 with `Selector.LAST`."""
        return 0 if self.selector is Selector.LAST else self.window

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of a prompt, `prefill_chunk` if `prefill_ratio` is given; else 0."""
        return 0 if self.prefill_ratio is None else self.prefill_chunk

    @property
    def whole_prompts(self) -> bool:
        """True if no entry of a prompt may be dropped: with `offload` or `prefill_ratio`."""
        return self.offload or self.chunk > 0

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError for filters with windows, for filters whose choice no layer reads, and for too low `mem`.

        Args:
            config: the model's shape.

        Raises:
            ValueError: naming `filter_layers` or `mem`.
        """
        filters, sliding_windows = self._filters, config.sliding_windows
        index = without_window(sliding_windows)
        named = ", ".join(map(str, index))
        remedy = f"of this model the layers {named} can choose"
        require(set(filters) <= set(index), "filter_layers", filters, remedy)
        mine, layers = self.among(sliding_windows), len(index)
        remedy = "no layer is left to read what they choose: all that attend to the whole prompt read all, with "
        remedy += f"adjacent={self.adjacent}: {named}"
        require(len(mine.whole(layers)) < layers, "filter_layers", filters, remedy)
        if mine.mem is not None:
            mine._share(layers)

    def among(self, sliding_windows: SlidingWindows) -> "FilteredReads":
        """Copy of the config whose filter layers are counted among the layers that attend to the whole prompt."""
        if not any(sliding_windows):
            return self
        index = without_window(sliding_windows)
        return dataclasses.replace(
            self, filter_layers=tuple(index.index(layer) for layer in self._filters)
        )

    @property
    def _filters(self) -> tuple[int, ...]:
        """Tuple of the filter layers' indices; raises ValueError if they are None."""
        remedy = (
            "give them, such as (2, 8, 18); `generate` and `prefill` take those found for the model"
        )
        require(self.filter_layers is not None, "filter_layers", None, remedy)
        return self.filter_layers or ()

    def whole(self, layers: int) -> tuple[int, ...]:
        """Tuple of the indices, ascending, of layers that read every entry.

        Args:
            layers: number of layers that attend to the whole prompt; indices count these.

        Returns:
            Their indices.
        """
        return whole_layers(self._filters, self.adjacent, layers)

    def _share(self, layers: int) -> Fraction:
        """Share (Fraction) of a prompt's tokens that a filter chooses, by `mem` or budget; ValueError for low `mem`."""
        if self.mem is None:
            assert isinstance(
                self.budget, Share
            )  # Tokens are no share, and without `mem` there is a budget.
            return Fraction(repr(self.budget.value))
        whole, mem = Fraction(len(self.whole(layers)), layers), Fraction(repr(self.mem))
        remedy = f"layers that read everything hold {float(whole):.4g} of the cache: give more, or lower filter layers"
        require(mem > whole, "mem", self.mem, remedy)
        return (mem - whole) / (1 - whole)

    def tokens(self, lengths: Int[np.ndarray, " B"], layers: int) -> Int[np.ndarray, " B"]:
        """Number `[B]` of each prompt's tokens that a filter layer chooses: the budget, share or `mem` in tokens.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The budget, or the share's whole number of each prompt; at least the window, or 1. At most the prompt,
            except for a budget in tokens with `include_generated`.

        References:
            OmniKV, section 5: Mem% = whole + share * (1 - whole).
        """
        if isinstance(self.budget, Tokens):
            wanted = np.full_like(lengths, self.budget.value)
        else:
            share = self._share(layers)
            wanted = np.asarray(
                [n * share.numerator // share.denominator for n in lengths.tolist()], np.int64
            )
        wanted = np.maximum(wanted, self._least)
        # Where later tokens have to be chosen as well, a budget in tokens is no smaller for a short prompt.
        grows = self.include_generated and isinstance(self.budget, Tokens)
        return wanted if grows else np.minimum(wanted, lengths)

    def reading(self, layers: int, padded_len: int, *, every_entry: bool) -> Reading:
        """Returns `Reading`, the static config: filter layers, layers that read their choices, offloaded layers."""
        filters, whole = self._filters, self.whole(layers)
        return Reading(
            filters=filters,
            sources=sources(filters, self.adjacent, layers),
            selector=Selector(self.selector),
            window=self._least,
            include_generated=self.include_generated,
            every_entry=every_entry,
            offloaded=tuple(sorted(set(range(layers)) - set(whole))) if self.offload else (),
            ahead=1,
            padded_len=padded_len,
            width=int(self.tokens(np.asarray([padded_len]), layers)[0]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedReads(Reads):
    """Config of BrutalOffload's reads: every layer reads every entry, upper layers load theirs from host memory.

    Fields are those of `BrutalOffload`.
    """

    resident_layers: int
    ahead: int

    whole_prompts = True

    def __post_init__(self) -> None:
        for name, least in (("resident_layers", 1), ("ahead", 0)):
            field(self, name, whole, f"give a number, at least {least}", least=least)

    def require_fits(self, config: ModelConfig) -> None:
        """Raises ValueError if the model has no layer above the resident ones whose entries could be offloaded."""
        require_fewer("resident_layers", self.resident_layers, config)

    def reading(self, layers: int, padded_len: int, *, every_entry: bool) -> Reading:
        """Returns `Reading`, the static config: every layer reads every entry, and upper layers are offloaded."""
        return Reading(
            sources=(WHOLE,) * layers,
            every_entry=True,
            offloaded=tuple(range(self.resident_layers, layers)),
            ahead=self.ahead,
            padded_len=padded_len,
            width=padded_len,
        )


def require_fewer(name: str, layers: int, config: ModelConfig) -> None:
    """Raises ValueError unless a number of layers leaves some of a model's that attend to the whole prompt."""
    whole, beside = (
        config.sliding_windows.count(None),
        " without a window" * any(config.sliding_windows),
    )
    require(layers < whole, name, layers, f"the model has {whole} layers{beside}: give fewer")


def tokens_read(
    read: Reads, lengths: Int[np.ndarray, " B"], sliding_windows: SlidingWindows
) -> Int[np.ndarray, " B"]:
    """Integers `[B]`: number of each prompt's tokens that a sparse layer reads per step, from `ModelConfig.sliding_windows`."""
    mine = read.among(sliding_windows)
    return mine.tokens(np.asarray(lengths, np.int64), sliding_windows.count(None))
