"""One decoder block over whole prompts: the program that prefill runs per layer, in blocks of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import (
    AttentionBackend,
    Implementation,
    fit_head_dim,
    get_attention_backend,
)
from jaxkv.attention.steps import GatheredEntries
from jaxkv.attention.xla import SegmentRanges, SegmentReadMode
from jaxkv.engine.lengths import QUERY_BLOCK, choose_block_size, choose_prefill_block_size
from jaxkv.engine.moments import compute_prompt_query_moments, sum_attention_in_blocks
from jaxkv.engine.segments import restrict_to_window
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.rope import RopeTables
from jaxkv.models.split_decoder import DecoderGraphs, Leaves
from jaxkv.models.states import DeltaState
from jaxkv.policies.scorer import ExtraInputs, Needs, compute_reference_positions
from jaxkv.sharding.collectives import average_over_devices

# On a CPU, blocks of 512 queries keep matrix products large and the logits of one kv head in a core's cache.
_BLOCKS = (512, QUERY_BLOCK)


@jax.tree_util.register_dataclass
@frozen_dataclass
class LayerOut:
    """One layer's prefill output: hidden states, keys, values, last queries, and statistics for the policy.

    Attributes:
        x: hidden states for the next layer, `[B, S, E]`; after the top layer, those of the last token, `[B, E]`.
        k: rotated keys.
        v: values.
        q: rotated queries of the last w = `needs.queries` tokens.
        q_positions: positions of these queries; negative ones are padding.
        extras: statistics requested by `needs`, under its names: `references`, `sums`, `norms`, `unrotated`, `hidden`,
            `moments`, `blocks`; and `replay` after a second pass over the prompt.
        sink_logits: the block's sink logits, for each sequence; None for blocks without sinks.
        states: states, after the prompt, of the layers below that have one.
    """

    x: Shaped[Array, "B ..."]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    q: Float[Array, "B K G w D"]
    q_positions: Int[Array, "B w"]
    extras: ExtraInputs
    sink_logits: Float[Array, "B K G"] | None = None
    states: tuple[DeltaState, ...] = ()


def layer(
    leaves: Leaves,
    x: Float[Array, "B S E"],
    length: Int[Array, " B"],
    table: RopeTables,
    *,
    graphs: DecoderGraphs,
    needs: Needs,
    last: bool,
    implementation: Implementation,
) -> LayerOut:
    """Run one block over right-padded prompts; return `LayerOut`: hidden states, keys, values, statistics in `needs`.

    With `last`, only the last token's hidden state is computed. `table` holds the angles of positions 0 to S.
    """
    block = graphs.rebuild_block(leaves)
    batch, padded_len, _ = x.shape
    x, states = advance_states(block, x, block.make_empty_states(batch), length)
    q_positions = (length - needs.queries)[:, None] + jnp.arange(needs.queries, dtype=jnp.int32)

    at = jnp.maximum(q_positions, 0)
    window = compute_queries_at(block, x, at, table.gather_positions(at))
    size = choose_block_size(padded_len, _BLOCKS)
    extras = ExtraInputs()
    if needs.references:
        at = compute_reference_positions(length, needs.references)
        extras["references"] = compute_queries_at(block, x, at, table.gather_positions(at))
    if needs.moments is not None:
        extras["moments"] = compute_prompt_query_moments(block, x, length, needs.moments, size=size)
    if needs.blocks is not None:
        extras["blocks"] = sum_attention_in_blocks(block, x, length, table, needs.blocks)
    if needs.hidden:
        extras["hidden"] = block.normalise_for_attention(x)
    backend = get_attention_backend(implementation)
    config = block.config
    reach = block.spec.sliding_window
    attends = (
        backend
        if reach is None or backend.can.sliding_windows
        else get_attention_backend(Implementation.XLA)
    )
    run = _run_block_in_batch if attends.can.at_once else _run_block_by_sequence
    x, (k, v, *unrotated), sums = run(block, x, length, table, needs, last, attends)
    if needs.unrotated:
        extras["unrotated"] = unrotated[0]
    if sums is not None:
        extras["sums"] = sums.reshape(batch, config.kv_heads, config.group_size, padded_len)
    if last:
        final = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)
        seen = SegmentRanges.make_strided_ranges(
            jnp.broadcast_to(length[:, None], (batch, config.kv_heads)), padded_len
        )
        if reach is not None:
            start, held = restrict_to_window(seen.start, seen.length, reach)
            seen = SegmentRanges(start=start, length=held, walk=SegmentReadMode.WINDOWS)
        cached = get_attention_backend(fit_head_dim(implementation, k.shape[-1]))
        out, _ = cached.attend_to_segments(
            block.compute_rotated_queries(
                block.normalise_for_attention(final), table.gather_positions((length - 1)[:, None])
            )[..., 0, :],
            GatheredEntries(*(each.reshape(batch, -1, each.shape[-1]) for each in (k, v))),
            seen,
            shaping=block.logits_shaping,
        )
        x = block.apply_output_and_mlp(final, out[..., None, :])[:, 0]
    sinks = block.sink_logits
    if needs.norms:
        extras["norms"] = compute_value_norms(block, v)
    return LayerOut(
        x=x,
        k=k,
        v=v,
        q=window,
        q_positions=q_positions,
        extras=extras,
        sink_logits=None if sinks is None else jnp.broadcast_to(sinks, (batch, *sinks.shape)),
        states=states,
    )


def compute_queries_at(
    block: DecoderBlock, x: Float[Array, "B N E"], index: Int[Array, "B n"], by: RopeTables
) -> Float[Array, "B K G n D"]:
    """Return rotated queries of the tokens at `index` in hidden states `x`; `by` holds the angles of these tokens."""
    hidden = jnp.take_along_axis(x, index[..., None], axis=1)
    return block.compute_rotated_queries(block.normalise_for_attention(hidden), by)


def advance_states(
    block: DecoderBlock,
    x: Float[Array, "B N E"],
    states: tuple[DeltaState, ...],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B N E"], tuple[DeltaState, ...]]:
    """Run the layers with a state below a block over N right-padded tokens; return hidden states, and states after.

    `count` of the tokens are valid. Runs in blocks of tokens, as many as the longest sequence fills.
    """
    batch, tokens, _ = x.shape
    size = choose_prefill_block_size(tokens, batch)
    if not states or size == tokens:
        return block.advance_states(x, states, count)

    def run(index: Array, carry: tuple[Array, tuple[DeltaState, ...]]) -> tuple[Any, ...]:
        """Run a block of tokens; return all tokens' hidden states, and the states after it."""
        x, states = carry
        part = lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
        part, states = block.advance_states(part, states, count - index * size)
        return lax.dynamic_update_slice_in_dim(x, part, index * size, axis=1), states

    return lax.fori_loop(0, (count.max() + size - 1) // size, run, (x, states))


def compute_value_norms(block: DecoderBlock, v: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    """Return the float32 L1 norm of each value after the output projection, averaged over the kv head's query heads.

    Runs over blocks of entries, because each entry becomes G * E numbers.
    """
    batch, heads, padded_len, dim = v.shape
    size = choose_block_size(padded_len, _BLOCKS)
    weight = block.attention.get_value_projection().astype(v.dtype)

    def norms(part: Array) -> Array:
        seen = jnp.einsum("bksd,ekgd->bkgse", part, weight, preferred_element_type=jnp.float32)
        return jnp.abs(seen).sum(axis=-1).mean(axis=2)

    parts = jnp.moveaxis(v.reshape(batch, heads, padded_len // size, size, dim), 2, 0)
    local = jnp.moveaxis(lax.map(norms, parts), 0, 2).reshape(batch, heads, padded_len)
    return average_over_devices(local, "G", block.axes)


def _run_block_by_sequence(
    block: DecoderBlock,
    x: Array,
    length: Array,
    table: RopeTables,
    needs: Needs,
    last: bool,
    backend: AttentionBackend,
) -> tuple[Array, tuple[Array, ...], Array | None]:
    """Run one block by sequence, for CPUs; return hidden states (`x` if `last`), keys, values, attention sums or None.

    Runs as many blocks of tokens as a sequence fills, so padding costs memory but no time. The top block (`last`)
    returns its hidden states unchanged.
    """
    batch, padded_len, width = x.shape
    shaping = block.logits_shaping
    reach = block.spec.sliding_window
    size = choose_block_size(padded_len, _BLOCKS)
    blocks = (length + size - 1) // size
    attends = needs.sums or not last
    put = lax.dynamic_update_slice

    def sequence(row, carry):
        def project(index, carry):
            buffers, q = carry
            first = index * size
            by = table.slice_positions(first, size)
            normed = block.normalise_for_attention(
                lax.dynamic_slice(x, (row, first, 0), (1, size, width))
            )
            new = _project_keys_values(block, normed, by, needs.unrotated)
            buffers = tuple(
                put(to, what, (row, 0, first, 0)) for to, what in zip(buffers, new, strict=True)
            )
            return buffers, put(
                q, block.compute_prompt_queries(normed, by)[0], (0, 0, first, 0)
            ) if attends else q

        buffers, x, sums, q = carry
        buffers, q = lax.fori_loop(0, blocks[row], project, (buffers, q))
        k_row, v_row = (
            each[0] for each in block.expand_entries(*(each[row][None] for each in buffers[:2]))
        )

        def attend(index, carry):
            x, sums = carry
            # Keys and values are complete, so hidden states can be overwritten block by block.
            first = index * size
            mine = lax.dynamic_slice_in_dim(q, first, size, axis=2)
            alone = (length[row][None], first[None])
            out, lse = backend.compute_prefill_attention(
                mine[None], k_row[None], v_row[None], *alone, shaping=shaping, window=reach
            )
            if sums is not None:
                mass = backend.sum_attention_per_key(
                    mine[None], k_row[None], lse, *alone, shaping=shaping
                )
                sums = sums.at[row].add(mass[0])
            if not last:
                part = lax.dynamic_slice(x, (row, first, 0), (1, size, width))
                x = put(x, block.apply_prompt_output_and_mlp(part, out), (row, first, 0))
            return x, sums

        if attends:
            x, sums = lax.fori_loop(0, blocks[row], attend, (x, sums))
        return buffers, x, sums, q

    *heads, dim = block.prompt_shape
    sums = jnp.zeros((batch, *heads, padded_len), jnp.float32) if needs.sums else None
    # One sequence's queries, computed with its keys and values from the same norm.
    q = jnp.zeros((*heads, padded_len if attends else 0, dim), x.dtype)
    carry = (_allocate_keys_values(block, x, needs.unrotated), x, sums, q)
    buffers, x, sums, _ = lax.fori_loop(0, batch, sequence, carry)
    return x, buffers, sums


def _run_block_in_batch(
    block: DecoderBlock,
    x: Array,
    length: Array,
    table: RopeTables,
    needs: Needs,
    last: bool,
    backend: AttentionBackend,
) -> tuple[Array, tuple[Array, ...], Array | None]:
    """Run one block by batch (GPUs, TPUs); return hidden states (`x` if `last`), keys, values, attention sums or None.

    Attention is a single call; matrix products run in long blocks.
    """
    batch, padded_len, width = x.shape
    size = choose_prefill_block_size(padded_len, batch)
    config = block.config
    put = lax.dynamic_update_slice

    def normed(index):
        return block.normalise_for_attention(
            lax.dynamic_slice(x, (0, index * size, 0), (batch, size, width))
        )

    def project(index, buffers):
        new = _project_keys_values(
            block, normed(index), table.slice_positions(index * size, size), needs.unrotated
        )
        return tuple(
            put(to, what, (0, 0, index * size, 0)) for to, what in zip(buffers, new, strict=True)
        )

    # Every row is written before it is read.
    shape = (batch, config.kv_heads, padded_len, block.spec.get_entry_dim(config.head_dim))
    buffers = lax.fori_loop(
        0, padded_len // size, project, (lax.empty(shape, x.dtype),) * (3 if needs.unrotated else 2)
    )

    def queries(index, q):
        return put(
            q,
            block.compute_prompt_queries(normed(index), table.slice_positions(index * size, size)),
            (0, 0, 0, index * size, 0),
        )

    def finish(index, x):
        part = lax.dynamic_slice(x, (0, index * size, 0), (batch, size, width))
        mine = lax.dynamic_slice_in_dim(out, index * size, size, axis=3)
        return put(
            x,
            block.apply_prompt_output_and_mlp(part, mine, apart=backend.can.operands_apart),
            (0, index * size, 0),
        )

    sums = None
    if needs.sums or not last:
        k, v = block.expand_entries(*buffers[:2])
        *heads, dim = block.prompt_shape
        grouped = (batch, *heads, padded_len, dim)
        q = lax.fori_loop(0, padded_len // size, queries, lax.empty(grouped, x.dtype))
        out, lse = backend.compute_prefill_attention(
            q,
            k,
            v,
            length,
            lse=needs.sums,
            shaping=block.logits_shaping,
            window=block.spec.sliding_window,
        )
        sums = (
            backend.sum_attention_per_key(q, k, lse, length, shaping=block.logits_shaping)
            if needs.sums and lse is not None
            else None
        )
    if not last:
        x = lax.fori_loop(0, padded_len // size, finish, x)
    return x, buffers, sums


def _project_keys_values(
    block: DecoderBlock, normed: Array, by: RopeTables, unrotated: bool
) -> tuple[Array, ...]:
    """Return rotated keys and values of normed hidden states; with `unrotated`, also the keys before RoPE."""
    raw, v = block.compute_keys_values(normed)
    k = block.rotate_keys(raw, by, normed.dtype)
    return (k, v, raw.astype(normed.dtype)) if unrotated else (k, v)


def _allocate_keys_values(block: DecoderBlock, x: Array, unrotated: bool) -> tuple[Array, ...]:
    """Return zero arrays `[B, K, S, D]` for keys and values, and a third for keys before RoPE if `unrotated`."""
    config = block.config
    dim = block.spec.get_entry_dim(config.head_dim)
    buffer = jnp.zeros((x.shape[0], config.kv_heads, x.shape[1], dim), x.dtype)
    return (buffer,) * (3 if unrotated else 2)
