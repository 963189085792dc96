"""Decode step of the whole model: N new tokens per sequence on top of a cache, a question or one sampled token."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache, KVCache, Tables
from jaxkv.cache.host_store import Loader
from jaxkv.cache.pools import Pool
from jaxkv.engine import offloaded_decode
from jaxkv.engine.bookkeeping import faded, of_whole_groups, within_limits
from jaxkv.engine.layers.binding import bound
from jaxkv.engine.layers.blocks import Bound, run_blocks
from jaxkv.engine.layers.step import Step, work_table
from jaxkv.engine.residual import Residual, first_stream
from jaxkv.engine.residual import logits as logits_of
from jaxkv.engine.sparse import new_tokens
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import step_angles
from jaxkv.models.decoder import Block, Flat, Leaves
from jaxkv.sharding.mesh import Axes, place
from jaxkv.sharding.sharded_program import sharded_jit


def step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    cache: Cache,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
) -> tuple[Float[Array, "B V"], Cache]:
    """Run N new tokens per sequence through all layers; return last logits and the new cache.

    Tokens are right-padded: `count` of them are valid, and 0 leaves a sequence's cache unchanged. The cache needs N
    free places behind every segment.
    """
    outer, tables, several = spec.graphs.ends(ends), cache.tables, tokens.shape[1]
    state = tables.state
    x = outer.embed(tokens)
    new = new_tokens(spec, tables, count, several)
    pools = faded(cache.pools, count, spec)
    stream = first_stream(x, spec, blocks[0])
    kinds = [spec.config.spec_of(layer) for layer in range(len(blocks))]
    turned = step_angles(spec, kinds, new.positions, cache)
    parted = [spec.parted(leaves) for leaves in blocks]

    def bind(layer: int, block: Block, pool: Pool) -> Bound:
        """Bind a layer in its state before the step; slices of tables are traced right before its block."""
        by = turned[layer]
        first = None if state is None or state.choosable is None else state.choosable[layer]
        rows = bound(
            spec,
            pool,
            tables.start[layer],
            tables.length[layer],
            shaping=block.shaping,
            sliding_window=block.spec.sliding_window,
            choosable=first if spec.sparse(layer, several) else None,
            index=layer,
            rotated=by.turning,
        )
        query_buffer = spec.query_buffer_index(layer)
        return Bound(
            rows=rows,
            by=by,
            query_buffer=None
            if query_buffer is None or state is None
            else state.query_buffers[query_buffer],
            asks=first if spec.chooses(layer, several) else None,
            centre=None if tables.centre is None else tables.centre[layer],
            gate=parted[layer][1],
        )

    decoder = (spec.graphs_of(layer).block(leaves) for layer, (leaves, _) in enumerate(parted))
    begun = Step(new=new, work=work_table(cache, spec, new))
    ran = run_blocks(decoder, spec, stream, begun, pools, bind)
    stream = ran.stream
    if several > 1:
        x = jnp.take_along_axis(stream.x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        stream = Residual(x=x)
    logits = logits_of(outer, stream, tokens.shape[0], spec)
    if state is not None:
        query_buffers = tuple(
            query_buffer for query_buffer in ran.query_buffers if query_buffer is not None
        )
        state = dataclasses.replace(state, query_buffers=query_buffers)
    cache = cache.updated(
        pools=tuple(of_whole_groups(ran.pools, spec)),
        state=state,
        length=tables.length + count[:, None],
        seen=tables.seen + count,
    )
    if spec.ongoing.evicts and several == 1:
        cache = within_limits(cache, ran.out, spec)
    return logits, cache


@sharded_jit(static=("spec",), donate=("pools",), on="spec")
def _extend(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    tables: Tables,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
) -> tuple[Float[Array, "B V"], Cache]:
    """Compiled `step`: return last logits and the cache after N new tokens per sequence; donate the pools."""
    return step(ends, blocks, Cache(pools=pools, tables=tables), tokens, count, spec=spec)


def extend(
    flat: Flat,
    cache: Cache,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
    loader: Loader | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Run N new tokens per sequence by compiled programs; return last logits and the cache; donate the pools.

    A single program runs, or with a `loader` one program per layer group between transfers from host memory.
    """
    if loader is not None:
        return offloaded_decode.step(flat, cache, tokens, count, spec=spec, loader=loader)
    return _extend(
        flat.ends, spec.blocks_of(flat), cache.pools, cache.tables, tokens, count, spec=spec
    )


def read_on_top(
    run: Callable[[Cache, Array, Array], tuple[Array, Cache]],
    cache: KVCache,
    tokens: Int[np.ndarray, "B n"],
    lengths: Int[np.ndarray, " B"],
    *,
    size: int,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Run prompts on top of a cache (donated) in chunks of `size` tokens; return last logits and the new cache.

    `run` is `extend` of a model and spec. Tokens are right-padded to a multiple of `size`.
    """
    logits, axes, arrays = cache.logits, cache.axes, cache.arrays
    for first in range(0, tokens.shape[1], size):
        count = place(np.clip(lengths - first, 0, size).astype(np.int32), "B", axes)
        after, arrays = run(arrays, place(tokens[:, first : first + size], "B N", axes), count)
        logits = after if logits is None else newest(after, logits, count, axes=axes)
    assert logits is not None
    return logits, dataclasses.replace(cache, arrays=arrays)


@sharded_jit(static=("axes",))
def newest(
    after: Float[Array, "B V"],
    before: Float[Array, "B V"],
    count: Int[Array, " B"],
    *,
    axes: Axes | None,
) -> Float[Array, "B V"]:
    """Compiled: return `after` for sequences with tokens in the last chunk, else `before`, `[B, V]`."""
    return jnp.where((count > 0)[:, None], after, before)
