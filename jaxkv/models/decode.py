"""A few new tokens at once on top of a cache: a question, or the one token of a decode step."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import attention
from jaxkv.attention import Implementation
from jaxkv.attention.xla import Form
from jaxkv.cache import KVCache, Pool, append
from jaxkv.config import ModelConfig
from jaxkv.models.decoder import Block, Flat, Graphs, Leaves
from jaxkv.rope import rotate


@partial(jax.tree_util.register_dataclass, data_fields=["pools", "start", "length", "seen"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
    """The moving part of a cache: what jitted code takes, gives back, and may write in place.

    Attributes:
        pools: as in KVCache.
        start: `i32[L, B, K]`.
        length: `i32[L, B, K]`.
        seen: `i32[B]`.
    """

    pools: tuple[Pool, ...]
    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]
    seen: Int[Array, " B"]

    @classmethod
    def of(cls, cache: KVCache) -> "Live":
        """The moving part of a cache, which must own its pools if a donating function takes it."""
        return cls(pools=cache.pools, start=cache.start, length=cache.length, seen=cache.seen)

    def into(self, cache: KVCache) -> KVCache:
        """The cache with this as its moving part."""
        return dataclasses.replace(cache, pools=self.pools, start=self.start, length=self.length, seen=self.seen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What a decode program is compiled for, besides shapes.

    Attributes:
        graphs: the decoder's static half.
        config: its shape.
        form: how segments lie in their pools.
        rolling: positions are those within the cache.
        tail: new rows gather beside the pool while tokens are drawn, and join it later. A CPU cannot write into a
            16-bit pool in place, so there one write for many tokens beats one per token.
        implementation: what computes attention over the pool.
    """

    graphs: Graphs
    config: ModelConfig
    form: Form
    rolling: bool
    tail: bool = False
    implementation: Implementation = Implementation.XLA


def program_for(flat: Flat, cache: KVCache, implementation: Implementation = Implementation.XLA) -> Program:
    """The program that decodes on top of a cache, on the default device.

    Args:
        flat: the decoder's parameters.
        cache: any cache of this decoder.
        implementation: what computes attention over its segments.

    Returns:
        What is static about it.
    """
    return Program(
        graphs=flat.graphs,
        config=cache.config,
        form=cache.form,
        rolling=cache.policy.rolling,
        tail=jax.default_backend() == "cpu" and cache.pools[0].k.dtype.itemsize == 2,
        implementation=implementation,
    )


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


def pool_attention(
    q: Float[Array, "B K G N D"], keys: Array, values: Array, start: Array, length: Array, program: Program
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    """New queries against one layer's segments."""
    batch, heads, group, tokens, dim = q.shape
    folded = q.reshape(batch, heads, group * tokens, dim)
    out, lse = attention.over_pool(
        folded, keys, values, start, length, form=program.form, implementation=program.implementation
    )
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _over_cache(
    block: Block,
    program: Program,
    x: Float[Array, "B N E"],
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B N E"], Pool]:
    """One block over N new tokens: their rows join the pool, and they attend to it and to each other."""
    tokens = x.shape[1]
    text = seen[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    # Rolling positions exist only where all heads of a sequence hold the same rows: any head's length is its count.
    place = length[:, :1] + jnp.arange(tokens, dtype=jnp.int32) if program.rolling else text
    new = project(block, program, x, place)
    after = append(pool, new.stored, new.v, text, start + length, count)
    # A single token simply joins the rows before it is its turn to look at them.
    source, rows = (after, length + count[:, None]) if tokens == 1 else (pool, length)
    keys = rolled(source.k, start, program) if program.rolling else source.k
    out, lse = pool_attention(new.q, keys, source.v, start, rows, program)
    if tokens > 1:
        new_out, new_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, new.v))
        out = attention.merge(out, lse, new_out, new_lse)
    return block.finish(x, out), after


def rolled(keys: Float[Array, "B P D"], start: Int[Array, "B K"], program: Program) -> Float[Array, "B P D"]:
    """Un-rotated keys, rotated by their place within the cache."""
    place = jnp.arange(keys.shape[1], dtype=jnp.int32) % (keys.shape[1] // start.shape[1])
    return rotate(keys, place, program.config.rope)


def step(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    live: Live,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    program: Program,
) -> tuple[Float[Array, "B V"], Live]:
    """Runs N new tokens per sequence through the model.

    Args:
        ends: parameters before and after the blocks.
        blocks: one tuple of parameters per block.
        live: the cache's moving part, with room for N rows behind every segment.
        tokens: ids, padded on the right.
        count: how many of the N are real; 0 leaves a sequence's cache as it is.
        program: what is static.

    Returns:
        Float32 logits of each sequence's last real token, and the moving part with the new rows.
    """
    outer = program.graphs.ends(ends)
    x = outer.embed(tokens)
    pools = list(live.pools)
    for index, leaves in enumerate(blocks):
        at = 0 if program.form is Form.SHARED else index
        block = program.graphs.block(leaves)
        x, pools[at] = _over_cache(
            block, program, x, pools[at], live.start[index], live.length[index], live.seen, count
        )
    last = jnp.maximum(count - 1, 0)
    logits = outer.logits(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])
    length = live.length + count[:, None]
    return logits, Live(pools=tuple(pools), start=live.start, length=length, seen=live.seen + count)


@partial(jax.jit, static_argnames=("program",), donate_argnames=("pools",))
def _extend(ends, blocks, pools, start, length, seen, tokens, count, *, program):
    live = Live(pools=pools, start=start, length=length, seen=seen)
    return step(ends, blocks, live, tokens, count, program=program)


def extend(
    flat: Flat, live: Live, tokens: Int[Array, "B N"], count: Int[Array, " B"], *, program: Program
) -> tuple[Float[Array, "B V"], Live]:
    """`step`, compiled; the pools given are consumed.

    Args:
        flat: the decoder's parameters.
        live: as for `step`; donated.
        tokens: as for `step`.
        count: as for `step`.
        program: what is static.

    Returns:
        As `step`.
    """
    return _extend(
        flat.ends, flat.blocks, live.pools, live.start, live.length, live.seen, tokens, count, program=program
    )
