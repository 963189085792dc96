"""Statistics of queries: mean and covariance (ExpectedAttention), pairs (TriAttention), attention within blocks."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import attention
from jaxkv.attention.xla import exact_einsum
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.rope import (
    RopeTables,
    apply_rope,
    compute_pair_norms,
    compute_rope_frequencies,
    compute_rope_tables,
)
from jaxkv.models.values import Rope
from jaxkv.policies.scorer import (
    BlockAttention,
    FutureQuerySettings,
    QueryMoments,
    QueryPairs,
    QueryPairSettings,
)
from jaxkv.sharding.collectives import slice_own_shard
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit


class _QueryStatistics(NamedTuple):
    """Float32 query statistics: count `[B]`, mean `[B, K, G, D]`; summed outer products about the mean, or None."""

    number: Float[Array, " B"]
    mean: Float[Array, "B K G D"]
    outer: Float[Array, "B K G D D"] | None


def compute_prompt_query_moments(
    block: DecoderBlock,
    x: Float[Array, "B S E"],
    length: Int[Array, " B"],
    needs: FutureQuerySettings,
    *,
    size: int,
) -> QueryMoments:
    """Return `QueryMoments` per head of prompts' queries past `skip`: mean, any covariance, rotated to later positions.

    Queries are projected from `x`, the hidden states before the block, `size` tokens of each prompt at a time. `size`
    is a divisor of S.
    """
    config = block.config
    batch, _, width = x.shape
    shape = (batch, config.kv_heads, config.group_size, config.head_dim)
    outer = jnp.zeros((*shape, config.head_dim), jnp.float32) if needs.covariance else None
    nothing = _QueryStatistics(
        jnp.zeros((batch,), jnp.float32), jnp.zeros(shape, jnp.float32), outer
    )

    def add(index: Int[Array, ""], sums: _QueryStatistics) -> _QueryStatistics:
        first = index * size
        part = block.normalise_for_attention(
            lax.dynamic_slice(x, (0, first, 0), (batch, size, width))
        )
        position = first + jnp.arange(size, dtype=jnp.int32)
        counts = (position >= needs.skip) & (position < length[:, None])
        return _merge_query_statistics(
            sums, _compute_query_statistics(block.compute_unrotated_queries(part), counts, needs)
        )

    blocks = (length.max() + size - 1) // size
    return _rotate_to_future_positions(
        lax.fori_loop(0, blocks, add, nothing), length, block.spec.rope, needs
    )


def sum_attention_in_blocks(
    block: DecoderBlock,
    x: Float[Array, "B S E"],
    length: Int[Array, " B"],
    table: RopeTables,
    needs: BlockAttention,
) -> Float[Array, "B K G S"]:
    """Return attention `f32[B, K, G, S]` to each key, summed over its own block's queries; 0 before `needs.first`."""
    padded_len = x.shape[1]
    size = needs.compute_block_size(padded_len)

    def of_block(index: Int[Array, ""]) -> Float[Array, "B K G T"]:
        position = needs.first + index * size + jnp.arange(size, dtype=jnp.int32)
        at = jnp.minimum(position, padded_len - 1)
        normed = block.normalise_for_attention(jnp.take(x, at, axis=1))
        by = table.gather_positions(at[None])
        k = block.rotate_keys(block.compute_keys_values(normed)[0], by, normed.dtype)
        inside = position < (length - needs.last)[:, None]
        return attention.sum_attention_in_block(
            block.compute_rotated_queries(normed, by), k, inside, zeros=needs.zeros
        )

    count = max(1, -(-(padded_len - needs.first) // size))
    sums = jnp.moveaxis(lax.map(of_block, jnp.arange(count, dtype=jnp.int32)), 0, 3)
    sums = jnp.pad(sums.reshape(*sums.shape[:3], -1), ((0, 0), (0, 0), (0, 0), (needs.first, 0)))
    return sums[..., :padded_len]


def compute_last_query_moments(
    q: Float[Array, "B K G w D"], seen: Int[Array, " B"], rope: Rope, needs: FutureQuerySettings
) -> QueryMoments:
    """Return the `QueryMoments` of the last w queries per head: mean, optional covariance, rotated to later positions.

    The queries are at positions `seen - w` to `seen`. Queries of negative positions may hold any finite values.
    """
    position = seen[:, None] + jnp.arange(-q.shape[3], 0, dtype=jnp.int32)
    sums = _compute_query_statistics(
        _undo_query_rope(q, position, rope), position >= needs.skip, needs
    )
    return _rotate_to_future_positions(sums, seen, rope, needs)


@sharded_jit(static=("needs", "rope", "heads", "axes"))
def compute_query_pairs(
    q: Float[Array, "B K G w D"] | None,
    seen: Int[Array, " B"],
    layer: Int[Array, ""],
    *,
    needs: QueryPairSettings,
    rope: Rope,
    heads: int,
    axes: ShardingMesh | None = None,
) -> QueryPairs:
    """Compiled: return `QueryPairs` after `seen` tokens, from the model's statistics, else from the last w queries.

    `heads` is K of the whole model, `layer` the layer's index. Queries are as in `compute_last_query_moments`. The
    factor that some ropes give to queries by their position is left out: it is the same for all entries.
    """
    if needs.statistics:
        of_layer = jnp.asarray(needs.statistics.host_arrays)[layer]
        by_head = of_layer.reshape(1, heads, -1, of_layer.shape[-1])
        mine = slice_own_shard(slice_own_shard(by_head, "K", 1, axes), "G", 2, axes)
        both = jnp.repeat(mine, len(seen), axis=0)
    else:
        assert q is not None
        position = seen[:, None] + jnp.arange(-q.shape[3], 0, dtype=jnp.int32)
        both = average_queries(q, position, rope)
    dim = both.shape[-1] * 2 // 3
    frequencies, factors = compute_rope_frequencies(rope, dim)
    # Distances 1, 2, 4, ..., 65536 past the text's end; in float64, because their angles are large.
    turns = np.exp(1j * 2 ** np.arange(17)[:, None] * frequencies).mean(axis=0, keepdims=True)[None]
    cos, sin = jnp.asarray([turns.real, turns.imag], jnp.float32)
    now = compute_rope_tables(seen[:, None], rope, dim)
    mean = both[..., None, :dim]
    excess = both[..., dim:] - compute_pair_norms(both[..., :dim])
    return QueryPairs(
        mean=apply_rope(apply_rope(mean, RopeTables(cos=cos, sin=sin)), now)[..., 0, :],
        excess=excess * jnp.asarray(factors, jnp.float32),
    )


def average_queries(
    q: Float[Array, "B K G w D"], position: Int[Array, "B w"], rope: Rope
) -> Float[Array, "B K G W"]:
    """Return the mean of queries before RoPE and the mean norms of their channel pairs, W = D + D/2 numbers per head.

    Queries of negative positions are left out.
    """
    unrotated = _undo_query_rope(q.astype(jnp.float32), position, rope)
    both = jnp.concatenate([unrotated, compute_pair_norms(unrotated)], axis=-1)
    return both.mean(axis=3, where=(position >= 0)[:, None, None, :, None])


def _undo_query_rope(
    q: Float[Array, "B K G w D"], position: Int[Array, "B w"], rope: Rope
) -> Float[Array, "B K G w D"]:
    """Return queries before RoPE and its factors; those of negative positions are arbitrary."""
    by = compute_rope_tables(jnp.maximum(position, 0), rope, q.shape[-1]).scale_for_queries()
    # Cosine and sine include all factors: dividing by their square inverts rotation and factors.
    square = by.cos**2 + by.sin**2
    return apply_rope(q, RopeTables(cos=by.cos / square, sin=-by.sin / square))


def _compute_query_statistics(
    q: Float[Array, "B K G N D"], counts: Bool[Array, "B N"], needs: FutureQuerySettings
) -> _QueryStatistics:
    """Return count, mean and summed outer products about the mean of the queries `q` in mask `counts`."""
    weight = counts.astype(jnp.float32)[:, None, None, :, None]
    number = counts.sum(axis=1).astype(jnp.float32)
    wide = q.astype(jnp.float32)
    mean = (wide * weight).sum(axis=3) / jnp.maximum(number, 1.0)[:, None, None, None]
    off = (wide - mean[..., None, :]) * weight
    product = exact_einsum("bkgni,bkgnj->bkgij", off, off)
    return _QueryStatistics(number, mean, product if needs.covariance else None)


def _merge_query_statistics(one: _QueryStatistics, other: _QueryStatistics) -> _QueryStatistics:
    """Merge two `_QueryStatistics` into those of both sets of queries (Chan et al., 1983)."""
    number = one.number + other.number
    share = (other.number / jnp.maximum(number, 1.0))[:, None, None, None]
    off = other.mean - one.mean
    mean = one.mean + off * share
    if one.outer is None or other.outer is None:
        return _QueryStatistics(number, mean, None)
    between = (
        (one.number[:, None, None, None] * share)[..., None] * off[..., :, None] * off[..., None, :]
    )
    return _QueryStatistics(number, mean, one.outer + other.outer + between)


def _rotate_to_future_positions(
    sums: _QueryStatistics, seen: Int[Array, " B"], rope: Rope, needs: FutureQuerySettings
) -> QueryMoments:
    """Return the `QueryMoments` of unrotated `_QueryStatistics`, rotated by the mean RoPE of later positions."""
    ahead = seen[:, None] + jnp.arange(needs.positions, dtype=jnp.int32)
    each = compute_rope_tables(ahead, rope, sums.mean.shape[-1]).scale_for_queries()
    by = RopeTables(
        cos=each.cos.mean(axis=1, keepdims=True), sin=each.sin.mean(axis=1, keepdims=True)
    )
    mean = apply_rope(sums.mean[..., None, :], by)[..., 0, :]
    if sums.outer is None:
        return QueryMoments(mean=mean, covariance=None)
    covariance = sums.outer / jnp.maximum(sums.number, 1.0)[:, None, None, None, None]
    half = jnp.swapaxes(apply_rope(covariance, by), -1, -2)
    return QueryMoments(mean=mean, covariance=apply_rope(half, by))
