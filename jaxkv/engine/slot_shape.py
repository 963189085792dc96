"""Static shape of a slot: pool rows for any prompt up to a limit, and its new tokens."""

import dataclasses

import numpy as np

from jaxkv._errors import require
from jaxkv.engine.growth import first_room
from jaxkv.engine.lengths import bucket, buckets
from jaxkv.engine.plan import pools_for
from jaxkv.models.config import ModelConfig
from jaxkv.policies.parts import Parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotShape:
    """Static size of a slot: rows of each pool (on a mesh, of a device's part); tokens of prompt, question, answer."""

    rows: tuple[int, ...]
    prompt: int
    question: int
    new: int

    @property
    def longest(self) -> int:
        """Most tokens of a slot's text: its limits of prompt, question and answer added, rounded up to a bucket."""
        return bucket(self.prompt + self.question + self.new)


def slot_shape(
    parts: Parts, config: ModelConfig, *, prompt: int, question: int, new: int, stretches: int = 1
) -> SlotShape:
    """Computes the `SlotShape` whose pools hold any prompt up to `prompt` tokens, with question and new tokens.

    `stretches` is the number of devices that share a pool's heads. Raises ValueError for policies that read prompts in
    chunks or keep rows in host memory.
    """
    reading = parts.reading(config.windows, bucket(prompt))
    remedy = "slots keep every row on the device: leave offload out, or answer one batch after the other"
    require(reading is None or not reading.offloaded, "policy", "rows wait in host memory", remedy)
    remedy = "slots take whole prompts: leave prefill_ratio out, or answer one batch after the other"
    require(parts.read is None or not parts.read.by_chunks, "policy", "prompts are read in chunks", remedy)
    # A policy that compresses again spreads a longer text over layers as it would a longer prompt.
    more = question + new
    longest = prompt + (more if parts.every else 0)
    most = np.zeros(1, np.int64)
    for shortest, size in buckets(longest):
        # The shortest prompt of a bucket grows furthest towards a limit in rows.
        room = np.asarray(first_room(parts, config.windows, np.asarray([shortest]), more, most=more, slides=False))
        # A question goes beyond a limit before the policy compresses it.
        room = room + (bucket(question) if question and parts.ongoing is not None else 0)
        most = np.maximum(most, pools_for(parts, config, size, tuple(room.tolist()), stretches))
    return SlotShape(rows=tuple(most.tolist()), prompt=prompt, question=question, new=new)
