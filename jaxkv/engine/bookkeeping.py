"""A step's bookkeeping over the whole cache: layer by layer, or at once where layers share a pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv import attention
from jaxkv.attention import Received
from jaxkv.cache import Cache, Tables
from jaxkv.cache.layout import by_layer, by_sequence
from jaxkv.cache.pools import Pool, row_norms
from jaxkv.engine.evict import Eviction, evict, weakest
from jaxkv.engine.segments import Segments
from jaxkv.engine.spec import Spec
from jaxkv.policies.checks import checked
from jaxkv.sharding.collectives import mean_of_devices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scratch:
    """What a step keeps for the next one beside the cache, where dropped keys are compared with all others on a CPU.

    Attributes:
        norms: one per pool, `f32[B, P]` length of each key.
        likely: `i32[L, B, K]` rows likely to go next, -1 for none; None where the program does not look ahead.
    """

    norms: tuple[Float[Array, "B P"], ...]
    likely: Int[Array, "L B K"] | None = None


def segments_of(tables: Tables, part: int | slice, likely: Int[Array, "L B K"] | None = None) -> Segments:
    """One layer's segments, or those of several layers one after the other."""
    part = slice(part, part + 1) if isinstance(part, int) else part
    state, start = tables.state, tables.start[part]
    none = jnp.zeros(tables.seen.shape, jnp.int32)
    recent = jnp.zeros_like(start) if state is None else jnp.broadcast_to(state.recent[part][..., None], start.shape)
    return Segments(
        start=by_sequence(start),
        length=by_sequence(tables.length[part]),
        limit=by_sequence(tables.limit[part]),
        recent=by_sequence(recent),
        tau=None if state is None or state.tau is None else by_sequence(state.tau[part]),
        prompt=none if state is None else state.prompt,
        seen=tables.seen,
        likely=None if likely is None else by_sequence(likely[part]),
        choosable=None if state is None or state.choosable is None else by_sequence(state.choosable[part]),
    )


def within_limits(
    cache: Cache, outs: list[Array], products: list[Array], scratch: Scratch | None, spec: Spec
) -> tuple[Cache, Scratch | None]:
    """Brings segments with a row too many back to their limits: layer by layer, or at once where layers share a pool.

    Args:
        cache: after one token, rows and scores included.
        outs: `[B, K]` of each layer, any number of each head's attention output.
        products: `f32[B, K, n]` of each layer, see `Received`; none if the program does not look ahead.
        scratch: what the step before left, if the program keeps any.
        spec: what is static.

    Returns:
        The cache, and what is left for the next step.
    """
    tables = cache.tables
    layers, _, heads = tables.start.shape
    assert tables.state is not None
    eviction = _eviction(spec, heads)
    parts = [slice(group[0], group[-1] + 1) for group in spec.layout.groups(range(layers))]
    foreseen = None if scratch is None else scratch.likely
    pools, norms, lengths, taus, likely = [], [], [], [], []
    for index, (pool, part) in enumerate(zip(cache.pools, parts, strict=True)):
        left = evict(
            pool,
            segments_of(tables, part, foreseen),
            by_sequence(jnp.stack(outs[part])),
            eviction,
            products=by_sequence(jnp.stack(products[part])) if products else None,
            norms=None if scratch is None else scratch.norms[index],
        )
        pools.append(left.pool)
        norms += [] if left.norms is None else [left.norms]
        lengths.append(by_layer(left.segments.length, heads))
        taus += [] if left.segments.tau is None else [by_layer(left.segments.tau, heads)]
        likely.append(by_layer(left.likely, heads))
    state = dataclasses.replace(tables.state, tau=jnp.concatenate(taus) if taus else None)
    cache = cache.updated(pools=tuple(pools), length=jnp.concatenate(lengths), state=state)
    if scratch is None:
        return cache, None
    return cache, Scratch(norms=tuple(norms), likely=None if foreseen is None else jnp.concatenate(likely))


def _eviction(spec: Spec, heads: int) -> Eviction:
    """Static config of eviction from a spec, for `heads` kv heads of a layer here."""
    assert spec.ongoing is not None
    return Eviction(
        ongoing=spec.ongoing,
        heads=heads,
        walk=spec.layout.walk,
        widest=spec.widest,
        axes=spec.axes,
        implementation=spec.implementation,
    )


def likely_keys(cache: Cache, scratch: Scratch | None) -> Float[Array, "L B K D"] | None:
    """Keys of the rows likely to go, float32, if the program looks ahead."""
    if scratch is None or scratch.likely is None:
        return None
    keys, _ = cache.pools[0].store.take(jnp.maximum(by_sequence(scratch.likely), 0)).view()
    return by_layer(keys.astype(jnp.float32), cache.tables.start.shape[2])


def with_received(pool: Pool, received: Received, start: Int[Array, "B K"], counts: Bool[Array, " B"]) -> Pool:
    """A pool whose scores count the attention that one layer's rows received."""
    assert pool.score is not None
    return dataclasses.replace(pool, score=attention.add_received(pool.score, received, start, counts))


def of_whole_groups(pools: list[Pool], spec: Spec) -> list[Pool]:
    """Pools after a step: scores count what all query heads of each kv head paid, not only those of the device."""
    if not spec.scored:
        return pools
    mean = lambda score: mean_of_devices(score, "G", spec.axes)  # noqa: E731
    return [dataclasses.replace(pool, score=mean(pool.score)) for pool in pools]


def scratch_of(cache: Cache, spec: Spec) -> Scratch | None:
    """Key norms, and the rows likely to be dropped, before the first step; None where programs keep neither."""
    if not spec.knows_norms:
        return None
    norms = tuple(row_norms(pool.k) for pool in cache.pools)
    if not spec.looks_ahead:
        return Scratch(norms=norms)
    heads, tables = cache.tables.start.shape[2], cache.tables
    soon = dataclasses.replace(segments_of(tables, slice(None)), seen=tables.seen + 1)
    row, *_ = weakest(cache.pools[0], soon, _eviction(spec, heads))
    return Scratch(norms=norms, likely=by_layer(row, heads))


def faded(pools: tuple[Pool, ...], count: Int[Array, " B"], spec: Spec) -> tuple[Pool, ...]:
    """Pools before `count` new tokens of each sequence: of older attention, what the policy lets count on."""
    decay = decay_of(spec)
    if decay is None or decay == 1:
        return pools

    def less(score: Array | None) -> Array:
        assert score is not None
        return jnp.where((count > 0)[:, None], score * decay ** count[:, None].astype(jnp.float32), score)

    return tuple(dataclasses.replace(pool, score=less(pool.score)) for pool in pools)


def decay_of(spec: Spec) -> float | None:
    """What of a row's score is left at each new token; None where attention does not enter it."""
    rank = spec.ongoing.rank if spec.ongoing is not None and spec.scored else None
    return None if rank is None else rank.decay


def scores_of(new_k: Float[Array, "B K N D"], new_v: Float[Array, "B K N D"], spec: Spec) -> Array | None:
    """The scores that new rows begin with, `f32[B, K, N]`; None where a pool has none."""
    ongoing = spec.ongoing
    if ongoing is None or not ongoing.scored or ongoing.rank is None:
        return None
    return checked(ongoing.rank, "begin", ongoing.rank.begin(new_k, new_v), new_k.shape[:3], "new row, [B, K, N]")
