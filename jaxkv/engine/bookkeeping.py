"""Score updates and evictions after a decode step: by layer, or for all layers of a shared pool in one step."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxkv.cache import Cache, Tables
from jaxkv.cache.layout import by_layer, by_sequence
from jaxkv.cache.pools import Pool
from jaxkv.engine.evict import Eviction, evict
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.segments import Segments
from jaxkv.engine.spec import Spec
from jaxkv.sharding.collectives import mean_of_devices


def segments_of(tables: Tables, part: int | slice) -> Segments:
    """Return the `Segments` (first pool row, length, limit per kv head) of one or several layers."""
    part = slice(part, part + 1) if isinstance(part, int) else part
    state, start = tables.state, tables.start[part]
    assert state is not None
    recent = jnp.broadcast_to(state.recent[part][..., None], start.shape)
    return Segments(
        start=by_sequence(start),
        length=by_sequence(tables.length[part]),
        limit=by_sequence(tables.limit[part]),
        recent=by_sequence(recent),
        tau=None if state.tau is None else by_sequence(state.tau[part]),
        prompt=state.prompt,
        seen=tables.seen,
    )


def within_limits(cache: Cache, outs: list[Array], spec: Spec) -> Cache:
    """Evict the lowest-ranked entry of each segment over its limit.

    Layers that share a pool are handled together. `outs` are one number of each head's attention output per layer,
    which orders writes after reads.
    """
    tables = cache.tables
    layers, _, heads = tables.start.shape
    assert tables.state is not None
    how = Eviction(terms=spec, heads=heads, dtype=spec.dtype)
    pools, lengths, taus = [], [], []
    for pool, part in zip(cache.pools, spec.layout.parts(layers), strict=True):
        if spec.config.sliding_windows[part.start] is not None and not spec.layout.one_pool:
            # A sliding-window layer's own pool has no limit and no scores; in a shared pool, its limit is never
            # reached.
            pools.append(pool)
            lengths.append(tables.length[part])
            taus += [] if tables.state.tau is None else [tables.state.tau[part]]
            continue
        pool, left = evict(pool, segments_of(tables, part), by_sequence(jnp.stack(outs[part])), how)
        pools.append(pool)
        lengths.append(by_layer(left.length, heads))
        taus += [] if left.tau is None else [by_layer(left.tau, heads)]
    state = dataclasses.replace(tables.state, tau=jnp.concatenate(taus) if taus else None)
    return cache.updated(pools=tuple(pools), length=jnp.concatenate(lengths), state=state)


def of_whole_groups(pools: list[Pool], spec: Spec) -> list[Pool]:
    """Average scores over devices that share a kv head's query heads; return pools unchanged without a mesh."""
    if not spec.scored:
        return pools
    return [pool.rescored(lambda score: mean_of_devices(score, "G", spec.axes)) for pool in pools]


def faded(pools: tuple[Pool, ...], count: Int[Array, " B"], terms: Terms) -> tuple[Pool, ...]:
    """Multiply scores by decay ** `count`, a sequence's new tokens; return pools unchanged without a decay."""
    decay = terms.decay
    if decay == 1:
        return pools
    some, share = (count > 0)[:, None], decay ** count[:, None].astype(jnp.float32)
    fade = lambda score: jnp.where(some, score * share, score)  # noqa: E731
    return tuple(pool.rescored(fade) for pool in pools)
