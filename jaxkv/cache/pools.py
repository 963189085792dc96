"""Pools: rows of keys and values, a segment for each sequence and kv head, and how rows are placed and written."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache.stores import Dense, Store, put_cells


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Rows of segments. Within a segment they lie in order of position until one is dropped by itself.

    Attributes:
        store: keys after RoPE at their original position (before it, where the policy rolls positions), and values.
        pos: `i32[B, P]` original position of each row; -1 where no row is.
        score: `f32[B, P]` what the policy has observed of each row, if it goes on observing; 0 where no row is.
    """

    store: Store
    pos: Int[Array, "B P"]
    score: Float[Array, "B P"] | None = None

    @property
    def k(self) -> Float[Array, "B P D"]:
        """Keys in the model's dtype, as attention reads them."""
        return self.store.view()[0]

    @property
    def v(self) -> Float[Array, "B P D"]:
        """Values in the model's dtype, as attention reads them."""
        return self.store.view()[1]

    @property
    def rows(self) -> int:
        """P."""
        return self.pos.shape[1]


def dense_pool(
    k: Float[Array, "B P D"],
    v: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    score: Float[Array, "B P"] | None = None,
) -> Pool:
    """A pool that holds rows in the arrays given."""
    return Pool(store=Dense.of(k, v), pos=pos, score=score)


def segment_of_row(start: Int[Array, "B K"], rows: int) -> Int[Array, "B P"]:
    """Which segment each pool row lies in, for segments laid in order of head.

    Args:
        start: first row of each segment, ascending, the first one 0.
        rows: P.

    Returns:
        The head of each row.
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
    """Scatters N new rows behind each segment; rows from `written` on (padding, finished sequences) stay out.

    Args:
        pool: the rows so far; donated by the jitted caller, so the scatter happens in place.
        k: keys as the pool stores them.
        v: values.
        positions: original position of each token.
        end: first free row of each segment.
        written: how many of the N tokens each sequence really has.
        score: what was observed of them, 0 by default, in a pool that keeps scores.

    Returns:
        The pool with the rows written.
    """
    batch, heads, count, dim = k.shape
    row = _behind(end, written, count, pool.rows)
    spread = jnp.broadcast_to(positions[:, None], (batch, heads, count)).reshape(row.shape)
    flat = lambda a: a.reshape(batch, heads * count, dim)  # noqa: E731
    scores = pool.score
    if scores is not None:
        scores = put_cells(scores, row, jnp.zeros(row.shape) if score is None else score.reshape(row.shape))
    pos = put_cells(pool.pos, row, spread)
    return Pool(store=pool.store.put((row, flat(k)), (row, flat(v))), pos=pos, score=scores)


def _behind(end: Int[Array, "B K"], written: Int[Array, " B"], count: int, rows: int) -> Int[Array, "B n"]:
    """Pool row of each of `count` new tokens behind every segment, head by head; P for those that are not written."""
    offset = jnp.arange(count, dtype=jnp.int32)
    real = offset < written[:, None]
    return jnp.where(real[:, None], end[..., None] + offset, rows).reshape(end.shape[0], -1)


def append_norms(
    norms: Float[Array, "B P"], k: Float[Array, "B K N D"], end: Int[Array, "B K"], written: Int[Array, " B"]
) -> Float[Array, "B P"]:
    """Writes the lengths of N new keys behind each segment, where `append` writes the keys.

    Args:
        norms: length of each key of the pool.
        k: new keys, in the pool's dtype.
        end: first free row of each segment.
        written: how many of the N tokens each sequence really has.

    Returns:
        The lengths with the new ones.
    """
    row = _behind(end, written, k.shape[2], norms.shape[1])
    return put_cells(norms, row, row_norms(k).reshape(row.shape))


def row_norms(rows: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """Euclidean length of each row, float32; never so near zero that it could not be divided by."""
    wide = rows.astype(jnp.float32)
    return jnp.maximum(jnp.sqrt((wide * wide).sum(axis=-1)), 1e-6)
