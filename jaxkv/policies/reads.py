"""The part `read` of a policy: filter layers choose the tokens that upper layers attend to; layers are offloaded."""

import dataclasses
import enum
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxkv._checks import (
    validate_bool,
    validate_enum,
    validate_field,
    validate_float,
    validate_int,
    validate_non_empty_tuple,
    validate_optional_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.checks import Budget, EntryBudget, Kept, ShareBudget, parse_budget
from jaxkv.policies.phases import After, Append, Evict, Select

# The source of a layer that attends to every entry.
WHOLE = -1


class QueryWeighting(enum.Enum):
    """Enum of query weights in filter layers: newest query alone (LAST), halved by age (EXPONENTIAL), equal (UNIFORM).

    LAST: the newest query alone. EXPONENTIAL: halved for every token of age. UNIFORM: equal weights.
    """

    LAST = "last"
    EXPONENTIAL = "exponential"
    UNIFORM = "uniform"

    def compute_query_weights(self, window: int) -> Float[np.ndarray, " w"]:
        """Return float32 weights of the last queries, newest first: halved by age or all 1, `[w]`; for LAST, `[1]`.

        Args:
            window: number of queries; LAST ignores it and uses one.

        Returns:
            The weights: halved per token of age, all 1, or a single 1 for LAST.
        """
        if self is QueryWeighting.LAST:
            return np.ones(1, np.float32)
        base = 0.5 if self is QueryWeighting.EXPONENTIAL else 1.0
        return base ** np.arange(window, dtype=np.float32)


@frozen_dataclass
class LayerReadConfig:
    """Static config of the entries that each layer attends to while decoding, and of offloaded layers.

    Attributes:
        filters: filter layers, ascending.
        sources: for each layer the filter layer whose choice it uses, or WHOLE if it attends to every entry.
        selector: weights of a filter layer's queries.
        window: number of weighted queries, the newest included.
        include_generated: True if attention to tokens after the prompt is limited to chosen ones, too.
        every_entry: True if segments hold every position, so that a position's row is known.
        offloaded: layers whose prompt entries are in host memory.
        ahead: number of offloaded layers to load ahead of the current one.
        padded_len: the prompts' bucket; 0 if nothing is chosen or offloaded.
        width: most chosen tokens, or entries of the chosen pages: a static shape; 0 if nothing is chosen or offloaded.
        several: True if filter layers choose for several new tokens together; otherwise several tokens use every entry.
        page: entries per page where each sparse layer chooses its own pages (Quest) and its source is its own index;
            0 with filter layers.
        channels: number of channels by which pages are chosen (RocketKV); 0 for Quest's bound, of all channels.
    """

    sources: tuple[int, ...]
    every_entry: bool
    padded_len: int = 0
    width: int = 0
    filters: tuple[int, ...] = ()
    selector: QueryWeighting = QueryWeighting.LAST
    window: int = 1
    include_generated: bool = False
    offloaded: tuple[int, ...] = ()
    ahead: int = 0
    several: bool = False
    page: int = 0
    channels: int = 0

    @property
    def has_sparse_layers(self) -> bool:
        """True if some layers attend to chosen entries only: by filter layers or by pages."""
        return bool(self.filters or self.page)

    @property
    def max_loaded_entries(self) -> int:
        """Most entries per kv head, summed over layers, loaded from host memory together; 0 without offloading."""
        if not self.offloaded:
            return 0
        if not self.filters:
            return self.padded_len * min(self.ahead + 1, len(self.offloaded))
        return self.width * max(self.sources.count(each) for each in self.filters)

    @property
    def filter_query_count(self) -> int:
        """Number of last queries in each filter layer's query buffer; 0 with `QueryWeighting.LAST`."""
        return 0 if self.selector is QueryWeighting.LAST else self.window

    def add_sliding_window_layers(self, sliding_windows: SlidingWindows) -> "LayerReadConfig":
        """Return the config of all layers, from this config of the layers without a sliding window only.

        `sliding_windows` are `ModelConfig.sliding_windows`. Sliding-window layers attend to all entries they hold.
        """
        if not any(sliding_windows):
            return self
        index = list_full_attention_layers(sliding_windows)
        sources = [WHOLE] * len(sliding_windows)
        for layer, source in zip(index, self.sources, strict=True):
            sources[layer] = source if source == WHOLE else index[source]
        filters, offloaded = (
            tuple(index[layer] for layer in layers) for layers in (self.filters, self.offloaded)
        )
        return dataclasses.replace(
            self, filters=filters, sources=tuple(sources), offloaded=offloaded
        )


def list_full_attention_layers(sliding_windows: SlidingWindows) -> tuple[int, ...]:
    """Return the ascending indices of the layers without a sliding window, from `ModelConfig.sliding_windows`."""
    return tuple(layer for layer, width in enumerate(sliding_windows) if width is None)


def find_unfiltered_layers(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Return the indices of layers that attend to every entry: below the first filter, filters, `adjacent` above each.

    Hao et al., OmniKV, section 4.1: these are (2m + F0) / L of all layers for adjacent = 1 and filters apart.
    """
    anchors = [*range(filters[0]), *filters, layers]
    return tuple(
        layer
        for at, after in pairwise(anchors)
        for layer in range(at, min(at + adjacent + 1, after))
    )


def map_layers_to_filters(filters: tuple[int, ...], adjacent: int, layers: int) -> tuple[int, ...]:
    """Return, per layer, the index of the nearest filter below, whose choice it uses; WHOLE (-1) if it reads all."""
    whole = set(find_unfiltered_layers(filters, adjacent, layers))
    return tuple(
        WHOLE if layer in whole else max(f for f in filters if f < layer) for layer in range(layers)
    )


class AttentionReads:
    """Base of a policy's part `read`: the entries that layers attend to while decoding, and those in host memory."""

    @property
    def reads_all_entries(self) -> bool:
        """True if every layer attends to all kept entries, and all are on the device; False by default."""
        return False

    @property
    def chooses_per_layer(self) -> bool:
        """True if each layer itself chooses what to attend to, all on the device; by default `reads_all_entries`."""
        return self.reads_all_entries

    @property
    def rolling(self) -> bool:
        """True if RoPE positions count within the cache and keys are rotated on each read; False by default."""
        return False

    @property
    def stored_query_count(self) -> int:
        """Number of the prompt's last queries that the cache stores for filter layers; 0 by default."""
        return 0

    @property
    def prefill_chunk_tokens(self) -> int:
        """Tokens per chunk of a chunked prefill; 0, the default, for a prefill of whole prompts."""
        return 0

    @property
    def needs_whole_prompts(self) -> bool:
        """True if offloading or chunked prefill needs all entries of a prompt; by default if prefill is chunked."""
        return self.prefill_chunk_tokens > 0

    def require_fits_selection(self, select: Select, after: After) -> None:
        """Raise ValueError if these reads need whole prompts, or if the phase after the prompt is not `Append`."""
        remedy = "host memory and chunked prefill need whole prompts: leave the scorer out"
        require(not self.needs_whole_prompts, "read", self, remedy)
        remedy = "choosing tokens needs kept entries that do not change: give a policy that appends"
        require(isinstance(after, Append), "read", self, remedy)

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if the model does not fit these reads; by default every model fits."""

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "AttentionReads":
        """Return the reads with layers counted among those without a sliding window; the same object by default.

        `sliding_windows` are `ModelConfig.sliding_windows`.
        """
        return self

    def count_attended_tokens(
        self, lengths: Int[np.ndarray, " B"], layers: int
    ) -> Int[np.ndarray, " B"]:
        """Return how many of each prompt's tokens `[B]` a sparse layer attends to per decode step; by default all.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            Tokens of each prompt; all of them by default.
        """
        return lengths

    def build_read_config(
        self, layers: int, padded_len: int, *, every_entry: bool
    ) -> LayerReadConfig:
        """Return `LayerReadConfig`, the static config of the entries each layer attends to; subclasses implement it.

        Args:
            layers: number of layers that attend to the whole prompt; indices count these.
            padded_len: the prompts' bucket.
            every_entry: True if all entries of a prompt are kept.

        Returns:
            The config.
        """
        raise NotImplementedError


@frozen_dataclass
class ReadAll(AttentionReads):
    """Reads in which every layer attends to every kept entry.

    Attributes:
        rolling: count positions within the cache: keys are stored before RoPE and rotated on each read.
    """

    reads_all_entries = True

    rolling: bool = False

    def __post_init__(self) -> None:
        validate_field(self, "rolling", validate_bool)

    def require_fits_selection(self, select: Select, after: After) -> None:
        """Raise ValueError if rolling positions do not work with a selection and the phase after the prompt."""
        if not self.rolling:
            return
        remedy = "a merger compares keys after RoPE: leave rolling positions out"
        require(select.merge is None, "merge", select.merge, remedy)
        remedy = (
            "segments must be of equal size: use UniformHeads() or SharedHeads(), and a schedule"
        )
        equal = select.heads.is_uniform and not select.layers.depends_on_scores
        require(equal, "rolling", self.rolling, remedy)
        remedy = "rolling positions do not move token by token: give every=64, for example"
        require(not isinstance(after, Evict), "after", after, remedy)

    def build_read_config(
        self, layers: int, padded_len: int, *, every_entry: bool
    ) -> LayerReadConfig:
        """Return `LayerReadConfig`: every layer attends to every entry, for prompts of any bucket."""
        return LayerReadConfig(sources=(WHOLE,) * layers, every_entry=every_entry)


def parse_token_budget(given: Any, least: int) -> EntryBudget | ShareBudget:
    """Return `EntryBudget` or `ShareBudget` of tokens to attend to (None: 1024); ValueError: bytes, below `least`."""
    budget = parse_budget(1024 if given is None else given)
    fits = (
        isinstance(budget, ShareBudget) or isinstance(budget, EntryBudget) and budget.value >= least
    )
    require(
        fits, "budget", budget, f"give at least {least} tokens, which are always used, or a share"
    )
    assert isinstance(budget, EntryBudget | ShareBudget)
    return budget


@frozen_dataclass
class FilteredReads(AttentionReads):
    """OmniKV's reads: filter layers choose, for every new token, the tokens that the layers above them attend to.

    Fields are those of `OmniKV`.
    """

    filter_layers: tuple[int, ...] | None
    budget: Kept | Budget
    mem: float | None
    selector: QueryWeighting | str
    window: int
    adjacent: int
    include_generated: bool
    offload: bool
    prefill_ratio: int | float | None
    prefill_chunk: int

    def __post_init__(self) -> None:
        validate_field(self, "selector", validate_enum, QueryWeighting)
        given = self.filter_layers
        if given is not None:
            remedy = "give one or more layers, ascending, such as (2, 8, 18)"
            layers = tuple(
                validate_int("filter_layers", each, remedy, least=0)
                for each in validate_non_empty_tuple("filter_layers", given, remedy)
            )
            require(sorted(set(layers)) == list(layers), "filter_layers", given, remedy)
            object.__setattr__(self, "filter_layers", layers)
        for name, least in (("window", 1), ("adjacent", 0), ("prefill_chunk", 16)):
            validate_field(
                self, name, validate_int, f"give a number, at least {least}", least=least
            )
        for name in ("include_generated", "offload"):
            validate_field(self, name, validate_bool)
        chunk = self.prefill_chunk
        blocks = chunk <= 256 or chunk % 256 == 0
        require(blocks, "prefill_chunk", chunk, "not a multiple of 256: give one, or less")
        remedy = "give chosen tokens per token of a chunk, such as 2, or None for full attention"
        validate_optional_field(
            self, "prefill_ratio", validate_float, remedy, high=1e9, open_low=True
        )
        generated = self.include_generated
        offload = self.offload
        remedy = "entries after the prompt are on the device and always used: leave one out"
        require(not (generated and offload), "include_generated", generated, remedy)
        self._check_mem_or_budget()

    def _check_mem_or_budget(self) -> None:
        """Raise ValueError unless at most one of `mem` and the budget is given; store the checked or default budget."""
        mem = self.mem
        budget = self.budget
        remedy = f"it determines the budget, and budget={budget!r} is set: give one of them"
        require(None in (mem, budget), "mem", mem, remedy)
        remedy = "give the share of the cache on the device, in (0, 1]"
        validate_optional_field(self, "mem", validate_float, remedy, high=1.0, open_low=True)
        if mem is None:
            object.__setattr__(
                self, "budget", parse_token_budget(budget, self._min_attended_tokens)
            )

    @property
    def _min_attended_tokens(self) -> int:
        """Fewest tokens that a layer attends to: `window`, or 1 with `QueryWeighting.LAST`."""
        return max(1, self.stored_query_count)

    @property
    def stored_query_count(self) -> int:
        """Number of the prompt's last queries that the cache stores: `window`, or 0 with `QueryWeighting.LAST`."""
        return 0 if self.selector is QueryWeighting.LAST else self.window

    @property
    def prefill_chunk_tokens(self) -> int:
        """Tokens per chunk of a prompt: `prefill_chunk` if `prefill_ratio` is given, else 0."""
        return 0 if self.prefill_ratio is None else self.prefill_chunk

    @property
    def needs_whole_prompts(self) -> bool:
        """True if no entry of a prompt may be evicted: with `offload` or `prefill_ratio`."""
        return self.offload or self.prefill_chunk_tokens > 0

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if filter layers are None or not full-attention, no layer uses their choice, `mem` is low.

        Args:
            config: the model's shape.

        Raises:
            ValueError: naming `filter_layers` or `mem`.
        """
        filters = self._required_filter_layers
        sliding_windows = config.sliding_windows
        index = list_full_attention_layers(sliding_windows)
        named = ", ".join(map(str, index))
        remedy = f"only layers {named} of this model attend to the whole prompt: choose among them"
        require(set(filters) <= set(index), "filter_layers", filters, remedy)
        mine = self.restrict_to_full_attention(sliding_windows)
        layers = len(index)
        remedy = "no layer is left to use their choice: all that attend to the whole prompt use every entry, with "
        remedy += f"adjacent={self.adjacent}: {named}"
        require(len(mine.list_unfiltered_layers(layers)) < layers, "filter_layers", filters, remedy)
        if mine.mem is not None:
            mine._compute_chosen_share(layers)

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "FilteredReads":
        """Return reads, filter layers counted among full-attention ones; unchanged without sliding windows."""
        if not any(sliding_windows):
            return self
        index = list_full_attention_layers(sliding_windows)
        return dataclasses.replace(
            self, filter_layers=tuple(index.index(layer) for layer in self._required_filter_layers)
        )

    @property
    def _required_filter_layers(self) -> tuple[int, ...]:
        """Indices of the filter layers; ValueError if `filter_layers` is None."""
        remedy = (
            "give them, such as (2, 8, 18); `generate` and `prefill` use those found for the model"
        )
        require(self.filter_layers is not None, "filter_layers", None, remedy)
        return self.filter_layers or ()

    def list_unfiltered_layers(self, layers: int) -> tuple[int, ...]:
        """Return ascending indices, among full-attention layers, of those that attend to every entry.

        Args:
            layers: number of layers that attend to the whole prompt; indices count these.

        Returns:
            Their indices.
        """
        return find_unfiltered_layers(self._required_filter_layers, self.adjacent, layers)

    def _compute_chosen_share(self, layers: int) -> Fraction:
        """Return the `Fraction` of a prompt's tokens that a filter layer chooses; ValueError for too low a `mem`."""
        if self.mem is None:
            assert isinstance(
                self.budget, ShareBudget
            )  # `mem` is None, so the budget is set; a budget in tokens does not come here.
            return Fraction(repr(self.budget.value))
        whole = Fraction(len(self.list_unfiltered_layers(layers)), layers)
        mem = Fraction(repr(self.mem))
        remedy = f"layers that use every entry hold {float(whole):.4g} of the cache: give more, or lower filter layers"
        require(mem > whole, "mem", self.mem, remedy)
        return (mem - whole) / (1 - whole)

    def count_attended_tokens(
        self, lengths: Int[np.ndarray, " B"], layers: int
    ) -> Int[np.ndarray, " B"]:
        """Return the number `[B]` of each prompt's tokens that a filter layer chooses, from the budget or `mem`.

        Args:
            lengths: tokens of each prompt.
            layers: number of layers that attend to the whole prompt.

        Returns:
            The budget, or the share of each prompt rounded down; at least the window, or 1. At most the prompt, except
            for a budget in tokens with `include_generated`.

        References:
            OmniKV, section 5: Mem% = whole + share * (1 - whole).
        """
        if isinstance(self.budget, EntryBudget):
            wanted = np.full_like(lengths, self.budget.value)
        else:
            share = self._compute_chosen_share(layers)
            wanted = np.asarray(
                [n * share.numerator // share.denominator for n in lengths.tolist()], np.int64
            )
        wanted = np.maximum(wanted, self._min_attended_tokens)
        # Generated tokens are chosen from as well: a budget in tokens may exceed a short prompt.
        grows = self.include_generated and isinstance(self.budget, EntryBudget)
        return wanted if grows else np.minimum(wanted, lengths)

    def build_read_config(
        self, layers: int, padded_len: int, *, every_entry: bool
    ) -> LayerReadConfig:
        """Return `LayerReadConfig`: filter layers, the layers that use their choices, and offloaded layers."""
        filters = self._required_filter_layers
        whole = self.list_unfiltered_layers(layers)
        return LayerReadConfig(
            filters=filters,
            sources=map_layers_to_filters(filters, self.adjacent, layers),
            selector=QueryWeighting(self.selector),
            window=self._min_attended_tokens,
            include_generated=self.include_generated,
            every_entry=every_entry,
            offloaded=tuple(sorted(set(range(layers)) - set(whole))) if self.offload else (),
            ahead=1,
            padded_len=padded_len,
            width=int(self.count_attended_tokens(np.asarray([padded_len]), layers)[0]),
        )


@frozen_dataclass
class OffloadedReads(AttentionReads):
    """BrutalOffload's reads: every layer attends to every entry; upper layers load their entries from host memory.

    Fields are those of `BrutalOffload`.
    """

    resident_layers: int
    ahead: int

    needs_whole_prompts = True

    def __post_init__(self) -> None:
        for name, least in (("resident_layers", 1), ("ahead", 0)):
            validate_field(
                self, name, validate_int, f"give a number, at least {least}", least=least
            )

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if the model has no layer above the resident ones to offload."""
        require_fewer_layers("resident_layers", self.resident_layers, config)

    def build_read_config(
        self, layers: int, padded_len: int, *, every_entry: bool
    ) -> LayerReadConfig:
        """Return `LayerReadConfig`: every layer attends to every entry, and upper layers are offloaded."""
        return LayerReadConfig(
            sources=(WHOLE,) * layers,
            every_entry=True,
            offloaded=tuple(range(self.resident_layers, layers)),
            ahead=self.ahead,
            padded_len=padded_len,
            width=padded_len,
        )


def require_fewer_layers(name: str, layers: int, config: ModelConfig) -> None:
    """Raise ValueError unless `layers` is below the model's number of layers without a sliding window."""
    whole = config.sliding_windows.count(None)
    beside = " without a sliding window" * any(config.sliding_windows)
    require(layers < whole, name, layers, f"the model has {whole} layers{beside}: give fewer")


def count_attended_prompt_tokens(
    read: AttentionReads, lengths: Int[np.ndarray, " B"], sliding_windows: SlidingWindows
) -> Int[np.ndarray, " B"]:
    """Return how many of each prompt's tokens `[B]` sparse layers attend to per decode step, by a policy's reads.

    `sliding_windows` are `ModelConfig.sliding_windows`.
    """
    mine = read.restrict_to_full_attention(sliding_windows)
    return mine.count_attended_tokens(np.asarray(lengths, np.int64), sliding_windows.count(None))
