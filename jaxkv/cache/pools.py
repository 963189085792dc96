"""A pool: P rows of keys and values for each sequence, shared by the segments of its kv heads."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.steps import NewEntries
from jaxkv.cache.page_bounds import PageBounds
from jaxkv.cache.residual_entries import ResidualEntries
from jaxkv.cache.stores import Store, write_pool_rows


@jax.tree_util.register_dataclass
@frozen_dataclass
class EntryPool:
    """Pytree of P rows per sequence: store of keys and values, positions `[B, P]`, optional scores and page bounds.

    A segment's entries ascend in position until one is evicted.

    Attributes:
        store: keys after RoPE at their original position (before RoPE if the policy rolls positions), and values.
        pos: `i32[B, P]` original position of each entry; -1 in free places.
        score: `f32[B, P]` accumulated score of each entry, for policies that score while decoding; 0 in free places.
        bounds: page bounds of the segments' keys, in layers that select pages to read; None in others.
        residual: the last appended entries before they were encoded, of stores that keep these; None in others.
    """

    store: Store
    pos: Int[Array, "B P"]
    score: Float[Array, "B P"] | None = None
    bounds: PageBounds | None = None
    residual: ResidualEntries | None = None

    @property
    def k(self) -> Float[Array, "B P D"]:
        """Keys `[B, P, D]` in the pool's `dtype`, decoded from the store as attention reads them."""
        return self.store.decode_entries()[0]

    @property
    def v(self) -> Float[Array, "B P D"]:
        """Values `[B, P, D]` in the pool's `dtype`, decoded from the store as attention reads them."""
        return self.store.decode_entries()[1]

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the pool's keys and values once decoded, as attention reads them; not of codes."""
        return self.store.dtype

    def cast_to_dtype(self, dtype: jnp.dtype) -> "EntryPool":
        """Return the pool with keys, values, bounds and residual in another dtype; itself if it has that dtype."""
        if dtype == self.dtype:
            return self
        # Positions remain integers.
        bounds, residual = jax.tree.map(
            lambda leaf: leaf.astype(dtype) if leaf.dtype == self.dtype else leaf,
            (self.bounds, self.residual),
        )
        store = self.store.cast_to_dtype(dtype)
        return dataclasses.replace(self, store=store, bounds=bounds, residual=residual)

    @property
    def row_count(self) -> int:
        """P, the pool's number of rows per sequence: places for entries, free ones included."""
        return self.pos.shape[1]

    def append_entries(self, new: NewEntries) -> "EntryPool":
        """Return the pool with new entries (key, value, position, score) behind each segment; in place if donated."""
        row = self._locate_new_rows(new)
        k, v = (each.reshape(len(row), -1, each.shape[-1]) for each in (new.k, new.v))
        pool = self.append_positions_and_scores(new)
        return dataclasses.replace(
            pool,
            store=self.store.overwrite_entries((row, k), (row, v)),
            residual=self.residual and self.residual.append_entries(new),
        )

    def append_positions_and_scores(self, new: NewEntries) -> "EntryPool":
        """Return the pool with new entries' positions and initial scores appended; a kernel writes keys and values."""
        row = self._locate_new_rows(new)
        batch = len(new.end)
        spread = jnp.broadcast_to(new.positions[:, None], new.k.shape[:3]).reshape(batch, -1)
        return dataclasses.replace(
            self.append_initial_scores(new), pos=write_pool_rows(self.pos, row, spread)
        )

    def transform_scores(self, change: Callable[[Array], Array]) -> "EntryPool":
        """Return the pool with `change` applied to its scores `f32[B, P]`; itself if it holds none."""
        if self.score is None:
            return self
        return dataclasses.replace(self, score=change(self.score))

    def append_initial_scores(self, new: NewEntries) -> "EntryPool":
        """Return the pool with new entries' initial scores (0 by default) written; itself if it holds no scores."""
        row = self._locate_new_rows(new)
        begun = jnp.zeros(row.shape) if new.score is None else new.score.reshape(row.shape)
        return self.transform_scores(lambda score: write_pool_rows(score, row, begun))

    def _locate_new_rows(self, new: NewEntries) -> Int[Array, "B n"]:
        """Return row indices `[B, n]` of the new entries of all segments, head by head; P for entries not written."""
        offset = jnp.arange(new.k.shape[2], dtype=jnp.int32)
        real = offset < new.count[:, None]
        return jnp.where(real[:, None], new.end[..., None] + offset, self.row_count).reshape(
            len(new.end), -1
        )


def map_rows_to_segments(start: Int[Array, "B K"], rows: int) -> Int[Array, "B P"]:
    """Return, for each of P = `rows` pool rows, the index of its segment, `i32[B, P]`, by ascending rows `start`.

    `start` is in ascending order from 0.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    return (row >= start[..., None]).sum(axis=-2, dtype=jnp.int32) - 1


def compute_vector_norms(rows: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """Return the Euclidean norm of each vector along the last axis, float32, at least 1e-6 for use as a divisor."""
    wide = rows.astype(jnp.float32)
    return jnp.maximum(jnp.sqrt((wide * wide).sum(axis=-1)), 1e-6)
