"""Pages of a layer's rows (Quest): when their bounds are computed, which kv heads choose, and attention to these."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention.filters import by_page
from jaxkv.attention.xla import Walk
from jaxkv.cache.pages import PageBounds, bounds_of, joined_rows
from jaxkv.cache.pools import Pool
from jaxkv.engine.segments import Segments, behind
from jaxkv.engine.sparse import largest
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import NewTokens, Token
from jaxkv.policies.reading import WHOLE, Reading
from jaxkv.policies.topk import sortable
from jaxkv.sharding.mesh import Axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageRows:
    """Rows that kv heads read (Quest): offsets `[B, K, T]` of chosen pages' rows, their number, first row always read.

    Attributes:
        rows: ascending; of T entries the first `held` are valid.
        held: number of valid rows.
        rest: first row of the page that the new token's row joins.
    """

    rows: Int[Array, "B K T"]
    held: Int[Array, "B K"]
    rest: Int[Array, "B K"]


def with_bounds(
    pools: tuple[Pool, ...], length: Int[Array, "L B K"], reading: Reading, axes: Axes | None
) -> tuple[Pool, ...]:
    """Tuple of pools, with page bounds (min/max keys, Quest) computed in layers that choose pages and lack them."""
    if not reading.page:
        return pools
    made = list(pools)
    for layer, (pool, source) in enumerate(zip(pools, reading.sources, strict=True)):
        if source != WHOLE and pool.bounds is None:
            bounds = bounds_of(pool.store, length[layer], page=reading.page, axes=axes)
            made[layer] = dataclasses.replace(pool, bounds=bounds)
    return tuple(made)


def with_new_rows(
    pool: Pool, segments: Segments, new: NewTokens, read: Float[Array, "B K"]
) -> Pool:
    """Copy of a pool, its page bounds (min/max keys) recomputed for the pages that the step's appended rows join.

    `segments` are those before the new rows, `read` numbers behind whose computation the bounds are written.
    """
    bounds = pool.bounds
    assert bounds is not None
    offset = joined_rows(segments.length, new.positions.shape[1], bounds.page)
    row = jnp.minimum(segments.start[..., None] + offset, pool.rows - 1)
    keys, _ = pool.store.take(row.reshape(row.shape[0], -1)).view()
    keys = behind(keys.reshape(*row.shape, -1), read[..., None, None])
    return dataclasses.replace(pool, bounds=bounds.renewed(keys, segments.length, new.count))


def rest_from(length: Int[Array, "*n"], page: int) -> Int[Array, "*n"]:
    """Index in its segment (int array) of the first row of the page that the next row, number `length`, joins."""
    return length // page * page


def full_pages(length: Int[Array, "*n"], budget: Int[Array, "*#n"], page: int) -> Int[Array, "*n"]:
    """Number of full pages to read (int array): as many as fit a row budget beside the newest page, at most all."""
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
    """Chooses per kv head the full pages of largest q.k bound for one new token, within a budget (Quest); `PageRows`.

    Tang et al., Quest, algorithm 1; a page's bound is the largest of its kv head's query heads, ties go to the lowest
    page. `length` are the rows before the token, `each` the rows that a segment can hold.
    """
    page, (batch, heads) = spec.reading.page, length.shape
    count = full_pages(length, budget[:, None], page)
    scores = by_page(q, bounds.low, bounds.high, spec.axes)
    pages = scores.shape[2]
    full = jnp.arange(pages, dtype=jnp.int32) < (length // page)[..., None]
    keys = jnp.where(full, sortable(scores), jnp.uint32(0)).reshape(-1, pages)
    width = max(1, min(pages, (spec.reading.width - 1) // page))
    at = largest(keys, count.reshape(-1), width, by_sorting=spec.backend.few_launches).reshape(
        batch, heads, width
    )
    rows = at[..., None] * page + jnp.arange(page, dtype=jnp.int32)
    rows = jnp.minimum(rows.reshape(batch, heads, -1), each - 1)
    return PageRows(rows=rows, held=count * page, rest=rest_from(length, page))


def over_pages(
    spec: Spec,
    token: Token,
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    chosen: PageRows,
) -> tuple[Float[Array, "B K G one D"], Float[Array, "B K G one"]]:
    """Attention output and log-sum-exp of one new token over its chosen pages' rows and the newest page's, gathered.

    `length` counts each segment's rows with the token's own.
    """
    (batch, heads), page = start.shape, spec.reading.page
    slot = jnp.arange(chosen.rows.shape[2] + page, dtype=jnp.int32)
    held, rest, rows = (
        chosen.held[..., None],
        chosen.rest[..., None],
        jnp.pad(chosen.rows, ((0, 0), (0, 0), (0, page))),
    )
    count = chosen.held + length - chosen.rest
    offset = jnp.where(slot < held, rows, rest + slot - held)
    source = jnp.where(slot < count[..., None], start[..., None] + offset, -1)
    k, v, _ = spec.backend.packed(pool.k[:, None], pool.v[:, None], source.reshape(batch, -1))
    first = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32) * slot.shape[0], start.shape)
    out, lse = spec.backend.attend(
        token.q[..., 0, :], k, v, first, count, walk=Walk.STRIDES, shaping=token.shaping
    )
    return out[..., None, :], lse[..., None]
