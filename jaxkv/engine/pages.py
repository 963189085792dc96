"""Pages of a layer's rows (Quest): the bounds of their keys, which of them kv heads choose, and attention to these."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention.filters import by_page
from jaxkv.attention.xla import Walk
from jaxkv.cache.pools import Pool
from jaxkv.cache.stores import put_rows
from jaxkv.engine.sparse import largest
from jaxkv.engine.spec import Spec
from jaxkv.policies.topk import sortable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageBounds:
    """Element-wise minimum and maximum of the keys of each page, in the keys' dtype: n / K pages of head 0, then 1, ...

    The bounds of a page without rows have no meaning.
    """

    low: Float[Array, "B n D"]
    high: Float[Array, "B n D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageRows:
    """Rows of chosen pages, counted from each segment's first row, and the row `rest` from which on all are read.

    Attributes:
        rows: ascending; of T entries the first `held` are valid.
        held: number of valid rows.
        rest: first row of the page that the new token's row joins.
    """

    rows: Int[Array, "B K T"]
    held: Int[Array, "B K"]
    rest: Int[Array, "B K"]


def bounds_of(pool: Pool, length: Int[Array, "B K"], page: int) -> PageBounds:
    """Computes the bounds of all pages of a layer's segments from their keys; `length` rows of each count."""
    keys, (batch, heads) = pool.k, length.shape
    each, dim = keys.shape[1] // heads, keys.shape[2]
    real = (jnp.arange(each, dtype=jnp.int32) < length[..., None])[..., None]

    def extreme(fill: float, reduce: str) -> Array:
        rows = jnp.where(real, keys.reshape(batch, heads, each, dim), jnp.asarray(fill, keys.dtype))
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -each % page), (0, 0)), constant_values=fill)
        return getattr(rows.reshape(batch, -1, page, dim), reduce)(axis=2)

    return PageBounds(low=extreme(jnp.inf, "min"), high=extreme(-jnp.inf, "max"))


def with_row(
    bounds: PageBounds, key: Float[Array, "B K D"], length: Int[Array, "B K"], count: Int[Array, " B"], page: int
) -> PageBounds:
    """Bounds with one new key in the page of row `length` of each segment; unchanged where `count` is 0."""
    heads, pages = length.shape[1], bounds.low.shape[1]
    at = length // page + jnp.arange(heads, dtype=jnp.int32) * (pages // heads)
    row, index = jnp.where(count[:, None] > 0, at, pages), jnp.minimum(at, pages - 1)[..., None]
    fresh = (length % page == 0)[..., None]

    def joined(leaf: Array, extreme: Callable[[Array, Array], Array]) -> Array:
        new = key.astype(leaf.dtype)
        return put_rows(leaf, row, jnp.where(fresh, new, extreme(jnp.take_along_axis(leaf, index, axis=1), new)))

    return PageBounds(low=joined(bounds.low, jnp.minimum), high=joined(bounds.high, jnp.maximum))


def rest_from(length: Int[Array, "*n"], page: int) -> Int[Array, "*n"]:
    """First row of the page that the row behind `length` others joins."""
    return length // page * page


def full_pages(length: Int[Array, "*n"], budget: Int[Array, "*#n"], page: int) -> Int[Array, "*n"]:
    """Number of full pages that a budget of rows has room for beside the page of the row behind `length` others."""
    newest = length + 1 - rest_from(length, page)
    return jnp.clip((budget - newest) // page, 0, length // page)


def chosen_pages(
    spec: Spec,
    q: Float[Array, "B K G D"],
    bounds: PageBounds,
    length: Int[Array, "B K"],
    budget: Int[Array, " B"],
    each: int,
) -> PageRows:
    """Row indices of each kv head's full pages of largest bound for one new token, as many as fit in `budget`.

    Tang et al., Quest, algorithm 1; a page's bound is the largest of its kv head's query heads, ties go to the lowest
    page. `length` are the rows before the token, `each` the rows that a segment can hold.
    """
    assert spec.reading is not None and spec.page is not None
    page, (batch, heads) = spec.page, length.shape
    count = full_pages(length, budget[:, None], page)
    scores = by_page(q, bounds.low, bounds.high, spec.axes)
    pages = scores.shape[2]
    full = jnp.arange(pages, dtype=jnp.int32) < (length // page)[..., None]
    keys = jnp.where(full, sortable(scores), jnp.uint32(0)).reshape(-1, pages)
    width = max(1, min(pages, (spec.reading.width - 1) // page))
    at = largest(keys, count.reshape(-1), width, by_sorting=spec.backend.few_launches).reshape(batch, heads, width)
    rows = at[..., None] * page + jnp.arange(page, dtype=jnp.int32)
    rows = jnp.minimum(rows.reshape(batch, heads, -1), each - 1)
    return PageRows(rows=rows, held=count * page, rest=rest_from(length, page))


def over_pages(
    spec: Spec,
    q: Float[Array, "B K G D"],
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    chosen: PageRows,
) -> Float[Array, "B K G D"]:
    """Attention output of one new token over the rows of its chosen pages and of the last page, gathered first.

    `length` counts each segment's rows with the token's own.
    """
    assert spec.page is not None
    (batch, heads), page = start.shape, spec.page
    slot = jnp.arange(chosen.rows.shape[2] + page, dtype=jnp.int32)
    held, rest, rows = chosen.held[..., None], chosen.rest[..., None], jnp.pad(chosen.rows, ((0, 0), (0, 0), (0, page)))
    count = chosen.held + length - chosen.rest
    offset = jnp.where(slot < held, rows, rest + slot - held)
    source = jnp.where(slot < count[..., None], start[..., None] + offset, -1)
    k, v, _ = spec.backend.packed(pool.k[:, None], pool.v[:, None], source.reshape(batch, -1))
    first = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32) * slot.shape[0], start.shape)
    return spec.backend.attend(q, k, v, first, count, walk=Walk.STRIDES)[0]
