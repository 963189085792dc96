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

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache.arrays import EntryOverflowCounts
from jaxkv.cache.packing import UnpackedEntries, compute_all_segment_starts, make_empty_pool
from jaxkv.cache.pools import EntryPool
from jaxkv.cache.stores import write_pool_rows
from jaxkv.engine.compress import CompressionResult, wait_for_pool
from jaxkv.engine.layer_sources import LayerEntrySource
from jaxkv.engine.progress import Walk
from jaxkv.engine.selection import (
    Candidates,
    mask_best_entries,
    mask_possible_survivors,
    prioritise_first_stage,
    select_entries,
)
from jaxkv.policies.head_budgets import HeadBudgets
from jaxkv.policies.parts import Parts
from jaxkv.policies.topk import count_true
from jaxkv.sharding.mesh import ShardingMesh, get_array_sharding, is_inside_shard_map
from jaxkv.sharding.sharded_program import sharded_jit


@jax.tree_util.register_dataclass
@frozen_dataclass
class CandidateBuffer:
    """Buffer of entries that may still be selected, with the scores and any value norms of all layers' entries.

    Attributes:
        pool: entries in no order; their `pos` is an index into the K * L * S entries of the device's heads, -1 for
            none.
        scores: scores of all heads, with the layers of a kv head adjacent; 0 for layers that have not run.
        norms: norms of values, in the same order; None if the policy does not use these.
    """

    pool: EntryPool
    scores: Float[Array, "B J S"]
    norms: Float[Array, "B J S"] | None = None


def compress_under_shared_budget(
    source: LayerEntrySource, parts: Parts, *, rows: int, headroom: Int[np.ndarray, " L"]
) -> Walk[CompressionResult]:
    """Generator: compress all layers under one budget, via a buffer of `rows` candidates; return `CompressionResult`.

    Yields 1 after each scored layer, 0 after packing all layers. On a mesh, each device has its own buffer.
    """
    indices = source.indices
    axes = source.axes
    layers = len(source.indices)
    joint = parts.layers.uses_joint_budget
    held = None
    layer_weights = list[Array | None]()
    known = source.count_entries_to_keep(indices, layer_weights) if joint else None
    for at, index in enumerate(indices):
        layer = source.get_layer_candidates(index)
        full = source.take_layer_entries(index)._replace(mass=None).cast_to_dtype(source.dtype)
        layer_weights.append(layer.claim)
        yield 1.0
        held = _make_empty_buffer(layer, full, rows, layers, axes) if held is None else held
        most, recent = source.bound_entries_to_keep(layer_weights) if known is None else known
        heads = parts.heads if joint else None
        held = update_candidate_buffer(
            held, full, layer, jnp.int32(at), most, recent, heads=heads, axes=axes
        )
        # Dispatch runs ahead of the device: without a wait, several layers' keys and values could be alive together.
        wait_for_pool(held.pool)
        unscored = dataclasses.replace(layer, scores=None, norms=None, first=None)
        del full, layer
    assert held is not None
    buffer = held.pool
    joined = dataclasses.replace(unscored, scores=held.scores, norms=held.norms)
    del held
    if known is not None:
        (mask,), tally = select_entries(
            [joined], known[0][0], known[1][0], heads=parts.heads, axes=axes
        )
    else:
        mask = select_entries_per_head(
            joined, *source.count_entries_to_keep(indices, layer_weights), axes=axes
        )
        tally = EntryOverflowCounts()
    del joined
    kept, cut = count_kept_by_layer(mask, tally.cut, layers=layers, axes=axes)
    size = source.compute_pool_size(indices, kept)
    behind = tuple(headroom.tolist())
    start = compute_all_segment_starts(
        kept, layout=parts.cache_layout, rows=size, headroom=behind, axes=axes
    )
    batch = len(mask)
    dim = buffer.k.shape[-1]
    pool = make_empty_pool(
        batch,
        size,
        dim,
        buffer.dtype,
        scored=buffer.score is not None,
        store=parts.store,
        axes=axes,
    )
    pool = pack_buffer_entries(pool, buffer, mask, start, axes=axes)
    wait_for_pool(pool)
    yield 0.0
    return CompressionResult((pool,), start, kept, None, dataclasses.replace(tally, cut=cut))


def _make_empty_buffer(
    layer: Candidates, full: UnpackedEntries, rows: int, layers: int, axes: ShardingMesh | None
) -> CandidateBuffer:
    """Return an empty `CandidateBuffer`: `rows` free places, and zero scores (and norms) of all layers' entries."""
    assert layer.scores is not None
    batch, heads, padded_len = layer.scores.shape
    shape = batch, heads * layers, padded_len
    placement = get_array_sharding("B J S", shape, None if is_inside_shard_map() else axes)
    none = partial(jnp.zeros_like, shape=shape, device=placement)
    scores, norms = jax.tree.map(none, (layer.scores, layer.norms))
    batch, _, _, dim = full.k.shape
    pool = make_empty_pool(batch, rows, dim, full.k.dtype, scored=full.score is not None, axes=axes)
    return CandidateBuffer(pool=pool, scores=scores, norms=norms)


@sharded_jit(static=("heads", "axes"), donate=("held",))
def update_candidate_buffer(
    held: CandidateBuffer,
    full: UnpackedEntries,
    layer: Candidates,
    at: Int[Array, ""],
    rows: Int[Array, "n B"],
    recent: Int[Array, "n B"],
    *,
    heads: HeadBudgets | None,
    axes: ShardingMesh | None,
) -> CandidateBuffer:
    """Compiled: add a layer's scores and entries to the buffer (donated); remove those that cannot be kept; return it.

    `rows` and `recent` are the layers' numbers of entries; if `heads` is None, their upper bounds. Each device
    considers its own heads only.
    """
    batch, each, padded_len, dim = full.k.shape
    pool = held.pool
    layers = held.scores.shape[1] // each

    def noted(known: Array, new: Array) -> Array:
        by_layer = known.reshape(batch, each, layers, padded_len)
        return lax.dynamic_update_index_in_dim(by_layer, new, at, 2).reshape(known.shape)

    scores = noted(held.scores, prioritise_first_stage(layer, rows[0], recent[0]))
    norms = jax.tree.map(noted, held.norms, layer.norms)
    ran = jnp.tile(jnp.arange(layers, dtype=jnp.int32) <= at, each)[:, None]
    joined = dataclasses.replace(layer, scores=scores, norms=norms, first=None)
    if heads is None:
        mask = mask_best_entries(joined, jnp.tile(rows.T, (1, each)), recent[0], ran)
    else:
        mask = mask_possible_survivors(
            joined, rows[0], recent[0], ran, heads=heads, most=pool.row_count
        )
    kept = (pool.pos >= 0) & jnp.take_along_axis(
        mask.reshape(batch, -1), jnp.maximum(pool.pos, 0), 1
    )
    # Indices of the buffer's free places, ascending; then its size, at which nothing is written.
    row = jnp.broadcast_to(jnp.arange(pool.row_count, dtype=jnp.int32), kept.shape)
    order = jnp.where(kept, pool.row_count, jnp.cumsum(~kept, axis=-1, dtype=jnp.int32) - 1)
    free = write_pool_rows(jnp.full_like(row, pool.row_count), order, row)
    layer_mask = mask.reshape(batch, each, layers, padded_len)
    layer_mask = lax.dynamic_index_in_dim(layer_mask, at, 2, keepdims=False).reshape(batch, -1)
    rank = jnp.maximum(jnp.cumsum(layer_mask, axis=-1, dtype=jnp.int32) - 1, 0)
    into = jnp.where(
        layer_mask,
        jnp.take_along_axis(free, rank, 1, mode="fill", fill_value=pool.row_count),
        pool.row_count,
    )
    head = jnp.arange(each, dtype=jnp.int32)[:, None]
    slot = jnp.arange(padded_len, dtype=jnp.int32)
    index = jnp.broadcast_to(((head * layers + at) * padded_len + slot).reshape(-1), into.shape)
    k, v = (a.reshape(batch, each * padded_len, dim) for a in (full.k, full.v))
    put = lambda known, new: write_pool_rows(known, into, new.reshape(into.shape))  # noqa: E731
    score = jax.tree.map(put, pool.score, full.score)
    pos = write_pool_rows(jnp.where(kept, pool.pos, -1), into, index)
    buffer = EntryPool(
        store=pool.store.overwrite_entries((into, k), (into, v)), pos=pos, score=score
    )
    return CandidateBuffer(pool=buffer, scores=scores, norms=norms)


@sharded_jit(static=("axes",))
def select_entries_per_head(
    joined: Candidates,
    rows: Int[Array, "n B"],
    recent: Int[Array, "n B"],
    *,
    axes: ShardingMesh | None,
) -> Bool[Array, "B J S"]:
    """Compiled: return the keep mask `[B, K * L, S]`: each head's `rows[l, b]` best entries, always-kept ones first."""
    assert joined.scores is not None
    heads = joined.scores.shape[1]
    return mask_best_entries(
        joined, jnp.tile(rows.T, (1, heads // len(rows))), recent[0], jnp.ones((heads, 1), bool)
    )


@sharded_jit(static=("layers", "axes"))
def count_kept_by_layer(
    mask: Bool[Array, "B J S"],
    cut: Int[Array, "B J"] | None,
    *,
    layers: int,
    axes: ShardingMesh | None = None,
) -> tuple[Int[Array, "n B K"], Int[Array, "B K"] | None]:
    """Compiled: return entry counts `[L, B, K]` of a mask `[B, K * L, S]`, and any counts `cut` summed over layers."""
    kept, cut = jax.tree.map(
        lambda each: each.reshape(len(mask), -1, layers), (count_true(mask), cut)
    )
    return jnp.moveaxis(kept, 2, 0), jax.tree.map(partial(jnp.sum, axis=-1, dtype=jnp.int32), cut)


@sharded_jit(static=("axes",), donate=("pool",))
def pack_buffer_entries(
    pool: EntryPool,
    buffer: EntryPool,
    mask: Bool[Array, "B J S"],
    start: Int[Array, "n B K"],
    *,
    axes: ShardingMesh | None,
) -> EntryPool:
    """Compiled: copy the buffer's entries in `mask` to their segments of the shared pool (donated); return it."""
    batch, heads, padded_len = mask.shape
    first = jnp.moveaxis(start, 0, 2).reshape(batch, heads, 1)
    row = jnp.where(
        mask, first + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, pool.row_count
    ).reshape(batch, -1)
    row = jnp.where(
        buffer.pos >= 0, jnp.take_along_axis(row, jnp.maximum(buffer.pos, 0), 1), pool.row_count
    )
    score = jax.tree.map(
        lambda known, new: write_pool_rows(known, row, new), pool.score, buffer.score
    )
    k, v = buffer.store.decode_entries()
    return EntryPool(
        store=pool.store.overwrite_entries((row, k), (row, v)),
        pos=write_pool_rows(pool.pos, row, buffer.pos % padded_len),
        score=score,
    )
