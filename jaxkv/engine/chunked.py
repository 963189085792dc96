"""Chunked prefill: above a filter layer, a chunk attends only to those earlier tokens that the filter selected."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.attention import Implementation
from jaxkv.cache import CacheArrays, KVCache, SegmentTables, drop_outside_sliding_windows
from jaxkv.cache.host_store import HostStore, commit_to_device, offload_layer_entries
from jaxkv.cache.packing import compute_all_segment_starts, make_empty_pool
from jaxkv.engine.decode import prefill_on_cache, run_new_tokens
from jaxkv.engine.lengths import query_buffer_size
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.progress import Walk
from jaxkv.engine.spec import create_decode_spec, create_selection_state
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.models.states import DeltaState
from jaxkv.policies.policy import Policy
from jaxkv.policies.reads import FilteredReads, LayerReadConfig, count_attended_prompt_tokens
from jaxkv.sharding.mesh import copy_to_host, place_dataclass_on_mesh, place_host_array


def prefill_in_chunks(
    flat: SplitDecoder,
    tokens: Int[np.ndarray, "B S"],
    lengths: Int[np.ndarray, " B"],
    policy: Policy,
    needed: PrefillPlan,
    *,
    implementation: Implementation = Implementation.XLA,
) -> Walk[tuple[KVCache, Float[Array, "B V"]]]:
    """Generator: prefill in chunks whose sparse layers attend to selected tokens (OmniKV); return cache, last logits.

    Yields each chunk's share of the layers. Each chunk selects `prefill_ratio` tokens per token of its own, and all its
    queries have equal weight (OmniKV, appendix D.10).
    """
    read = policy.composed.read
    assert isinstance(read, FilteredReads) and read.prefill_ratio is not None
    chunk = min(read.prefill_chunk, needed.padded_len)
    width = min(needed.padded_len, max(1, int(read.prefill_ratio * chunk)))
    spec = create_decode_spec(
        flat, policy.composed, padded_len=needed.padded_len, implementation=implementation
    )
    reading = spec.reading
    chunks = dataclasses.replace(reading, width=width, offloaded=(), several=True)
    spec = dataclasses.replace(spec, reading=chunks, fused=False)
    cache = _make_empty_cache(flat, lengths, policy, needed, reading, chunk=chunk)
    longest = int(np.max(lengths))
    run = partial(run_new_tokens, flat, spec=spec)
    sliding_windows = flat.config.sliding_windows
    pools = tuple(pool.row_count // cache.kv_shards for pool in cache.pools)
    tokens = np.pad(tokens, ((0, 0), (0, -needed.padded_len % chunk)))
    lengths = np.asarray(lengths)
    for first in range(0, longest, chunk):
        if first and any(sliding_windows):
            # Sliding-window layers have places for their window and one chunk.
            cache = drop_outside_sliding_windows(cache, pools)
        logits, cache = prefill_on_cache(
            run, cache, tokens[:, first : first + chunk], lengths - first, size=chunk
        )
        cache = dataclasses.replace(cache, logits=logits)
        yield flat.config.layers * chunk / longest
    if any(sliding_windows):
        cache = drop_outside_sliding_windows(cache, needed.pools)
    assert cache.state is not None
    state = dataclasses.replace(cache.state, choosable=jnp.copy(cache.length))
    cache = dataclasses.replace(
        cache.replace_arrays(limit=jnp.copy(cache.length), state=state), logits=None
    )
    return offload_layers(cache, reading, needed, release=True), logits


def _make_empty_cache(
    flat: SplitDecoder,
    lengths: Int[np.ndarray, " B"],
    policy: Policy,
    needed: PrefillPlan,
    reading: LayerReadConfig,
    *,
    chunk: int,
) -> KVCache:
    """Return an empty `KVCache` for chunks; pools fit padded prompts and headroom, or a sliding window and a chunk."""
    config = flat.config
    axes = flat.axes
    heads = config.kv_heads
    batch = len(lengths)
    # On a mesh, kv heads of one device.
    heads_here = heads if axes is None else heads // axes.count_axis_shards("K")
    rows = tuple(
        heads_here
        * (needed.padded_len + headroom if width is None else min(width, needed.padded_len) + chunk)
        for headroom, width in zip(needed.headroom, config.sliding_windows, strict=True)
    )
    one = jnp.zeros((1, batch, heads), jnp.int32)
    start = jnp.concatenate(
        [
            compute_all_segment_starts(
                one, layout=policy.composed.cache_layout, rows=each, axes=axes
            )
            for each in rows
        ]
    )
    query_buffer = (
        batch,
        heads,
        config.group_size,
        query_buffer_size(reading.filter_query_count),
        config.head_dim,
    )
    query_buffers = (
        tuple(jnp.zeros(query_buffer, jnp.float32) for _ in reading.filters)
        if reading.filter_query_count
        else ()
    )
    nothing = jnp.zeros_like(start)
    read = policy.composed.read
    store = policy.composed.store
    tables = SegmentTables(
        start=start,
        length=nothing,
        limit=nothing,
        seen=jnp.zeros((batch,), jnp.int32),
        state=create_selection_state(
            lengths,
            count_attended_prompt_tokens(read, np.asarray(lengths), config.sliding_windows),
            nothing,
            query_buffers,
        ),
    )
    pools = tuple(
        make_empty_pool(batch, each, dim, needed.dtype, scored=False, store=store, axes=axes)
        for each, dim in zip(rows, config.entry_dims, strict=True)
    )
    states = tuple(
        DeltaState.make_empty(each, batch, each.key_heads) for each in config.state_layers
    )
    arrays = place_dataclass_on_mesh(CacheArrays(pools=pools, tables=tables, states=states), axes)
    return KVCache(
        arrays=arrays,
        layout=policy.composed.cache_layout,
        policy=policy,
        config=config,
        dtype=flat.ends[0].dtype.name,
        padded_len=needed.padded_len,
        axes=axes,
    )


def offload_layers(
    cache: KVCache, reading: LayerReadConfig, needed: PrefillPlan, *, release: bool = False
) -> KVCache:
    """Return a cache with offloaded layers' entries in host memory, and small pools for new ones; the same if none.

    Return the cache unchanged if `reading` offloads nothing. `release` frees the old pools one by one.
    """
    if not reading.offloaded:
        return cache
    config = cache.config
    axes = cache.axes
    heads = config.kv_heads
    batch = cache.seen.shape[0]
    # On a mesh, first rows count from the start of the device's part of the pool.
    own = np.arange(heads) % (heads // cache.kv_shards)
    pools = list(cache.pools)
    rows = []
    state = cache.state
    assert state is not None and state.choosable is not None
    tables = tuple(
        np.array(copy_to_host(table))
        for table in (cache.start, cache.length, cache.limit, state.choosable)
    )
    for layer in reading.offloaded:
        pool = pools[layer]
        k, v = (
            leaf.reshape(batch, heads, -1, config.head_dim)[:, :, : needed.padded_len]
            for leaf in (pool.k, pool.v)
        )
        rows.append(offload_layer_entries(k, v, axes))
        del k, v
        each = 1 + needed.headroom[layer]
        small = heads * each // cache.kv_shards
        pools[layer] = make_empty_pool(
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
    start, length, limit, choosable = (place_host_array(table, "L B K", axes) for table in tables)
    state = dataclasses.replace(state, choosable=choosable)
    moved = cache.replace_arrays(
        pools=tuple(pools), start=start, length=length, limit=limit, state=state
    )
    return dataclasses.replace(
        commit_to_device(moved), host_store=HostStore(rows=tuple(rows), layers=reading.offloaded)
    )
