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
        tail: new rows gather beside the pool while a loop runs, and join it at its end. A CPU cannot write into a
            16-bit pool in place, so there one write per loop beats one per token.
    """

    graphs: Graphs
    config: ModelConfig
    form: Form
    rolling: bool
    tail: bool = False


def program_for(flat: Flat, cache: KVCache) -> Program:
    """The program that decodes on top of a cache, on the default device.

    Args:
        flat: the decoder's parameters.
        cache: any cache of this decoder.

    Returns:
        What is static about it.
    """
    return Program(
        graphs=flat.graphs,
        config=cache.config,
        form=cache.form,
        rolling=cache.policy.rolling,
        tail=jax.default_backend() == "cpu" and cache.pools[0].k.dtype.itemsize == 2,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """Rows drawn since the loop began, for programs that leave the pool alone while they loop.

    Attributes:
        k: `f32[B, K, T, D]` keys as the pool stores them.
        v: `f32[B, K, T, D]` values.
    """

    k: Float[Array, "B K T D"]
    v: Float[Array, "B K T D"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Token:
    """N new tokens of every sequence, as one block of the decoder sees them."""

    q: Float[Array, "B K G N D"]
    k: Float[Array, "B K N D"]
    v: Float[Array, "B K N D"]
    stored: Float[Array, "B K N D"]


def _project(block: Block, program: Program, x: Float[Array, "B N E"], place: Int[Array, "B N"]) -> _Token:
    raw, v = block.keys_values(x)
    k = block.rotated(raw, place)
    return _Token(q=block.queries(x, place), k=k, v=v, stored=raw if program.rolling else k)


def _pool_attention(
    q: Float[Array, "B K G N D"], keys: Array, values: Array, start: Array, length: Array, form: Form
) -> tuple[Float[Array, "B K G N D"], Float[Array, "B K G N"]]:
    batch, heads, group, tokens, dim = q.shape
    folded = q.reshape(batch, heads, group * tokens, dim)
    out, lse = attention.over_pool(folded, keys, values, start, length, form=form)
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
    new = _project(block, program, x, place)
    after = append(pool, new.stored, new.v, text, start + length, count)
    # A single token simply joins the rows before it is its turn to look at them.
    source, rows = (after, length + count[:, None]) if tokens == 1 else (pool, length)
    keys = _rolled(source.k, start, program) if program.rolling else source.k
    out, lse = _pool_attention(new.q, keys, source.v, start, rows, program.form)
    if tokens > 1:
        new_out, new_lse = lax.map(lambda a: attention.causal(a[0], a[1], a[2], jnp.int32(0)), (new.q, new.k, new.v))
        out = attention.merge(out, lse, new_out, new_lse)
    return block.finish(x, out), after


def _over_tail(
    block: Block,
    program: Program,
    x: Float[Array, "B 1 E"],
    pool: Pool,
    tail: Tail,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    seen: Int[Array, " B"],
    index: Int[Array, ""],
) -> tuple[Float[Array, "B 1 E"], Tail]:
    """One block over one new token: its row joins the tail, and it attends to the pool and to the tail."""
    place = (length[:, :1] if program.rolling else seen[:, None]) + index
    new = _project(block, program, x, place)
    put = lambda leaf, row: lax.dynamic_update_slice(leaf, row.astype(leaf.dtype), (0, 0, index, 0))  # noqa: E731
    # Without the barrier the update is fused into its reader as well as into the loop's state: done twice, by copies.
    tail = lax.optimization_barrier(Tail(k=put(tail.k, new.stored), v=put(tail.v, new.v)))
    keys, tail_keys = pool.k, tail.k
    batch, heads, size, dim = tail.k.shape
    if program.rolling:
        keys = _rolled(pool.k, start, program)
        tail_places = length[:, :1] + jnp.arange(size, dtype=jnp.int32)
        tail_keys = rotate(tail.k, tail_places[:, None], program.config.rope)
    out, lse = _pool_attention(new.q, keys, pool.v, start, length, program.form)
    flat = lambda a: a.reshape(batch, heads * size, dim)  # noqa: E731
    begin = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32) * size, (batch, heads))
    rows = jnp.broadcast_to(index + 1, (batch, heads))
    wide = new.q.astype(tail.k.dtype)
    own, own_lse = _pool_attention(wide, flat(tail_keys), flat(tail.v), begin, rows, Form.EQUAL)
    return block.finish(x, attention.merge(out, lse, own, own_lse)), tail


def _rolled(keys: Float[Array, "B P D"], start: Int[Array, "B K"], program: Program) -> Float[Array, "B P D"]:
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


def _tail_step(ends, blocks, live, tails, index, token, *, program):
    """`step` for one token, which writes to the tails and only reads the pools."""
    outer = program.graphs.ends(ends)
    x = outer.embed(token[:, None])
    after = []
    for layer, leaves in enumerate(blocks):
        pool = live.pools[0 if program.form is Form.SHARED else layer]
        block = program.graphs.block(leaves)
        x, tail = _over_tail(
            block, program, x, pool, tails[layer], live.start[layer], live.length[layer], live.seen, index
        )
        after.append(tail)
    return outer.logits(x[:, 0]), tuple(after)


def _flush(live: Live, tails: tuple[Tail, ...], written: Int[Array, " B"], *, program: Program) -> Live:
    """Moves the tails' rows behind their segments."""
    pools = list(live.pools)
    text = live.seen[:, None] + jnp.arange(tails[0].k.shape[2], dtype=jnp.int32)
    for layer, tail in enumerate(tails):
        at = 0 if program.form is Form.SHARED else layer
        dtype = pools[at].k.dtype
        end = live.start[layer] + live.length[layer]
        pools[at] = append(pools[at], tail.k.astype(dtype), tail.v.astype(dtype), text, end, written)
    length = live.length + written[:, None]
    return Live(pools=tuple(pools), start=live.start, length=length, seen=live.seen + written)


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
        index, _, draw, _, _ = carry
        # Stops at the requested number of steps, or as soon as every sequence has ended.
        return (index < steps) & ~draw.done.all()

    def body(carry):
        index, store, draw, fed, out = carry
        keys = jax.vmap(lambda row, at: jax.random.fold_in(jax.random.fold_in(draw.key, row), at))(rows, seen + fed)
        token = sampling(draw.logits, keys)
        out = lax.dynamic_update_slice(out, jnp.where(draw.done, -1, token)[:, None], (0, index))
        done = draw.done | (token[:, None] == eos).any(axis=1)
        count = (~done).astype(jnp.int32)
        if program.tail:
            logits, store = _tail_step(ends, blocks, live, store, index, token, program=program)
        else:
            logits, store = step(ends, blocks, store, token[:, None], count, program=program)
        return index + 1, store, Draw(logits=logits, done=done, key=draw.key), fed + count, out

    out = jnp.full((batch, size), -1, jnp.int32)
    fed = jnp.zeros((batch,), jnp.int32)
    store = _empty_tails(live, program, size) if program.tail else live
    index, store, draw, fed, out = lax.while_loop(going, body, (jnp.int32(0), store, draw, fed, out))
    # Sequences end for good, so the rows a sequence has in its tail are the first ones.
    live = _flush(live, store, fed, program=program) if program.tail else store
    return live, draw, out, index


def _empty_tails(live: Live, program: Program, size: int) -> tuple[Tail, ...]:
    config = program.config
    zeros = jnp.zeros((live.seen.shape[0], config.kv_heads, size, config.head_dim), jnp.float32)
    return (Tail(k=zeros, v=zeros),) * config.layers


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
