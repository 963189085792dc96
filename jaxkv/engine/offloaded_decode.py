"""Decode step over a cache whose upper layers are in host memory: device programs, with transfers between these.

A step runs groups of consecutive layers. A group ends with the selection by the next filter layer. The next group, with
this filter's attention and the layers above, runs while the host gathers the selected entries for the group after it.
"""

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import CacheArrays, SegmentTables
from jaxkv.cache.host_store import HostStoreLoader
from jaxkv.cache.last_tokens import write_last_tokens
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.embedding import embed_tokens
from jaxkv.engine.layers.binding import make_cache_layer
from jaxkv.engine.layers.blocks import BlockInputs, QueryBuffer, run_blocks
from jaxkv.engine.layers.run import select_last_tokens
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.residual import ResidualStream
from jaxkv.engine.sparse import SelectedPositions, create_new_tokens, select_positions
from jaxkv.engine.spec import DecodeSpec
from jaxkv.engine.tokens import compute_step_angles
from jaxkv.models.config import SlidingWindows
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.split_decoder import DecoderGraphs, Leaves, SplitDecoder
from jaxkv.models.values import LayerSpec
from jaxkv.policies.reads import LayerReadConfig
from jaxkv.sharding.mesh import ShardingMesh, place_host_array
from jaxkv.sharding.sharded_program import sharded_jit


@frozen_dataclass
class LayerGroup:
    """Consecutive layers that one program runs: their indices, those loaded from the host, the next filter."""

    layers: tuple[int, ...]
    loaded: tuple[int, ...]
    ask: int | None


@lru_cache(maxsize=64)
def split_into_layer_groups(
    reading: LayerReadConfig, sliding_windows: SlidingWindows, *, whole: bool
) -> tuple[LayerGroup, ...]:
    """Split a decode step's layers into `LayerGroup`, one program each, cut at filter and offloaded layers; cached.

    With `whole`, layers attend to all entries and filters select none. Sliding-window layers join the layer below.
    """
    runs: list[list[int]] = []
    below = False
    for layer, width in enumerate(sliding_windows):
        if runs and width is not None:
            runs[-1].append(layer)
            continue
        away = layer in reading.offloaded
        alone = whole and (away or below)
        # A filter layer begins a new group, because it selects before its own attention.
        if runs and below == away and not alone and (whole or layer not in reading.filters):
            runs[-1].append(layer)
        else:
            runs.append([layer])
        below = away
    if not whole and reading.filters[0] == 0:
        runs.insert(0, [])
    after = [run[0] if run and run[0] in reading.filters else None for run in runs[1:]] + [None]
    return tuple(
        LayerGroup(
            layers=tuple(run),
            loaded=tuple(layer for layer in run if layer in reading.offloaded),
            ask=None if whole else ask,
        )
        for run, ask in zip(runs, after, strict=True)
    )


@sharded_jit(static=("graphs",), on="graphs")
def _compute_last_logits(
    ends: Leaves,
    x: Float[Array, "B N E"],
    tables: SegmentTables,
    count: Int[Array, " B"],
    *,
    graphs: DecoderGraphs,
) -> tuple[Float[Array, "B V"], Int[Array, " B"], Int[Array, "L B K"]]:
    """Compiled: return logits after each sequence's last valid token, and new `seen` and `length` tables."""
    last = select_last_tokens(x, count)[:, 0]
    return (
        graphs.rebuild_embedding_and_head(ends).compute_logits(last),
        tables.seen + count,
        tables.length + count[:, None],
    )


class LayerGroupInputs(NamedTuple):
    """Inputs of a layer group: parameters, query buffers, layer indices, filter pool, loaded entries and positions.

    If a filter layer selects at the end of the group, its parameters, query buffer and index come last, and `filter` is
    its pool. `loaded` are selected entries from host memory, `chosen` their positions.
    """

    blocks: tuple[Leaves, ...]
    query_buffers: tuple[QueryBuffer | None, ...]
    layers: Int[Array, " n"]
    filter: EntryPool | None = None
    loaded: Float[Array, "B n T 2 K D"] | None = None
    chosen: SelectedPositions | None = None


@sharded_jit(static=("spec", "kinds"), donate=("pools",), on="spec")
def run_layer_group(
    pools: tuple[EntryPool, ...],
    inputs: LayerGroupInputs,
    tables: SegmentTables,
    x: Float[Array, "B N E"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
    kinds: tuple[LayerSpec, ...],
) -> tuple[
    Float[Array, "B N E"],
    tuple[EntryPool, ...],
    tuple[QueryBuffer | None, ...],
    SelectedPositions | None,
]:
    """Compiled: run a layer group; return hidden states, pools, query buffers, and the next filter's selection or None.

    Equal groups share a program. Pools are donated; `tables` are those of all layers before the step; `kinds` are the
    specs of the layers and of the filter.
    """
    held = tables.select_layer_tables(inputs.layers)
    assert held.state is not None and held.state.choosable is not None
    choosable = held.state.choosable
    new = create_new_tokens(spec, tables, count, x.shape[1])
    cache = CacheArrays(pools=pools, tables=held)
    turned = compute_step_angles(spec, kinds, new.positions, cache)
    blocks = [
        spec.graphs.replace_layer_spec(kind).rebuild_block(leaves)
        for kind, leaves in zip(kinds, inputs.blocks, strict=True)
    ]
    # Loaded entries belong to all layers except sliding-window layers.
    away = (
        []
        if inputs.loaded is None
        else [at for at, kind in enumerate(kinds) if not kind.sliding_window]
    )

    def bind_layer(index: int, block: DecoderBlock, pool: EntryPool) -> BlockInputs:
        """Return a block's `BlockInputs`: its entries before the step, loaded ones, RoPE angles, query buffer."""
        by = turned[index]
        loaded = None
        first = None
        if inputs.loaded is not None and index in away:
            loaded = inputs.loaded[:, away.index(index)]
            first = choosable[index]
        rows = make_cache_layer(
            spec,
            pool,
            held.start[index],
            held.length[index],
            shaping=block.logits_shaping,
            sliding_window=block.spec.sliding_window,
            choosable=first,
            loaded=loaded,
            rotated=by.key_rotation,
        )
        return BlockInputs(rows=rows, by=by, query_buffer=inputs.query_buffers[index])

    begun = StepState(new=new, chosen=inputs.chosen)
    ran = run_blocks(blocks[: len(pools)], spec, ResidualStream(x=x), begun, cache, bind_layer)
    x = ran.stream.x
    choice = None
    if inputs.filter is not None:
        q = (
            blocks[-1]
            .compute_rotated_queries(blocks[-1].normalise_for_attention(x), turned[-1].new)
            .astype(inputs.filter.dtype)
        )
        query_buffer = jax.tree.map(
            lambda buffer: write_last_tokens(buffer, q, new.positions, new.count),
            inputs.query_buffers[-1],
        )
        own = (inputs.filter, held.start[-1], choosable[-1])
        choice = select_positions(spec, *own, q, query_buffer, new, blocks[-1].logits_shaping)
    return x, tuple(ran.pools), tuple(ran.query_buffers), choice


@lru_cache(maxsize=1024)
def _place_layer_indices(
    layers: tuple[int, ...], where: jax.Device | ShardingMesh
) -> Int[Array, " n"]:
    """Return layer indices as an int32 array on a device or mesh; cached, so that each tuple is transferred once."""
    numbers = np.asarray(layers, np.int32)
    return (
        place_host_array(numbers, "n", where)
        if isinstance(where, ShardingMesh)
        else jax.device_put(numbers, where)
    )


def run_offloaded_step(
    flat: SplitDecoder,
    cache: CacheArrays,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
    loader: HostStoreLoader,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Run N new tokens over a cache with layers in host memory; return last logits and cache; donate the pools.

    Several tokens in one call attend to all entries of every layer.
    """
    reading = spec.reading
    graphs = spec.graphs
    tables = cache.tables
    state = cache.tables.state
    assert state is not None
    whole = tokens.shape[1] > 1 or not reading.filters
    pools = list(cache.pools)
    query_buffers = dict[int, QueryBuffer | None](
        zip(reading.filters, state.query_buffers, strict=False)
    )
    placement = spec.axes or next(iter(tables.seen.devices()))
    x = embed_tokens(flat.ends, tokens, graphs=graphs)
    chosen = None
    cut = split_into_layer_groups(reading, spec.config.sliding_windows, whole=whole)
    single = [part.loaded[0] for part in cut if part.loaded]
    layers = _prefetch_layers(loader, single, tables.seen, reading.ahead)
    if whole:
        nothing = place_host_array(np.zeros((len(tables.seen), 1), np.int32), "B T", spec.axes)
        chosen = SelectedPositions(positions=nothing, count=state.prompt)
    for part in cut:
        loaded = None
        if part.loaded and whole:
            # Whole layers are large: keep no more of them on the device than planned.
            jax.block_until_ready(x)
            loaded = next(layers)
        elif part.loaded:
            assert chosen is not None
            # Waits for the selection only, while the device runs the filter's own group.
            loaded = loader.load_entries_by_position(part.loaded, chosen.positions)
        every = part.layers if part.ask is None else (*part.layers, part.ask)
        inputs = LayerGroupInputs(
            blocks=tuple(flat.blocks[layer] for layer in every),
            query_buffers=tuple(query_buffers.get(layer) for layer in every),
            layers=_place_layer_indices(every, placement),
            filter=None if part.ask is None else pools[part.ask],
            loaded=loaded,
            chosen=chosen if part.loaded else None,
        )
        mine = tuple(pools[layer] for layer in part.layers)
        kinds = tuple(map(spec.config.get_layer_spec, every))
        x, mine, kept, choice = run_layer_group(
            mine, inputs, tables, x, count, spec=spec, kinds=kinds
        )
        chosen = chosen if choice is None else choice
        for layer, pool, query_buffer in zip(part.layers, mine, kept, strict=True):
            pools[layer] = pool
            query_buffers[layer] = query_buffer
    logits, seen, length = _compute_last_logits(flat.ends, x, tables, count, graphs=graphs)
    state = dataclasses.replace(
        state,
        query_buffers=tuple(
            query_buffer
            for _, query_buffer in sorted(query_buffers.items())
            if query_buffer is not None
        ),
    )
    return logits, cache.replace_arrays(pools=tuple(pools), state=state, seen=seen, length=length)


def _prefetch_layers(
    loader: HostStoreLoader, layers: list[int], like: Int[Array, " B"], ahead: int
) -> Iterator[Array]:
    """Yield one device array of entries per whole offloaded layer, in order, with up to `ahead` more in transfer."""
    coming: list[Array] = []
    while layers or coming:
        while layers and len(coming) <= ahead:
            coming.append(loader.load_layer_entries(layers.pop(0), like))
        yield coming.pop(0)
