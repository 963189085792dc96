"""Chunked prefill: above a filter layer, a chunk attends only to those earlier tokens that the filter selected."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, Tables, drop_outside_sliding_windows
from jaxkv.cache.host_store import HostStore, committed, put_away
from jaxkv.cache.packing import empty_pool, placed
from jaxkv.engine.decode import extend, read_on_top
from jaxkv.engine.lengths import query_buffer_size
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.progress import Walk
from jaxkv.engine.spec import reading_state, specialise
from jaxkv.models.decoder import Flat
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import FilteredReads, Reading, tokens_read
from jaxkv.sharding.mesh import host, place, settle_down


def prefill(
    flat: Flat,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    policy: Policy,
    needed: PrefillPlan,
    *,
    implementation: Implementation = Implementation.XLA,
) -> Walk[tuple[KVCache, Float[Array, "B V"]]]:
    """Generator: prefill right-padded prompts chunk by chunk; return the cache and last logits.

    Yields each chunk's share of the layers. Each chunk selects `prefill_ratio` tokens per token of its own, and all its
    queries have equal weight (OmniKV, appendix D.10).
    """
    read = policy.composed.read
    assert isinstance(read, FilteredReads) and read.prefill_ratio is not None
    chunk = min(read.prefill_chunk, needed.padded_len)
    width = min(needed.padded_len, max(1, int(read.prefill_ratio * chunk)))
    spec = specialise(
        flat, policy.composed, padded_len=needed.padded_len, implementation=implementation
    )
    reading = spec.reading
    chunks = dataclasses.replace(reading, width=width, offloaded=(), several=True)
    spec = dataclasses.replace(spec, reading=chunks, fused=False)
    cache, longest = (
        _empty(flat, lengths, policy, needed, reading, chunk=chunk),
        int(np.max(lengths)),
    )
    run, sliding_windows = partial(extend, flat, spec=spec), flat.config.sliding_windows
    pools = tuple(pool.rows // cache.kv_shards for pool in cache.pools)
    tokens, lengths = np.pad(tokens, ((0, 0), (0, -needed.padded_len % chunk))), np.asarray(lengths)
    for first in range(0, longest, chunk):
        if first and any(sliding_windows):
            # Sliding-window layers have places for their window and one chunk.
            cache = drop_outside_sliding_windows(cache, pools)
        logits, cache = read_on_top(
            run, cache, tokens[:, first : first + chunk], lengths - first, size=chunk
        )
        cache = dataclasses.replace(cache, logits=logits)
        yield flat.config.layers * chunk / longest
    if any(sliding_windows):
        cache = drop_outside_sliding_windows(cache, needed.pools)
    assert cache.state is not None
    state = dataclasses.replace(cache.state, choosable=jnp.copy(cache.length))
    cache = dataclasses.replace(
        cache.updated(limit=jnp.copy(cache.length), state=state), logits=None
    )
    return to_host_store(cache, reading, needed, release=True), logits


def _empty(
    flat: Flat,
    lengths: Int[np.ndarray, " B"],
    policy: Policy,
    needed: PrefillPlan,
    reading: Reading,
    *,
    chunk: int,
) -> KVCache:
    """Return an empty `KVCache` with places for whole prompts in each pool; or for a sliding window and a chunk."""
    config, axes = flat.config, flat.axes
    heads, dim, batch = config.kv_heads, config.head_dim, len(lengths)
    # On a mesh, kv heads of one device.
    heads_here = heads if axes is None else heads // axes.size("K")
    rows = tuple(
        heads_here
        * (needed.padded_len + headroom if width is None else min(width, needed.padded_len) + chunk)
        for headroom, width in zip(needed.headroom, config.sliding_windows, strict=True)
    )
    one = jnp.zeros((1, batch, heads), jnp.int32)
    start = jnp.concatenate(
        [placed(one, layout=policy.composed.layout, rows=each, axes=axes) for each in rows]
    )
    query_buffer = (batch, heads, config.group, query_buffer_size(reading.query_buffer), dim)
    query_buffers = (
        tuple(jnp.zeros(query_buffer, jnp.float32) for _ in reading.filters)
        if reading.query_buffer
        else ()
    )
    nothing, read, store = jnp.zeros_like(start), policy.composed.read, policy.composed.store
    tables = Tables(
        start=start,
        length=nothing,
        limit=nothing,
        seen=jnp.zeros((batch,), jnp.int32),
        state=reading_state(
            lengths,
            tokens_read(read, np.asarray(lengths), config.sliding_windows),
            nothing,
            query_buffers,
        ),
    )
    pools = tuple(
        empty_pool(batch, each, dim, needed.dtype, scored=False, store=store, axes=axes)
        for each in rows
    )
    arrays = settle_down(Cache(pools=pools, tables=tables), axes)
    return KVCache(
        arrays=arrays,
        layout=policy.composed.layout,
        policy=policy,
        config=config,
        dtype=flat.ends[0].dtype.name,
        padded_len=needed.padded_len,
        axes=axes,
    )


def to_host_store(
    cache: KVCache, reading: Reading, needed: PrefillPlan, *, release: bool = False
) -> KVCache:
    """Move the entries of offloaded layers to host memory, leaving small pools for later entries.

    Return the cache unchanged if `reading` offloads nothing. `release` frees the old pools one by one.
    """
    if not reading.offloaded:
        return cache
    config, axes = cache.config, cache.axes
    heads, batch = config.kv_heads, cache.seen.shape[0]
    # On a mesh, first rows count from the start of the device's part of the pool.
    own = np.arange(heads) % (heads // cache.kv_shards)
    pools, rows = list(cache.pools), []
    state = cache.state
    assert state is not None and state.choosable is not None
    tables = tuple(
        np.array(host(table)) for table in (cache.start, cache.length, cache.limit, state.choosable)
    )
    for layer in reading.offloaded:
        pool = pools[layer]
        k, v = (
            leaf.reshape(batch, heads, -1, config.head_dim)[:, :, : needed.padded_len]
            for leaf in (pool.k, pool.v)
        )
        rows.append(put_away(k, v, axes))
        del k, v
        each = 1 + needed.headroom[layer]
        small = heads * each // cache.kv_shards
        pools[layer] = empty_pool(
            batch,
            small,
            config.head_dim,
            pool.k.dtype,
            scored=False,
            store=type(pool.store),
            axes=axes,
        )
        for table, first in zip(tables, (own * each, 0, 0, 0), strict=True):
            table[layer] = first
        jax.block_until_ready(rows[-1])
        for leaf in jax.tree.leaves(pool) if release else ():
            leaf.delete()
    start, length, limit, choosable = (place(table, "L B K", axes) for table in tables)
    state = dataclasses.replace(state, choosable=choosable)
    moved = cache.updated(pools=tuple(pools), start=start, length=length, limit=limit, state=state)
    return dataclasses.replace(
        committed(moved), host_store=HostStore(rows=tuple(rows), layers=reading.offloaded)
    )
