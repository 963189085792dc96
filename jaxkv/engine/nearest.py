"""Nearest entry of a segment by cosine, into which an evicted entry may be merged."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.xla import WALK_BLOCK, SegmentReadMode
from jaxkv.cache.pools import compute_vector_norms
from jaxkv.engine.segments import Segments, fold_over_entries


def find_most_similar_entry(
    rows: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    of: Float[Array, "B K D"],
    but: Int[Array, "B K"],
    segments: Segments,
    *,
    walk: SegmentReadMode,
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Return two `[B, K]` per segment: largest cosine of an entry, not row `but`, to vector `of`; its pool row or -1.

    `rows` are the pool's keys or values at positions `pos`. The row `but`, the given entry itself, is excluded; ties go
    to the first position.
    """

    def body(best, row, inside, rows, pos):
        wide = rows.astype(jnp.float32)
        cosine = _compute_dot_products(of, wide) / (
            compute_vector_norms(of)[..., None] * compute_vector_norms(wide)
        )
        found = _find_largest_cosine(cosine, pos, row, inside & (row != but[..., None]))
        better = (found[0] > best[0]) | ((found[0] == best[0]) & (found[1] < best[1]))
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best, strict=True))

    shape = of.shape[:2]
    carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32),
        jnp.full(shape, -1, jnp.int32),
    )
    cosine, _, at = fold_over_entries(
        body, carry, (rows, pos), segments.start, segments.length, walk=walk, block=WALK_BLOCK
    )
    return cosine, at


def _find_largest_cosine(
    cosine: Array, pos: Array, row: Array, counts: Bool[Array, "B K n"]
) -> tuple[Array, Array, Array]:
    """Return per segment the largest cosine in mask `counts`, its earliest position, and its pool row (-1 for none)."""
    cosine = jnp.where(counts, cosine, -jnp.inf)
    top = cosine.max(axis=-1)
    none = jnp.iinfo(jnp.int32).max
    position = jnp.where(counts & (cosine == top[..., None]), pos, none).min(axis=-1)
    return top, position, jnp.where(counts & (pos == position[..., None]), row, -1).max(axis=-1)


def _compute_dot_products(
    q: Float[Array, "B K D"], rows: Float[Array, "B _ n D"]
) -> Float[Array, "B K n"]:
    """Return float32 dot products `[B, K, n]` of each head's vector with n entries, its own or shared by all heads."""
    dot = partial(
        lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if rows.shape[1] == 1:
        return dot(q, rows[:, 0], (((2,), (2,)), ((0,), (0,))))
    return dot(q, rows, (((2,), (3,)), ((0, 1), (0, 1))))
