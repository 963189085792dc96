"""Static shape of a slot: pool rows for any prompt up to a limit, and its new tokens."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool

from jaxkv._errors import require
from jaxkv.cache import KVCache
from jaxkv.engine.headroom import first_headroom
from jaxkv.engine.lengths import SHORT, bucket, buckets, by_length
from jaxkv.engine.plan import pools_for
from jaxkv.models.config import ModelConfig
from jaxkv.policies.parts import Parts

# Tokens of a prompt that only compiles programs; and the padded length, a short chat's, that is
# compiled first.
FEW = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotShape:
    """Static size of a slot: entries of each pool (on a mesh, of a device's part); tokens of prompt, question, answer."""

    rows: tuple[int, ...]
    prompt: int
    question: int
    new: int

    @property
    def longest(self) -> int:
        """Most tokens of a slot's text: its limits of prompt, question and answer added, rounded up to a bucket."""
        return bucket(self.prompt + self.question + self.new)

    @property
    def lengths(self) -> list[tuple[bool, int]]:
        """Padded lengths of prompts (False), then of questions (True), of each the nearest to a short chat's first."""
        most = (False, self.prompt), (True, self.question)
        found = [(question, size) for question, longest in most for _, size in buckets(longest)]
        lengths = {(question, max(SHORT, size) if question else size) for question, size in found}
        return sorted(lengths, key=lambda each: (each[0], abs(math.log2(each[1] / FEW))))

    def require_fits(
        self, parts: Parts, cache: KVCache, rows: int, sliding: Bool[np.ndarray, " L"]
    ) -> None:
        """Raises ValueError for a cache with pools of other sizes or another store, or with fewer than `rows` free.

        Layers in the mask `sliding` are not asked for free places.
        """
        sizes = tuple(pool.rows // cache.kv_shards for pool in cache.pools)
        require(
            sizes == self.rows,
            "cache",
            f"pools of {sizes} entries",
            "give what prefill of these slots returned",
        )
        # A policy's own class may have another store by now than when its cache was saved.
        stores, mine = {type(pool.store).__name__ for pool in cache.pools}, parts.store.__name__
        require(
            stores == {mine},
            "cache",
            f"entries held by {stores}",
            f"these slots have {mine}: prefill the prompt anew",
        )
        free = int(cache.free()[~sliding].min(initial=self.longest))
        remedy = f"there is room for {free}: read one question on top of a prompt, or make slots with more max_question"
        require(rows <= free, "cache", f"{rows} more entries", remedy)


def slides(parts: Parts) -> bool:
    """True if sliding-window layers of a slot drop the entries that leave their windows: not those that share a pool."""
    return not parts.layout.one_pool


def slot_shape(
    parts: Parts, config: ModelConfig, *, prompt: int, question: int, new: int, kv_shards: int = 1
) -> SlotShape:
    """Computes the `SlotShape` whose pools hold any prompt up to `prompt` tokens, with question and new tokens.

    `kv_shards` is the number of devices that share a pool's heads. Raises ValueError for policies that read prompts in
    chunks or keep entries in host memory, and for budgets that they cannot honour.
    """
    by_length(parts, np.asarray([prompt]), config.sliding_windows)
    reading = parts.reading(config.sliding_windows, bucket(prompt))
    remedy = "slots keep every entry on the device: leave offload out, or answer one batch after the other"
    require(not reading.offloaded, "policy", "entries wait in host memory", remedy)
    remedy = (
        "slots take whole prompts: leave prefill_ratio out, or answer one batch after the other"
    )
    require(
        not parts.read.chunk,
        "policy",
        "prompts are read in chunks",
        remedy,
    )
    # A policy that recompresses spreads a longer text over layers as it would a longer prompt.
    more = question + new
    longest = prompt + (more if parts.every else 0)
    most, asked = np.zeros(1, np.int64), bucket(max(1, question))
    for shortest, size in buckets(longest):
        # The shortest prompt of a bucket grows furthest towards a limit in entries.
        short = np.asarray([shortest])
        given = first_headroom(
            parts, config.sliding_windows, short, more, most=more, slides=slides(parts), least=asked
        )
        headroom = np.asarray(given)
        # A question goes beyond a limit before the policy compresses it.
        headroom = headroom + (asked if question and parts.ongoing.compresses else 0)
        most = np.maximum(most, pools_for(parts, config, size, tuple(headroom.tolist()), kv_shards))
    return SlotShape(rows=tuple(most.tolist()), prompt=prompt, question=question, new=new)
