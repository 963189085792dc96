"""`run_layers`: consecutive layers of a decode step on their pools and tables, in one program or in several."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.cache import CacheArrays
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.bookkeeping import average_scores_over_devices, decay_scores, evict_over_limits
from jaxkv.engine.layers.binding import make_cache_layer
from jaxkv.engine.layers.blocks import BlockInputs, run_blocks
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.residual import ResidualStream
from jaxkv.engine.sparse import SelectedPositions
from jaxkv.engine.spec import DecodeSpec
from jaxkv.engine.tokens import compute_step_angles
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.split_decoder import Leaves


def run_layers(
    blocks: tuple[Leaves, ...],
    cache: CacheArrays,
    stream: ResidualStream,
    step: StepState,
    *,
    layers: tuple[int, ...],
    spec: DecodeSpec,
) -> tuple[ResidualStream, SelectedPositions | None, CacheArrays]:
    """Run consecutive layers over a step's new tokens; evict if the step has one token and the policy evicts.

    Args:
        blocks: parameters of each layer.
        cache: pools, tables, states and query buffers of these layers alone, before the step.
        stream: hidden states below the first layer.
        step: new tokens, and the selection of the last filter layer below.
        layers: indices of the layers, or of layers with equal code, whose program these share.
        spec: static config.

    Returns:
        Hidden states, the selection of the last filter layer, and the layers' cache after the step.
    """
    tables = cache.tables
    count = step.new.count
    several = step.new.positions.shape[1]
    state = tables.state
    begun = cache.replace_arrays(pools=tuple(decay_scores(cache.pools, count, spec)))
    kinds = [spec.config.get_layer_spec(layer) for layer in layers]
    turned = compute_step_angles(spec, kinds, step.new.positions, cache)
    parted = [spec.split_gate_leaves(leaves) for leaves in blocks]
    buffered = [layer for layer in layers if spec.find_query_buffer_index(layer) is not None]
    buffers = dict(zip(buffered, tables.query_buffers, strict=False))

    def make_block_inputs(index: int, block: DecoderBlock, pool: EntryPool) -> BlockInputs:
        """Return a layer's `BlockInputs` from the cache before the step; tables are sliced right before its block."""
        by = turned[index]
        layer = layers[index]
        first = None if state is None or state.choosable is None else state.choosable[index]
        rows = make_cache_layer(
            spec,
            pool,
            tables.start[index],
            tables.length[index],
            shaping=block.logits_shaping,
            sliding_window=block.spec.sliding_window,
            choosable=first if spec.is_sparse_layer(layer, several) else None,
            index=index,
            rotated=by.key_rotation,
        )
        return BlockInputs(
            rows=rows,
            by=by,
            query_buffer=buffers.get(layer),
            asks=first if spec.is_selecting_layer(layer, several) else None,
            centre=None if tables.centre is None else tables.centre[index],
            gate=parted[index][1],
        )

    decoder = (
        spec.get_layer_graphs(layer).rebuild_block(leaves)
        for layer, (leaves, _) in zip(layers, parted, strict=True)
    )
    ran = run_blocks(decoder, spec, stream, step, begun, make_block_inputs)
    tables = tables.replace_query_buffers([each for each in ran.query_buffers if each is not None])
    cache = cache.replace_arrays(
        pools=tuple(average_scores_over_devices(ran.pools, spec)),
        states=ran.states,
        state=tables.state,
        length=tables.length + count[:, None],
        seen=tables.seen + count,
    )
    if spec.ongoing.evicts and several == 1:
        windows = [kind.sliding_window for kind in kinds]
        cache = evict_over_limits(cache, ran.out, count, spec, windows)
    return ran.stream, ran.chosen, cache


def select_last_tokens(
    x: Float[Array, "B N E"], count: Int[Array, " B"]
) -> Float[Array, "B one E"]:
    """Return the hidden states of each sequence's last valid token; of its first one if it has none."""
    return jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
