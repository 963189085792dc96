"""Score updates and evictions after a decode step: by layer, or for all layers of a shared pool in one step."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.cache import CacheArrays, SegmentTables
from jaxkv.cache.layout import flatten_layers_and_heads, unflatten_layers_and_heads
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.evict import EvictionConfig, evict_entries
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.segments import Segments
from jaxkv.engine.spec import DecodeSpec
from jaxkv.sharding.collectives import average_over_devices


def select_layer_segments(tables: SegmentTables, part: int | slice) -> Segments:
    """Return the `Segments` of one layer, or of a slice of n layers joined as `[B, n * K]`, from the cache's tables."""
    part = slice(part, part + 1) if isinstance(part, int) else part
    state = tables.state
    start = tables.start[part]
    assert state is not None
    recent = jnp.broadcast_to(state.recent[part][..., None], start.shape)
    return Segments(
        start=flatten_layers_and_heads(start),
        length=flatten_layers_and_heads(tables.length[part]),
        limit=flatten_layers_and_heads(tables.limit[part]),
        recent=flatten_layers_and_heads(recent),
        tau=None if state.tau is None else flatten_layers_and_heads(state.tau[part]),
        prompt=state.prompt,
        seen=tables.seen,
    )


def evict_over_limits(
    cache: CacheArrays,
    outs: list[Array],
    count: Int[Array, " B"],
    spec: DecodeSpec,
    windows: Sequence[int | None],
) -> CacheArrays:
    """Evict or merge the lowest-ranked entry of segments over their limit, in layers with limits; return `CacheArrays`.

    Layers that share a pool are handled together. `outs` are one number of each head's attention output per layer,
    which orders writes after reads. `count` is the number of each sequence's new tokens; 0 leaves it unchanged.
    `windows` are the layers' sliding windows.
    """
    # A sequence without a new token may be over its limit, if a text was appended to it in one step.
    limit = jnp.where(count[:, None] > 0, cache.tables.limit, cache.tables.length)
    tables = dataclasses.replace(cache.tables, limit=limit)
    layers, _, heads = tables.start.shape
    assert tables.state is not None
    how = EvictionConfig(terms=spec, heads=heads, dtype=spec.dtype)
    pools = []
    lengths = []
    taus = []
    for pool, part in zip(cache.pools, spec.layout.slice_layers_by_pool(layers), strict=True):
        if windows[part.start] is not None and not spec.layout.uses_shared_pool:
            # A sliding-window layer's own pool has no limit and no scores; in a shared pool, its limit is never
            # reached.
            pools.append(pool)
            lengths.append(tables.length[part])
            taus += [] if tables.state.tau is None else [tables.state.tau[part]]
            continue
        pool, left = evict_entries(
            pool,
            select_layer_segments(tables, part),
            flatten_layers_and_heads(jnp.stack(outs[part])),
            how,
        )
        pools.append(pool)
        lengths.append(unflatten_layers_and_heads(left.length, heads))
        taus += [] if left.tau is None else [unflatten_layers_and_heads(left.tau, heads)]
    state = dataclasses.replace(tables.state, tau=jnp.concatenate(taus) if taus else None)
    return cache.replace_arrays(pools=tuple(pools), length=jnp.concatenate(lengths), state=state)


def average_scores_over_devices(pools: list[EntryPool], spec: DecodeSpec) -> list[EntryPool]:
    """Return pools with scores averaged over devices that share a kv head; the same if attention changes no scores."""
    if not spec.uses_attention_scores:
        return pools
    return [
        pool.transform_scores(lambda score: average_over_devices(score, "G", spec.axes))
        for pool in pools
    ]


def decay_scores(
    pools: tuple[EntryPool, ...], count: Int[Array, " B"], terms: DecodeAttentionConfig
) -> tuple[EntryPool, ...]:
    """Return pools with scores times decay ** `count`, the sequence's number of new tokens; the same for decay 1."""
    decay = terms.score_decay
    if decay == 1:
        return pools
    some = (count > 0)[:, None]
    share = decay ** count[:, None].astype(jnp.float32)
    fade = lambda score: jnp.where(some, score * share, score)  # noqa: E731
    return tuple(pool.transform_scores(fade) for pool in pools)
