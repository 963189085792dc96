"""New tokens of a decode step: positions, projections, RoPE angles, and attention to a pool."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv._checks import checked
from jaxkv.attention.steps import Unrotated
from jaxkv.cache import Cache
from jaxkv.engine.hadamard import stored_keys, transformed
from jaxkv.engine.lengths import QUERY_BLOCK
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Block, Flat
from jaxkv.models.rope import Angles, angles, rotate
from jaxkv.models.values import LayerSpec, Rope
from jaxkv.policies.parts import Ongoing
from jaxkv.sharding.mesh import settle_down


class Choosable(NamedTuple):
    """Per sequence, the `budget` of positions that filter layers select, among positions less than `below`."""

    below: Int[Array, " B"]
    budget: Int[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """A step's N new tokens, the same for all layers: positions, number of valid ones, candidates.

    `candidates` bounds the positions that filter layers select from.
    """

    positions: Int[Array, "B N"]
    count: Int[Array, " B"]
    candidates: Choosable | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """Queries and keys (both after RoPE) and values of N new tokens in one block; `stored`: keys as pools hold them.

    `begun` are the initial scores of new entries, None if unknown. `split` are the inputs of a fused step; None in
    other steps.
    """

    q: Float[Array, "B K G N D"]
    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    stored: Float[Array, "B K N D"]
    begun: Float[Array, "B K N"] | None = None
    split: Unrotated | None = None

    def transformed(self, centre: Float[Array, "B K D"]) -> "Token":
        """Return the token for caches of transformed entries, whose keys have `centre` subtracted."""
        k = stored_keys(self.k, centre)
        return dataclasses.replace(
            self, q=transformed(self.q), k=k, v=transformed(self.v), stored=k
        )

    def widened(self, dtype: jnp.dtype) -> "Token":
        """Return the token with queries, keys and values in the dtype of its pool."""
        names = ("q", "k", "v", "stored")
        return dataclasses.replace(
            self, **{name: getattr(self, name).astype(dtype) for name in names}
        )

    def parts(
        self, sequences: int
    ) -> tuple[Float[Array, "one M K G D"], Float[Array, "one M two K D"]]:
        """Return queries, and keys with values, of one new token each for a fused step, padded to `sequences`."""
        q, kv = self.q[..., 0, :], jnp.stack([self.k[:, :, 0], self.v[:, :, 0]], axis=1)
        wide = ((0, sequences - q.shape[0]), *((0, 0),) * 3)
        return jnp.pad(q.astype(jnp.float32), wide)[None], jnp.pad(kv.astype(jnp.float32), wide)[
            None
        ]


def project(block: Block, spec: Spec, normed: Float[Array, "B N E"], by: Angles) -> Token:
    """Return rotated queries, rotated keys and values of new tokens from normed hidden states."""
    raw, v = block.keys_values(normed)
    k = rotate(raw, by, normed.dtype)
    stored = raw.astype(normed.dtype) if spec.rolling else k
    return Token(q=block.queries(normed, by), k=k, v=v, stored=stored)


def token_of_parts(
    q: Float[Array, "n M K G D"], kv: Float[Array, "n M two K D"], by: Angles, dtype: jnp.dtype
) -> Token:
    """Return the rotated query and key and the value of one new token from split-K partial sums of projections."""
    batch = by.cos.shape[0]
    query, both = q.sum(axis=0)[:batch], kv.sum(axis=0)[:batch]
    k = rotate(both[:, 0, :, None], by, dtype)
    return Token(
        q=rotate(query[..., None, :], by, dtype),
        k=k,
        v=both[:, 1, :, None].astype(dtype),
        stored=k,
        split=Unrotated(q, kv, by.cos[:, 0], by.sin[:, 0]),
    )


def in_blocks(
    attend: Callable[[Array], tuple[Array, Array]], q: Float[Array, "B K G N D"]
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Return attention output and log-sum-exp, computed by `attend` on blocks of at most `QUERY_BLOCK` query tokens.

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


def first_scores(token: Token, ongoing: Ongoing) -> Float[Array, "B K N"] | None:
    """Return the initial scores of new entries, from a gate or the rank's `begin`; None if the pool has no scores."""
    if not ongoing.scored:
        return None
    if token.begun is not None:
        return token.begun
    begun = ongoing.rank.begin(token.stored, token.v)
    return checked(ongoing.rank, "begin", begun, token.v.shape[:3], "new entry, [B, K, N]")


def remembered(
    query_buffer: Float[Array, "B K G R D"], q: Float[Array, "B K G N D"], new: NewTokens
) -> Float[Array, "B K G R D"]:
    """Write the valid new tokens' queries into a query buffer, that of position p at index p % R."""
    batch, rows, tokens = query_buffer.shape[0], query_buffer.shape[3], q.shape[3]
    offset, count = jnp.arange(tokens, dtype=jnp.int32), new.count
    # If there are more queries than places, only the last ones count.
    real = (offset < count[:, None]) & (offset >= count[:, None] - rows)
    slot = jnp.where(real, new.positions % rows, rows)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    by_token = jnp.moveaxis(q, 3, 1).astype(query_buffer.dtype)
    return query_buffer.at[index, :, :, slot].set(by_token, mode="drop", unique_indices=True)


@partial(jax.jit, static_argnames=("padded_len", "rope", "dim"))
def _angles_of(*, padded_len: int, rope: Rope, dim: int) -> Angles:
    """Compiled: return rotary angles (cos, sin) of positions 0 to `padded_len` - 1."""
    return angles(jnp.arange(padded_len, dtype=jnp.int32)[None], rope, dim)


def angles_by_rope(flat: Flat, padded_len: int) -> dict[Rope, Angles]:
    """Return the angles of each rotary embedding of the model at positions 0 to `padded_len` - 1."""
    ropes = dict.fromkeys(flat.config.spec_of(layer).rope for layer in range(flat.config.layers))
    dim = flat.config.head_dim
    return {
        rope: settle_down(_angles_of(padded_len=padded_len, rope=rope, dim=dim), flat.axes)
        for rope in ropes
    }


class StepAngles(NamedTuple):
    """A layer's RoPE angles in a step: for new tokens, and for unrotated keys of the pool."""

    new: Angles
    rows: Angles | None = None

    @property
    def turning(self) -> Callable[[Array], Array] | None:
        """Function that rotates keys `[B, P, D]` before attention; None if pools hold rotated keys."""
        return None if self.rows is None else partial(rolled, by=self.rows)


def step_angles(
    spec: Spec, kinds: Sequence[LayerSpec], positions: Int[Array, "B N"], cache: Cache
) -> list[StepAngles]:
    """Return each layer's `StepAngles`; layers with equal RoPE share arrays.

    Rolling positions are places within the cache. `cache` is the state before the step, used with rolling positions
    only.
    """
    angles_at = partial(angles, head_dim=spec.config.head_dim)
    ropes = [kind.rope for kind in kinds]
    if not spec.rolling:
        by_rope = {rope: StepAngles(angles_at(positions, rope)) for rope in dict.fromkeys(ropes)}
        return [by_rope[rope] for rope in ropes]
    tables, heads = cache.tables, cache.tables.start.shape[2]
    sizes = [pool.rows // heads for pool in cache.pools]
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


def rolled(keys: Float[Array, "B P D"], by: Angles) -> Float[Array, "B P D"]:
    """Rotate keys by their places within the cache; segments have equal size and unrotated keys."""
    batch, rows, dim = keys.shape
    return rotate(keys.reshape(batch, -1, by.cos.shape[1], dim), by).reshape(keys.shape)
