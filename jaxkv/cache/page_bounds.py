"""Page bounds (Quest): element-wise minimum and maximum of the keys of each page of entries."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import select_array_module
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache.layout import Numbers
from jaxkv.cache.stores import Store, write_pool_rows
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit


@partial(jax.tree_util.register_dataclass, data_fields=["low", "high"], meta_fields=["page"])
@frozen_dataclass
class PageBounds:
    """Element-wise minimum and maximum of the keys of a layer's segments by page, exact for full pages only.

    Page p of a segment has the entries from p * page on, counted from the segment's first row. Bounds of full pages are
    exact. Bounds of other pages cover some of their entries, or evicted ones.

    Attributes:
        page: entries per page.
        low: `[B, K, n, D]` minimum of each page.
        high: `[B, K, n, D]` maximum of each page.
    """

    page: int
    low: Float[Array, "B K n D"]
    high: Float[Array, "B K n D"]

    @property
    def page_bound_bytes(self) -> int:
        """Bytes of the key minimum and maximum of one page of one segment."""
        return 2 * self.low.shape[3] * self.low.dtype.itemsize

    def resize_page_bounds(self, each: int) -> "PageBounds":
        """Return page bounds resized to segments of `each` entries: zero pages appended, or the last ones removed."""
        pages = -(-each // self.page)
        low, high = (resize_page_axis(leaf, pages) for leaf in (self.low, self.high))
        return dataclasses.replace(self, low=low, high=high)

    def recompute_appended_pages(
        self,
        keys: Float[Array, "B K n D"],
        length: Int[Array, "B K"],
        count: Int[Array, " B"],
    ) -> "PageBounds":
        """Return `PageBounds` after `count` entries were appended at `length`: pages that these reach are recomputed.

        `keys` are those of the entries at `list_appended_page_rows`; sequences with a `count` of 0 are unchanged.
        """
        batch, heads, pages, dim = self.low.shape
        new = keys.shape[2] // self.page
        first = length // self.page
        end = length + count[:, None]
        index = first[..., None] + jnp.arange(new, dtype=jnp.int32)
        written = (index * self.page < end[..., None]) & (count > 0)[:, None, None]
        at = index + jnp.arange(heads, dtype=jnp.int32)[:, None] * pages
        at = jnp.where(written, at, heads * pages).reshape(batch, -1)
        held = (first * self.page)[..., None] + jnp.arange(keys.shape[2], dtype=jnp.int32) < end[
            ..., None
        ]

        def put(leaf: Array, extreme: Array) -> Array:
            flat = leaf.reshape(batch, heads * pages, dim)
            return write_pool_rows(flat, at, extreme.reshape(batch, -1, dim)).reshape(leaf.shape)

        low, high = _compute_page_extremes(keys, held, self.page)
        return dataclasses.replace(self, low=put(self.low, low), high=put(self.high, high))


def resize_page_axis(leaf: Numbers, pages: int) -> Numbers:
    """Resize minima or maxima `[B, K, n, D]` to `pages` pages: cut at the end, or zeros appended."""
    leaf = leaf[:, :, :pages]
    more = ((0, 0), (0, 0), (0, pages - leaf.shape[2]), (0, 0))
    return select_array_module(leaf).pad(leaf, more)


def list_appended_page_rows(
    length: Int[Array, "B K"], tokens: int, page: int
) -> Int[Array, "B K n"]:
    """Return row offsets `[B, K, n]` in each segment of all pages that `tokens` entries from `length` on may reach."""
    pages = (tokens + page - 2) // page + 1
    return (length // page * page)[..., None] + jnp.arange(pages * page, dtype=jnp.int32)


@sharded_jit(static=("page", "axes"))
def compute_page_bounds(
    store: Store, length: Int[Array, "B K"], *, page: int, axes: ShardingMesh | None = None
) -> PageBounds:
    """Return the `PageBounds` of all pages of a store's equal-sized segments; zeros for empty pages; compiled.

    `length` is the number of entries of each segment.
    """
    keys = store.decode_entries()[0]
    batch, heads = length.shape
    each = keys.shape[1] // heads
    dim = keys.shape[2]
    wide = jnp.pad(
        keys.reshape(batch, heads, each, dim), ((0, 0), (0, 0), (0, -each % page), (0, 0))
    )
    held = jnp.arange(wide.shape[2], dtype=jnp.int32) < length[..., None]
    low, high = _compute_page_extremes(wide, held, page)
    return PageBounds(page=page, low=low, high=high)


def _compute_page_extremes(
    keys: Float[Array, "B K n D"], held: Bool[Array, "B K n"], page: int
) -> tuple[Array, Array]:
    """Return minimum and maximum `[B, K, n / page, D]` of each page's keys in mask `held`; zeros for empty pages."""
    batch, heads, rows, dim = keys.shape
    some = held.reshape(batch, heads, rows // page, page).any(axis=3)[..., None]

    def extreme(fill: float, reduce: Callable[..., Array]) -> Array:
        filled = jnp.where(held[..., None], keys, jnp.asarray(fill, keys.dtype))
        return jnp.where(
            some, reduce(filled.reshape(batch, heads, rows // page, page, dim), axis=3), 0
        )

    return extreme(jnp.inf, jnp.min), extreme(-jnp.inf, jnp.max)
