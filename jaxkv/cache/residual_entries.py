"""Residual of a quantised pool (KIVI, arXiv:2402.02750): its last appended entries also before they were encoded."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.steps import GatheredEntries, NewEntries
from jaxkv.cache.last_tokens import write_last_tokens


@jax.tree_util.register_dataclass
@frozen_dataclass
class ResidualEntries:
    """The last R appended entries of each kv head before they were encoded, that of position p at index p % R.

    Attributes:
        entries: keys and values, in the pool's dtype.
        positions: positions of the entries; -1 for none.
    """

    entries: Float[Array, "B K two R D"]
    positions: Int[Array, "B R"]

    @classmethod
    def make_empty(
        cls, length: Int[Array, "B K"], size: int, dim: int, dtype: jnp.dtype
    ) -> "ResidualEntries":
        """Return the residual of R = `size` entries of segments `length` before an entry is appended."""
        return cls(
            entries=jnp.zeros((*length.shape, 2, size, dim), dtype),
            positions=jnp.full((length.shape[0], size), -1, jnp.int32),
        )

    def drop_sequences(self, which: Bool[Array, " B"]) -> "ResidualEntries":
        """Return a copy of the residual without the entries of the sequences in the mask `which`."""
        positions = jnp.where(which[:, None], -1, self.positions)
        return ResidualEntries(entries=jnp.copy(self.entries), positions=positions)

    def append_entries(self, new: NewEntries) -> "ResidualEntries":
        """Return the residual with the last R of the new entries written over the oldest."""
        both = jnp.stack([new.k, new.v], axis=2)
        places = new.positions[:, None, None, :, None]
        held = self.positions[:, None, None, :, None]
        return ResidualEntries(
            entries=write_last_tokens(self.entries, both, new.positions, new.count),
            positions=write_last_tokens(held, places, new.positions, new.count)[:, 0, 0, :, 0],
        )

    def take_entries(self, seen: Int[Array, " B"]) -> tuple[GatheredEntries, Int[Array, " B"]]:
        """Return entries `[B, K * R, D]`, from position `seen` - 1 downwards, and how many of each head's R are held.

        Entries of tokens that were taken back are no longer held, nor those that they replaced.
        """
        batch, _, _, size, dim = self.entries.shape
        wanted = seen[:, None] - 1 - jnp.arange(size, dtype=jnp.int32)
        index = wanted % size
        held = (jnp.take_along_axis(self.positions, index, axis=1) == wanted) & (wanted >= 0)
        taken = jnp.take_along_axis(self.entries, index[:, None, None, :, None], axis=3)
        k, v = (taken[:, :, at].reshape(batch, -1, dim) for at in (0, 1))
        return GatheredEntries(k, v), held.sum(axis=1, dtype=jnp.int32)
