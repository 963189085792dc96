"""Tokens on top of a cache: a few at once (a question), or one after the other in a jitted loop."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv import attention
from jaxkv.attention.xla import Form
from jaxkv.cache import KVCache, Pool, append
from jaxkv.config import ModelConfig
from jaxkv.models.decoder import Block, Flat, Graphs, Leaves
from jaxkv.rope import rotate
from jaxkv.sampling import Sampling


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
    """

    graphs: Graphs
    config: ModelConfig
    form: Form
    rolling: bool


def _attend(
    block: Block,
    program: Program,
    x: Float[Array, "B N E"],
    pool: Pool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    seen: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B N E"], Pool, Int[Array, "B K"]]:
    """One block over N new tokens: their rows join the pool, and they attend to it and to each other."""
    batch, tokens, _ = x.shape
    text = seen[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    # Rolling positions exist only where all heads of a sequence hold the same rows: any head's length is its count.
    place = length[:, :1] + jnp.arange(tokens, dtype=jnp.int32) if program.rolling else text
    q = block.queries(x, place)
    raw, v = block.keys_values(x)
    k = block.rotated(raw, place)
    pool_after = append(pool, raw if program.rolling else k, v, text, start + length, count)
    length_after = length + count[:, None]
    # A single token simply joins the rows before it is its turn to look at them.
    source, rows = (pool_after, length_after) if tokens == 1 else (pool, length)
    keys = _rolled(source, start, program) if program.rolling else source.k
    heads, group, dim = q.shape[1], q.shape[2], q.shape[4]
    folded = q.reshape(batch, heads, group * tokens, dim)
    out, lse = attention.over_pool(folded, keys, source.v, start, rows, form=program.form)
    out = out.reshape(q.shape)
    if tokens > 1:
        among = lambda a: attention.causal(*a, jnp.int32(0))  # noqa: E731
        new_out, new_lse = lax.map(among, (q, k, v))
        out = attention.merge(out, lse.reshape(q.shape[:-1]), new_out, new_lse)
    return block.finish(x, out), pool_after, length_after


def _rolled(pool: Pool, start: Int[Array, "B K"], program: Program) -> Float[Array, "B P D"]:
    each = pool.rows // start.shape[1]
    place = jnp.arange(pool.rows, dtype=jnp.int32) % each
    return rotate(pool.k, place, program.config.rope)


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
    pools, lengths = list(live.pools), []
    for index, leaves in enumerate(blocks):
        at = 0 if program.form is Form.SHARED else index
        block = program.graphs.block(leaves)
        x, pools[at], length = _attend(
            block, program, x, pools[at], live.start[index], live.length[index], live.seen, count
        )
        lengths.append(length)
    last = jnp.maximum(count - 1, 0)
    logits = outer.logits(jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0])
    after = Live(pools=tuple(pools), start=live.start, length=jnp.stack(lengths), seen=live.seen + count)
    return logits, after


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


@partial(jax.tree_util.register_dataclass, data_fields=["logits", "done", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Where sampling stands.

    Attributes:
        logits: `f32[B, V]` of the next token.
        done: `bool[B]` sequences that have ended.
        key: the random key; each step and sequence folds in its own number.
    """

    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    key: PRNGKeyArray


@partial(jax.jit, static_argnames=("program", "sampling", "size"), donate_argnames=("pools",))
def _loop(ends, blocks, pools, start, length, seen, draw, eos, steps, *, program, sampling, size):
    batch = seen.shape[0]
    live = Live(pools=pools, start=start, length=length, seen=seen)
    rows = jnp.arange(batch, dtype=jnp.int32)

    def going(carry):
        index, _, draw, _ = carry
        # Stops at the requested number of steps, or as soon as every sequence has ended.
        return (index < steps) & ~draw.done.all()

    def body(carry):
        index, live, draw, out = carry
        keys = jax.vmap(lambda row, seen: jax.random.fold_in(jax.random.fold_in(draw.key, row), seen))(rows, live.seen)
        token = sampling(draw.logits, keys)
        out = lax.dynamic_update_slice(out, jnp.where(draw.done, -1, token)[:, None], (0, index))
        done = draw.done | (token[:, None] == eos).any(axis=1)
        logits, live = step(ends, blocks, live, token[:, None], (~done).astype(jnp.int32), program=program)
        return index + 1, live, Draw(logits=logits, done=done, key=draw.key), out

    out = jnp.full((batch, size), -1, jnp.int32)
    index, live, draw, out = lax.while_loop(going, body, (jnp.int32(0), live, draw, out))
    return live, draw, out, index


def decode(
    flat: Flat,
    live: Live,
    draw: Draw,
    eos: Int[Array, " n"],
    steps: int,
    *,
    program: Program,
    sampling: Sampling,
    size: int,
) -> tuple[Live, Draw, Int[Array, "B size"], Int[Array, ""]]:
    """Draws up to `steps` tokens per sequence in one compiled loop; the pools given are consumed.

    A drawn token runs through the model before the next one is drawn, so that the cache holds all that was said; a
    token that ends a sequence does not.

    Args:
        flat: the decoder's parameters.
        live: the cache's moving part, with room for `steps` rows; donated.
        draw: where sampling stands.
        eos: ids that end a sequence.
        steps: tokens wanted now, at most `size`; a number, not a shape.
        program: what is static.
        sampling: how to draw.
        size: columns of the output.

    Returns:
        The moving part, where sampling stands, the tokens (-1 after a sequence's end), and how many steps were run.
    """
    return _loop(
        flat.ends,
        flat.blocks,
        live.pools,
        live.start,
        live.length,
        live.seen,
        draw,
        eos,
        jnp.int32(steps),
        program=program,
        sampling=sampling,
        size=size,
    )
