"""Static shape of a slot: pool sizes for any prompt up to a limit, and its new tokens."""

import math
from typing import Literal

import numpy as np
from jaxtyping import Bool

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.lengths import SHORT, compute_entry_counts, list_buckets, round_up_to_bucket
from jaxkv.engine.plan import compute_pool_sizes
from jaxkv.models.config import ModelConfig
from jaxkv.policies.parts import Parts

# Number of tokens of a dummy prompt for compilation; and the padded length, a short chat's, that is
# compiled first.
FEW = 64
# Numbers of prompts that are prefilled together.
BATCHES = (1, 2, 4, 8)


@frozen_dataclass
class SlotPrograms:
    """Programs of slots that are compiled together.

    Attributes:
        kind: what they run: "prompt", "question", or "extras" for the decode loop with penalties, say.
        length: padded length in tokens; 0 for extras.
        batch: number of prompts.
    """

    kind: Literal["prompt", "question", "extras"]
    length: int = 0
    batch: int = 1

    def get_rank(self) -> tuple[str, int, float, int]:
        """Return the place in the order of compilation: prompts, then batches, then questions."""
        return self.kind, self.batch, abs(math.log2(self.length / FEW)), self.length


EXTRAS = SlotPrograms(kind="extras")


@frozen_dataclass
class SlotShape:
    """Static shape of a slot: size of each pool (on a mesh, per device); maximum tokens of prompt, question, answer."""

    rows: tuple[int, ...]
    prompt: int
    question: int
    new: int

    @property
    def longest_text(self) -> int:
        """Maximum number of tokens of a slot's text: prompt, question and answer, rounded up to a bucket."""
        return round_up_to_bucket(self.prompt + self.question + self.new)

    def compute_slot_bytes(self, parts: Parts, config: ModelConfig, itemsize: int) -> int:
        """Return the bytes of a slot on a device of this config: pools, residual and states; `itemsize` per number."""
        # A pool that layers share has entries of one size.
        dims = config.entry_dims[: len(self.rows)]
        beside = config.state_bytes + parts.compute_residual_bytes(config, itemsize)
        return beside + sum(
            rows * parts.compute_entry_bytes(dim, itemsize)
            for rows, dim in zip(self.rows, dims, strict=True)
        )

    def list_programs(self, prefill_tokens: int, most: int) -> list[SlotPrograms]:
        """Return all `SlotPrograms` to compile: single prompts, batches, questions; nearest to a short chat's first.

        A batch has at most `most` prompts, of at most `prefill_tokens` padded tokens together.
        """
        programs = [
            SlotPrograms(kind="prompt", length=size, batch=batch)
            for _, size in list_buckets(self.prompt)
            for batch in BATCHES
            if batch == 1 or (batch <= most and batch * size <= prefill_tokens)
        ]
        questions = {max(SHORT, size) for _, size in list_buckets(self.question)}
        programs += [SlotPrograms(kind="question", length=size) for size in questions]
        return [*sorted(programs, key=SlotPrograms.get_rank), EXTRAS]

    def require_cache_fits(
        self, parts: Parts, cache: KVCache, rows: int, sliding: Bool[np.ndarray, " L"]
    ) -> None:
        """Raise ValueError for a cache with pools of other sizes, another store, or fewer than `rows` free places.

        Layers in the mask `sliding` need no free places.
        """
        sizes = tuple(pool.row_count // cache.kv_shards for pool in cache.pools)
        require(
            sizes == self.rows,
            "cache",
            f"pools of {sizes} entries",
            "pool sizes of other slots. Give a cache from prefill of these slots.",
        )
        # A custom policy class may have changed its store since the cache was saved.
        stores = {type(pool.store).__name__ for pool in cache.pools}
        store = parts.store.__name__
        require(
            stores == {store},
            "cache",
            f"entries held by {stores}",
            f"another store than the slots' {store}. Prefill the prompt again.",
        )
        free = self.count_free_places(cache, sliding)
        remedy = f"only {free} places free: run one question on top of a prompt, or make slots with more max_question"
        require(rows <= free, "cache", f"{rows} more entries", remedy)

    def count_free_places(self, cache: KVCache, sliding: Bool[np.ndarray, " L"]) -> int:
        """Return the fewest free places behind a cache's segments, without those of layers in the mask `sliding`."""
        return int(cache.compute_layer_headroom()[~sliding].min(initial=self.longest_text))

    def count_places_after_repacking(self, cache: KVCache, sliding: Bool[np.ndarray, " L"]) -> int:
        """Return `count_free_places` of a cache of one device, once its entries are in pools of a slot's sizes."""
        layout, length = cache.layout, cache.kept
        parts = zip(layout.slice_layers_by_pool(len(length)), self.rows, strict=True)
        starts = [layout.compute_segment_starts(length[part], rows) for part, rows in parts]
        free = layout.compute_segment_headroom(np.concatenate(starts), length, self.rows)
        return int(free[~sliding].min(initial=self.longest_text))


def uses_window_eviction(parts: Parts) -> bool:
    """Return True if a slot's sliding-window layers evict entries outside their windows, False for a shared pool."""
    return not parts.cache_layout.uses_shared_pool


def compute_slot_shape(
    parts: Parts, config: ModelConfig, *, prompt: int, question: int, new: int, kv_shards: int = 1
) -> SlotShape:
    """Return the `SlotShape` for prompts up to `prompt` tokens, question, answer; ValueError for unsupported policies.

    Args:
        parts: parts of the policy.
        config: the model's shape.
        prompt: maximum number of tokens per prompt.
        question: maximum number of tokens per question.
        new: maximum number of sampled tokens.
        kv_shards: number of devices that share a pool's heads.

    Returns:
        The shape.

    Raises:
        ValueError: for policies with chunked prefill or a host store, and for budgets that they do not support.
    """
    compute_entry_counts(parts, np.asarray([prompt]), config.sliding_windows)
    reading = parts.build_read_config(config.sliding_windows, round_up_to_bucket(prompt))
    remedy = "not supported in slots: leave offload out, or answer one batch after the other"
    require(not reading.offloaded, "policy", "entries in host memory", remedy)
    remedy = "not supported in slots: leave prefill_ratio out, or answer one batch after the other"
    require(
        not parts.read.prefill_chunk_tokens,
        "policy",
        "chunked prefill",
        remedy,
    )
    # A policy that recompresses divides a longer text among layers like a longer prompt.
    more = question + new
    longest = prompt + (more if parts.recompression_interval else 0)
    most = np.zeros(1, np.int64)
    asked = round_up_to_bucket(max(1, question))
    for shortest, size in list_buckets(longest):
        # The shortest prompt of a bucket gains the most entries before its limit.
        short = np.asarray([shortest])
        free = compute_prefill_headroom(
            parts,
            config.sliding_windows,
            short,
            more,
            most=more,
            slides=uses_window_eviction(parts),
            least=asked,
        )
        headroom = np.asarray(free)
        # A question may exceed a limit before the policy compresses it.
        headroom = headroom + (asked if question and parts.decoding_compression.compresses else 0)
        most = np.maximum(
            most, compute_pool_sizes(parts, config, size, tuple(headroom.tolist()), kv_shards)
        )
    return SlotShape(rows=tuple(most.tolist()), prompt=prompt, question=question, new=new)
