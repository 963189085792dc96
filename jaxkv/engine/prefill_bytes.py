"""Bytes of a prefill on one device, weights excluded, computed by arithmetic for the engine's plans.

After a layer's program, other programs score, select, merge and pack its entries. Memory peaks at the last two layers,
when most of the cache exists, so only these are computed. Array sizes follow from shapes. XLA's temporaries are bounded
by the measured needs of compiled programs.
"""

from functools import cached_property

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import Implementation, get_attention_backend
from jaxkv.engine.hadamard import uses_hadamard
from jaxkv.engine.lengths import (
    QUERY_BLOCK,
    choose_prefill_block_size,
    count_buffered_queries,
    query_buffer_size,
)
from jaxkv.models.config import ModelConfig
from jaxkv.models.mixture import choose_block_rows
from jaxkv.policies.methods.rkv import COSINES
from jaxkv.policies.parts import Parts
from jaxkv.policies.reads import WHOLE, LayerReadConfig

# Bytes of the cuBLAS workspace that XLA allocates on Hopper.
WORKSPACE = 1 << 25


@frozen_dataclass
class PrefillBytes:
    """Estimated bytes of a prefill on one device, weights excluded, as properties; fields are shapes and counts.

    Attributes:
        config: the device's part of the model.
        parts: parts of the policy.
        batch: number of prompts on the device.
        padded_len: padded length of each prompt.
        item: bytes per element of the model's dtype.
        pool_rows: size P of each pool, in entries per sequence.
        buffer: size in entries per sequence of the candidate buffer of layers that share one budget; None without one.
        kv_heads: number of kv heads over all devices.
        implementation: attention implementation.
    """

    config: ModelConfig
    parts: Parts
    batch: int
    padded_len: int
    item: int
    pool_rows: tuple[int, ...]
    buffer: int | None
    kv_heads: int
    implementation: Implementation

    @cached_property
    def selection_config(self) -> LayerReadConfig:
        """`LayerReadConfig` of decoding: which layers select tokens, attend to selected ones only, or are offloaded."""
        return self.parts.build_read_config(self.config.sliding_windows, self.padded_len)

    @cached_property
    def pool_bytes(self) -> list[int]:
        """List of each pool's bytes on the device: one per layer, or one for a pool that all layers share."""
        sliding_windows = self.config.sliding_windows
        # Sliding-window layers select no entries, so theirs have no scores.
        apart = self.parts.stores_scores and not self.parts.cache_layout.uses_shared_pool
        less = [
            4 * (apart and width is not None) for width in sliding_windows[: len(self.pool_rows)]
        ]
        # A pool that layers share has entries of one size.
        dims = self.config.entry_dims[: len(self.pool_rows)]
        each = (self.parts.compute_entry_bytes(dim, self.item) for dim in dims)
        return [
            rows * self.batch * (size - off)
            for rows, size, off in zip(self.pool_rows, each, less, strict=True)
        ]

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the cache on the device: pools, page bounds, segment tables, policy state, states of layers."""
        return sum(self.pool_bytes) + self._page_bound_bytes + self._table_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory of the keys and values of all offloaded layers, padding included."""
        return len(self.selection_config.offloaded) * self._uncompressed_layer_bytes

    @property
    def loaded_bytes(self) -> int:
        """Maximum bytes of offloaded keys and values that are on the device at once during decoding."""
        return (
            self.selection_config.max_loaded_entries
            * self._uncompressed_layer_bytes
            // self.padded_len
        )

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device, weights excluded: cache plus the larger of prefill's arrays and loaded entries."""
        config = self.config
        parts = self.parts
        reading = self.selection_config
        loaded = self.loaded_bytes
        token = self._uncompressed_layer_bytes // self.padded_len
        layer = self._uncompressed_layer_bytes
        beside = self._compute_activation_bytes() + (layer if self.host_bytes else 0)
        if loaded:
            # Attention transposes the loaded entries of one layer.
            loaded += token * (reading.width if reading.filters else self.padded_len)
        total = self.cache_bytes + max(loaded, beside)
        if parts.read.prefill_chunk_tokens:
            # All entries remain on the device until the last chunk; sliding-window layers have places for a chunk.
            chunk = min(parts.read.prefill_chunk_tokens, self.padded_len)
            windows = [at for at, width in enumerate(config.sliding_windows) if width is not None]
            places = sum(map(self._count_layer_bytes, windows)) * chunk // self.padded_len
            total += self.host_bytes + places
        return total

    def _compute_activation_bytes(self) -> int:
        """Return peak bytes beyond the final cache, in the last two layers, a second pass, or the end."""
        config = self.config
        parts = self.parts
        layers = self.config.layers
        hidden = self.batch * self.padded_len * config.embed * self.item
        peaks = list[int]()
        for index in range(max(0, layers - 2), layers):
            top = index == layers - 1
            below = self._compute_lower_layer_bytes(index) + self._count_layer_bytes(index)
            peaks.append(
                below + hidden + self._statistic_bytes + self._compute_temporary_bytes(top)
            )
            # The top layer returns the hidden state of a single token.
            peaks.append(
                below + (0 if top else hidden) + self._compute_compression_bytes(index, top)
            )
        if parts.needs.replay is not None:
            # All layers below the top one have run and wait for the second pass.
            rows = [*map(self._count_layer_bytes, range(layers))]
            waiting = sum(rows[:-1]) + (layers - 1) * self._statistic_bytes
            peaks += [
                hidden + waiting + self._compute_temporary_bytes(False),
                sum(rows) + self._compute_second_pass_bytes(),
            ]
        peaks.append(sum(self.pool_bytes) + self._page_bound_bytes + 4 * self.batch * config.vocab)
        # Allocated throughout: token masks, the table of rotary angles, and the cache's tables.
        masks = self.batch * self.padded_len * (3 + config.kv_heads)
        specs = map(config.get_layer_spec, range(layers))
        widest = max(spec.get_head_dim(config.head_dim) for spec in specs)
        tables = 4 * self.padded_len * (1 + widest) + self._query_buffer_bytes + self._table_bytes
        return max(peaks) + masks + tables - self.cache_bytes

    def _compute_compression_bytes(self, index: int, top: bool) -> int:
        """Return peak bytes of scoring, selecting, merging and packing a layer, beyond its entries and lower layers."""
        parts = self.parts
        layers = self.config.layers
        scored = parts.stores_scores
        # Scores that order entries, attention mass kept for later, and norms of keys.
        scores = self._compute_array_bytes(
            4 * (1 + (scored or parts.merge is not None)) + 4 * parts.needs.norms
        )
        scoring = self._statistic_bytes + self._compute_array_bytes(
            4 * (2 + self.config.group_size)
        )
        if parts.scorer.compares_keys:
            # Cosines of a block of entries with all others, and their intermediate results.
            scoring += 8 * min(self.padded_len**2, COSINES)
        # Sort keys and masks, of all devices' heads if these compete for entries.
        heads = self.config.kv_heads if parts.heads.is_uniform else self.kv_heads
        # Entries of all layers are selected in one program if layers compete, or if a buffer holds the candidates.
        joint = parts.layers.uses_joint_budget or self.buffer is not None
        choosing = 16 * self.batch * heads * self.padded_len * (layers if joint else 1)
        if self.buffer is not None:
            # The layer's own entries are freed before the selection, and scores before the entries' places are
            # computed.
            last = (
                self._compute_array_bytes(layers)
                - self._uncompressed_layer_bytes
                + max(choosing, sum(self.pool_bytes))
            )
            return max(scoring, scores + self._compute_array_bytes(16 * layers), last if top else 0)
        if parts.cache_layout.uses_shared_pool and not top:
            return scoring
        pool = self.pool_bytes[0 if parts.cache_layout.uses_shared_pool else index]
        merging = (
            self._uncompressed_layer_bytes + self._compute_array_bytes(8 * self.config.head_dim)
        ) * (parts.merge is not None)
        # Logits and probabilities of one kv head's reference queries, over all and over kept entries, and equations.
        queries = self.config.group_size * parts.needs.references
        merging += queries * (16 * self.padded_len + 12 * queries)
        return max(scoring, scores + self._compute_array_bytes(1) + max(choosing, merging, pool))

    def _compute_second_pass_bytes(self) -> int:
        """Return the bytes of a second pass, without prompt keys and values: scores, activations, logits."""
        replay = self.parts.needs.replay
        config = self.config
        assert replay is not None
        chunk = min(replay.chunk, self.padded_len)
        # The tokenizer turns text into fewer tokens than characters; at least one block of queries runs.
        texts = sum(len(each or ()) for each in (replay.first, replay.following, replay.closing))
        before = texts + min(replay.tail, self.padded_len)
        tokens = self.batch * (chunk + max(QUERY_BLOCK, before))
        each = config.embed * (2 * self.item + 8)
        each += 4 * config.heads * max(config.entry_dims) * self.item
        each += (4 * (1 + config.gated) + self.item) * max(config.mlp_widths)
        # Logits of a block of queries over a chunk and sinks, or over a sliding window and the tokens of the pass.
        keys = chunk + max(QUERY_BLOCK // 2, min(replay.sinks, self.padded_len))
        keys += max(width or 0 for width in config.sliding_windows) and before
        logits = 24 * config.group_size * QUERY_BLOCK * keys
        if replay.runs_backwards:
            # The inputs of all layers wait. A gradient needs twice a layer's activations, and all logits of a kv head.
            each += each + config.layers * config.embed * self.item
            run = chunk + before
            logits += 20 * config.group_size * run * (self.padded_len + run)
        waiting = config.layers * (self._compute_array_bytes(4) + self._statistic_bytes)
        return waiting + tokens * each + logits

    @property
    def _page_bound_bytes(self) -> int:
        """Bytes of the minimum and maximum keys of all pages of layers that select pages (Quest); 0 without pages."""
        reading = self.selection_config
        heads = self.config.kv_heads
        if not reading.page:
            return 0
        sources = zip(self.pool_rows, reading.sources, strict=True)
        pages = (-(-rows // heads // reading.page) for rows, source in sources if source != WHOLE)
        return self.batch * heads * sum(pages) * 2 * self.config.head_dim * self.item

    @property
    def _query_buffer_bytes(self) -> int:
        """Bytes of the float32 query buffers that the cache keeps to score or select entries."""
        config = self.config
        counts = count_buffered_queries(
            self.parts.decoding_compression, self.selection_config, config.sliding_windows
        )
        rows = sum(query_buffer_size(count) for count in counts if count)
        return 4 * self.batch * config.heads * rows * config.head_dim

    @property
    def _table_bytes(self) -> int:
        """Bytes of segment tables, mean keys, policy state with query buffers, states of layers, and residuals."""
        ongoing = self.parts.decoding_compression
        layers = self.config.layers
        segments = layers * self.config.kv_heads
        numbers = 1 + 3 * segments + segments * self.config.head_dim * uses_hadamard(self.parts)
        if ongoing.compresses:
            merging = 0 if ongoing.merge is None else ongoing.merge.threshold_count
            numbers += 2 + layers + segments * merging
        elif not self.parts.read.reads_all_entries:
            numbers += 2 + layers + segments
        each = 4 * numbers + self.config.state_bytes
        each += self.parts.compute_residual_bytes(self.config, self.item)
        return self.batch * each + self._query_buffer_bytes

    @property
    def _candidate_buffer_bytes(self) -> int:
        """Bytes of the buffer of candidates of layers that share one budget: entries, indices, scores; 0 if none."""
        row = 2 * self.config.head_dim * self.item + 4 * (1 + self.parts.stores_scores)
        return self.batch * (self.buffer or 0) * row

    def _compute_lower_layer_bytes(self, index: int) -> int:
        """Return the bytes that the layers below `index` hold: pools, or entries with scores, or a candidate buffer."""
        parts = self.parts
        layers = self.config.layers
        norms = self.parts.needs.norms
        if self.buffer is not None:
            return self._candidate_buffer_bytes + self._compute_array_bytes(
                4 * layers * (1 + norms)
            )
        if parts.cache_layout.uses_shared_pool:
            scores = self._compute_array_bytes(4 * (1 + (parts.merge is not None) + norms))
            chosen = self.config.sliding_windows[:index].count(None)
            return (
                int(self._count_full_layers(index) * self._uncompressed_layer_bytes)
                + chosen * scores
            )
        # Entries and scores of layers that wait for a second pass before packing, plus the pools of packed layers.
        waiting = range(index, index + (layers - index) * (parts.needs.replay is not None))
        return sum(self.pool_bytes[:index]) + sum(
            self._count_layer_bytes(each) + self._compute_array_bytes(4) for each in waiting
        )

    def _count_full_layers(self, index: int) -> float:
        """Return the entries of layers below `index` as a number of full layers; a sliding window is a fraction."""
        widths = self.config.sliding_windows[:index]
        shares = (1.0 if width is None else min(1.0, width / self.padded_len) for width in widths)
        return sum(shares, 0.0)

    def _compute_array_bytes(self, size: int) -> int:
        """Return the bytes of an array `[B, K, S]` over the padded, uncompressed prompts at `size` bytes per entry."""
        return self.batch * self.config.kv_heads * self.padded_len * size

    @property
    def _uncompressed_layer_bytes(self) -> int:
        """Bytes of a full-attention layer's keys and values before compression, padding included."""
        return self._compute_array_bytes(2 * self.config.head_dim * self.item)

    def _count_layer_bytes(self, index: int) -> int:
        """Return the bytes of layer `index`'s keys and values before compression, padding included."""
        return self._compute_array_bytes(2 * self.config.entry_dims[index] * self.item)

    @property
    def _scoring_block_bytes(self) -> int:
        """Bytes of one block of tokens in scoring: float32 projected values, or logits of all heads; 0 if unused."""
        needs = self.parts.needs
        config = self.config
        projected = 4 * min(self.padded_len, 512) * config.embed * needs.norms
        most = 0 if needs.blocks is None else needs.blocks.compute_block_size(self.padded_len)
        return self.batch * config.heads * max(projected, 8 * most**2)

    @cached_property
    def _statistic_bytes(self) -> int:
        """Bytes that a layer's program returns for scoring, such as last queries, attention sums, unrotated keys."""
        needs = self.parts.needs
        config = self.config
        size = config.head_dim * self.item * needs.unrotated + 4 * needs.norms
        size += 4 * config.group_size * (needs.sums + (needs.blocks is not None))
        window = (needs.queries + needs.references) * config.head_dim * self.item
        if needs.moments is not None:
            window += 4 * config.head_dim * (1 + needs.moments.covariance * config.head_dim)
        hidden = self.batch * self.padded_len * config.embed * self.item * needs.hidden
        return self.batch * config.heads * window + self._compute_array_bytes(size) + hidden

    def _compute_temporary_bytes(self, top: bool) -> int:
        """Return a layer program's temporary bytes: maximum of attention, scoring, MLP; on CPUs q, k, v + scoring."""
        config = self.config
        needs = self.parts.needs
        backend = get_attention_backend(self.implementation)
        if not backend.can.at_once:
            # XLA on a CPU runs prompts one by one in float32: queries of all prompts, keys and values of one, and a
            # copy of the returned arrays. The top layer attends from a single token.
            whole = not top or needs.sums or needs.norms
            numbers = self.batch * config.heads * config.prompt_head_dim * whole
            widest = max(config.entry_dims)
            numbers += 2 * config.kv_heads * widest * (2 if top else 1 + self.batch)
            numbers += config.expanded_elements
            return 4 * self.padded_len * numbers + self._scoring_block_bytes
        if top and not needs.sums:
            return max(WORKSPACE, self._scoring_block_bytes)
        tokens = self.batch * choose_prefill_block_size(self.padded_len, self.batch)
        queries = self.batch * config.heads * self.padded_len * config.prompt_head_dim * self.item
        expanded = self.batch * self.padded_len * config.expanded_elements * self.item
        # Arrays of the queries' size (queries, output, copies), and the log-sum-exp of each query.
        attend = (
            queries * backend.can.query_copies + 4 * self.batch * config.heads * self.padded_len
        ) + expanded
        if needs.sums or config.sink_logits:
            attend += backend.count_column_sum_bytes(
                self.batch, self.padded_len, config.heads, queries
            )
        if top:
            return max(attend, self._scoring_block_bytes)
        inner = self._compute_mlp_bytes(tokens)
        finish = queries + max(inner, tokens * (8 + self.item) * config.embed) + WORKSPACE
        return max(attend, self._scoring_block_bytes, finish)

    def _compute_mlp_bytes(self, tokens: int) -> int:
        """Return the bytes of the largest MLP's float32 inner products for `tokens` tokens, and of its output."""
        config = self.config
        experts = config.experts
        each = 4 * (1 + config.gated) + self.item
        if experts is None:
            return tokens * (each * config.hidden + self.item * config.embed)
        # A mixture runs an expert on a few tokens at a time, with a slice of the stacked weights and float32 sums.
        rows = choose_block_rows(tokens, experts.chosen, experts.count)
        weights = (2 + config.gated) * config.embed * self.item
        block = (rows * each + weights) * config.hidden
        specs = map(config.get_layer_spec, range(config.layers))
        dense = max(experts.shared or 0, *(spec.dense_hidden or 0 for spec in specs))
        return max(block, tokens * each * dense) + 4 * tokens * config.embed
