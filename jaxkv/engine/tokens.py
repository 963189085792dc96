"""New tokens as one block of the decoder sees them, and their attention to a pool."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache
from jaxkv.engine.lengths import QUERY_BLOCK
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Block
from jaxkv.models.rope import Angles, angles, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewTokens:
    """What all layers of a step know of its N tokens.

    Attributes:
        positions: theirs in the text.
        count: how many of the N are real; 0 leaves a sequence's rows as they are.
        written: rows of the tails that each sequence has, where there are tails.
        candidates: tokens at positions below which filter layers choose, and how many they do; None without filters.
    """

    positions: Int[Array, "B N"]
    count: Int[Array, " B"]
    written: Int[Array, " B"] | None = None
    candidates: tuple[Int[Array, " B"], Int[Array, " B"]] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """N new tokens of every sequence, as one block of the decoder sees them."""

    q: Float[Array, "B K G N D"]
    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    stored: Float[Array, "B K N D"]


def project(block: Block, spec: Spec, normed: Float[Array, "B N E"], by: Angles) -> Token:
    """Queries, keys and values of new tokens, made of normed hidden states, rotated by the angles of their places."""
    raw, v = block.keys_values(normed)
    k = rotate(raw, by, normed.dtype)
    return Token(q=block.queries(normed, by), k=k, v=v, stored=raw.astype(normed.dtype) if spec.rolling else k)


def whole_token(q: Float[Array, "n M K G D"], kv: Float[Array, "n M two K D"], by: Angles, dtype: jnp.dtype) -> Token:
    """`project` from the parts of one token's products, as far as anybody looks at it."""
    batch = by.cos.shape[0]
    whole = lambda parts: parts.sum(axis=0)[:batch]  # noqa: E731
    rotated = lambda a: rotate(a[..., None, :], by, dtype)  # noqa: E731
    both = whole(kv)
    k = rotated(both[:, 0])
    return Token(q=rotated(whole(q)), k=k, v=both[:, 1, :, None].astype(dtype), stored=k)


def in_blocks(
    attend: Callable[[Array], tuple[Array, Array]], q: Float[Array, "B K G N D"]
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """Attention that takes queries `[B, K, R, D]`, R folding the group and tokens: many tokens go block by block.

    Args:
        attend: gives the output and its log-sum-exp.
        q: queries of N tokens; beyond a block's N a multiple of it.

    Returns:
        The output, and its log-sum-exp.
    """
    batch, heads, group, tokens, dim = q.shape
    size = min(tokens, QUERY_BLOCK)

    def one(part: Array) -> tuple[Array, Array]:
        out, lse = attend(part.reshape(batch, heads, group * size, dim))
        return out.reshape(part.shape), lse.reshape(part.shape[:-1])

    if size == tokens:
        return one(q)
    parts = jnp.moveaxis(q.reshape(batch, heads, group, -1, size, dim), 3, 0)
    out, lse = lax.map(one, parts)
    return jnp.moveaxis(out, 0, 3).reshape(q.shape), jnp.moveaxis(lse, 0, 3).reshape(q.shape[:-1])


def pool_attention(
    q: Float[Array, "B K G N D"], keys: Array, values: Array, start: Array, length: Array, spec: Spec
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """New queries against one layer's segments."""
    attend = partial(spec.backend.attend, walk=spec.layout.walk)
    return in_blocks(lambda part: attend(part, keys, values, start, length), q)


class StepAngles(NamedTuple):
    """The angles that a layer needs in a step.

    Attributes:
        new: those of the new tokens.
        rows: those of places within the cache, for keys that are rotated when they are read; else None.
        tail: likewise those of rows beside the pool.
    """

    new: Angles
    rows: Angles | None = None
    tail: Angles | None = None


def step_angles(cache: Cache, positions: Int[Array, "B N"], spec: Spec, tail: int = 0) -> list[StepAngles]:
    """The angles of a step, made once for all layers that share them.

    Args:
        cache: before the new tokens.
        positions: their positions in the text.
        spec: what is static.
        tail: rows beside each segment of a pool.

    Returns:
        For each layer those of positions in the text; of places within the cache where the policy rolls positions.
    """
    config = spec.config
    ropes = [config.spec_of(layer).rope for layer in range(config.layers)]
    made = partial(angles, head_dim=config.head_dim)
    if not spec.rolling:
        by_rope = {rope: StepAngles(made(positions, rope)) for rope in dict.fromkeys(ropes)}
        return [by_rope[rope] for rope in ropes]
    tables, heads = cache.tables, cache.tables.start.shape[2]
    sizes = [pool.rows // heads for pool in cache.pools]
    distinct = dict.fromkeys(zip(sizes, ropes, strict=True))
    of_rows = {(size, rope): made(jnp.arange(size, dtype=jnp.int32)[None], rope) for size, rope in distinct}
    # Positions roll only where all heads of a sequence hold the same rows: any head's length will do.
    lengths = [length[:, :1] for length in tables.length]
    ahead, behind = positions - tables.seen[:, None], jnp.arange(tail, dtype=jnp.int32)
    return [
        StepAngles(made(length + ahead, rope), of_rows[size, rope], made(length + behind, rope) if tail else None)
        for length, size, rope in zip(lengths, sizes, ropes, strict=True)
    ]


def rolled(keys: Float[Array, "B P D"], by: Angles) -> Float[Array, "B P D"]:
    """Un-rotated keys of segments of equal size, rotated by their place within the cache."""
    batch, rows, dim = keys.shape
    return rotate(keys.reshape(batch, -1, by.cos.shape[1], dim), by).reshape(keys.shape)
