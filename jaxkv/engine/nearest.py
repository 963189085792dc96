"""Nearest row of a segment by cosine: the row into which an evicted row may be merged."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.columns import span
from jaxkv.attention.xla import WALK_BLOCK, Walk, inside_segments, windows
from jaxkv.cache.pools import Pool, row_norms
from jaxkv.engine.segments import Segments, fold


def nearest(
    rows: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    of: Float[Array, "B K D"],
    but: Int[Array, "B K"],
    segments: Segments,
    *,
    walk: Walk,
    norm: Float[Array, "B P"] | None = None,
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Pair `[B, K]` per segment: largest cosine of a row, except row `but`, to vector `of`, and its pool row or -1.

    `rows` are the pool's keys or values at positions `pos`, `norm` their lengths if these are known. The row `but`, the
    given one itself, does not count; ties go to the first position.
    """

    def body(best, row, inside, rows, pos, *norm):
        wide = rows.astype(jnp.float32)
        cosine = _cosines(_dots(of, wide), of, norm[0] if norm else row_norms(wide))
        found = _most(cosine, pos, row, inside & (row != but[..., None]))
        better = (found[0] > best[0]) | ((found[0] == best[0]) & (found[1] < best[1]))
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best, strict=True))

    shape = of.shape[:2]
    carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32),
        jnp.full(shape, -1, jnp.int32),
    )
    leaves = (rows, pos) if norm is None else (rows, pos, norm)
    cosine, _, at = fold(
        body, carry, leaves, segments.start, segments.length, walk=walk, block=WALK_BLOCK
    )
    return cosine, at


def nearest_of_products(
    pool: Pool,
    norms: Float[Array, "B P"],
    of: Float[Array, "B K D"],
    but: Int[Array, "B K"],
    products: Float[Array, "B K n"],
    wrong: Bool[Array, "B K"],
    segments: Segments,
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """Pair `[B, K]` per segment: largest cosine of a key, except row `but`, to `of`, its row; from inner products.

    `products` lie in the rows of `attention.columns.span`; only for segments marked in `wrong`, where they are of
    another row's key, are keys read again. `of` is the key to compare, `but` its row, `norms` the pool's key lengths.
    """
    first, width = span(segments.start, pool.rows, products.shape[-1])

    def mend(state):
        """Loop body: recomputes inner products of the first segment marked `wrong`; returns mask, products."""
        wrong, products = state
        index = jnp.argmax(wrong.reshape(-1)).astype(jnp.int32)
        b, s = index // wrong.shape[1], index % wrong.shape[1]
        keys = lax.dynamic_slice(pool.k, (b, first[b, s], 0), (1, width, pool.k.shape[2])).astype(
            jnp.float32
        )
        one = lax.dynamic_slice(of, (b, s, 0), (1, 1, of.shape[2]))
        product = _dots(one, keys[:, None])
        return wrong.at[b, s].set(False), lax.dynamic_update_slice(products, product, (b, s, 0))

    _, products = lax.while_loop(lambda state: state[0].any(), mend, (wrong, products))
    row = first[..., None] + jnp.arange(width, dtype=jnp.int32)
    inside = inside_segments(row, segments.start, segments.length)
    pos, norm = (windows(leaf, first, width) for leaf in (pool.pos, norms))
    cosine, _, found = _most(
        _cosines(products, of, norm), pos, row, inside & (row != but[..., None])
    )
    return cosine, found


def _cosines(
    products: Float[Array, "B K n"], of: Float[Array, "B K D"], length: Float[Array, "B _ n"]
) -> Array:
    """Cosines `[B, K, n]`: inner products of vectors `of` with n rows, divided by the norms of both."""
    return products / (row_norms(of)[..., None] * length)


def _most(
    cosine: Array, pos: Array, row: Array, counts: Bool[Array, "B K n"]
) -> tuple[Array, Array, Array]:
    """Triple `[B, K]` per segment: largest cosine in mask `counts`, its earliest position, its pool row (-1: none)."""
    cosine = jnp.where(counts, cosine, -jnp.inf)
    top = cosine.max(axis=-1)
    none = jnp.iinfo(jnp.int32).max
    position = jnp.where(counts & (cosine == top[..., None]), pos, none).min(axis=-1)
    return top, position, jnp.where(counts & (pos == position[..., None]), row, -1).max(axis=-1)


def _dots(q: Float[Array, "B K D"], rows: Float[Array, "B _ n D"]) -> Float[Array, "B K n"]:
    """Float32 inner products `[B, K, n]` of each head's vector with n rows, per head or shared by all heads."""
    dot = partial(
        lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    if rows.shape[1] == 1:
        return dot(q, rows[:, 0], (((2,), (2,)), ((0,), (0,))))
    return dot(q, rows, (((2,), (3,)), ((0, 1), (0, 1))))
