"""New tokens of a decode step: positions, projections, RoPE angles, and attention to a pool."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv._checks import require_shape_and_dtype
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention.steps import UnrotatedProjections
from jaxkv.cache import CacheArrays
from jaxkv.engine.hadamard import apply_hadamard, centre_and_transform_keys
from jaxkv.engine.lengths import QUERY_BLOCK
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.decoder_blocks import DecoderBlock
from jaxkv.models.rope import RopeTables, apply_rope, compute_rope_tables
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.models.values import LayerSpec, Rope
from jaxkv.policies.parts import DecodingCompressionConfig
from jaxkv.sharding.mesh import place_dataclass_on_mesh


class SelectionBounds(NamedTuple):
    """Per sequence, the number of positions (`budget`) that filter layers select, all of them less than `below`."""

    below: Int[Array, " B"]
    budget: Int[Array, " B"]


@frozen_dataclass
class NewTokens:
    """The N new tokens per sequence of a step, for all layers: positions, valid counts, `SelectionBounds`.

    `candidates` bounds the positions that filter layers select from.
    """

    positions: Int[Array, "B N"]
    count: Int[Array, " B"]
    candidates: SelectionBounds | None = None


@jax.tree_util.register_dataclass
@frozen_dataclass
class TokenProjections:
    """Queries and keys (after RoPE) and values of N new tokens in one block; `stored`: keys as pools hold them.

    `begun` are the initial scores of new entries, None if unknown. `split` are the inputs of a fused step; None in
    other steps.
    """

    q: Float[Array, "B K G N D"]
    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    stored: Float[Array, "B K N D"]
    begun: Float[Array, "B K N"] | None = None
    split: UnrotatedProjections | None = None

    def transform_projections(self, centre: Float[Array, "B K D"]) -> "TokenProjections":
        """Return new tokens' projections, Hadamard-transformed: queries, values, and keys minus `centre`."""
        k = centre_and_transform_keys(self.k, centre)
        return dataclasses.replace(
            self, q=apply_hadamard(self.q), k=k, v=apply_hadamard(self.v), stored=k
        )

    def cast_to_dtype(self, dtype: jnp.dtype) -> "TokenProjections":
        """Return new tokens' projections with queries, keys and values cast to the pool's `dtype`."""
        names = ("q", "k", "v", "stored")
        return dataclasses.replace(
            self, **{name: getattr(self, name).astype(dtype) for name in names}
        )

    def arrange_for_fused_step(
        self, sequences: int
    ) -> tuple[Float[Array, "one M K G D"], Float[Array, "one M two K D"]]:
        """Return float32 `q[1, M, K, G, D]` and `kv[1, M, 2, K, D]` of one token, padded to M = `sequences`."""
        q = self.q[..., 0, :]
        kv = jnp.stack([self.k[:, :, 0], self.v[:, :, 0]], axis=1)
        wide = ((0, sequences - q.shape[0]), *((0, 0),) * 3)
        return jnp.pad(q.astype(jnp.float32), wide)[None], jnp.pad(kv.astype(jnp.float32), wide)[
            None
        ]


def project_new_tokens(
    block: DecoderBlock, spec: DecodeSpec, normed: Float[Array, "B N E"], by: RopeTables
) -> TokenProjections:
    """Return the `TokenProjections` of new tokens from normed hidden states: rotated queries and keys, values."""
    raw, v = block.compute_keys_values(normed)
    k = block.rotate_keys(raw, by, normed.dtype)
    stored = raw.astype(normed.dtype) if spec.rolling else k
    return TokenProjections(q=block.compute_rotated_queries(normed, by), k=k, v=v, stored=stored)


def sum_token_projections(
    q: Float[Array, "n M K G D"], kv: Float[Array, "n M two K D"], by: RopeTables, dtype: jnp.dtype
) -> TokenProjections:
    """Sum split-K partial q, k and v of a token per sequence, rotate q and k; return `TokenProjections`."""
    batch = by.cos.shape[0]
    q = by.scale_partial_queries(q)
    query = q.sum(axis=0)[:batch]
    both = kv.sum(axis=0)[:batch]
    k = apply_rope(both[:, 0, :, None], by, dtype)
    return TokenProjections(
        q=apply_rope(query[..., None, :], by, dtype),
        k=k,
        v=both[:, 1, :, None].astype(dtype),
        stored=k,
        split=UnrotatedProjections(q, kv, by.cos[:, 0], by.sin[:, 0]),
    )


def attend_in_blocks(
    attend: Callable[[Array], tuple[Array, Array]], q: Float[Array, "B K G N D"]
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Return output and log-sum-exp of `attend`, called on blocks of at most `QUERY_BLOCK` query tokens.

    `attend` accepts queries `[B, K, G * N, D]`.
    """
    batch, heads, group, tokens, dim = q.shape
    size = min(tokens, QUERY_BLOCK)

    def one(part: Array) -> tuple[Array, Array]:
        out, lse = attend(part.reshape(batch, heads, group * size, dim))
        return out.reshape(part.shape), lse.reshape(part.shape[:-1])

    if size == tokens:
        return one(q)
    wide = jnp.pad(q, (*((0, 0),) * 3, (0, -tokens % size), (0, 0))) if tokens % size else q
    parts = jnp.moveaxis(wide.reshape(batch, heads, group, -1, size, dim), 3, 0)
    out, lse = (jnp.moveaxis(each, 0, 3) for each in lax.map(one, parts))
    return out.reshape(wide.shape)[:, :, :, :tokens], lse.reshape(wide.shape[:-1])[..., :tokens]


def compute_first_scores(
    token: TokenProjections, ongoing: DecodingCompressionConfig
) -> Float[Array, "B K N"] | None:
    """Return the first scores `[B, K, N]` of new entries, by a gate or the rank; None if pools have no scores."""
    if not ongoing.stores_scores:
        return None
    if token.begun is not None:
        return token.begun
    begun = ongoing.rank.score_new_entries(token.stored, token.v)
    return require_shape_and_dtype(
        ongoing.rank, "score_new_entries", begun, token.v.shape[:3], "new entry, [B, K, N]"
    )


@partial(jax.jit, static_argnames=("padded_len", "rope", "dim"))
def _compute_position_angles(*, padded_len: int, rope: Rope, dim: int) -> RopeTables:
    """Compiled: return rotary angles (cos, sin) of positions 0 to `padded_len` - 1."""
    return compute_rope_tables(jnp.arange(padded_len, dtype=jnp.int32)[None], rope, dim)


def compute_angles_by_rope(flat: SplitDecoder, padded_len: int) -> dict[Rope, RopeTables]:
    """Return a dict from each rotary embedding of the model to its angles at positions 0 to `padded_len` - 1."""
    specs = map(flat.config.get_layer_spec, range(flat.config.layers))
    dims = {spec.rope: spec.get_head_dim(flat.config.head_dim) for spec in specs}
    return {
        rope: place_dataclass_on_mesh(
            _compute_position_angles(padded_len=padded_len, rope=rope, dim=dim), flat.axes
        )
        for rope, dim in dims.items()
    }


class StepAngles(NamedTuple):
    """RoPE angles of one layer in a step: of the new tokens, and of the pool's keys if these are unrotated."""

    new: RopeTables
    rows: RopeTables | None = None

    @property
    def key_rotation(self) -> Callable[[Array], Array] | None:
        """Function that rotates keys `[B, P, D]` before attention; None if pools hold rotated keys."""
        return None if self.rows is None else partial(rotate_pool_keys, by=self.rows)


def compute_step_angles(
    spec: DecodeSpec, kinds: Sequence[LayerSpec], positions: Int[Array, "B N"], cache: CacheArrays
) -> list[StepAngles]:
    """Return a list of each layer's `StepAngles`; layers with equal RoPE share arrays.

    Rolling positions are places within the cache. `cache` is the state before the step, used with rolling positions
    only.
    """
    ropes = [kind.rope for kind in kinds]
    if not spec.rolling:
        dims = {kind.rope: kind.get_head_dim(spec.config.head_dim) for kind in kinds}
        by_rope = {
            rope: StepAngles(compute_rope_tables(positions, rope, dim))
            for rope, dim in dims.items()
        }
        return [by_rope[rope] for rope in ropes]
    angles_at = partial(compute_rope_tables, head_dim=spec.config.head_dim)
    tables = cache.tables
    heads = cache.tables.start.shape[2]
    sizes = [pool.row_count // heads for pool in cache.pools]
    distinct = dict.fromkeys(zip(sizes, ropes, strict=True))
    of_rows = {
        (size, rope): angles_at(jnp.arange(size, dtype=jnp.int32)[None], rope)
        for size, rope in distinct
    }
    # Positions roll only if all heads of a sequence hold the same entries, so any head's length applies.
    lengths = [length[:, :1] for length in tables.length]
    ahead = positions - tables.seen[:, None]
    return [
        StepAngles(angles_at(length + ahead, rope), of_rows[size, rope])
        for length, size, rope in zip(lengths, sizes, ropes, strict=True)
    ]


def rotate_pool_keys(keys: Float[Array, "B P D"], by: RopeTables) -> Float[Array, "B P D"]:
    """Rotate a pool's keys `[B, P, D]` by their places within their segments, which have equal sizes."""
    batch, rows, dim = keys.shape
    return apply_rope(keys.reshape(batch, -1, by.cos.shape[1], dim), by).reshape(keys.shape)
