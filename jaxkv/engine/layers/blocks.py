"""A block's step on the view of its layer, independent of how entries are attended to; and consecutive blocks."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.steps import UnrotatedProjections
from jaxkv.cache import CacheArrays
from jaxkv.cache.last_tokens import write_last_tokens
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.hadamard import apply_hadamard
from jaxkv.engine.layers.dense import FullAttentionCacheLayer
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.prefill_layer import advance_states
from jaxkv.engine.residual import ResidualStream, compute_attention_input, finish_block
from jaxkv.engine.segments import take_number_per_head
from jaxkv.engine.sparse import SelectedPositions, select_positions
from jaxkv.engine.spec import DecodeSpec
from jaxkv.engine.tokens import (
    StepAngles,
    TokenProjections,
    compute_first_scores,
    project_new_tokens,
    sum_token_projections,
)
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.states import DeltaState

QueryBuffer = Float[Array, "B K G R D"]


@frozen_dataclass
class BlockInputs:
    """Inputs of one layer's block in a decode step: view of its entries, RoPE angles, query buffer and others.

    Attributes:
        rows: view of the layer's entries.
        by: rotary angles.
        query_buffer: query buffer; None if the layer has none.
        asks: number of first entries per segment that a filter layer selects from; None for other layers.
        centre: vector subtracted from all keys of a head before their transform; None without a transform.
        gate: weights of the layer's gate, which scores new entries; None without a gate.
    """

    rows: FullAttentionCacheLayer
    by: StepAngles
    query_buffer: QueryBuffer | None = None
    asks: Int[Array, "B K"] | None = None
    centre: Float[Array, "B K D"] | None = None
    gate: Any = None


class BlockOutputs(NamedTuple):
    """Result of consecutive layers: hidden states, pools, states, query buffers, numbers that order later writes.

    Later writes can depend on these numbers, `out`, one per head.
    """

    stream: ResidualStream
    pools: list[EntryPool]
    states: tuple[DeltaState, ...]
    query_buffers: list[QueryBuffer | None]
    out: list[Float[Array, "B K"]]
    chosen: SelectedPositions | None


def run_blocks(
    blocks: Iterable[DecoderBlock],
    spec: DecodeSpec,
    stream: ResidualStream,
    step: StepState,
    cache: CacheArrays,
    bind: Callable[[int, DecoderBlock, EntryPool], BlockInputs],
) -> BlockOutputs:
    """Run consecutive blocks over a step's tokens; call `bind` for each one's `BlockInputs`; return `BlockOutputs`.

    `cache` has their pools, and the states of the layers below them.
    """
    ran = BlockOutputs(stream, list(cache.pools), (), [], [], step.chosen)
    states = iter(cache.states)
    for index, block in enumerate(blocks):
        at = spec.layout.get_pool_index(index)
        below = tuple(itertools.islice(states, len(block.below)))
        x, below = advance_states(block, ran.stream.x, below, step.new.count)
        stream = dataclasses.replace(ran.stream, x=x)
        layer = bind(index, block, ran.pools[at])
        stream, ran.pools[at], query_buffer, step, out = run_block(block, spec, stream, layer, step)
        ran = BlockOutputs(
            stream,
            ran.pools,
            ran.states + below,
            [*ran.query_buffers, query_buffer],
            [*ran.out, out],
            step.chosen,
        )
    return ran


def run_block(
    block: DecoderBlock,
    spec: DecodeSpec,
    stream: ResidualStream,
    layer: BlockInputs,
    step: StepState,
) -> tuple[ResidualStream, EntryPool, QueryBuffer | None, StepState, Float[Array, "B K"]]:
    """Run one block over a step's tokens; return stream, pool, query buffer, `StepState`, one number per kv head."""
    new = step.new
    query_buffer = layer.query_buffer
    rows = layer.rows
    x, normed = compute_attention_input(block, stream, spec)
    token = _project_tokens(block, spec, normed, layer, step)
    if query_buffer is not None:
        query_buffer = write_last_tokens(query_buffer, token.q, new.positions, new.count)
    attended = rows.append_tokens_and_attend(token, step)
    if layer.asks is not None:
        # Use the pool after its update: a use of the earlier pool would cost a copy.
        args = (attended.pool, rows.start, layer.asks, token.q, query_buffer, new, rows.shaping)
        step = dataclasses.replace(step, chosen=select_positions(spec, *args))
    out = attended.out if layer.centre is None else apply_hadamard(attended.out)
    stream = finish_block(block, x, out, spec)
    return (
        stream,
        attended.pool,
        query_buffer,
        step,
        take_number_per_head(attended.out, len(new.count)),
    )


def _project_tokens(
    block: DecoderBlock,
    spec: DecodeSpec,
    normed: Float[Array, "M N E"],
    layer: BlockInputs,
    step: StepState,
) -> TokenProjections:
    """Return new tokens' `TokenProjections` in pool dtype, with gate scores and Hadamard transform if used."""
    own = normed[: len(step.new.count)]
    by = layer.by.new
    if step.work is None:
        token = project_new_tokens(block, spec, own, by)
    else:
        token = sum_token_projections(*block.compute_qkv_partial_sums(normed), by, normed.dtype)
    if spec.entry_gate is not None:
        token = dataclasses.replace(
            token, begun=spec.entry_gate.score_hidden_states(layer.gate, own)
        )
    if layer.centre is not None:
        # Compute scores from entries before their transform.
        begun = compute_first_scores(token, spec.ongoing)
        token = dataclasses.replace(token, begun=begun).transform_projections(layer.centre)
    # Round to the model's dtype first: a CPU holds the same numbers as float32.
    token = token.cast_to_dtype(layer.rows.pool.dtype)
    if layer.centre is not None and token.split is not None:
        # The token is already rotated and transformed, and the kernel would only rotate.
        cos = jnp.ones_like(token.split.cos)
        split = UnrotatedProjections(
            *token.arrange_for_fused_step(token.split.q.shape[1]), cos, jnp.zeros_like(cos)
        )
        token = dataclasses.replace(token, split=split)
    return token
