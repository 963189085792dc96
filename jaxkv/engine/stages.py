"""What lies on a GPU while prompts are prefilled there, program after program, weights left out.

Prompts go through a layer together; then its rows are scored, chosen, merged and packed, each by a program of its own.
Most lies there around the last layers, when most of the cache does too: those are looked at. What a program's arrays
weigh follows from their shapes; what XLA needs beside them is what it needed where it was asked
(`benchmarks/results/plan_cells.md`).
"""

import dataclasses
from collections.abc import Sequence

from jaxkv.attention import Implementation
from jaxkv.models.config import ModelConfig
from jaxkv.models.mixture import block_rows
from jaxkv.policies.parts import Parts
from jaxkv.policies.scorer import Needs

# Slots of each prompt that go through the projections and the MLP at once, where they are no more tokens than `most`.
_BLOCKS, _LEAST = (2048, 1024, 512), 256
# What XLA gives cuBLAS to work with, on Hopper.
WORKSPACE = 1 << 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefilling:
    """A prefill on one device; sizes are those of the device's part.

    Attributes:
        config: what the device has of the model.
        parts: of the policy.
        batch: prompts.
        slots: of each.
        item: bytes of a number.
        pools: bytes of each layer's pool, or of the one that all share.
        rings: bytes of the queries that the cache remembers.
        kv_heads: of all devices together.
        most: tokens that go through the projections and the MLP at once.
        implementation: what computes attention.
    """

    config: ModelConfig
    parts: Parts
    batch: int
    slots: int
    item: int
    pools: Sequence[int]
    rings: int
    kv_heads: int
    most: int
    implementation: Implementation

    @property
    def peak(self) -> int:
        """The most that lies there."""
        return max(self.stages().values())

    def stages(self) -> dict[str, int]:
        """Bytes that lie there while each of the programs runs, for the layer below the top one and the top one."""
        layers, rows, found = self.config.layers, self._rows(), dict[str, int]()
        hidden = self.batch * self.slots * self.config.embed * self.item
        for index in range(max(0, layers - 2), layers):
            top = index == layers - 1
            name = "top layer" if top else "layer"
            there = self._always() + self._kept(index)
            found[name] = there + hidden + rows + self._looked() + self._layer(top)
            # Of the top layer a token's hidden state comes out.
            there += rows + (0 if top else hidden)
            found |= {f"{name}, {each}": there + more for each, more in self._afterwards(index, top).items()}
        found["logits"] = self._always() + sum(self.pools) + 4 * self.batch * self.config.vocab
        return found

    def _afterwards(self, index: int, top: bool) -> dict[str, int]:
        """Scoring, choosing, merging and packing a layer's rows: what lies there beside them and the layers below."""
        parts, found = self.parts, dict[str, int]()
        scored = parts.ongoing is not None and parts.ongoing.scored
        # What was observed, and what rows are ordered by; then the norms, where heads compete by them.
        scores = self._rows_of(4 * (1 + (scored or parts.merge is not None)) + 4 * parts.needs.norms)
        mask = self._rows_of(1)
        if parts.scorer is not None:
            found["score"] = self._looked() + self._rows_of(4 * (2 + self._group))
        if parts.layout.one_pool and not top:
            return found
        if parts.scorer is not None:
            found["choose"] = scores + mask + self._choosing()
        if parts.merge is not None:
            found["merge"] = scores + mask + self._rows() + self._rows_of(8 * self.config.head_dim)
        pool = self.pools[0] if parts.layout.one_pool else self.pools[index]
        return found | {"pack": scores * (parts.scorer is not None) + mask + pool}

    def _always(self) -> int:
        """Which slots are there and which stay, the table of angles, remembered queries."""
        cells = self.batch * self.slots
        return cells * (3 + self.config.kv_heads) + 4 * self.slots * (1 + self.config.head_dim) + self.rings

    def _kept(self, index: int) -> int:
        """What is left of the layers below: pools, or rows and scores that wait for a pool."""
        parts = self.parts
        if not parts.layout.one_pool:
            return sum(self.pools[:index])
        scores = self._rows_of(4 * (1 + (parts.merge is not None)) + 4 * parts.needs.norms)
        return index * (self._rows() + scores)

    def _rows_of(self, size: int) -> int:
        """So many bytes for each row of a layer."""
        return self.batch * self.config.kv_heads * self.slots * size

    def _rows(self) -> int:
        """A layer's keys and values."""
        return self._rows_of(2 * self.config.head_dim * self.item)

    @property
    def _group(self) -> int:
        """Query heads of a kv head here."""
        return self.config.heads // self.config.kv_heads

    def _looked(self) -> int:
        """What else comes out of a layer: rotated keys where the others are kept, what scoring looks at."""
        needs, config = self.parts.needs, self.config
        window = self.batch * config.heads * needs.queries * config.head_dim * self.item
        size = config.head_dim * self.item * needs.unrotated + 4 * self._group * needs.sums + 4 * needs.norms
        return window + self._rows_of(size) + moment_bytes(config, needs, self.batch)

    def _layer(self, top: bool) -> int:
        """What a layer's program needs beside what comes out of it."""
        config, needs, tokens = self.config, self.parts.needs, self._block()
        queries = self.batch * config.heads * self.slots * config.head_dim * self.item
        # Queries and output, cuDNN's queries in another order, and the log-sum-exp of each query.
        attend = queries * (3 if self.implementation is Implementation.CUDNN else 2)
        attend += 4 * self.batch * config.heads * self.slots
        # Of a mixture's tokens as many go through at once as an expert takes, and beside them are the sums of all.
        rows, sums, weights = tokens, self.item, 0
        if config.experts is not None:
            rows, sums = block_rows(tokens, config.experts.chosen, config.experts.count), 4
            # Those of one expert, cut out of all.
            weights = (2 + config.gated) * config.hidden * config.embed * self.item
        # Inner products of the MLP, and its output and the residual stream, are float32.
        inner = rows * (4 * (1 + config.gated) + self.item) * config.hidden + tokens * sums * config.embed + weights
        finish = queries + max(inner, tokens * (8 + self.item) * config.embed) + WORKSPACE
        norms = 4 * self.batch * config.heads * min(self.slots, 512) * config.embed * needs.norms
        if top and not needs.sums:
            return max(WORKSPACE, norms)
        return max(attend, norms, 0 if top else finish)

    def _block(self) -> int:
        """Tokens that go through the projections and the MLP at once."""
        sizes = [each for each in _BLOCKS if each * self.batch <= self.most] + [_LEAST]
        return self.batch * next((each for each in sizes if self.slots % each == 0), self.slots)

    def _choosing(self) -> int:
        """Scores as keys to order by, and masks: of all devices' heads, where heads look at one another."""
        heads = self.config.kv_heads if self.parts.heads.uniform else self.kv_heads
        layers = self.config.layers if self.parts.layers.joint else 1
        return self.batch * heads * layers * self.slots * 16


def moment_bytes(config: ModelConfig, needs: Needs, batch: int) -> int:
    """Bytes of one layer's means and covariances of queries, as a policy asks for them."""
    each = sum(1 + asked.covariance * config.head_dim for asked in needs.future)
    return 4 * batch * config.heads * config.head_dim * each
