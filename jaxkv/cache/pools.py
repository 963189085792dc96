"""A pool: P rows of keys and values for each sequence, shared by the segments of its kv heads."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention.steps import NewEntries
from jaxkv.cache.page_bounds import PageBounds
from jaxkv.cache.stores import Store, put_cells


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Pytree of P rows per sequence: store of keys and values, positions `[B, P]`, optional scores and page bounds.

    A segment's entries ascend in position until one is evicted.

    Attributes:
        store: keys after RoPE at their original position (before RoPE if the policy rolls positions), and values.
        pos: `i32[B, P]` original position of each entry; -1 in free places.
        score: `f32[B, P]` accumulated score of each entry, for policies that score while decoding; 0 in free places.
        bounds: page bounds of the segments' keys, in layers that select pages to read; None in others.
    """

    store: Store
    pos: Int[Array, "B P"]
    score: Float[Array, "B P"] | None = None
    bounds: PageBounds | None = None

    @property
    def k(self) -> Float[Array, "B P D"]:
        """Keys `[B, P, D]` in the model's dtype, decoded from the store as attention reads them."""
        return self.store.view()[0]

    @property
    def v(self) -> Float[Array, "B P D"]:
        """Values `[B, P, D]` in the model's dtype, decoded from the store as attention reads them."""
        return self.store.view()[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of keys and values as attention reads them; nothing is decoded."""
        return self.store.dtype

    def widened(self, dtype: jnp.dtype) -> "Pool":
        """Return the pool with keys, values and page bounds in another dtype; itself if it has that dtype."""
        if dtype == self.dtype:
            return self
        bounds = jax.tree.map(lambda leaf: leaf.astype(dtype), self.bounds)
        return dataclasses.replace(self, store=self.store.widened(dtype), bounds=bounds)

    @property
    def rows(self) -> int:
        """P, the pool's number of places for entries per sequence, free ones included."""
        return self.pos.shape[1]

    def appended(self, new: NewEntries) -> "Pool":
        """Return the pool with new entries behind each segment; in place if the pool is donated."""
        row = self._behind(new)
        k, v = (each.reshape(len(row), -1, each.shape[-1]) for each in (new.k, new.v))
        pool = self.placed(new)
        return dataclasses.replace(pool, store=self.store.put((row, k), (row, v)))

    def placed(self, new: NewEntries) -> "Pool":
        """Return the pool with positions and scores of new entries; a kernel writes their keys and values."""
        row, batch = self._behind(new), len(new.end)
        spread = jnp.broadcast_to(new.positions[:, None], new.k.shape[:3]).reshape(batch, -1)
        return dataclasses.replace(self.begun(new), pos=put_cells(self.pos, row, spread))

    def rescored(self, change: Callable[[Array], Array]) -> "Pool":
        """Return the pool with changed scores; itself if it holds none."""
        if self.score is None:
            return self
        return dataclasses.replace(self, score=change(self.score))

    def begun(self, new: NewEntries) -> "Pool":
        """Return the pool with initial scores of new entries; itself if it holds none."""
        row = self._behind(new)
        begun = jnp.zeros(row.shape) if new.score is None else new.score.reshape(row.shape)
        return self.rescored(lambda score: put_cells(score, row, begun))

    def _behind(self, new: NewEntries) -> Int[Array, "B n"]:
        """Row indices `[B, n]` of the new entries of every segment, head by head; P where none is written."""
        offset = jnp.arange(new.k.shape[2], dtype=jnp.int32)
        real = offset < new.count[:, None]
        return jnp.where(real[:, None], new.end[..., None] + offset, self.rows).reshape(
            len(new.end), -1
        )


def segment_of_row(start: Int[Array, "B K"], rows: int) -> Int[Array, "B P"]:
    """Return the segment index of each of P = `rows` pool rows, `i32[B, P]`, from the segments' first rows.

    `start` is in ascending order from 0.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    return (row >= start[..., None]).sum(axis=-2, dtype=jnp.int32) - 1


def row_norms(rows: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """Euclidean norm of each vector along the last axis, float32, at least 1e-6 for use as a divisor."""
    wide = rows.astype(jnp.float32)
    return jnp.maximum(jnp.sqrt((wide * wide).sum(axis=-1)), 1e-6)
