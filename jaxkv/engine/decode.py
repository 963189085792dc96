"""Decode step of the whole model: N new tokens per sequence on top of a cache, a question or one sampled token."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import CacheArrays, KVCache, SegmentTables
from jaxkv.cache.host_store import HostStoreLoader
from jaxkv.cache.pools import EntryPool
from jaxkv.engine import offloaded_decode
from jaxkv.engine.bookkeeping import average_scores_over_devices, decay_scores, evict_over_limits
from jaxkv.engine.layers.binding import make_cache_layer
from jaxkv.engine.layers.blocks import BlockInputs, run_blocks
from jaxkv.engine.layers.step import StepState, build_work_table
from jaxkv.engine.residual import ResidualStream, start_residual_stream
from jaxkv.engine.residual import compute_stream_logits as logits_of
from jaxkv.engine.sparse import create_new_tokens
from jaxkv.engine.spec import DecodeSpec
from jaxkv.engine.tokens import compute_step_angles
from jaxkv.models.decoder import DecoderBlock, Leaves, SplitDecoder
from jaxkv.sharding.mesh import ShardingMesh, place_host_array
from jaxkv.sharding.sharded_program import sharded_jit


def run_decode_step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    cache: CacheArrays,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Run N new tokens per sequence, evict if N is 1 and the policy evicts; return last logits `[B, V]`, `CacheArrays`.

    Tokens are right-padded: `count` of them are valid, and 0 leaves a sequence's cache unchanged. The cache needs N
    free places behind every segment.
    """
    outer, tables, several = (
        spec.graphs.rebuild_embedding_and_head(ends),
        cache.tables,
        tokens.shape[1],
    )
    state = tables.state
    x = outer.embed_tokens(tokens)
    new = create_new_tokens(spec, tables, count, several)
    pools = decay_scores(cache.pools, count, spec)
    stream = start_residual_stream(x, spec, blocks[0])
    kinds = [spec.config.get_layer_spec(layer) for layer in range(len(blocks))]
    turned = compute_step_angles(spec, kinds, new.positions, cache)
    parted = [spec.split_gate_leaves(leaves) for leaves in blocks]

    def make_block_inputs(layer: int, block: DecoderBlock, pool: EntryPool) -> BlockInputs:
        """Return a layer's `BlockInputs` from the cache before the step; tables are sliced right before its block."""
        by = turned[layer]
        first = None if state is None or state.choosable is None else state.choosable[layer]
        rows = make_cache_layer(
            spec,
            pool,
            tables.start[layer],
            tables.length[layer],
            shaping=block.logits_shaping,
            sliding_window=block.spec.sliding_window,
            choosable=first if spec.is_sparse_layer(layer, several) else None,
            index=layer,
            rotated=by.key_rotation,
        )
        query_buffer = spec.find_query_buffer_index(layer)
        return BlockInputs(
            rows=rows,
            by=by,
            query_buffer=None
            if query_buffer is None or state is None
            else state.query_buffers[query_buffer],
            asks=first if spec.is_selecting_layer(layer, several) else None,
            centre=None if tables.centre is None else tables.centre[layer],
            gate=parted[layer][1],
        )

    decoder = (
        spec.get_layer_graphs(layer).rebuild_block(leaves)
        for layer, (leaves, _) in enumerate(parted)
    )
    begun = StepState(new=new, work=build_work_table(cache, spec, new))
    ran = run_blocks(decoder, spec, stream, begun, pools, make_block_inputs)
    stream = ran.stream
    if several > 1:
        x = jnp.take_along_axis(stream.x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        stream = ResidualStream(x=x)
    logits = logits_of(outer, stream, tokens.shape[0], spec)
    if state is not None:
        query_buffers = tuple(
            query_buffer for query_buffer in ran.query_buffers if query_buffer is not None
        )
        state = dataclasses.replace(state, query_buffers=query_buffers)
    cache = cache.replace_arrays(
        pools=tuple(average_scores_over_devices(ran.pools, spec)),
        state=state,
        length=tables.length + count[:, None],
        seen=tables.seen + count,
    )
    if spec.ongoing.evicts and several == 1:
        cache = evict_over_limits(cache, ran.out, spec)
    return logits, cache


@sharded_jit(static=("spec",), donate=("pools",), on="spec")
def _run_compiled_step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[EntryPool, ...],
    tables: SegmentTables,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Compiled `run_decode_step`: return last logits and the cache after N new tokens per sequence; donates pools."""
    return run_decode_step(
        ends, blocks, CacheArrays(pools=pools, tables=tables), tokens, count, spec=spec
    )


def run_new_tokens(
    flat: SplitDecoder,
    cache: CacheArrays,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
    loader: HostStoreLoader | None = None,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Run N new tokens per sequence by compiled programs; return last logits and the cache; donate the pools.

    A single program runs, or with a `loader` one program per layer group between transfers from host memory.
    """
    if loader is not None:
        return offloaded_decode.run_offloaded_step(
            flat, cache, tokens, count, spec=spec, loader=loader
        )
    return _run_compiled_step(
        flat.ends,
        spec.collect_block_leaves(flat),
        cache.pools,
        cache.tables,
        tokens,
        count,
        spec=spec,
    )


def prefill_on_cache(
    run: Callable[[CacheArrays, Array, Array], tuple[Array, CacheArrays]],
    cache: KVCache,
    tokens: Int[np.ndarray, "B n"],
    lengths: Int[np.ndarray, " B"],
    *,
    size: int,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Run prompts on top of a cache (donated) in chunks of `size` tokens; return last logits and the new cache.

    `run` is `run_new_tokens` of a model and spec. Tokens are right-padded to a multiple of `size`.
    """
    logits, axes, arrays = cache.logits, cache.axes, cache.arrays
    for first in range(0, tokens.shape[1], size):
        count = place_host_array(np.clip(lengths - first, 0, size).astype(np.int32), "B", axes)
        after, arrays = run(
            arrays, place_host_array(tokens[:, first : first + size], "B N", axes), count
        )
        logits = after if logits is None else select_latest_logits(after, logits, count, axes=axes)
    assert logits is not None
    return logits, dataclasses.replace(cache, arrays=arrays)


@sharded_jit(static=("axes",))
def select_latest_logits(
    after: Float[Array, "B V"],
    before: Float[Array, "B V"],
    count: Int[Array, " B"],
    *,
    axes: ShardingMesh | None,
) -> Float[Array, "B V"]:
    """Compiled: return logits `[B, V]`: `after` if a sequence had tokens in the last chunk, else `before`."""
    return jnp.where((count > 0)[:, None], after, before)
