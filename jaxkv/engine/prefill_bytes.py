"""Bytes that a prefill takes on one device, weights excluded, by arithmetic; the engine's plans use them.

On a GPU all prompts go through a layer together; then separate programs score, choose, merge and pack its rows. Memory
peaks at the last two layers, when most of the cache exists, so only these are computed. Sizes of arrays follow from
their shapes; XLA's temporaries beside them follow what the compiler said of fourteen settings.
"""

import dataclasses
from functools import cached_property

from jaxkv.attention import Implementation, backend_of
from jaxkv.engine.hadamard import transforms
from jaxkv.engine.lengths import QUERY_BLOCK, long_block, ring_rows
from jaxkv.models.config import ModelConfig
from jaxkv.models.mixture import block_rows
from jaxkv.policies.parts import Parts
from jaxkv.policies.reading import WHOLE, Reading
from jaxkv.policies.scorer import Replay

# Bytes of the workspace that XLA gives cuBLAS on Hopper.
WORKSPACE = 1 << 25


def bound_bytes(
    reading: Reading | None, config: ModelConfig, batch: int, item: int, pool_rows: tuple[int, ...]
) -> int:
    """Bytes of the minimum and maximum key of every page of the layers that choose pages (Quest); 0 without pages.

    `pool_rows` is P of each layer's pool, and `config` the model's shape, on one device.
    """
    if reading is None or reading.page is None:
        return 0
    page, heads = reading.page, config.kv_heads
    sparse = (
        rows for rows, source in zip(pool_rows, reading.sources, strict=True) if source != WHOLE
    )
    return (
        sum(heads * -(-rows // heads // page) for rows in sparse)
        * batch
        * 2
        * config.head_dim
        * item
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillBytes:
    """Memory estimate of a prefill on one device: fields give its shapes (batch, slots, pool rows), properties bytes.

    Attributes:
        config: the device's part of the model.
        parts: parts of the policy.
        batch: number of prompts on the device.
        slots: padded length of each prompt.
        item: bytes of a number of the model's dtype.
        pool_rows: rows of one sequence in each pool.
        buffer: rows of one sequence in the buffer of a budget over all layers; None without one.
        kv_heads: number of kv heads over all devices.
        implementation: implementation of attention.
    """

    config: ModelConfig
    parts: Parts
    batch: int
    slots: int
    item: int
    pool_rows: tuple[int, ...]
    buffer: int | None
    kv_heads: int
    implementation: Implementation

    @cached_property
    def reading(self) -> Reading | None:
        """`Reading` config: which layers choose tokens, which read only those in decoding; None if all read all."""
        return self.parts.reading(self.config.windows, self.slots)

    @cached_property
    def pools(self) -> list[int]:
        """List of the bytes of each layer's pool, or of the one pool that all layers share."""
        each, windows = self.parts.row_bytes(self.config.head_dim, self.item), self.config.windows
        # Rows of window layers, which are never chosen from, have no scores.
        apart = self.parts.scored and not self.parts.layout.one_pool
        less = [4 * (apart and width is not None) for width in windows[: len(self.pool_rows)]]
        return [
            rows * self.batch * (each - off) for rows, off in zip(self.pool_rows, less, strict=True)
        ]

    @property
    def cache(self) -> int:
        """Bytes of the cache on the device: pools, bounds of pages, tables of segments, remembered queries."""
        return sum(self.pools) + self.bounds + self._tables

    @property
    def host(self) -> int:
        """Bytes of the keys and values of all offloaded layers, in host memory."""
        return self._offloaded * self._rows()

    @property
    def loaded(self) -> int:
        """Bytes of offloaded keys and values that are on the device at once during decoding."""
        return 0 if self.reading is None else self.reading.loaded * self._token

    @property
    def bounds(self) -> int:
        """Bytes of the minimum and maximum keys of all pages (Quest); 0 without pages."""
        return bound_bytes(self.reading, self.config, self.batch, self.item, self.pool_rows)

    @property
    def peak(self) -> int:
        """Peak bytes on the device, weights excluded: cache, plus the larger of prefill's arrays and reloaded rows."""
        cache, layer, read, reading = self.cache, self._rows(), self.parts.read, self.reading
        if backend_of(self.implementation).at_once:
            beside = max(self.stages().values()) + self._tables - cache
        elif self.buffer is not None:
            # The pool is made behind the last layer, from a copy of the buffer; masks of all layers are there, too.
            packing = self._buffered + self._scores_of_all()
            beside = self._buffered + max(
                2 * layer + self._activations() - sum(self.pools), packing
            )
        else:
            held = self._held(self.config.layers) if self.parts.layers.from_scores else 1
            held = self.config.layers if self.replay else held
            beside = int((held + 1) * layer) + self._activations() + self._again()
        beside += bool(self._offloaded) * layer
        # Attention transposes the loaded rows of one layer.
        turned = 0
        if reading is not None and self.loaded:
            turned = self._token * (reading.width if reading.filters else self.slots)
        # The rows of prompts that are read in chunks stay on the device until the last; windows have room for a chunk.
        whole = (self.host + self._chunk) * (read is not None and read.by_chunks)
        return cache + max(self.loaded + turned, beside) + whole

    @property
    def replay(self) -> Replay | None:
        """`Replay` settings of a second pass over the prompts; None for policies that read them once."""
        return self.parts.needs.replay

    def _again(self) -> int:
        """Bytes of a second pass over prompts, beyond their K and V: all layers' scores, activations; 0 without one.

        The arrays that layers return for scoring wait in all of them.
        """
        if self.replay is None:
            return 0
        asked, chunk = self.replay, min(self.replay.chunk, self.slots)
        # Text becomes tokens in the model's tokenizer, fewer than its letters; a block of queries is the least.
        first, following, closing = (
            len(each or ()) for each in (asked.first, asked.following, asked.closing)
        )
        before = max(first, following + min(asked.tail, self.slots)) + closing
        config, tokens = self.config, self.batch * (chunk + max(QUERY_BLOCK, before))
        each = config.embed * (2 * self.item + 8) + 4 * config.heads * config.head_dim * self.item
        inner = (4 * (1 + config.gated) + self.item) * config.hidden
        sinks = max(QUERY_BLOCK // 2, min(asked.sinks, self.slots))
        logits = 12 * config.group * 2 * QUERY_BLOCK * (chunk + sinks)
        # Of a window layer's tokens, of one head, over the window and the tokens of the pass.
        width = min(self.slots, max(width or 0 for width in config.windows))
        logits = max(
            logits, bool(width) * 8 * config.group * 2 * QUERY_BLOCK * (width + chunk + before)
        )
        waiting = config.layers * self._looked()
        return self._rows_of(4 * config.layers) + waiting + tokens * (each + inner) + logits

    @property
    def _chunk(self) -> int:
        """Bytes of the keys and values of a prompt's chunk in all window layers; 0 for prompts not read in chunks."""
        chunk = getattr(self.parts.read, "prefill_chunk", 0)
        windows = self.config.layers - self.config.windows.count(None)
        return windows * self._token * min(chunk, self.slots)

    @property
    def _offloaded(self) -> int:
        """Number of layers whose rows are offloaded to host memory."""
        return 0 if self.reading is None else len(self.reading.offloaded)

    @property
    def _token(self) -> int:
        """Bytes of one layer's keys and values for one token of each prompt."""
        return self._rows() // self.slots

    @property
    def _remembered(self) -> int:
        """Bytes of the float32 ring buffers of last queries that the cache keeps for scoring or choosing rows."""
        ongoing, reading, queries = self.parts.ongoing, self.reading, 0
        if ongoing is not None:
            queries = (
                self.config.windows.count(None) * ring_rows(ongoing.queries)
                if ongoing.queries
                else 0
            )
        elif reading is not None and reading.ring:
            queries = len(reading.filters) * ring_rows(reading.ring)
        return 4 * self.batch * self.config.heads * queries * self.config.head_dim

    @property
    def _tables(self) -> int:
        """Bytes of the tables of segments and of the policy's state in the cache, remembered queries included."""
        ongoing, layers = self.parts.ongoing, self.config.layers
        segments = layers * self.config.kv_heads
        numbers = 1 + 3 * segments
        if ongoing is not None:
            numbers += (
                2 + layers + segments * (0 if ongoing.merge is None else ongoing.merge.thresholds)
            )
        elif self.reading is not None:
            numbers += 2 + layers + segments
        numbers += segments * self.config.head_dim * transforms(self.parts)
        return 4 * self.batch * numbers + self._remembered

    def _activations(self) -> int:
        """Bytes of a CPU prefill's arrays beside the layers' K and V: hidden states, queries, scores, statistics."""
        config, parts, cells = self.config, self.parts, self.batch * self.slots
        # Hidden states and queries of all prompts (it holds one prompt's queries), and the table of angles.
        each = (config.embed + config.heads * config.head_dim) * self.item + config.kv_heads * 12
        found = cells * each + 4 * self.slots * config.head_dim
        found += (
            4 * cells * config.heads * (parts.needs.sums + len(parts.needs.blocks))
            + self._moments()
        )
        found += max(self._projected(), self._in_blocks())
        found += self._hidden + self._scores_of_all()
        # Merging compares float32 copies of one layer's rows.
        return found + 8 * cells * config.kv_heads * config.head_dim * (parts.merge is not None)

    @property
    def _together(self) -> bool:
        """True if rows of all layers are chosen at once: heads of all compete, or a buffer holds what may be chosen."""
        return self.parts.layers.joint or self.buffer is not None

    def _scores_of_all(self) -> int:
        """Bytes of scores, sort keys and masks of all layers, on a CPU; 0 unless rows of all compete or are thinned."""
        return self._rows_of(20 * self.config.layers) * self._together

    @property
    def _buffered(self) -> int:
        """Bytes of a joint budget's buffer of candidate rows: keys, values, indices, kept scores; 0 without one."""
        ongoing = self.parts.ongoing
        row = (
            2 * self.config.head_dim * self.item
            + 4
            + (4 if ongoing is not None and ongoing.scored else 0)
        )
        return self.batch * (self.buffer or 0) * row

    def stages(self) -> dict[str, int]:
        """Dict from program name to the bytes on a GPU while it runs, for a prefill's last two layers and logits."""
        layers, rows, found = self.config.layers, self._rows(), dict[str, int]()
        hidden = self.batch * self.slots * self.config.embed * self.item
        for index in range(max(0, layers - 2), layers):
            top = index == layers - 1
            name = "top layer" if top else "layer"
            there = self._always() + self._kept(index)
            found[name] = there + hidden + rows + self._looked() + self._layer(top)
            # The top layer returns the hidden state of one token alone.
            there += rows + (0 if top else hidden)
            found |= {
                f"{name}, {each}": there + more
                for each, more in self._afterwards(index, top).items()
            }
        if self.replay is not None:
            # All layers below the top one have run, and wait, while its neighbour runs.
            found["first pass"] = (
                self._always()
                + hidden
                + (layers - 1) * (rows + self._looked())
                + self._layer(False)
            )
            found["second pass"] = self._always() + layers * rows + self._again()
        found["logits"] = (
            self._always() + sum(self.pools) + self.bounds + 4 * self.batch * self.config.vocab
        )
        return found

    def _afterwards(self, index: int, top: bool) -> dict[str, int]:
        """Dict from program name (score, choose, merge, pack, thin) to its GPU bytes beside rows and lower layers."""
        parts, found = self.parts, dict[str, int]()
        scored = parts.ongoing is not None and parts.ongoing.scored
        # Scores that rows are ordered by, the observed attention that is kept for later, and norms of keys.
        scores = self._rows_of(
            4 * (1 + (scored or parts.merge is not None)) + 4 * parts.needs.norms
        )
        mask = self._rows_of(1)
        if parts.scorer is not None:
            found["score"] = self._looked() + self._rows_of(4 * (2 + self.config.group))
        if self.buffer is not None:
            # Scores, sort keys and masks of all layers' heads, of this device alone.
            found["thin"] = scores + self._rows_of(16 * self.config.layers)
            # The layer's own rows are gone when the choice is made, and scores when each row's place is computed.
            last = {"choose": self._choosing(), "pack": sum(self.pools)}
            more = self._rows_of(self.config.layers) - self._rows()
            return found | {name: size + more for name, size in last.items() if top}
        if parts.layout.one_pool and not top:
            return found
        if parts.scorer is not None:
            found["choose"] = scores + mask + self._choosing()
        if parts.merge is not None:
            found["merge"] = scores + mask + self._rows() + self._rows_of(8 * self.config.head_dim)
        pool = self.pools[0] if parts.layout.one_pool else self.pools[index]
        return found | {"pack": scores * (parts.scorer is not None) + mask + pool}

    def _always(self) -> int:
        """Bytes allocated during all of prefill: masks of slots, the table of rotary angles, remembered queries."""
        cells = self.batch * self.slots
        return (
            cells * (3 + self.config.kv_heads)
            + 4 * self.slots * (1 + self.config.head_dim)
            + self._remembered
        )

    def _kept(self, index: int) -> int:
        """Bytes held of the layers below `index`: their pools; for a shared pool their rows and scores, or a buffer."""
        parts = self.parts
        if self.buffer is not None:
            return self._buffered + self._rows_of(4 * self.config.layers * (1 + parts.needs.norms))
        if self.replay is not None and not parts.layout.one_pool:
            # Rows and scores of the layers that wait to be packed, beside the pools of those that are.
            waiting = self.config.layers - index
            return sum(self.pools[:index]) + waiting * (self._rows() + self._rows_of(4))
        if not parts.layout.one_pool:
            return sum(self.pools[:index])
        scores = self._rows_of(4 * (1 + (parts.merge is not None)) + 4 * parts.needs.norms)
        return (
            int(self._held(index) * self._rows()) + self.config.windows[:index].count(None) * scores
        )

    def _held(self, index: int) -> float:
        """Rows of the layers below `index` while they wait for the last one, in prompts: window layers hold windows."""
        return sum(
            (
                1.0 if width is None else min(1.0, width / self.slots)
                for width in self.config.windows[:index]
            ),
            0.0,
        )

    def _rows_of(self, size: int) -> int:
        """Bytes of one layer's array `[B, K, S]` with `size` bytes for each row of the uncompressed prompt."""
        return self.batch * self.config.kv_heads * self.slots * size

    def _rows(self) -> int:
        """Bytes of one layer's keys and values, before compression."""
        return self._rows_of(2 * self.config.head_dim * self.item)

    def _moments(self) -> int:
        """Bytes of one layer's means and covariances of queries; 0 unless the policy needs them."""
        config = self.config
        each = sum(1 + asked.covariance * config.head_dim for asked in self.parts.needs.future)
        return 4 * self.batch * config.heads * config.head_dim * each

    def _projected(self) -> int:
        """Bytes of a block of values after the output projection; 0 unless the policy needs their norms."""
        config = self.config
        return (
            4
            * self.batch
            * config.heads
            * min(self.slots, 512)
            * config.embed
            * self.parts.needs.norms
        )

    @property
    def _hidden(self) -> int:
        """Bytes of one layer's normed hidden states; 0 unless the policy needs them."""
        return self.batch * self.slots * self.config.embed * self.item * self.parts.needs.hidden

    def _in_blocks(self) -> int:
        """Bytes of logits and probabilities of all heads within one block of tokens; 0 unless the policy needs them."""
        most = max((asked.tokens(self.slots) for asked in self.parts.needs.blocks), default=0)
        return 8 * self.batch * self.config.heads * most**2

    def _looked(self) -> int:
        """Bytes that a layer's program returns for scoring: window queries, attention sums, norms, unrotated keys."""
        needs, config = self.parts.needs, self.config
        window = self.batch * config.heads * needs.queries * config.head_dim * self.item
        size = config.head_dim * self.item * needs.unrotated + 4 * needs.norms
        size += 4 * config.group * (needs.sums + len(needs.blocks))
        return window + self._rows_of(size) + self._moments() + self._hidden

    def _layer(self, top: bool) -> int:
        """Temporary bytes of a layer's program: the largest of attention, the MLP and norms."""
        config, needs, tokens = (
            self.config,
            self.parts.needs,
            self.batch * long_block(self.slots, self.batch),
        )
        queries = self.batch * config.heads * self.slots * config.head_dim * self.item
        # Arrays of the queries' size (queries, output, copies), and the log-sum-exp of each query.
        backend = backend_of(self.implementation)
        attend = queries * backend.query_copies
        attend += 4 * self.batch * config.heads * self.slots
        if needs.sums or config.sink_logits:
            attend += backend.summed_bytes(self.batch, self.slots, config.heads, queries)
        # A mixture runs an expert on `block_rows` tokens at a time, beside the float32 sums of all tokens.
        rows, sums, weights = tokens, self.item, 0
        if config.experts is not None:
            rows, sums = block_rows(tokens, config.experts.chosen, config.experts.count), 4
            # The weights of one expert, sliced out of the stacked ones.
            weights = (2 + config.gated) * config.hidden * config.embed * self.item
        # Inner products of the MLP, and its output and the residual stream, are float32.
        inner = (
            rows * (4 * (1 + config.gated) + self.item) * config.hidden
            + tokens * sums * config.embed
            + weights
        )
        finish = queries + max(inner, tokens * (8 + self.item) * config.embed) + WORKSPACE
        norms = max(self._projected(), self._in_blocks())
        if top and not needs.sums:
            return max(WORKSPACE, norms)
        return max(attend, norms, 0 if top else finish)

    def _choosing(self) -> int:
        """Bytes of sort keys and masks while rows are chosen; of all devices' heads if heads compete for rows."""
        heads = self.config.kv_heads if self.parts.heads.uniform else self.kv_heads
        layers = self.config.layers if self._together else 1
        return self.batch * heads * layers * self.slots * 16
