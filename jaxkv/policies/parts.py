"""`Parts`, the plain value through which the engine sees a policy."""

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxkv._checks import (
    compute_floor_share,
    format_non_default_fields,
    require_instance,
    select_array_module,
    validate_field,
)
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache.layout import SegmentLayout
from jaxkv.cache.stores import DenseStore, Store
from jaxkv.models.config import ModelConfig, SlidingWindows
from jaxkv.policies.checks import EntryBudget, Kept, ShareBudget, get_store_class, normalise_store
from jaxkv.policies.head_budgets import (
    HeadBudgets,
    SelectionOrder,
    get_score_threshold,
    heads_share_positions,
    unwrap_head_budgets,
)
from jaxkv.policies.keep import Keep
from jaxkv.policies.layer_budgets import Counts, LayerBudgets, Table, WeightedLayers
from jaxkv.policies.merger import Merger
from jaxkv.policies.phases import After, Append, Evict, KeepAll, Recompress, Select
from jaxkv.policies.rank import ByNewScores, Rank
from jaxkv.policies.reads import AttentionReads, LayerReadConfig, ReadAll
from jaxkv.policies.scorer import Needs, Scorer


@frozen_dataclass
class DecodingCompressionConfig:
    """Static config of compression while decoding, without budgets: eviction, rank, merger, protected entries.

    The defaults are those of policies that only append new entries.

    Attributes:
        compresses: False if new entries are only appended; the other fields are then unused.
        evicts: True if, after each token, segments above their limit evict the entry of lowest rank.
        rank: how scores change.
        one_set: True if all kv heads of a layer hold the same positions, and evict the same position.
        keep: sinks and spans that are never evicted.
        merge: the merger of evicted entries; None discards them.
        queries: size of the query buffer, for scorers that score again.
    """

    compresses: bool = False
    evicts: bool = False
    rank: Rank = ByNewScores()
    one_set: bool = False
    keep: Keep = Keep()
    merge: Merger | None = None
    queries: int = 0

    @property
    def stores_scores(self) -> bool:
        """True if the cache stores a score for each entry while decoding: if the rank does."""
        return self.rank.stores_scores

    @property
    def updates_scores(self) -> bool:
        """True if the attention that entries receive while decoding changes their stored scores."""
        return self.stores_scores and self.rank.decay is not None


@frozen_dataclass
class Parts:
    """A policy as the engine sees it: selection of a prompt's entries, phase after it, reads while decoding, store.

    Attributes:
        select: entries of a prompt to keep: `KeepAll()` or `Select(...)`.
        after: what happens to entries after the prompt: `Append()`, `Evict(...)` or `Recompress(...)`.
        read: entries that layers attend to while decoding: `ReadAll()`, or fewer.
        store: how entries are held: a subclass of `jaxkv.cache.Store`.
    """

    select: KeepAll | Select = KeepAll()
    after: After = Append()
    read: AttentionReads = ReadAll()
    store: type[Store] = DenseStore

    def __post_init__(self) -> None:
        validate_field(
            self, "select", require_instance, (KeepAll, Select), "give KeepAll(), or Select(...)"
        )
        remedy = "give Append(), Evict(...) or Recompress(...)"
        validate_field(self, "after", require_instance, (Append, Evict, Recompress), remedy)
        validate_field(
            self,
            "read",
            require_instance,
            AttentionReads,
            "give what layers attend to, such as ReadAll()",
        )
        object.__setattr__(self, "store", get_store_class(normalise_store(self.store)))
        self._require_compatible_phases()

    def _require_compatible_phases(self) -> None:
        """Raise ValueError if selection, phase after the prompt, reads and store exclude one another."""
        appends = isinstance(self.after, Append)
        name, given = (
            ("every", self.recompression_interval)
            if self.recompression_interval
            else ("after", self.after)
        )
        require(appends or self.compresses_prompts, name, given, _KEPT)
        remedy = "nested layers are chosen once only, for the prompt: leave it out"
        require(appends or not self.nested, name, given, remedy)
        if isinstance(self.select, Select):
            self.read.require_fits_selection(self.select, self.after)
            self.after.require_fits_selection(self.select)
        remedy = "offloading and chunked prefill need dense entries: leave it out"
        held = self.store is DenseStore or not self.read.needs_whole_prompts
        require(held, "store", self.store.__name__, remedy)
        remedy = "the last entries stay unencoded only where all are read, none is evicted for a new one, and layers "
        remedy += "share no pool: use 'int4'"
        plain = self.read == ReadAll() and not self.cache_layout.uses_shared_pool
        held = not self.store.residual_length or (plain and not self.evicts_while_decoding)
        require(held, "store", self.store.__name__, remedy)

    @classmethod
    def create_from_fields(cls, *, scorer: Scorer | None, **parts: Any) -> "Parts":
        """Return `Parts` from fields of `Parts` and `Select`; scorer None keeps all entries, rejects budgets, merger.

        Args:
            scorer: scorer of entries; None keeps every entry.
            **parts: the fields; without a scorer, fields of `Select` must have their defaults.

        Returns:
            The parts.

        Raises:
            ValueError: for parts that exclude one another.
            TypeError: for parts of a wrong type.
        """
        phases = {name: parts.pop(name) for name in _PHASES & parts.keys()}
        if scorer is not None:
            return cls(select=Select(scorer=scorer, **parts), **phases)
        for name, given in parts.items():
            plain = name in _KEPT_ANYWAY or given == getattr(KeepAll, name)
            require(plain, name, given, _KEPT)
        return cls(select=KeepAll(), **phases)

    def replace(self, **parts: Any) -> "Parts":
        """Return a copy with the given fields of `Parts`, or of its selection `select`, replaced."""
        phases = {name: parts.pop(name) for name in _PHASES & parts.keys()}
        select = dataclasses.replace(self.select, **parts) if parts else self.select
        return dataclasses.replace(self, **({"select": select} | phases))

    @property
    def compresses_prompts(self) -> bool:
        """True if the policy has a scorer that chooses which entries of a prompt to keep; False if it keeps all."""
        return isinstance(self.select, Select)

    @property
    def scorer(self) -> Scorer:
        """Policy's `Scorer` of entries; if it keeps all, a base `Scorer` without needs, which is not called."""
        return self.select.scorer

    @property
    def budget(self) -> Kept | None:
        """Policy's `EntryBudget`, `ShareBudget` or `ByteBudget`; None: all entries, or layer budgets decide."""
        return self.select.budget

    @property
    def keep(self) -> Keep:
        """`Keep` of a policy: its always-kept entries, such as sinks and the observation window."""
        return self.select.keep

    @property
    def layers(self) -> LayerBudgets:
        """`LayerBudgets` of a policy, which divide its budget of entries among layers."""
        return self.select.layers

    @property
    def heads(self) -> HeadBudgets:
        """`HeadBudgets` of a policy, which divide each layer's budget of entries among its kv heads."""
        return self.select.heads

    @property
    def merge(self) -> Merger | None:
        """`Merger` of a policy, which merges evicted entries into kept ones; None discards evicted entries."""
        return self.select.merge

    @property
    def nested(self) -> bool:
        """True if, under the policy, a layer chooses only among positions that the layer below kept."""
        return self.select.nested

    @property
    def rolling(self) -> bool:
        """True if RoPE positions count within the cache: keys are stored before RoPE, and rotated on each read."""
        return self.read.rolling

    def require_fits_model(self, config: ModelConfig) -> None:
        """Raise ValueError if a part does not fit the model, such as the gate of another model."""
        for part in (self.scorer, self.layers, unwrap_head_budgets(self.heads), self.read):
            part.require_fits_model(config)
        if self.merge is not None and config.latent is not None:
            remedy = "latents are keys and values at once: give a merger that compares keys, such as Merge()"
            require(self.merge.compared_tensors == ("k",), "merge", self.merge, remedy)
        if config.state_layers:
            offloaded = self.build_read_config(config.sliding_windows, 1).offloaded
            remedy = "not supported for models with layers that have a state: leave offload out"
            require(not offloaded, "policy", "entries in host memory", remedy)
        if len(set(config.entry_dims)) > 1:
            remedy = (
                "layers of this model have entries of different sizes, and share no pool: use a policy "
                "with equal layers, such as SnapKV, KVzip(over='layer') or D2O(layers=UniformLayers())"
            )
            require(not self.cache_layout.uses_shared_pool, "policy", self.layers, remedy)
            remedy = (
                "not supported for a model whose layers have entries of different sizes: use 'int8'"
            )
            require(not self.store.transformed, "store", self.store.__name__, remedy)
        if any(config.sliding_windows):
            self.require_fits_sliding_windows(config.sliding_windows)
        turns = self.rolling or bool(self.needs.moments or self.needs.pairs)
        remedy = (
            "it turns keys or queries, which this model scales behind RoPE: use SnapKV, or FullKV"
        )
        require(not (turns and config.qk_norm_rotated), "policy", self.scorer, remedy)

    def require_fits_sliding_windows(self, sliding_windows: SlidingWindows) -> None:
        """Raise ValueError for parts that do not fit a model's sliding windows, such as rolling positions."""
        whole = [layer for layer, width in enumerate(sliding_windows) if width is None]
        remedy = f"only layers {whole} of this model attend to the whole prompt: use FullKV"
        chooses = self.scorer if self.compresses_prompts else self.read
        plain = not self.compresses_prompts and self.read.reads_all_entries
        require(bool(whole) or plain, "policy", chooses, remedy)
        remedy = "not supported for models with sliding windows: leave it out"
        require(not self.rolling, "rolling", self.rolling, remedy)
        self.restrict_to_full_attention(sliding_windows)

    def restrict_to_full_attention(self, sliding_windows: SlidingWindows) -> "Parts":
        """Return `Parts` whose layer tables hold only layers without a sliding window; itself if all or none have one.

        `sliding_windows` are `ModelConfig.sliding_windows`; without any, the parts are unchanged. ValueError if a
        table names sliding-window layers, or nothing but these.
        """
        return (
            _restrict_parts(self, sliding_windows)
            if any(sliding_windows) and None in sliding_windows
            else self
        )

    def mask_layers_without_eviction(
        self, sliding_windows: SlidingWindows
    ) -> Bool[np.ndarray, " L"]:
        """Return the mask `[L]` of layers whose new entries the policy never evicts; includes sliding-window layers."""
        mask = np.asarray([width is not None for width in sliding_windows])
        mask[~mask] = self.restrict_to_full_attention(
            sliding_windows
        ).layers.mask_layers_without_eviction(sliding_windows.count(None))
        return mask

    @property
    def cache_layout(self) -> SegmentLayout:
        """`SegmentLayout` of the cache: SHARED for layer budgets by scores, else EQUAL (uniform heads) or RAGGED."""
        if self.layers.depends_on_scores:
            return SegmentLayout.SHARED
        return SegmentLayout.EQUAL if self.heads.is_uniform else SegmentLayout.RAGGED

    @property
    def uses_layer_weights(self) -> bool:
        """True if layer budgets use weights of layers, from scores or attention; False for a joint budget."""
        return self.layers.depends_on_scores and not self.layers.uses_joint_budget

    @property
    def bounds_layers_early(self) -> bool:
        """True if prefill can discard entries beyond `bound_lower_layers`: weighted layers, each head's own best."""
        shares = (
            isinstance(self.layers, WeightedLayers)
            and type(self.layers).compute_layer_entries is WeightedLayers.compute_layer_entries
        )
        best = self.heads.selection_order is SelectionOrder.OWN and not self.heads.needs_value_norms
        plainly = best and not self.keep.recent
        return shares and plainly and not self.scorer.has_first_stage

    @property
    def score_threshold(self) -> float | None:
        """Lowest score (float) of a kept entry if the head budgets are `ThresholdHeads`; else None."""
        return get_score_threshold(self.heads)

    @property
    def needs(self) -> Needs:
        """`Needs` of all these parts except a gate: what prefill computes in addition to keys and values."""
        needs = self.scorer.needs
        return dataclasses.replace(
            needs,
            queries=max(needs.queries, self.read.stored_query_count),
            references=needs.references or (self.merge.reference_count if self.merge else 0),
            sums=needs.sums or self.layers.needs_attention_sums,
            norms=needs.norms or self.heads.needs_value_norms,
            unrotated=needs.unrotated or self.rolling,
            # A gate's weights are arrays, and an argument of their own.
            gate=None,
        )

    def compute_entry_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes of one entry of a kv head: key, value and position, and the score where scores are stored.

        Args:
            dim: D.
            itemsize: bytes per element of the model's dtype.

        Returns:
            Bytes.
        """
        return self.store.compute_entry_bytes(dim, itemsize) + 4 + (4 if self.stores_scores else 0)

    def compute_residual_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """Return the bytes per sequence of last entries before encoding, in layers without a sliding window.

        Args:
            config: the model's shape, on a mesh a device's part.
            itemsize: bytes per element of the model's dtype.

        Returns:
            Bytes.
        """
        return self.store.residual_length * sum(
            2 * config.kv_heads * dim * itemsize + 4
            for dim, width in zip(config.entry_dims, config.sliding_windows, strict=True)
            if not width
        )

    def kernels_read_as_stored(self, dim: int) -> bool:
        """Return True if kernels read entries undecoded: dense, or if they fit `dim`, with `Append` and `ReadAll()`."""
        appends = not self.decoding_compression.compresses and self.read == ReadAll()
        return self.store.kernels == DenseStore.kernels or (
            appends and self.store.supports_kernels(set(self.store.kernels), dim)
        )

    @property
    def uses_random_key(self) -> bool:
        """True if the scorer or merger uses random numbers, so that results depend on the call's random key."""
        return self.scorer.uses_random_key or (
            self.merge is not None and self.merge.uses_random_key
        )

    @property
    def evicts_while_decoding(self) -> bool:
        """True if decoding evicts an entry for each new entry beyond the budget: if `after` is `Evict`."""
        return isinstance(self.after, Evict)

    @property
    def recompression_interval(self) -> int | None:
        """Number of new tokens between compressions of the whole cache; None without recompression."""
        return self.after.every if isinstance(self.after, Recompress) else None

    @property
    def growing_budget(self) -> Kept | None:
        """`budget` if it is a share of all tokens seen so far, prompt and answer; None if it is of the prompt alone."""
        grows = isinstance(self.after, Recompress) and self.after.grows
        return self.budget if grows else None

    @property
    def decoding_compression(self) -> DecodingCompressionConfig:
        """`DecodingCompressionConfig`, the static config of compression while decoding, from these parts."""
        after = self.after
        if isinstance(after, Append):
            return DecodingCompressionConfig()
        return DecodingCompressionConfig(
            compresses=True,
            evicts=self.evicts_while_decoding,
            rank=after.rank,
            one_set=heads_share_positions(self.heads),
            keep=Keep(sinks=self.keep.sinks, protect=self.keep.protect),
            merge=self.merge,
            queries=self.scorer.needs.queries if isinstance(after.rank, ByNewScores) else 0,
        )

    def build_read_config(
        self, sliding_windows: SlidingWindows, padded_len: int
    ) -> LayerReadConfig:
        """Return `LayerReadConfig`, the static config of the entries that each layer attends to, for one bucket."""
        read = self.read.restrict_to_full_attention(sliding_windows)
        mine = read.build_read_config(
            sliding_windows.count(None), padded_len, every_entry=not self.compresses_prompts
        )
        return mine.add_sliding_window_layers(sliding_windows)

    @property
    def stores_scores(self) -> bool:
        """True if the cache stores a score for each entry, which decoding compares or changes."""
        return self.decoding_compression.stores_scores

    @property
    def growth_limit(self) -> int | None:
        """Entries per kv head to which short prompts' segments may grow: an entry budget, layers' limit, or None."""
        if isinstance(self.budget, EntryBudget):
            return self.budget.value
        return self.layers.growth_limit

    def compute_growth_limits(self, budget: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        """Return entries per kv head `[B]` to which the cache may grow: `budget`, or `growth_limit` if larger."""
        return budget if self.growth_limit is None else np.maximum(budget, self.growth_limit)

    def compute_prompt_budgets(
        self,
        lengths: Int[np.ndarray, " B"],
        always_kept: Int[np.ndarray, " B"],
        *,
        strict: bool = True,
    ) -> Int[np.ndarray, " B"]:
        """Return prompts' mean entries per kv head `[B]`, raised to always-kept ones (`strict`: ValueError).

        `strict` rejects budgets below the always-kept entries, except shares under `clamp`; the error names the prompt.
        """
        lengths = np.asarray(lengths, np.int64)
        budget = self.budget
        if self.layers.sets_entry_count:
            return self.layers.compute_average_entries(lengths, always_kept)
        if budget is None:
            return lengths.copy()
        rows = budget.count_entries(lengths)
        share = isinstance(budget, ShareBudget)
        low = np.flatnonzero(rows < always_kept)
        if strict and low.size and not (share and self.select.clamp):
            row = int(low[0])
            remedy = f"prompt {row} ({lengths[row]} tokens) keeps {rows[row]} entries, but sinks, window and protected "
            remedy += f"spans take {always_kept[row]}: raise the budget"
            remedy += ", or give min_budget='clamp'" if share else ""
            require(False, "budget", budget, remedy)
        return np.maximum(rows, np.minimum(always_kept, lengths))

    def count_raised_budgets(self, lengths: Int[np.ndarray, " B"]) -> int:
        """Return how many prompts a `ShareBudget` gives too few entries for always-kept ones; 0 for other budgets."""
        if not isinstance(self.budget, ShareBudget):
            return 0
        lengths = np.asarray(lengths, np.int64)
        return int(
            (self.budget.count_entries(lengths) < self.keep.count_always_kept(lengths)).sum()
        )

    def count_recent_entries(
        self,
        rows: Table,
        length: Counts,
        always_kept: Counts,
        weights: Any = None,
        budget: Counts | None = None,
    ) -> Table:
        """Return how many recent entries `[L, B]` to keep: layer budgets' own, or share `recent`; at least the window.

        The share is of the entries that are not always kept. The result is at most what other always-kept entries
        leave of `rows`. `weights` are the layers' weights, and `budget` the average entries per kv head, where budgets
        follow from weights. All arguments are on the host, or all are traced.
        """
        xp = select_array_module(rows)
        window = self.keep.window
        left = xp.maximum(rows - (always_kept - window), 0)
        if weights is not None and self.keep.recent:
            own = self.layers.count_recent_entries(budget, length, weights)
            if own is not None:
                return xp.clip(own, window, xp.maximum(left, window))
        return xp.maximum(window, compute_floor_share(left, self.keep.recent))

    def describe_parts(self) -> dict[str, str]:
        """Return a dict of short texts, by field name, of parts that differ from defaults; `KeepAll()` is included."""
        found = (
            {} if self.compresses_prompts else {"select": format_non_default_fields(self.select)}
        )
        for of in (self.select, self):
            for each in dataclasses.fields(of):
                part = getattr(of, each.name)
                if part != each.default and part is not self.select:
                    found[each.name] = format_non_default_fields(part)
        return found


@lru_cache(maxsize=256)
def _restrict_parts(parts: Parts, sliding_windows: SlidingWindows) -> Parts:
    """Return a copy of `parts` with layer and head budgets of the layers without a sliding window; memoised.

    `sliding_windows` are `ModelConfig.sliding_windows`. ValueError if a table names sliding-window layers, or if head
    budgets that differ by layer do not override `restrict_to_full_attention`.
    """
    layers = parts.layers.restrict_to_full_attention(sliding_windows)
    heads = parts.heads.restrict_to_full_attention(sliding_windows)
    inner = unwrap_head_budgets(parts.heads)
    cut = unwrap_head_budgets(heads)
    alike = not inner.needs_layer_index and inner.get_segment_limits() is None
    remedy = "they differ by layer, and some layers have sliding windows: write a method "
    remedy += (
        "restrict_to_full_attention(sliding_windows) that returns the budgets of the other layers"
    )
    require(alike or cut is not inner, "heads", inner, remedy)
    return parts.replace(layers=layers, heads=heads) if parts.compresses_prompts else parts


_PHASES = {each.name for each in dataclasses.fields(Parts)}
_KEPT = "without a scorer every entry is kept: leave it out, or choose a policy such as SnapKV"
# Fields of `Select` that have no effect, and are accepted, where every entry is kept.
_KEPT_ANYWAY = ("keep", "clamp")
