"""Decode step in programs of a few layers, which equal groups of layers share: compiled in a fraction of the time.

On a CPU a program of all layers takes seconds to compile, and runs hardly faster.
"""

import dataclasses
import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import CacheArrays, SegmentTables
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.embedding import embed_tokens
from jaxkv.engine.layers.run import run_layers, select_last_tokens
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.residual import ResidualStream
from jaxkv.engine.sparse import SelectedPositions, create_new_tokens
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.split_decoder import DecoderGraphs, Leaves, SplitDecoder
from jaxkv.models.states import DeltaState
from jaxkv.sharding.sharded_program import sharded_jit

# Layers per group: the first of these numbers that divides a model's layers, else the first.
_GROUP_SIZES = (3, 4, 2)


class EqualLayers(NamedTuple):
    """Indices of consecutive `layers`, the same as an array (`indices`), and those of the `first` group equal to it."""

    layers: tuple[int, ...]
    indices: Int[np.ndarray, " n"]
    first: tuple[int, ...]


@lru_cache(maxsize=64)
def split_into_equal_groups(spec: DecodeSpec, tokens: int) -> tuple[EqualLayers, ...]:
    """Split the layers of a step of `tokens` tokens into `EqualLayers`; equal groups share the program of the first."""
    count = spec.config.layers
    size = next((size for size in _GROUP_SIZES if count % size == 0), _GROUP_SIZES[0])
    first_of: dict[tuple, tuple[int, ...]] = {}

    def describe_layer(layer: int) -> tuple:
        """Return what a layer's code depends on besides its arrays."""
        return (
            spec.config.get_layer_spec(layer),
            spec.is_sparse_layer(layer, tokens),
            spec.is_selecting_layer(layer, tokens),
            spec.find_query_buffer_index(layer) is None,
        )

    groups = [tuple(range(at, min(at + size, count))) for at in range(0, count, size)]
    return tuple(
        EqualLayers(
            layers=group,
            indices=np.asarray(group, np.int32),
            first=first_of.setdefault(tuple(map(describe_layer, group)), group),
        )
        for group in groups
    )


@sharded_jit(static=("spec", "layers"), donate=("pools", "states"), on="spec")
def run_grouped_layers(
    pools: tuple[EntryPool, ...],
    states: tuple[DeltaState, ...],
    blocks: tuple[Leaves, ...],
    tables: SegmentTables,
    where: Int[Array, " n"],
    x: Float[Array, "B N E"],
    count: Int[Array, " B"],
    chosen: SelectedPositions | None,
    *,
    spec: DecodeSpec,
    layers: tuple[int, ...],
) -> tuple[Float[Array, "B N E"], SelectedPositions | None, CacheArrays]:
    """Compiled: run a group of layers over a step's tokens; return hidden states, selection, the layers' cache.

    `tables` are those of all layers, with the query buffers of the group, whose indices are `where`. `layers` are the
    indices of the first group equal to it.
    """
    new = create_new_tokens(spec, tables, count, x.shape[1])
    held = tables.select_layer_tables(where)
    cache = CacheArrays(pools=pools, tables=held, states=states)
    begun = StepState(new=new, chosen=chosen)
    stream, chosen, cache = run_layers(
        blocks, cache, ResidualStream(x=x), begun, layers=layers, spec=spec
    )
    return stream.x, chosen, cache


@sharded_jit(static=("graphs",), on="graphs")
def _finish_step(
    ends: Leaves,
    x: Float[Array, "B N E"],
    count: Int[Array, " B"],
    tables: SegmentTables,
    parts: tuple[SegmentTables, ...],
    *,
    graphs: DecoderGraphs,
) -> tuple[Float[Array, "B V"], SegmentTables]:
    """Compiled: return logits after each sequence's last valid token, and all layers' tables from those of groups."""
    tables = dataclasses.replace(tables.join_layer_groups(parts), seen=tables.seen + count)
    last = select_last_tokens(x, count)[:, 0]
    return graphs.rebuild_embedding_and_head(ends).compute_logits(last), tables


def run_grouped_step(
    flat: SplitDecoder,
    cache: CacheArrays,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: DecodeSpec,
) -> tuple[Float[Array, "B V"], CacheArrays]:
    """Run N new tokens per sequence, a program per group of layers; return logits, cache; donate pools and states."""
    tables = cache.tables
    graphs = spec.graphs
    x = embed_tokens(flat.ends, tokens, graphs=graphs)
    chosen = None
    pools = list(cache.pools)
    blocks = spec.collect_block_leaves(flat)
    parts = []
    states = iter(cache.states)
    advanced = list[DeltaState]()
    for group, indices, first in split_into_equal_groups(spec, tokens.shape[1]):
        own = sorted({spec.layout.get_pool_index(layer) for layer in group})
        places = [spec.find_query_buffer_index(layer) for layer in group]
        held = tables.replace_query_buffers(
            [tables.query_buffers[at] for at in places if at is not None]
        )
        below = sum(len(spec.config.get_layer_spec(layer).below) for layer in group)
        x, chosen, after = run_grouped_layers(
            tuple(pools[at] for at in own),
            tuple(itertools.islice(states, below)),
            tuple(blocks[layer] for layer in group),
            held,
            indices,
            x,
            count,
            chosen,
            spec=spec,
            layers=first,
        )
        parts.append(after.tables)
        advanced += after.states
        for at, pool in zip(own, after.pools, strict=True):
            pools[at] = pool
    logits, tables = _finish_step(flat.ends, x, count, tables, tuple(parts), graphs=graphs)
    return logits, CacheArrays(pools=tuple(pools), tables=tables, states=tuple(advanced))
