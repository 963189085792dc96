"""`SlotExtras`: the extras of a running batch, which exist only while an active slot needs them."""

import dataclasses

import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from jaxkv.cache.slot_copies import copy_from_slots, copy_into_slots
from jaxkv.engine.sampling import GREEDY
from jaxkv.engine.sampling_extras import SamplingExtras, create_extras
from jaxkv.sharding.mesh import ShardingMesh, place_host_array


@dataclasses.dataclass(kw_only=True, eq=False)
class SlotExtras:
    """Extras of all slots while an active one needs some; the others then have neutral ones.

    Attributes:
        count: number of slots.
        groups: number of the mesh's groups of sequences.
        vocab: size of the vocabulary.
        axes: the mesh.
        arrays: the extras, an argument of the token loop; None while no active slot needs some.
        needed: slots that need some.
    """

    count: int
    groups: int
    vocab: int
    axes: ShardingMesh | None
    arrays: SamplingExtras | None = None
    needed: frozenset[int] = frozenset()

    def create_neutral(self, batch: int) -> SamplingExtras | None:
        """Return extras without effect of `batch` sequences."""
        return create_extras(GREEDY, (), batch=batch, vocab=self.vocab, axes=self.axes, always=True)

    def insert(self, extras: SamplingExtras | None, slot: int, where: Int[Array, " g"]) -> None:
        """Copy a sequence's extras into a slot, in place; `where` is the slot per group, as in `copy_into_slots`."""
        self.needed = self.needed | {slot} if extras else self.needed - {slot}
        if extras or self.arrays:
            arrays = self.arrays or self.create_neutral(self.count)
            given = extras or self.create_neutral(self.groups)
            self.arrays = copy_into_slots(arrays, given, where, axes=self.axes)

    def copy(self, slot: int, where: Int[Array, " g"]) -> SamplingExtras | None:
        """Return a copy of a slot's extras; None if the slot needs none."""
        if slot not in self.needed:
            return None
        return copy_from_slots(self.arrays, where, axes=self.axes)

    def set_token_masks(self, masks: UInt32[np.ndarray, "B w"]) -> None:
        """Set which tokens each slot may sample next, 32 per word; only while a slot needs extras."""
        assert self.arrays is not None
        allowed = place_host_array(masks, "B", self.axes)
        self.arrays = dataclasses.replace(self.arrays, allowed=allowed)

    def drop_if_unneeded(self, done: Bool[np.ndarray, " B"]) -> None:
        """Free the arrays if all slots that need them are in the mask `done`."""
        self.needed = frozenset(slot for slot in self.needed if not done[slot])
        self.arrays = self.arrays if self.needed else None
