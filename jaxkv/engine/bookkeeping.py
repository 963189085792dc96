"""Scores and evictions of a decode step over the whole cache: by layer, or all layers of a shared pool at once."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv import attention
from jaxkv._checks import checked
from jaxkv.attention import Received
from jaxkv.cache import Cache, Tables
from jaxkv.cache.layout import by_layer, by_sequence
from jaxkv.cache.pools import Pool
from jaxkv.engine.evict import Eviction, evict
from jaxkv.engine.segments import Segments
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import Token
from jaxkv.sharding.collectives import mean_of_devices


def segments_of(tables: Tables, part: int | slice) -> Segments:
    """Makes `Segments` (first pool row, length, row limit per kv head) of one or several layers from `tables`."""
    part = slice(part, part + 1) if isinstance(part, int) else part
    state, start = tables.state, tables.start[part]
    none = jnp.zeros(tables.seen.shape, jnp.int32)
    recent = (
        jnp.zeros_like(start)
        if state is None
        else jnp.broadcast_to(state.recent[part][..., None], start.shape)
    )
    return Segments(
        start=by_sequence(start),
        length=by_sequence(tables.length[part]),
        limit=by_sequence(tables.limit[part]),
        recent=by_sequence(recent),
        tau=None if state is None or state.tau is None else by_sequence(state.tau[part]),
        prompt=none if state is None else state.prompt,
        seen=tables.seen,
        choosable=None
        if state is None or state.choosable is None
        else by_sequence(state.choosable[part]),
    )


def within_limits(cache: Cache, outs: list[Array], spec: Spec) -> Cache:
    """Cache without the lowest-ranked row of each segment over its limit.

    Layers that share a pool are handled at once. `outs` are one number of each head's attention output per layer, which
    orders writes behind reads.
    """
    tables = cache.tables
    layers, _, heads = tables.start.shape
    assert tables.state is not None
    eviction = _eviction(spec, heads)
    parts = [slice(group[0], group[-1] + 1) for group in spec.layout.groups(range(layers))]
    pools, lengths, taus = [], [], []
    for pool, part in zip(cache.pools, parts, strict=True):
        if spec.config.windows[part.start] is not None and not spec.layout.one_pool:
            # A window layer's own pool has no limit and no scores; in a shared pool its limit is never reached.
            pools.append(pool)
            lengths.append(tables.length[part])
            taus += [] if tables.state.tau is None else [tables.state.tau[part]]
            continue
        pool, left = evict(
            pool, segments_of(tables, part), by_sequence(jnp.stack(outs[part])), eviction
        )
        pools.append(pool)
        lengths.append(by_layer(left.length, heads))
        taus += [] if left.tau is None else [by_layer(left.tau, heads)]
    state = dataclasses.replace(tables.state, tau=jnp.concatenate(taus) if taus else None)
    return cache.updated(pools=tuple(pools), length=jnp.concatenate(lengths), state=state)


def _eviction(spec: Spec, heads: int) -> Eviction:
    """Makes the static config of eviction from a spec; `heads` is the number of kv heads per layer on this device."""
    return Eviction(
        ongoing=spec.ongoing,
        heads=heads,
        walk=spec.layout.walk,
        widest=spec.widest,
        axes=spec.axes,
        implementation=spec.implementation,
        dtype=spec.dtype,
    )


def with_received(
    pool: Pool, received: Received, start: Int[Array, "B K"], counts: Bool[Array, " B"]
) -> Pool:
    """`Pool` with attention that a layer's rows received added to its scores, for the sequences in mask `counts`."""
    assert pool.score is not None  # Only scored pools receive.
    return dataclasses.replace(
        pool, score=attention.add_received(pool.score, received, start, counts)
    )


def of_whole_groups(pools: list[Pool], spec: Spec) -> list[Pool]:
    """List of pools, scores averaged over devices that share a kv head's query heads; unchanged without a mesh."""
    if not spec.scored:
        return pools

    def averaged(pool: Pool) -> Pool:
        if pool.score is None:
            return pool
        return dataclasses.replace(pool, score=mean_of_devices(pool.score, "G", spec.axes))

    return [averaged(pool) for pool in pools]


def faded(pools: tuple[Pool, ...], count: Int[Array, " B"], spec: Spec) -> tuple[Pool, ...]:
    """Tuple of pools with scores times decay ** `count`, a sequence's new tokens; unchanged without a decay."""
    decay = decay_of(spec)
    if decay is None or decay == 1:
        return pools
    some, share = (count > 0)[:, None], decay ** count[:, None].astype(jnp.float32)

    def less(pool: Pool) -> Pool:
        if pool.score is None:
            return pool
        return dataclasses.replace(pool, score=jnp.where(some, pool.score * share, pool.score))

    return tuple(map(less, pools))


def decay_of(spec: Spec) -> float | None:
    """Factor by which a row's score is multiplied at each new token; None if attention does not change scores."""
    return spec.ongoing.rank.decay if spec.scored else None


def scores_of(token: Token, spec: Spec) -> Array | None:
    """Initial scores `f32[B, K, N]` of new rows: a gate's or the rank's `begin`; None if the pool keeps no scores."""
    ongoing = spec.ongoing
    if not ongoing.scored:
        return None
    if token.begun is not None:
        return token.begun
    begun = ongoing.rank.begin(token.stored, token.v)
    return checked(ongoing.rank, "begin", begun, token.v.shape[:3], "new row, [B, K, N]")
