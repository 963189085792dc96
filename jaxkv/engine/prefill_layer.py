"""One block of the decoder over whole prompts, in blocks of tokens."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxkv import attention
from jaxkv.attention import Implementation, over_rows
from jaxkv.attention.xla import Walk, as_bits, from_bits
from jaxkv.engine.moments import prompt_moments
from jaxkv.engine.plan import QUERY_BLOCK, TOKENS_AT_ONCE
from jaxkv.models.decoder import Block, Graphs, Leaves
from jaxkv.models.rope import Angles, rotate
from jaxkv.policies.scorer import Needs, QueryMoments
from jaxkv.sharding.collectives import mean_of_devices


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "k", "v", "unrotated", "q", "q_positions", "sums", "norms", "moments"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOut:
    """One layer's yield.

    Attributes:
        x: `[B, S, E]` hidden states for the next layer; after the last layer `[B, E]`, the last token's.
        k: `[B, K, S, D]` rotated keys.
        v: `[B, K, S, D]` values.
        unrotated: keys before RoPE where the policy stores those, else None.
        q: `[B, K, G, w, D]` rotated queries of the last w tokens.
        q_positions: `i32[B, w]` their positions; negative ones do not exist.
        sums: `f32[B, K, G, S]` attention each key receives from all queries, if asked for.
        norms: `f32[B, K, S]` L1 norms of values at the layer's output, mean over the group, if asked for.
        moments: mean and covariance of queries, one for each of the settings asked for.
    """

    x: Shaped[Array, "B ..."]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    unrotated: Float[Array, "B K S D"] | None
    q: Float[Array, "B K G w D"]
    q_positions: Int[Array, "B w"]
    sums: Float[Array, "B K G S"] | None
    norms: Float[Array, "B K S"] | None
    moments: tuple[QueryMoments, ...] = ()


def layer(
    leaves: Leaves,
    x: Float[Array, "B S E"],
    length: Int[Array, " B"],
    table: Angles,
    *,
    graphs: Graphs,
    needs: Needs,
    last: bool,
    implementation: Implementation,
) -> LayerOut:
    """Runs one block over whole prompts.

    Args:
        leaves: the block's parameters.
        x: hidden states, donated.
        length: tokens of each sequence.
        table: angles of positions 0 to S, the same for all layers.
        graphs: the decoder's static half.
        needs: what to return beside hidden states, keys and values.
        last: this is the top block: only the last token's hidden state is wanted.
        implementation: what computes attention.

    Returns:
        The layer's yield.
    """
    block = graphs.block(leaves)
    batch, slots, _ = x.shape
    q_positions = (length - needs.queries)[:, None] + jnp.arange(needs.queries, dtype=jnp.int32)
    at = jnp.maximum(q_positions, 0)
    window = block.queries(block.normed(jnp.take_along_axis(x, at[..., None], axis=1)), table.at(at))
    size = _block(slots, (512, QUERY_BLOCK))
    moments = tuple(prompt_moments(block, x, length, asked, size=size) for asked in needs.future)
    if implementation is Implementation.XLA:
        x, k, v, unrotated, sums = _by_sequence(block, x, length, table, needs, last)
    else:
        x, k, v, unrotated, sums = _at_once(block, x, length, table, needs, last, implementation)
    if last:
        config = block.config
        final = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)
        heads = jnp.arange(config.kv_heads, dtype=jnp.int32)
        out, _ = attention.over_pool(
            block.queries(block.normed(final), table.at((length - 1)[:, None]))[..., 0, :],
            k.reshape(batch, -1, config.head_dim),
            v.reshape(batch, -1, config.head_dim),
            jnp.broadcast_to(heads * slots, (batch, config.kv_heads)),
            jnp.broadcast_to(length[:, None], (batch, config.kv_heads)),
            walk=Walk.STRIDES,
            implementation=over_rows(implementation),
        )
        x = block.finish(final, out[..., None, :])[:, 0]
    return LayerOut(
        x=x,
        k=k,
        v=v,
        unrotated=unrotated,
        q=window,
        q_positions=q_positions,
        sums=sums,
        norms=value_norms(block, v) if needs.norms else None,
        moments=moments,
    )


def value_norms(block: Block, v: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    """L1 norms of values seen through the output projection, mean over the query heads that read them.

    Args:
        block: whose projection it is.
        v: values.

    Returns:
        The norms, float32; a block of rows at a time, because each row becomes G times E numbers.
    """
    batch, heads, slots, dim = v.shape
    size = _block(slots, (512, QUERY_BLOCK))
    weight = block.attention.out[...].reshape(-1, heads, block.config.group, dim)

    def norms(part: Array) -> Array:
        seen = jnp.einsum("bksd,ekgd->bkgse", part, weight, preferred_element_type=jnp.float32)
        return jnp.abs(seen).sum(axis=-1).mean(axis=2)

    parts = jnp.moveaxis(v.reshape(batch, heads, slots // size, size, dim), 2, 0)
    mine = jnp.moveaxis(lax.map(norms, parts), 0, 2).reshape(batch, heads, slots)
    return mean_of_devices(mine, "G", block.axes)


def _by_sequence(block: Block, x: Array, length: Array, table: Angles, needs: Needs, last: bool):
    """One sequence after the other, as many blocks as it has: padding costs memory but no time. For a CPU.

    Returns x after the block (as it came, if last), K, V, and un-rotated keys and sums or None.
    """
    config, (batch, slots, width) = block.config, x.shape
    size = _block(slots, (512, QUERY_BLOCK))
    blocks = (length + size - 1) // size
    attends = needs.sums or not last

    def sequence(row, carry):
        def project(index, carry):
            buffers, q = carry
            first = index * size
            by = table.block(first, size)
            normed = block.normed(_take(x, (row, first, 0), (1, size, width)))
            new = _keys_values(block, normed, by, needs.unrotated)
            buffers = tuple(_put(to, what, (row, 0, first, 0)) for to, what in zip(buffers, new, strict=True))
            return buffers, _put(q, block.queries(normed, by)[0], (0, 0, first, 0)) if attends else q

        buffers, x, sums, q = carry
        buffers, q = lax.fori_loop(0, blocks[row], project, (buffers, q))
        k_row, v_row = (from_bits(as_bits(each)[row], x.dtype) for each in buffers[:2])

        def attend(index, carry):
            x, sums = carry
            # K and V are complete, so hidden states can be overwritten block by block.
            first = index * size
            mine = _take(q, (0, 0, first, 0), (*q.shape[:2], size, q.shape[3]))
            out, lse = attention.causal(mine, k_row, v_row, first)
            if sums is not None:
                position = first + jnp.arange(size, dtype=jnp.int32)
                real = jnp.where(position < length[row], lse, jnp.inf)
                sums = sums.at[row].add(attention.column_sums(mine, k_row, real, first))
            if not last:
                part = _take(x, (row, first, 0), (1, size, width))
                x = _put(x, block.finish(part, out[None]), (row, first, 0))
            return x, sums

        if attends:
            x, sums = lax.fori_loop(0, blocks[row], attend, (x, sums))
        return buffers, x, sums, q

    sums = jnp.zeros((batch, config.kv_heads, config.group, slots), jnp.float32) if needs.sums else None
    # One sequence's queries: made with its keys and values, from one norm.
    q = jnp.zeros((config.kv_heads, config.group, slots if attends else 0, config.head_dim), x.dtype)
    carry = (_buffers(block, x, needs.unrotated), x, sums, q)
    (k, v, *unrotated), x, sums, _ = lax.fori_loop(0, batch, sequence, carry)
    return x, k, v, unrotated[0] if unrotated else None, sums


def _at_once(
    block: Block, x: Array, length: Array, table: Angles, needs: Needs, last: bool, implementation: Implementation
):
    """All sequences together, attention in one call, the matrix products in long blocks. For a GPU."""
    batch, slots, width = x.shape
    # Long blocks fill the device; the MLP's float32 product of a block, 2 F wide, bounds them.
    sizes = (size for size in (2048, 1024, 512) if size * batch <= TOKENS_AT_ONCE)
    size = _block(slots, (*sizes, QUERY_BLOCK))
    config = block.config

    def normed(index):
        return block.normed(lax.dynamic_slice(x, (0, index * size, 0), (batch, size, width)))

    def project(index, buffers):
        new = _keys_values(block, normed(index), table.block(index * size, size), needs.unrotated)
        return tuple(_put(to, what, (0, 0, index * size, 0)) for to, what in zip(buffers, new, strict=True))

    k, v, *unrotated = lax.fori_loop(0, slots // size, project, _buffers(block, x, needs.unrotated))

    def queries(index, q):
        return _put(q, block.queries(normed(index), table.block(index * size, size)), (0, 0, 0, index * size, 0))

    def finish(index, x):
        part = lax.dynamic_slice(x, (0, index * size, 0), (batch, size, width))
        return _put(
            x, block.finish(part, lax.dynamic_slice_in_dim(out, index * size, size, axis=3)), (0, index * size, 0)
        )

    sums = None
    if needs.sums or not last:
        shape = (batch, config.kv_heads, config.group, slots, config.head_dim)
        q = lax.fori_loop(0, slots // size, queries, jnp.zeros(shape, x.dtype))
        out, sums = attention.prompts(q, k, v, length, sums=needs.sums, implementation=implementation)
    if not last:
        x = lax.fori_loop(0, slots // size, finish, x)
    return x, k, v, unrotated[0] if unrotated else None, sums


def _keys_values(block: Block, normed: Array, by: Angles, unrotated: bool) -> tuple[Array, ...]:
    raw, v = block.keys_values(normed)
    k = rotate(raw, by, normed.dtype)
    return (k, v, raw.astype(normed.dtype)) if unrotated else (k, v)


def _buffers(block: Block, x: Array, unrotated: bool) -> tuple[Array, ...]:
    config = block.config
    buffer = jnp.zeros((x.shape[0], config.kv_heads, x.shape[1], config.head_dim), x.dtype)
    return (buffer,) * (3 if unrotated else 2)


def _take(of: Array, at: tuple, sizes: tuple[int, ...]) -> Array:
    return from_bits(lax.dynamic_slice(as_bits(of), at, sizes), of.dtype)


def _put(to: Array, what: Array, at: tuple) -> Array:
    return from_bits(lax.dynamic_update_slice(as_bits(to), as_bits(what), at), to.dtype)


def _block(slots: int, sizes: tuple[int, ...]) -> int:
    # On a CPU, 512 queries at a time keep the products large and the logits of one kv head inside a core's cache.
    return next((size for size in sizes if slots % size == 0), slots)
