"""New tokens as one block of the decoder sees them, and their attention to a pool."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.models.decoder import Block
from jaxkv.models.moving import Program
from jaxkv.plan import QUERY_BLOCK
from jaxkv.rope import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """N new tokens of every sequence, as one block of the decoder sees them."""

    q: Float[Array, "B K G N D"]
    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    stored: Float[Array, "B K N D"]


def project(block: Block, program: Program, x: Float[Array, "B N E"], place: Int[Array, "B N"]) -> Token:
    """Queries, keys and values of new tokens at their places."""
    raw, v = block.keys_values(x)
    k = block.rotated(raw, place)
    return Token(q=block.queries(x, place), k=k, v=v, stored=raw if program.rolling else k)


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
    q: Float[Array, "B K G N D"], keys: Array, values: Array, start: Array, length: Array, program: Program
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """New queries against one layer's segments."""
    attend = partial(attention.over_pool, form=program.form, implementation=program.implementation)
    return in_blocks(lambda part: attend(part, keys, values, start, length), q)


def rolled(keys: Float[Array, "B P D"], start: Int[Array, "B K"], program: Program) -> Float[Array, "B P D"]:
    """Un-rotated keys, rotated by their place within the cache."""
    place = jnp.arange(keys.shape[1], dtype=jnp.int32) % (keys.shape[1] // start.shape[1])
    return rotate(keys, place, program.config.rope)
