"""`SlotExtras`: the extras of a running batch, which exist only while an active slot needs them."""

from functools import partial

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxkv.cache.slot_copies import copy_from_slots, copy_into_slots
from jaxkv.engine.sampling import GREEDY
from jaxkv.engine.sampling_extras import SamplingExtras, create_extras
from jaxkv.sharding.mesh import ShardingMesh


class SlotExtras:
    """Extras of all slots while an active one needs some; the others then have neutral ones.

    Attributes:
        arrays: the extras, an argument of the token loop; None while no active slot needs some.
        create_neutral: function of `batch` that returns extras without effect of as many sequences.
    """

    def __init__(self, *, count: int, groups: int, vocab: int, axes: ShardingMesh | None):
        """Hold no arrays; `groups` is the number of the mesh's groups of sequences."""
        self.arrays: SamplingExtras | None = None
        self._needed = np.zeros(count, bool)
        self._groups, self._axes = groups, axes
        self.create_neutral = partial(
            create_extras, GREEDY, (), vocab=vocab, axes=axes, always=True
        )

    def insert(self, extras: SamplingExtras | None, slot: int, where: Int[Array, " g"]) -> None:
        """Copy a sequence's extras into a slot, in place; `where` is the slot per group, as in `copy_into_slots`."""
        self._needed[slot] = bool(extras)
        if extras or self.arrays:
            arrays = self.arrays or self.create_neutral(batch=len(self._needed))
            given = extras or self.create_neutral(batch=self._groups)
            self.arrays = copy_into_slots(arrays, given, where, axes=self._axes)

    def copy(self, slot: int, where: Int[Array, " g"]) -> SamplingExtras | None:
        """Return a copy of a slot's extras; None if the slot needs none."""
        if not self._needed[slot]:
            return None
        return copy_from_slots(self.arrays, where, axes=self._axes)

    def drop_if_unneeded(self, done: Bool[np.ndarray, " B"]) -> None:
        """Free the arrays if all slots that need them are in the mask `done`."""
        self._needed &= ~done
        self.arrays = self.arrays if self._needed.any() else None
