"""A pool: P rows of keys and values for each sequence, shared by the segments of its kv heads; appending rows."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache.pages import PageBounds
from jaxkv.cache.stores import Dense, Store, put_cells


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Pytree of P rows per sequence: store of keys and values, positions `[B, P]`, optional scores and page bounds.

    A segment's rows ascend in position until one is evicted.

    Attributes:
        store: keys after RoPE at their original position (before it, where the policy rolls positions), and values.
        pos: `i32[B, P]` original position of each row; -1 where no row is.
        score: `f32[B, P]` accumulated score of each row, for policies that score while decoding; 0 where no row is.
        bounds: of the pages of the segments' keys, in layers that choose pages to read; None in others.
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
        """Dtype of keys and values as attention reads them; decodes no row."""
        return self.store.dtype

    def widened(self, dtype: jnp.dtype) -> "Pool":
        """The same rows, with keys and values in another dtype, and bounds of pages; itself if they have it."""
        if dtype == self.dtype:
            return self
        bounds = jax.tree.map(lambda leaf: leaf.astype(dtype), self.bounds)
        return dataclasses.replace(self, store=self.store.widened(dtype), bounds=bounds)

    @property
    def rows(self) -> int:
        """P, the number of rows per sequence."""
        return self.pos.shape[1]


def dense_pool(
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    score: Float[Array, "B P"] | None = None,
) -> Pool:
    """Makes a `Pool` that holds the given keys and values unencoded, with their positions and scores."""
    return Pool(store=Dense.of(k, v), pos=pos, score=score)


def segment_of_row(start: Int[Array, "B K"], rows: int) -> Int[Array, "B P"]:
    """Index, `i32[B, P]`, of the segment in which each of P = `rows` rows of a pool lies, by the segments' first rows.

    `start` ascends from 0.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    return (row >= start[..., None]).sum(axis=-2, dtype=jnp.int32) - 1


def append(
    pool: Pool,
    k: Float[Array, "B K N D"],
    v: Float[Array, "B K N D"],
    positions: Int[Array, "B N"],
    end: Int[Array, "B K"],
    written: Int[Array, " B"],
    score: Float[Array, "B K N"] | None = None,
) -> Pool:
    """Pool with the first `written` of N new rows of each sequence added at row `end` of each segment.

    In place if the pool is donated.
    `score` is the first score of each new row, 0 by default, in a pool that keeps scores.
    """
    batch, heads, count, dim = k.shape
    row = _behind(end, written, count, pool.rows)
    spread = jnp.broadcast_to(positions[:, None], (batch, heads, count)).reshape(row.shape)
    k, v = (a.reshape(batch, heads * count, dim) for a in (k, v))
    scores = pool.score
    if scores is not None:
        scores = put_cells(
            scores, row, jnp.zeros(row.shape) if score is None else score.reshape(row.shape)
        )
    pos = put_cells(pool.pos, row, spread)
    return dataclasses.replace(
        pool, store=pool.store.put((row, k), (row, v)), pos=pos, score=scores
    )


def append_places(
    pool: Pool,
    positions: Int[Array, " B"],
    row: Int[Array, "B K"],
    score: Float[Array, "B K"] | None,
) -> Pool:
    """Pool with positions, and scores (0 by default), of one new row of each segment at `row`; nothing at P or more.

    Keys and values are left to whoever writes them.
    """
    scores = pool.score
    if scores is not None:
        scores = put_cells(scores, row, jnp.zeros(row.shape) if score is None else score)
    pos = put_cells(pool.pos, row, jnp.broadcast_to(positions[:, None], row.shape))
    return dataclasses.replace(pool, pos=pos, score=scores)


def _behind(
    end: Int[Array, "B K"], written: Int[Array, " B"], count: int, rows: int
) -> Int[Array, "B n"]:
    """Row indices `[B, n]` at which `count` new rows of every segment are written, head by head; P where none is."""
    offset = jnp.arange(count, dtype=jnp.int32)
    real = offset < written[:, None]
    return jnp.where(real[:, None], end[..., None] + offset, rows).reshape(end.shape[0], -1)


def row_norms(rows: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """Euclidean norm of each vector along the last axis, float32, at least 1e-6 so that it can be a divisor."""
    wide = rows.astype(jnp.float32)
    return jnp.maximum(jnp.sqrt((wide * wide).sum(axis=-1)), 1e-6)
