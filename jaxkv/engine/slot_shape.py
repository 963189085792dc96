"""Static shape of a slot: pool sizes for any prompt up to a limit, and its new tokens."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.engine.headroom import first_headroom
from jaxkv.engine.lengths import SHORT, bucket, buckets, entry_counts
from jaxkv.engine.plan import pools_for
from jaxkv.models.config import ModelConfig
from jaxkv.policies.parts import Parts

# Number of tokens of a dummy prompt for compilation; and the padded length, a short chat's, that is
# compiled first.
FEW = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotShape:
    """Static shape of a slot: size of each pool (on a mesh, per device); maximum tokens of prompt, question, answer."""

    rows: tuple[int, ...]
    prompt: int
    question: int
    new: int

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a slot's text: prompt, question and answer, rounded up to a bucket."""
        return bucket(self.prompt + self.question + self.new)

    @property
    def lengths(self) -> list[tuple[bool, int]]:
        """Padded lengths of prompts (False), then of questions (True), those closest to a short chat's first."""
        most = (False, self.prompt), (True, self.question)
        pairs = [(question, size) for question, longest in most for _, size in buckets(longest)]
        lengths = {(question, max(SHORT, size) if question else size) for question, size in pairs}
        return sorted(lengths, key=lambda each: (each[0], abs(math.log2(each[1] / FEW))))

    def require_fits(
        self, parts: Parts, cache: KVCache, rows: int, sliding: Bool[np.ndarray, " L"]
    ) -> None:
        """Raise ValueError for a cache with pools of other sizes or another store, or without `rows` free places.

        Layers in the mask `sliding` need no free places.
        """
        sizes = tuple(pool.rows // cache.kv_shards for pool in cache.pools)
        require(
            sizes == self.rows,
            "cache",
            f"pools of {sizes} entries",
            "pool sizes of other slots. Give a cache from prefill of these slots.",
        )
        # A custom policy class may have changed its store since the cache was saved.
        stores, store = {type(pool.store).__name__ for pool in cache.pools}, parts.store.__name__
        require(
            stores == {store},
            "cache",
            f"entries held by {stores}",
            f"another store than the slots' {store}. Prefill the prompt again.",
        )
        free = int(cache.free()[~sliding].min(initial=self.longest))
        remedy = f"only {free} places free: run one question on top of a prompt, or make slots with more max_question"
        require(rows <= free, "cache", f"{rows} more entries", remedy)


def slides(parts: Parts) -> bool:
    """Return True if sliding-window layers of a slot evict entries outside their windows: not in a shared pool."""
    return not parts.layout.one_pool


def slot_shape(
    parts: Parts, config: ModelConfig, *, prompt: int, question: int, new: int, kv_shards: int = 1
) -> SlotShape:
    """Compute the `SlotShape` whose pools hold any prompt up to `prompt` tokens, with question and new tokens.

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
    entry_counts(parts, np.asarray([prompt]), config.sliding_windows)
    reading = parts.reading(config.sliding_windows, bucket(prompt))
    remedy = "not supported in slots: leave offload out, or answer one batch after the other"
    require(not reading.offloaded, "policy", "entries in host memory", remedy)
    remedy = "not supported in slots: leave prefill_ratio out, or answer one batch after the other"
    require(
        not parts.read.chunk,
        "policy",
        "chunked prefill",
        remedy,
    )
    # A policy that recompresses divides a longer text among layers like a longer prompt.
    more = question + new
    longest = prompt + (more if parts.every else 0)
    most, asked = np.zeros(1, np.int64), bucket(max(1, question))
    for shortest, size in buckets(longest):
        # The shortest prompt of a bucket gains the most entries before its limit.
        short = np.asarray([shortest])
        free = first_headroom(
            parts, config.sliding_windows, short, more, most=more, slides=slides(parts), least=asked
        )
        headroom = np.asarray(free)
        # A question may exceed a limit before the policy compresses it.
        headroom = headroom + (asked if question and parts.ongoing.compresses else 0)
        most = np.maximum(most, pools_for(parts, config, size, tuple(headroom.tolist()), kv_shards))
    return SlotShape(rows=tuple(most.tolist()), prompt=prompt, question=question, new=new)
