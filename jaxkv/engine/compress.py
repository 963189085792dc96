"""Compression in one function: observe, select, merge, pack. Prompts, caches and users' arrays use it.

A source provides the entries of one layer at a time. If layers share a pool, all are scored before the first one is
packed. The function is a generator over layers: its caller may run other programs in between.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._checks import checked, instance
from jaxkv.attention import Implementation
from jaxkv.cache.arrays import Tally
from jaxkv.cache.packing import Unpacked, cut, empty_pool, pack, pack_shared, placed
from jaxkv.cache.pools import Pool
from jaxkv.engine.layer_sources import LayerSource
from jaxkv.engine.progress import Walk
from jaxkv.engine.selection import Candidates, choose
from jaxkv.policies.merger import UNSET, Merged, Merger, axes_for
from jaxkv.policies.parts import Parts
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.sharded_program import sharded_jit

# Pools cut by one program: one program per pool would compile longer, one for all pools would hold all wide pools.
_CUT_TOGETHER = 4


class Compressed(NamedTuple):
    """Result of `compress`: pools, first row and length of segments, merging thresholds, `Tally` of entries."""

    pools: tuple[Pool, ...]
    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]
    tau: Float[Array, "L B K n"] | None
    tally: Tally


def compress(
    source: LayerSource,
    parts: Parts,
    *,
    key: PRNGKeyArray,
    headroom: Int[np.ndarray, " L"] | None = None,
    due: Bool[Array, " B"] | None = None,
    implementation: Implementation = Implementation.XLA,
) -> Walk[Compressed]:
    """Generator: select, merge and pack entries layer by layer; return `Compressed`.

    Args:
        source: layer source.
        parts: parts of the policy.
        key: random key for mergers that sample.
        headroom: free places behind each layer's segments in a shared pool, `[L]`; by default the rest of it, evenly.
        due: mask of sequences to compress; the others are copied. All if None.
        implementation: attention implementation, which determines how entries are packed.

    Yields:
        1 after each scored layer, 0 after each packed layer.

    Returns:
        The new pools and tables.
    """
    parts = parts.among(source.sliding_windows)
    layout, axes = parts.layout, source.axes
    pools, starts, lengths = list[Pool](), list[Array](), list[Array]()
    packed, sizes, whole = list[Pool](), list[int](), True
    taus, below, tally, under_way = list[Array](), None, Tally(), deque[Pool]()
    for group in layout.groups(source.indices):
        masks, with_scores, more, below = yield from _chosen(source, group, parts, below, due)
        tally = tally.plus(more)
        kept = _counted(masks)
        size, pool, start = source.pool_rows(group, kept), None, None
        wide = size
        if layout.one_pool:
            behind = None if headroom is None else tuple(headroom.tolist())
            start = placed(kept, layout=layout, rows=size, headroom=behind, axes=axes)
        for at, index in enumerate(group):
            rows = source.rows(index)
            if parts.merge is not None:
                if with_scores[at]:
                    rows = merged(
                        rows,
                        masks[at],
                        jax.random.fold_in(key, index),
                        due,
                        merge=parts.merge,
                        axes=axes,
                    )
                else:
                    # Entries outside a window are not visible to later tokens, so they are not merged.
                    rows = with_thresholds(rows, parts.merge, axes)
                taus += [] if rows.tau is None else [rows.tau]
            rows = rows.widened(source.dtype)
            if start is None:
                wide = source.packed_rows(index, size)
                pool, first = pack(
                    rows,
                    masks[at],
                    jnp.int32(size),
                    rows=wide,
                    layout=layout,
                    store=parts.store,
                    implementation=implementation,
                    axes=axes,
                )
                starts.append(first)
            else:
                if pool is None:
                    # The first layer may have a sliding window, and no scores.
                    of, batch, dim = parts.store, rows.k.shape[0], rows.k.shape[-1]
                    pool = empty_pool(
                        batch, size, dim, rows.k.dtype, scored=parts.scored, store=of, axes=axes
                    )
                pool = pack_shared(pool, rows, masks[at], start[at], axes=axes)
            # Dispatch runs ahead of the device: without a wait, all layers' keys and values could be alive together.
            under_way.append(pool)
            # A shared pool is donated to the next layer's packing.
            while len(under_way) > (0 if layout.one_pool else source.ahead):
                wait(under_way.popleft())
            del rows
            yield 0.0
        assert pool is not None
        packed.append(pool)
        sizes.append(size)
        whole = whole and wide == size
        if len(packed) == _CUT_TOGETHER or group[-1] == source.indices[-1]:
            pools += packed if whole else cut(tuple(packed), rows=tuple(sizes), axes=axes)
            packed, sizes, whole = [], [], True
        lengths.append(kept)
        starts += [] if start is None else [start]
    tau = jnp.stack(taus) if taus else None
    return Compressed(tuple(pools), jnp.concatenate(starts), jnp.concatenate(lengths), tau, tally)


def wait(pool: Pool) -> None:
    """Block until a pool has been computed; return immediately in a trace."""
    if not isinstance(pool.pos, jax.core.Tracer):
        jax.block_until_ready(pool)


@jax.jit
def _counted(masks: list[Bool[Array, "B K S"]]) -> Int[Array, "n B K"]:
    """Return the number of entries kept per segment, `i32[n, B, K]`, from the masks of n layers."""
    return jnp.stack([mask.sum(axis=-1, dtype=jnp.int32) for mask in masks])


def _chosen(
    source: LayerSource, group: Sequence[int], parts: Parts, below: Array | None, due: Array | None
) -> Walk[tuple[list[Array], list[bool], Tally, Array | None]]:
    """Generator: score a group's layers, yield 1 after each; return masks, which layers have scores, `Tally`, `below`.

    Layers without scores, such as sliding-window layers, keep their candidates and compete with no other layer. A
    nested policy selects from the positions `below` that the layer below kept, and returns those for the layer above.
    """
    seen = list[Candidates]()
    for index in group:
        seen.append(source.candidates(index))
        yield 1.0
    rows, recent = source.wanted(group, [layer.claim for layer in seen])
    with_scores = [layer.scores is not None for layer in seen]
    if parts.layers.joint and any(with_scores):
        of, heads = with_scores.index(True), parts.heads
        compete = [layer for layer in seen if layer.scores is not None]
        choice = choose(compete, rows[of], recent[of], due=due, heads=heads, axes=source.axes)
        best = iter(choice.masks)
        return (
            [next(best) if layer.scores is not None else layer.inside for layer in seen],
            with_scores,
            choice.tally,
            below,
        )
    masks, tally = list[Array](), Tally()
    for at, index in enumerate(group):
        # Free a layer's scores as soon as its entries have been selected.
        one, of = [seen.pop(0)], source.sliding_windows[:index].count(None)
        heads, axes = parts.heads, source.axes
        choice = choose(one, rows[at], recent[at], below, due, heads=heads, axes=axes, index=of)
        masks += choice.masks
        tally = tally.plus(choice.tally)
        if parts.nested and with_scores[at]:
            below = masks[-1][:, 0]
    return masks, with_scores, tally, below


def merged(
    rows: Unpacked,
    kept: Bool[Array, "B K S"],
    key: PRNGKeyArray,
    due: Bool[Array, " B"] | None = None,
    *,
    merge: Merger,
    axes: Axes | None = None,
) -> Unpacked:
    """Merge one layer's evicted entries into the entries of mask `kept`, and update merging thresholds.

    Sequences that are not `due`, by default none, are unchanged. Raise TypeError if the merger's results do not have
    the entries' shapes and dtypes.
    """
    rows = with_thresholds(rows, merge, axes)
    # Exclude arrays that mergers do not use from the compiled program.
    read = rows._replace(score=None, positions=None)
    k, v, tau = _merged(read, kept, key, due, merge=merge, axes=axes)
    return rows._replace(k=k, v=v, tau=tau)


def with_thresholds(rows: Unpacked, merge: Merger, axes: Axes | None) -> Unpacked:
    """Add initial merging thresholds to one layer's entries, if the merger has thresholds and none are set."""
    if rows.tau is not None or not merge.thresholds:
        return rows
    return rows._replace(tau=_unset(rows.k, count=merge.thresholds, axes=axes))


@sharded_jit(static=("count", "axes"))
def _unset(k: Float[Array, "B K S D"], *, count: int, axes: Axes | None) -> Float[Array, "B K n"]:
    """Compiled: return `count` thresholds per kv head, with their values before the first eviction."""
    return jnp.full((*k.shape[:2], count), UNSET, jnp.float32)


@sharded_jit(static=("merge", "axes"))
def _merged(
    rows: Unpacked,
    kept: Bool[Array, "B K S"],
    key: PRNGKeyArray,
    due: Bool[Array, " B"] | None,
    *,
    merge: Merger,
    axes: Axes | None,
) -> Merged:
    """Compiled `merged`: return all keys and values after merging, and thresholds or None."""
    k, v, tau = rows.k, rows.v, rows.tau
    inside = jnp.broadcast_to(rows.inside, kept.shape)
    mass = jnp.zeros(kept.shape, jnp.float32) if rows.mass is None else rows.mass
    returned = merge.merge(k, v, kept, inside, mass, tau, key, **axes_for(merge, axes))
    name = f"{type(merge).__name__}.merge"
    result: Merged = instance(name, returned, Merged, "return Merged(k, v, tau)")
    for name, new, old in (("k", result.k, k), ("v", result.v, v)):
        checked(
            merge, f"merge.{name}", new, old.shape, "number of each entry, [B, K, S, D]", old.dtype
        )
    if tau is not None:
        level = checked(
            merge, "merge.tau", result.tau, tau.shape, "threshold of each kv head, [B, K, n]"
        )
        result = result._replace(
            tau=level if due is None else jnp.where(due[:, None, None], level, tau)
        )
    if due is None:
        return result
    now = due[:, None, None, None]
    return result._replace(k=jnp.where(now, result.k, k), v=jnp.where(now, result.v, v))
