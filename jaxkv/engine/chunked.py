"""Prefill chunk by chunk: above the filter layers a chunk reads only what was chosen of all that came before it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, Tables
from jaxkv.cache.bank import Bank, committed, put_away
from jaxkv.cache.packing import empty_pool, placed
from jaxkv.engine.compress import Walk
from jaxkv.engine.decode import extend, newest
from jaxkv.engine.plan import PrefillPlan, ring_rows
from jaxkv.engine.spec import Spec, reading_state
from jaxkv.models.decoder import Flat
from jaxkv.policies.policy import Method
from jaxkv.policies.reading import FilteredReads, Reading
from jaxkv.sharding.mesh import host, place, settle_down, where


def _reading(flat: Flat, policy: Method, needed: PrefillPlan) -> Reading:
    reading = policy.parts().reading(flat.config.layers, needed.slots)
    assert reading is not None
    return reading


def _spec(flat: Flat, policy: Method, needed: PrefillPlan, implementation: Implementation) -> tuple[Spec, int]:
    """The spec that chunks of prompts are run with, and tokens of a chunk."""
    read, reading = policy.parts().read, _reading(flat, policy, needed)
    assert isinstance(read, FilteredReads) and read.prefill_ratio is not None
    chunk = min(read.prefill_chunk, needed.slots)
    width = min(needed.slots, max(1, int(read.prefill_ratio * chunk)))
    spec = Spec(
        graphs=flat.graphs,
        config=flat.config,
        layout=needed.layout,
        rolling=False,
        reading=dataclasses.replace(reading, width=width, offloaded=(), several=True),
        implementation=implementation,
    )
    return spec, chunk


def prefill(
    flat: Flat,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    policy: Method,
    needed: PrefillPlan,
    *,
    model: str = "",
    implementation: Implementation = Implementation.XLA,
) -> Walk[tuple[KVCache, Float[Array, "B V"]]]:
    """Runs prompts through the model, a chunk of every prompt at a time.

    Args:
        flat: the decoder's parameters.
        tokens: prompts padded on the right to the plan's slots.
        lengths: tokens of each prompt.
        policy: with a `prefill_ratio`.
        needed: the plan for these lengths.
        model: the weights' fingerprint.
        implementation: what computes attention.

    Yields:
        After each chunk its share of the layers.

    Returns:
        The cache, and float32 logits of each prompt's last token.

    References:
        OmniKV, appendix D.10: each chunk chooses `prefill_ratio` tokens for each of its own, all queries alike.
    """
    spec, chunk = _spec(flat, policy, needed, implementation)
    cache = _empty(flat, lengths, policy, needed)
    longest = int(np.max(lengths))
    shape = (len(lengths), flat.config.vocab)
    logits = jnp.zeros(shape, jnp.float32, device=where("B V", shape, flat.axes))
    for first in range(0, longest, chunk):
        part = np.zeros((len(lengths), chunk), np.int32)
        mine = tokens[:, first : first + chunk]
        part[:, : mine.shape[1]] = mine
        count = np.clip(np.asarray(lengths) - first, 0, chunk).astype(np.int32)
        given, counts = (place(each, letters, flat.axes) for each, letters in ((part, "B N"), (count, "B")))
        new, arrays = extend(flat, cache.arrays, given, counts, spec=spec)
        cache = dataclasses.replace(cache, arrays=arrays)
        logits = newest(new, logits, counts, axes=flat.axes)
        yield flat.config.layers * chunk / longest
    assert cache.state is not None
    state = dataclasses.replace(cache.state, choosable=jnp.copy(cache.length))
    cache = dataclasses.replace(cache.updated(limit=jnp.copy(cache.length), state=state), model=model)
    return banked(cache, _reading(flat, policy, needed), needed, release=True), logits


def _empty(flat: Flat, lengths: Int[np.ndarray, " B"], policy: Method, needed: PrefillPlan) -> KVCache:
    """A cache of no tokens, with room for the prompts in every layer."""
    config, axes, reading = flat.config, flat.axes, _reading(flat, policy, needed)
    dtype, heads, dim, batch = flat.ends[0].dtype, config.kv_heads, config.head_dim, len(lengths)
    # On a mesh, of each stretch of heads.
    mine = heads if axes is None else heads // axes.size("K")
    rows = tuple(mine * (needed.slots + room) for room in needed.room)
    one = jnp.zeros((1, batch, heads), jnp.int32)
    start = jnp.concatenate([placed(one, layout=needed.layout, rows=each, axes=axes) for each in rows])
    ring = (batch, heads, config.group, ring_rows(reading.ring), dim)
    rings = tuple(jnp.zeros(ring, jnp.float32) for _ in reading.filters) if reading.ring else ()
    nothing, read, store = jnp.zeros_like(start), policy.parts().read, policy.parts().store
    assert read is not None
    tables = Tables(
        start=start,
        length=nothing,
        limit=nothing,
        seen=jnp.zeros((batch,), jnp.int32),
        state=reading_state(lengths, read.tokens(np.asarray(lengths), config.layers), nothing, rings),
    )
    pools = tuple(empty_pool(batch, each, dim, dtype, scored=False, store=store, axes=axes) for each in rows)
    arrays = settle_down(Cache(pools=pools, tables=tables), axes)
    return KVCache(arrays=arrays, layout=needed.layout, policy=policy, config=config, slots=needed.slots, axes=axes)


def banked(cache: KVCache, reading: Reading, needed: PrefillPlan, *, release: bool = False) -> KVCache:
    """Moves rows to host memory, layer by layer, where they are to wait there.

    Args:
        cache: prompts of which every layer's rows are on the device.
        reading: which layers' rows wait.
        needed: the prompts' plan.
        release: give up the pools of those layers one by one.

    Returns:
        The cache, with small pools for them and what waits; as it is if nothing does.
    """
    if not reading.offloaded:
        return cache
    config, axes = cache.config, cache.axes
    heads, batch = config.kv_heads, cache.seen.shape[0]
    # First rows count from the stretch of its device.
    own = np.arange(heads) % (heads // cache.stretches)
    pools, rows = list(cache.pools), []
    state = cache.state
    assert state is not None and state.choosable is not None
    tables = tuple(np.array(host(table)) for table in (cache.start, cache.length, cache.limit, state.choosable))
    for layer in reading.offloaded:
        pool = pools[layer]
        apart = lambda a: a.reshape(batch, heads, -1, config.head_dim)[:, :, : needed.slots]  # noqa: E731
        rows.append(put_away(apart(pool.k), apart(pool.v), axes))
        each = 1 + needed.room[layer]
        small = heads * each // cache.stretches
        pools[layer] = empty_pool(
            batch, small, config.head_dim, pool.k.dtype, scored=False, store=type(pool.store), axes=axes
        )
        for table, first in zip(tables, (own * each, 0, 0, 0), strict=True):
            table[layer] = first
        jax.block_until_ready(rows[-1])
        for leaf in jax.tree.leaves(pool) if release else ():
            leaf.delete()
    start, length, limit, choosable = (place(table, "L B K", axes) for table in tables)
    state = dataclasses.replace(state, choosable=choosable)
    moved = cache.updated(pools=tuple(pools), start=start, length=length, limit=limit, state=state)
    return dataclasses.replace(committed(moved), bank=Bank(rows=tuple(rows), layers=reading.offloaded))
