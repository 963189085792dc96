"""Prefill under one budget for all layers: entries are evicted as soon as they can no longer be kept.

Either the kv heads of all layers compete (`GlobalLayers`), or layers share the budget by their weights (CAKE's
cascade). Memory holds the scores of all layers, but keys and values only of candidates, in a buffer of fixed size. The
selection after the last layer equals the selection from full layers. Peak memory is the buffer plus one layer, then the
buffer plus the pool that it is packed into, instead of all layers' entries.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.arrays import Tally
from jaxkv.cache.packing import Unpacked, empty_pool, placed
from jaxkv.cache.pools import Pool
from jaxkv.cache.stores import put_cells
from jaxkv.engine.compress import Compressed, wait
from jaxkv.engine.layer_sources import LayerSource
from jaxkv.engine.progress import Walk
from jaxkv.engine.selection import Candidates, choose, staged, surviving, within
from jaxkv.policies.head_budgets import HeadBudgets
from jaxkv.policies.parts import Parts
from jaxkv.policies.topk import count
from jaxkv.sharding.mesh import Axes, inside, where
from jaxkv.sharding.sharded_program import sharded_jit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Survivors:
    """Buffer of the entries that may be selected, with scores (and norms) of all entries; heads of all layers joined.

    Attributes:
        pool: entries in no order; their `pos` is an index into the K * L * S entries of the device's heads, -1 for
            none.
        scores: scores of all heads, with the layers of a kv head adjacent; 0 for layers that have not run.
        norms: norms of values, in the same order; None if the policy does not use these.
    """

    pool: Pool
    scores: Float[Array, "B J S"]
    norms: Float[Array, "B J S"] | None = None


def cascaded(
    source: LayerSource, parts: Parts, *, rows: int, headroom: Int[np.ndarray, " L"]
) -> Walk[Compressed]:
    """Generator: compress layers under one budget via a buffer of `rows` entries; return `Compressed`.

    Yields 1 after each scored layer, 0 after packing all layers. On a mesh, each device has its own buffer.
    """
    indices, axes, layers, joint = (
        source.indices,
        source.axes,
        len(source.indices),
        parts.layers.joint,
    )
    held, layer_weights = None, list[Array | None]()
    known = source.wanted(indices, layer_weights) if joint else None
    for at, index in enumerate(indices):
        layer = source.candidates(index)
        full = source.rows(index)._replace(mass=None).widened(source.dtype)
        layer_weights.append(layer.claim)
        yield 1.0
        held = _nothing(layer, full, rows, layers, axes) if held is None else held
        most, recent = source.at_most(layer_weights) if known is None else known
        heads = parts.heads if joint else None
        held = thinned(held, full, layer, jnp.int32(at), most, recent, heads=heads, axes=axes)
        # Dispatch runs ahead of the device: without a wait, several layers' keys and values could be alive together.
        wait(held.pool)
        unscored = dataclasses.replace(layer, scores=None, norms=None, first=None)
        del full, layer
    assert held is not None
    buffer, joined = held.pool, dataclasses.replace(unscored, scores=held.scores, norms=held.norms)
    del held
    if known is not None:
        (mask,), tally = choose([joined], known[0][0], known[1][0], heads=parts.heads, axes=axes)
    else:
        mask, tally = (
            chosen_apart(joined, *source.wanted(indices, layer_weights), axes=axes),
            Tally(),
        )
    del joined
    kept, cut = counted(mask, tally.cut, layers=layers, axes=axes)
    size = source.pool_rows(indices, kept)
    behind = tuple(headroom.tolist())
    start = placed(kept, layout=parts.layout, rows=size, headroom=behind, axes=axes)
    batch, dim = len(mask), buffer.k.shape[-1]
    pool = empty_pool(
        batch,
        size,
        dim,
        buffer.dtype,
        scored=buffer.score is not None,
        store=parts.store,
        axes=axes,
    )
    pool = pack_chosen(pool, buffer, mask, start, axes=axes)
    wait(pool)
    yield 0.0
    return Compressed((pool,), start, kept, None, dataclasses.replace(tally, cut=cut))


def _nothing(
    layer: Candidates, full: Unpacked, rows: int, layers: int, axes: Axes | None
) -> Survivors:
    """Return empty `Survivors`: a buffer of `rows` free places, and zero scores (and norms) for all layers' heads."""
    assert layer.scores is not None
    batch, heads, padded_len = layer.scores.shape
    shape = batch, heads * layers, padded_len
    placement = where("B J S", shape, None if inside() else axes)
    none = partial(jnp.zeros_like, shape=shape, device=placement)
    scores, norms = jax.tree.map(none, (layer.scores, layer.norms))
    batch, _, _, dim = full.k.shape
    pool = empty_pool(batch, rows, dim, full.k.dtype, scored=full.score is not None, axes=axes)
    return Survivors(pool=pool, scores=scores, norms=norms)


@sharded_jit(static=("heads", "axes"), donate=("held",))
def thinned(
    held: Survivors,
    full: Unpacked,
    layer: Candidates,
    at: Int[Array, ""],
    rows: Int[Array, "n B"],
    recent: Int[Array, "n B"],
    *,
    heads: HeadBudgets | None,
    axes: Axes | None,
) -> Survivors:
    """Compiled: add a layer's scores and entries to `Survivors` (donated); remove entries that cannot be selected.

    `rows` and `recent` are the layers' numbers of entries; if `heads` is None, their upper bounds. Each device
    considers its own heads only.
    """
    batch, each, padded_len, dim = full.k.shape
    pool, layers = held.pool, held.scores.shape[1] // each

    def noted(known: Array, new: Array) -> Array:
        by_layer = known.reshape(batch, each, layers, padded_len)
        return lax.dynamic_update_index_in_dim(by_layer, new, at, 2).reshape(known.shape)

    scores = noted(held.scores, staged(layer, rows[0], recent[0]))
    norms = jax.tree.map(noted, held.norms, layer.norms)
    ran = jnp.tile(jnp.arange(layers, dtype=jnp.int32) <= at, each)[:, None]
    joined = dataclasses.replace(layer, scores=scores, norms=norms, first=None)
    if heads is None:
        mask = within(joined, jnp.tile(rows.T, (1, each)), recent[0], ran)
    else:
        mask = surviving(joined, rows[0], recent[0], ran, heads=heads, most=pool.rows)
    kept = (pool.pos >= 0) & jnp.take_along_axis(
        mask.reshape(batch, -1), jnp.maximum(pool.pos, 0), 1
    )
    # Indices of the buffer's free places, ascending; then its size, at which nothing is written.
    row = jnp.broadcast_to(jnp.arange(pool.rows, dtype=jnp.int32), kept.shape)
    order = jnp.where(kept, pool.rows, jnp.cumsum(~kept, axis=-1, dtype=jnp.int32) - 1)
    free = put_cells(jnp.full_like(row, pool.rows), order, row)
    layer_mask = mask.reshape(batch, each, layers, padded_len)
    layer_mask = lax.dynamic_index_in_dim(layer_mask, at, 2, keepdims=False).reshape(batch, -1)
    rank = jnp.maximum(jnp.cumsum(layer_mask, axis=-1, dtype=jnp.int32) - 1, 0)
    into = jnp.where(
        layer_mask, jnp.take_along_axis(free, rank, 1, mode="fill", fill_value=pool.rows), pool.rows
    )
    head, slot = jnp.arange(each, dtype=jnp.int32)[:, None], jnp.arange(padded_len, dtype=jnp.int32)
    index = jnp.broadcast_to(((head * layers + at) * padded_len + slot).reshape(-1), into.shape)
    k, v = (a.reshape(batch, each * padded_len, dim) for a in (full.k, full.v))
    put = lambda known, new: put_cells(known, into, new.reshape(into.shape))  # noqa: E731
    score = jax.tree.map(put, pool.score, full.score)
    pos = put_cells(jnp.where(kept, pool.pos, -1), into, index)
    buffer = Pool(store=pool.store.put((into, k), (into, v)), pos=pos, score=score)
    return Survivors(pool=buffer, scores=scores, norms=norms)


@sharded_jit(static=("axes",))
def chosen_apart(
    joined: Candidates, rows: Int[Array, "n B"], recent: Int[Array, "n B"], *, axes: Axes | None
) -> Bool[Array, "B J S"]:
    """Compiled: return the mask `[B, K * L, S]` of each head's always-kept and best entries, `rows[l, b]` in all."""
    assert joined.scores is not None
    heads = joined.scores.shape[1]
    return within(
        joined, jnp.tile(rows.T, (1, heads // len(rows))), recent[0], jnp.ones((heads, 1), bool)
    )


@sharded_jit(static=("layers", "axes"))
def counted(
    mask: Bool[Array, "B J S"],
    cut: Int[Array, "B J"] | None,
    *,
    layers: int,
    axes: Axes | None = None,
) -> tuple[Int[Array, "n B K"], Int[Array, "B K"] | None]:
    """Compiled: count kept entries `[L, B, K]` in a mask over K * L heads; sum `cut` counts to `[B, K]`, if any."""
    kept, cut = jax.tree.map(lambda each: each.reshape(len(mask), -1, layers), (count(mask), cut))
    return jnp.moveaxis(kept, 2, 0), jax.tree.map(partial(jnp.sum, axis=-1, dtype=jnp.int32), cut)


@sharded_jit(static=("axes",), donate=("pool",))
def pack_chosen(
    pool: Pool,
    buffer: Pool,
    mask: Bool[Array, "B J S"],
    start: Int[Array, "n B K"],
    *,
    axes: Axes | None,
) -> Pool:
    """Compiled: write the buffer's entries in `mask` to their segments of the shared pool (donated)."""
    batch, heads, padded_len = mask.shape
    first = jnp.moveaxis(start, 0, 2).reshape(batch, heads, 1)
    row = jnp.where(
        mask, first + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, pool.rows
    ).reshape(batch, -1)
    row = jnp.where(
        buffer.pos >= 0, jnp.take_along_axis(row, jnp.maximum(buffer.pos, 0), 1), pool.rows
    )
    score = jax.tree.map(lambda known, new: put_cells(known, row, new), pool.score, buffer.score)
    k, v = buffer.store.view()
    return Pool(
        store=pool.store.put((row, k), (row, v)),
        pos=put_cells(pool.pos, row, buffer.pos % padded_len),
        score=score,
    )
