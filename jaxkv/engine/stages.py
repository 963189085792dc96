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
from jaxkv.policies.parts import Parts

# Slots of each prompt that go through the projections and the MLP at once, where they are no more tokens than `most`.
_BLOCKS, _LEAST = (2048, 1024, 512), 256


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
        """Bytes that lie there while each of the programs runs: around the last layer, or where the most do."""
        waiting, at_layer, at_pack = self._kept()
        there, rows, looked = self._always(), self._rows(), self._looked()
        found = {"layer": there + at_layer + waiting + rows + looked + self._layer()}
        mask, scores = self._rows_of(1), 0
        if self.parts.scorer is not None:
            # What was observed, and what rows are ordered by; then the norms, where heads compete by them.
            scores = self._rows_of(4 * (2 - (self.parts.scorer.rank is None and self.parts.merge is None)))
            scores += self._rows_of(4 * self.parts.needs.norms)
            found["score"] = there + at_layer + waiting + rows + looked + self._rows_of(4 * (2 + self._heads()))
            found["choose"] = there + at_layer + waiting + rows + scores + mask + self._choosing()
        if self.parts.merge is not None:
            found["merge"] = there + waiting + at_layer + rows * 2 + mask + self._merging()
        found["pack"] = there + waiting + at_pack + rows + mask
        logits = 4 * self.batch * self.config.vocab
        found["logits"] = there + sum(self.pools) + logits
        return found

    def _always(self) -> int:
        """Hidden states, which slots are there and which stay, the table of angles, remembered queries."""
        cells, config = self.batch * self.slots, self.config
        masks = cells * (3 + config.kv_heads) + 4 * self.slots
        return cells * config.embed * self.item + masks + 4 * self.slots * config.head_dim + self.rings

    def _kept(self) -> tuple[int, int, int]:
        """Rows of layers that wait for a pool, and pools: while the top layer runs, and while it is packed."""
        if not self.parts.layout.one_pool:
            return 0, sum(self.pools[:-1]), sum(self.pools)
        held = self._rows() + self._rows_of(4 * (1 + (self.parts.merge is not None)) + 4 * self.parts.needs.norms)
        return held * (self.config.layers - 1), 0, self.pools[0]

    def _rows_of(self, size: int) -> int:
        """So many bytes for each row of a layer."""
        return self.batch * self.config.kv_heads * self.slots * size

    def _rows(self) -> int:
        """A layer's keys and values."""
        return self._rows_of(2 * self.config.head_dim * self.item)

    def _heads(self) -> int:
        return self.config.heads // self.config.kv_heads

    def _looked(self) -> int:
        """What else comes out of a layer: rotated keys where the others are kept, what scoring looks at."""
        needs, config = self.parts.needs, self.config
        window = self.batch * config.heads * needs.queries * config.head_dim * self.item
        size = config.head_dim * self.item * needs.unrotated + 4 * self._heads() * needs.sums + 4 * needs.norms
        return window + self._rows_of(size)

    def _layer(self) -> int:
        """What a layer's program needs beside what comes out of it."""
        config, tokens = self.config, self._block()
        queries = self.batch * config.heads * self.slots * config.head_dim * self.item
        # cuDNN wants queries in another order.
        turned = queries * (self.implementation is Implementation.CUDNN)
        sums = 4 * self.batch * config.heads * self.slots * self.parts.needs.sums
        # The residual stream, the MLP's output and its inner products are float32.
        finish = queries + tokens * (8 * config.embed + 8 * config.hidden)
        norms = 4 * self.batch * config.heads * min(self.slots, 512) * config.embed * self.parts.needs.norms
        return max(2 * queries + turned + sums, finish, norms)

    def _block(self) -> int:
        """Tokens that go through the projections and the MLP at once."""
        sizes = [each for each in _BLOCKS if each * self.batch <= self.most] + [_LEAST]
        return self.batch * next((each for each in sizes if self.slots % each == 0), self.slots)

    def _choosing(self) -> int:
        """Scores as keys to order by, and masks: of all devices' heads, where heads look at one another."""
        heads = self.config.kv_heads if self.parts.heads.uniform else self.kv_heads
        return self.batch * heads * self.slots * 16

    def _merging(self) -> int:
        """Float32 copies of rows."""
        return self._rows_of(8 * self.config.head_dim)
