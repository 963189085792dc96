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
from jaxkv.engine.grouped_decode import run_grouped_step
from jaxkv.engine.layers.run import run_layers, select_last_tokens
from jaxkv.engine.layers.step import StepState, build_work_table
from jaxkv.engine.residual import (
    ResidualStream,
    compute_stream_logits,
    start_residual_stream,
)
from jaxkv.engine.sparse import create_new_tokens
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.split_decoder import Leaves, SplitDecoder
from jaxkv.models.states import DeltaState
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
    outer = spec.graphs.rebuild_embedding_and_head(ends)
    several = tokens.shape[1]
    stream = start_residual_stream(outer.embed_tokens(tokens), spec, blocks[0])
    new = create_new_tokens(spec, cache.tables, count, several)
    begun = StepState(new=new, work=build_work_table(cache, spec, new))
    stream, _, cache = run_layers(
        blocks, cache, stream, begun, layers=tuple(range(len(blocks))), spec=spec
    )
    if several > 1:
        stream = ResidualStream(x=select_last_tokens(stream.x, count))
    return compute_stream_logits(outer, stream, tokens.shape[0], spec), cache


@sharded_jit(static=("spec",), donate=("pools", "states"), on="spec")
def _run_compiled_step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[EntryPool, ...],
    states: tuple[DeltaState, ...],
    tables: SegmentTables,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Compiled `run_decode_step`: return last logits and the cache after N new tokens; donates pools and states."""
    cache = CacheArrays(pools=pools, tables=tables, states=states)
    return run_decode_step(ends, blocks, cache, tokens, count, spec=spec)


def run_new_tokens(
    flat: SplitDecoder,
    cache: CacheArrays,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
    loader: HostStoreLoader | None = None,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Run N new tokens per sequence by compiled programs; return last logits and the cache; donate pools and states.

    A single program runs, or one per group of layers: with a `loader` between transfers from host memory, and if the
    `spec` is `grouped`.
    """
    if loader is not None:
        return offloaded_decode.run_offloaded_step(
            flat, cache, tokens, count, spec=spec, loader=loader
        )
    if spec.grouped:
        return run_grouped_step(flat, cache, tokens, count, spec=spec)
    return _run_compiled_step(
        flat.ends,
        spec.collect_block_leaves(flat),
        cache.pools,
        cache.states,
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
    logits = cache.logits
    axes = cache.axes
    arrays = cache.arrays
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
