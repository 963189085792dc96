"""A block's step on the view of its layer, independent of how entries are attended to; and consecutive blocks."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention.steps import Unrotated
from jaxkv.cache.pools import Pool
from jaxkv.engine.hadamard import transformed
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.step import Step
from jaxkv.engine.residual import Residual, attention_input, block_output
from jaxkv.engine.segments import heads_of
from jaxkv.engine.sparse import chosen_at
from jaxkv.engine.spec import Spec
from jaxkv.engine.tokens import (
    StepAngles,
    Token,
    first_scores,
    project,
    remembered,
    token_of_parts,
)
from jaxkv.models.decoder import Block

QueryBuffer = Float[Array, "B K G R D"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """One layer of a step: the view of its entries, and the inputs of its block.

    Attributes:
        rows: view of the layer's entries.
        by: rotary angles.
        query_buffer: query buffer; None if the layer has none.
        asks: number of first entries per segment that a filter layer selects from; None for other layers.
        centre: vector subtracted from all keys of a head before their transform; None without a transform.
        gate: weights of the layer's gate, which scores new entries; None without a gate.
    """

    rows: DenseLayer
    by: StepAngles
    query_buffer: QueryBuffer | None = None
    asks: Int[Array, "B K"] | None = None
    centre: Float[Array, "B K D"] | None = None
    gate: Any = None


class Ran(NamedTuple):
    """Result of consecutive layers: hidden states, pools, query buffers, one number of each head's attention output.

    Later writes can depend on these numbers, `out`.
    """

    stream: Residual
    pools: list[Pool]
    query_buffers: list[QueryBuffer | None]
    out: list[Float[Array, "B K"]]


def run_blocks(
    blocks: Iterable[Block],
    spec: Spec,
    stream: Residual,
    step: Step,
    pools: Sequence[Pool],
    bind: Callable[[int, Block, Pool], Bound],
) -> Ran:
    """Run consecutive blocks over the step's tokens; call `bind` right before each, with its index and pool."""
    ran = Ran(stream, list(pools), [], [])
    for index, block in enumerate(blocks):
        at = spec.layout.pool_of(index)
        layer = bind(index, block, ran.pools[at])
        stream, ran.pools[at], query_buffer, step, out = run_block(
            block, spec, ran.stream, layer, step
        )
        ran = Ran(stream, ran.pools, [*ran.query_buffers, query_buffer], [*ran.out, out])
    return ran


def run_block(
    block: Block, spec: Spec, stream: Residual, layer: Bound, step: Step
) -> tuple[Residual, Pool, QueryBuffer | None, Step, Float[Array, "B K"]]:
    """Run one block over the step's tokens; return hidden states, pool, query buffer, step, output numbers."""
    new, query_buffer, rows = step.new, layer.query_buffer, layer.rows
    x, normed = attention_input(block, stream, spec)
    token = _projected(block, spec, normed, layer, step)
    if query_buffer is not None:
        query_buffer = remembered(query_buffer, token.q, new)
    attended = rows.attended(token, step)
    if layer.asks is not None:
        # Use the pool after its update: a use of the earlier pool would cost a copy.
        args = (attended.pool, rows.start, layer.asks, token.q, query_buffer, new, rows.shaping)
        step = dataclasses.replace(step, chosen=chosen_at(spec, *args))
    out = attended.out if layer.centre is None else transformed(attended.out)
    stream = block_output(block, x, out, spec)
    return stream, attended.pool, query_buffer, step, heads_of(attended.out, len(new.count))


def _projected(
    block: Block, spec: Spec, normed: Float[Array, "M N E"], layer: Bound, step: Step
) -> Token:
    """Return the step's queries, keys and values as the layer stores them, with initial scores from a gate."""
    own, by = normed[: len(step.new.count)], layer.by.new
    if step.work is None:
        token = project(block, spec, own, by)
    else:
        token = token_of_parts(*block.parts(normed), by, normed.dtype)
    if spec.gate is not None:
        token = dataclasses.replace(token, begun=spec.gate.scores(layer.gate, own))
    if layer.centre is not None:
        # Compute scores from entries before their transform.
        begun = first_scores(token, spec.ongoing)
        token = dataclasses.replace(token, begun=begun).transformed(layer.centre)
    # Round to the model's dtype first: a CPU holds the same numbers as float32.
    token = token.widened(layer.rows.pool.dtype)
    if layer.centre is not None and token.split is not None:
        # The token is already rotated and transformed, and the kernel would only rotate.
        cos = jnp.ones_like(token.split.cos)
        split = Unrotated(*token.parts(token.split.q.shape[1]), cos, jnp.zeros_like(cos))
        token = dataclasses.replace(token, split=split)
    return token
