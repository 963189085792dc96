"""Pools: rows of keys and values, a segment for each sequence and kv head, and how rows are placed and written."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "pos", "score", "norm"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Rows of segments. Within a segment they lie in order of position until one is dropped by itself.

    Attributes:
        k: `[B, P, D]` keys after RoPE at their original position (before it, where the policy rolls positions).
        v: `[B, P, D]` values.
        pos: `i32[B, P]` original position of each row; -1 where no row is.
        score: `f32[B, P]` what the policy has observed of each row, if it goes on observing; 0 where no row is.
        norm: `f32[B, P]` length of each key, only while tokens are drawn for a policy that compares keys.
    """

    k: Float[Array, "B P D"]
    v: Float[Array, "B P D"]
    pos: Int[Array, "B P"]
    score: Float[Array, "B P"] | None = None
    norm: Float[Array, "B P"] | None = None

    @property
    def rows(self) -> int:
        """P."""
        return self.k.shape[1]


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
    offset = jnp.arange(count, dtype=jnp.int32)
    real = offset < written[:, None]
    row = jnp.where(real[:, None], end[..., None] + offset, pool.rows).reshape(batch, heads * count)
    spread = jnp.broadcast_to(positions[:, None], (batch, heads, count)).reshape(row.shape)
    flat = lambda a: a.reshape(batch, heads * count, dim)  # noqa: E731
    scores = pool.score
    if scores is not None:
        scores = put_cells(scores, row, jnp.zeros(row.shape) if score is None else score.reshape(row.shape))
    pos = put_cells(pool.pos, row, spread)
    norm = None if pool.norm is None else put_cells(pool.norm, row, row_norms(flat(k).astype(pool.k.dtype)))
    return Pool(k=put_rows(pool.k, row, flat(k)), v=put_rows(pool.v, row, flat(v)), pos=pos, score=scores, norm=norm)


def row_norms(rows: Float[Array, "*n D"]) -> Float[Array, "*n"]:
    """Euclidean length of each row, float32; never so near zero that it could not be divided by."""
    wide = rows.astype(jnp.float32)
    return jnp.maximum(jnp.sqrt((wide * wide).sum(axis=-1)), 1e-6)


def take_rows(leaf: Float[Array, "B P D"], row: Int[Array, "B N"]) -> Float[Array, "B N D"]:
    """A few rows of a pool, in float32."""
    return jnp.take_along_axis(leaf, row[..., None], axis=1).astype(jnp.float32)


def put_cells(leaf: Array, row: Int[Array, "B N"], new: Array) -> Array:
    """Writes what each row has, one number or several; rows from P on are left out."""
    index = jnp.arange(leaf.shape[0], dtype=jnp.int32)[:, None]
    return leaf.at[index, row].set(new, mode="drop", unique_indices=True)


def put_rows(leaf: Float[Array, "B P D"], row: Int[Array, "B N"], new: Float[Array, "B N D"]) -> Array:
    """Writes rows, in place where the buffer is donated; rows from P on are left out."""
    return _scatter_narrow(leaf, row, new) if leaf.dtype.itemsize == 2 else put_cells(leaf, row, new)


@jax.custom_jvp
def _scatter_narrow(leaf: Array, row: Int[Array, "B N"], new: Array) -> Array:
    def as_integers(leaf: Array, row: Array, new: Array) -> Array:
        # A CPU widens a 16-bit float operand of a scatter to float32 and back, all of it; integers it leaves alone.
        bits = partial(lax.bitcast_convert_type, new_dtype=jnp.uint16)
        return lax.bitcast_convert_type(put_cells(bits(leaf), row, bits(new)), leaf.dtype)

    return lax.platform_dependent(leaf, row, new, cpu=as_integers, default=put_cells)


@_scatter_narrow.defjvp
def _scatter_narrow_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # Integers have no derivative: without this rule gradients of 16-bit rows would be zero on a CPU.
    leaf, row, new = primals
    return _scatter_narrow(leaf, row, new), put_cells(tangents[0], row, tangents[2])
