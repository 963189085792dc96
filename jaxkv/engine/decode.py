"""Decode step of the whole model: N new tokens per sequence on top of a cache, a question or the one token drawn."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache, KVCache, Tables
from jaxkv.cache.bank import Loader
from jaxkv.cache.pools import Pool
from jaxkv.engine import staged
from jaxkv.engine.bookkeeping import (
    faded,
    of_whole_groups,
    segments_of,
    within_limits,
)
from jaxkv.engine.layer_step import Dealt, LayerRows, run_layers
from jaxkv.engine.pages import full_pages, rest_from
from jaxkv.engine.segments import in_window
from jaxkv.engine.sparse import new_tokens, rest_of
from jaxkv.engine.spec import Spec
from jaxkv.engine.stream import Stream, first_stream
from jaxkv.engine.stream import logits as logits_of
from jaxkv.engine.tokens import NewTokens, step_angles
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, place


def step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    cache: Cache,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: Spec,
) -> tuple[Float[Array, "B V"], Cache]:
    """Runs N new tokens per sequence through all layers; returns last logits and new cache.

    Tokens are padded on the right; `count` of them are real, and 0 leaves a sequence's cache unchanged. The cache has
    room for N rows behind every segment.
    """
    outer, tables, several = spec.graphs.ends(ends), cache.tables, tokens.shape[1]
    x = outer.embed(tokens)
    new = new_tokens(spec, tables, count, several)
    pools = faded(cache.pools, count, spec)
    stream, kinds = (
        first_stream(x, spec, blocks[0]),
        [spec.config.spec_of(layer) for layer in range(len(blocks))],
    )
    turned = step_angles(spec, kinds, new.positions, cache)
    dealt = _dealt(cache, spec, new)

    parted = [spec.parted(leaves) for leaves in blocks]

    def rows_of(layer: int) -> LayerRows:
        at, ring, state = spec.layout.pool_of(layer), spec.ring_of(layer), tables.state
        return LayerRows(
            pool=pools[at],
            segments=segments_of(tables, layer),
            by=turned[layer],
            layer=layer,
            ring=None if ring is None or state is None else state.rings[ring],
            asks=spec.chooses(layer, several),
            sparse=spec.sparse(layer, several),
            dealt=dealt,
            gate=parted[layer][1],
            centre=None if tables.centre is None else tables.centre[layer],
        )

    # Lazily: what a layer reads of tables and pools is traced right before its step.
    bound = (spec.graphs_of(layer).block(leaves) for layer, (leaves, _) in enumerate(parted))
    done = run_layers(bound, spec, stream, map(rows_of, range(len(blocks))), new)
    stream = done[-1].stream
    if several > 1:
        x = jnp.take_along_axis(stream.x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        stream = Stream(x=x)
    logits = logits_of(outer, stream, tokens.shape[0], spec)
    after = [each.rows for each in done]
    state = tables.state
    if state is not None:
        state = dataclasses.replace(
            state, rings=tuple(each.ring for each in after if each.ring is not None)
        )
    last = after[-1:] if spec.layout.one_pool else after
    done_pools = [each.pool for each in last]
    cache = cache.updated(
        pools=tuple(of_whole_groups(done_pools, spec)),
        state=state,
        length=tables.length + count[:, None],
        seen=tables.seen + count,
    )
    if spec.ongoing.evicts and several == 1:
        cache = within_limits(cache, [each.out for each in done], spec)
    return logits, cache


def _dealt(cache: Cache, spec: Spec, new: NewTokens) -> Dealt | None:
    """`Dealt` table of row chunks that programs of a fused decode kernel read, for all layers; None if not fused."""
    if spec.rolling or not spec.streams(new.positions.shape[1]):
        return None
    tables, picked, rest = cache.tables, None, None
    start, length = tables.start, tables.length
    sparse = np.asarray([spec.sparse(layer, 1) for layer in range(len(start))])
    if new.candidates is not None and sparse.any():
        # The kernel counts chosen rows as if they lay right before the rows that are always read, from row 0 on.
        some = sparse[:, None, None]
        if page := spec.reading.page:
            full = full_pages(length, new.candidates.budget[:, None], page)
            picked, rest = full.max(axis=(0, 2)) * page, rest_from(length, page)
        else:
            picked, rest = jnp.minimum(*new.candidates), rest_of(spec, tables)
        length = jnp.where(some, picked[:, None] + length - rest, length)
        start = jnp.where(some, 0, start)
    if any(spec.config.windows):
        # The new row joins behind, and is one of the window's.
        endless = np.iinfo(np.int32).max
        widths = [endless if each is None else each - 1 for each in spec.config.windows]
        start, length = in_window(start, length, jnp.asarray(widths, jnp.int32)[:, None, None])
    itemsize = cache.pools[0].store.element_bytes
    chunks = spec.backend.deal(start, length, dim=spec.config.head_dim, itemsize=itemsize)
    return Dealt(chunks=chunks, start=tables.start, picked=picked, rest=rest)


@program(static=("spec",), donate=("pools",), on="spec")
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
    """Compiled `step`: last tokens' logits and cache after N new tokens per sequence; pools are donated."""
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
    """Last tokens' logits and cache after N new tokens per sequence, by compiled programs; pools are donated.

    One program; with a `loader`, a program for each stretch of layers between transfers from host memory.
    """
    if loader is not None:
        return staged.step(flat, cache, tokens, count, spec=spec, loader=loader)
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
    """Runs prompts on top of a cache (donated), `size` tokens at a time; returns last tokens' logits and new cache.

    `run` is `extend` of a model and spec, called with `size` tokens of every prompt at a time; tokens are padded on the
    right to a multiple of `size`.
    """
    logits, axes, arrays = cache.logits, cache.axes, cache.arrays
    for first in range(0, tokens.shape[1], size):
        count = place(np.clip(lengths - first, 0, size).astype(np.int32), "B", axes)
        after, arrays = run(arrays, place(tokens[:, first : first + size], "B N", axes), count)
        logits = after if logits is None else newest(after, logits, count, axes=axes)
    assert logits is not None
    return logits, dataclasses.replace(cache, arrays=arrays)


@program(static=("axes",))
def newest(
    after: Float[Array, "B V"],
    before: Float[Array, "B V"],
    count: Int[Array, " B"],
    *,
    axes: Axes | None,
) -> Float[Array, "B V"]:
    """Compiled: logits `[B, V]` of each sequence: `after` a block if it had tokens there, else `before`."""
    return jnp.where((count > 0)[:, None], after, before)
