"""Token after token, drawn in a jitted loop."""

import dataclasses
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from jaxkv.cache import Cache, Tables
from jaxkv.cache.pools import Pool, append
from jaxkv.engine.bookkeeping import scratch_of
from jaxkv.engine.decode import step
from jaxkv.engine.layer_step import Tail
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.sampling import Sampling, argument
from jaxkv.sharding.collectives import count_of_all, first, gathered
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, inside, where


def _one_command_buffer() -> dict[str, str]:
    """Options by which a GPU runs the loop over tokens as one command buffer: no wait on the host for each token."""
    name = "xla_gpu_enable_command_buffer"
    if name in os.environ.get("XLA_FLAGS", ""):
        return {}
    usual = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
    return {name: f"{usual},CONDITIONAL,WHILE"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A cache's arrays while tokens are drawn on top of them.

    Attributes:
        cache: its pools stand still while there are tails.
        tails: one per layer where the program keeps new rows beside the pools, else none.
        written: `i32[B]` rows of the tails that each sequence has.
    """

    cache: Cache
    tails: tuple[Tail, ...]
    written: Int[Array, " B"]

    def rewound(self, rows: Int[Array, " B"]) -> "Running":
        """Forgets the last rows of each sequence, none of them older than the last `decode`."""
        if self.tails:
            return dataclasses.replace(self, written=self.written - rows)
        # Rows behind a stop string are the last ones of their segments: nothing is dropped between two looks.
        tables = self.cache.tables
        length, seen = tables.length - rows[None, :, None], tables.seen - rows
        return dataclasses.replace(self, cache=self.cache.updated(length=length, seen=seen))


def begin(cache: Cache, *, spec: Spec, size: int) -> Running:
    """Makes ready to draw.

    Args:
        cache: with room for `size` rows behind every segment.
        spec: what is static.
        size: tokens that each sequence can draw before `settle`, where the program keeps tails.

    Returns:
        What `decode` takes.
    """
    config, axes, (_, batch, heads) = spec.config, None if inside() else spec.axes, cache.tables.start.shape
    shape = (batch, heads, size, config.head_dim)
    zeros = lambda: jnp.zeros(shape, jnp.float32, device=where("B K T D", shape, axes))  # noqa: E731
    tails = tuple(Tail(k=zeros(), v=zeros()) for _ in range(config.layers)) if spec.tail else ()
    return Running(cache=cache, tails=tails, written=jnp.zeros((batch,), jnp.int32))


def settle(running: Running, *, spec: Spec, which: Bool[Array, " B"] | None = None) -> Cache:
    """Moves the tails' rows behind their segments.

    Args:
        running: from `begin` or `decode`; consumed.
        spec: what is static.
        which: sequences whose rows are moved; all by default.

    Returns:
        The cache, with every row of those in its pool.
    """
    if not running.tails:
        return running.cache
    tables, written = running.cache.tables, running.written
    written = written if which is None else jnp.where(which, written, 0)
    pools = _settle(running.cache.pools, tables, running.tails, written, spec=spec)
    return running.cache.updated(pools=pools, length=tables.length + written[None, :, None], seen=tables.seen + written)


@program(static=("spec",), donate=("pools",), on="spec")
def _settle(
    pools: tuple[Pool, ...],
    tables: Tables,
    tails: tuple[Tail, ...],
    written: Int[Array, " B"],
    *,
    spec: Spec,
) -> tuple[Pool, ...]:
    moved = list(pools)
    text = tables.seen[:, None] + jnp.arange(tails[0].k.shape[2], dtype=jnp.int32)
    for layer, tail in enumerate(tails):
        at = spec.layout.pool_of(layer)
        dtype = moved[at].k.dtype
        end = tables.start[layer] + tables.length[layer]
        moved[at] = append(moved[at], tail.k.astype(dtype), tail.v.astype(dtype), text, end, written)
    return tuple(moved)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Sampling state of each sequence: logits, random key, end tokens, tokens left. None depends on another sequence.

    Attributes:
        logits: `f32[B, V]` of the next token.
        done: `bool[B]` sequences that have ended.
        left: `i32[B]` tokens that each may still draw; the last of them ends it, as an end token does.
        key: `key[B]` random keys; each step folds in `row` and the position.
        row: `i32[B]` numbers folded into the keys: of sequences that share a key their place among those.
        ends: `i32[B, n]` ids that end each sequence; -2 is none.
    """

    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    left: Int[Array, " B"]
    key: Key[Array, " B"]
    row: Int[Array, " B"]
    ends: Int[Array, "B n"]

    def after(self, logits: Float[Array, "B V"], done: Bool[Array, " B"]) -> "Draw":
        """Where it stands after a step. What ends a sequence becomes no row: its logits stay those of the last row."""
        left = self.left - (~self.done).astype(jnp.int32)
        return dataclasses.replace(self, logits=jnp.where(done[:, None], self.logits, logits), done=done, left=left)


@program(static=("axes",))
def draw_of(
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    key: PRNGKeyArray,
    eos: Int[Array, " n"],
    *,
    axes: Axes | None = None,
) -> Draw:
    """Makes the sampling state of sequences that begin together: one key, the same end tokens, no end by count.

    Args:
        logits: of the next token.
        done: sequences that draw nothing.
        key: of all sequences.
        eos: ids that end a sequence.
        axes: of the mesh that the logits lie on, if they do.

    Returns:
        The state of their sampling.
    """
    batch = done.shape[0]
    return Draw(
        logits=logits,
        done=done,
        left=jnp.full((batch,), jnp.iinfo(jnp.int32).max, jnp.int32),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.arange(batch, dtype=jnp.int32) + first("B", batch, axes),
        ends=jnp.broadcast_to(eos, (batch, *eos.shape)),
    )


def drawn(
    draw: Draw, seen: Int[Array, " B"], sampling: Sampling, axes: Axes | None = None
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """The next token of every sequence, and which sequences have then ended."""
    logits = gathered(draw.logits, "V", 1, axes)
    keys = jax.vmap(lambda key, row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(draw.key, draw.row, seen)
    token = sampling(logits, keys)
    whole = jnp.issubdtype(jnp.asarray(token).dtype, jnp.integer)
    if not whole or jnp.shape(token) != seen.shape:
        found = f"{jnp.asarray(token).dtype}{list(jnp.shape(token))}"
        raise TypeError(f"sampling={sampling}: it gives {found}: give one token id for each sequence, int32 [B]")
    vocab = logits.shape[1]
    # What is no token of the vocabulary is told as such where it is read; -1 would be taken for an end.
    token = jnp.where((token < 0) | (token >= vocab), vocab, token.astype(jnp.int32))
    return token, draw.done | (token[:, None] == draw.ends).any(axis=1) | (draw.left <= 1)


def decode(
    flat: Flat,
    running: Running,
    draw: Draw,
    steps: int | Int[Array, ""],
    *,
    spec: Spec,
    sampling: Sampling,
    size: int,
    idle: int | None = None,
) -> tuple[Running, Draw, Int[Array, "B size"], Int[Array, ""]]:
    """Draws up to `steps` tokens per sequence in one compiled loop.

    A drawn token runs through the model before the next one is drawn, so that the cache holds all that was said; a
    token that ends a sequence does not.

    Args:
        flat: the decoder's parameters.
        running: the cache, with room for `steps` rows; consumed.
        draw: where sampling stands.
        steps: tokens wanted now, at most `size`; a number, not a shape.
        spec: what is static.
        sampling: how to draw.
        size: columns of the output.
        idle: sequences that have ended up to which it goes on; a number, not a shape. By default until all have.

    Returns:
        The cache, where sampling stands, the tokens (-1 after a sequence's end), and how many steps were run.
    """
    written, tables, moving, out, ran = _loop(
        *loop_arguments(flat, running, draw, steps, sampling, idle), spec=spec, size=size
    )
    tails, pools = (written, running.cache.pools) if running.tails else ((), written)
    fed, draw = moving
    return Running(cache=Cache(pools=pools, tables=tables), tails=tails, written=fed), draw, out, ran


def loop_arguments(
    flat: Flat,
    running: Running,
    draw: Draw,
    steps: int | Int[Array, ""],
    sampling: Sampling,
    idle: int | None = None,
) -> tuple[Any, ...]:
    """Arguments of the compiled loop that are not static, in its order; the third is donated if the loop is run."""
    cache, moving = running.cache, (running.written, draw)
    written, read = (running.tails, cache.pools) if running.tails else (cache.pools, ())
    # Those that fill a mesh's groups have ended, too.
    many = draw.done.shape[0] * (flat.axes.size("B") if flat.axes is not None and inside() else 1)
    most = many - 1 if idle is None else idle
    counts = jnp.int32(steps), jnp.int32(most)
    return flat.ends, flat.blocks, written, read, cache.tables, moving, *counts, argument(sampling)


@program(static=("spec", "size"), donate=("written",), on="spec", compiler=_one_command_buffer())
def _loop(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    written: tuple[Any, ...],
    read: tuple[Pool, ...],
    tables: Tables,
    moving: tuple[Int[Array, " B"], Draw],
    steps: Int[Array, ""],
    idle: Int[Array, ""],
    sampling: Any,
    *,
    spec: Spec,
    size: int,
) -> tuple[
    tuple[Any, ...],
    Tables,
    tuple[Int[Array, " B"], Draw],
    Int[Array, "B size"],
    Int[Array, ""],
]:
    """The loop over what it writes: pools, or tails beside pools that are only read."""
    fed, draw = moving
    batch = fed.shape[0]
    # What moves: the cache; or the tails, and the rings of a cache that stands still otherwise.
    cache = Cache(pools=read if spec.tail else written, tables=tables)
    store: Any = (written, tables.state) if spec.tail else (cache, scratch_of(cache, spec))

    def going(carry):
        index, _, draw, _, _ = carry
        # Stops at the requested number of steps, or as soon as more sequences have ended than may.
        return (index < steps) & (count_of_all(draw.done, spec.axes) <= idle)

    def body(carry):
        index, store, draw, fed, out = carry
        seen = tables.seen + fed if spec.tail else store[0].tables.seen
        token, done = drawn(draw, seen, sampling, spec.axes)
        out = lax.dynamic_update_slice(out, jnp.where(draw.done, -1, token)[:, None], (0, index))
        count = (~done).astype(jnp.int32)
        one = partial(step, ends, blocks, tokens=token[:, None], count=count, spec=spec)
        if spec.tail:
            tails, state = store
            made = one(cache.updated(state=state), tails=tails, written=fed)
            store = made.tails, made.cache.tables.state
        else:
            made = one(store[0], scratch=store[1])
            store = made.cache, made.scratch
        return index + 1, store, draw.after(made.logits, done), fed + count, out

    out = jnp.full((batch, size), -1, jnp.int32)
    index, store, draw, fed, out = lax.while_loop(going, body, (jnp.int32(0), store, draw, fed, out))
    if spec.tail:
        tails, state = store
        return tails, dataclasses.replace(tables, state=state), (fed, draw), out, index
    return store[0].pools, store[0].tables, (jnp.zeros_like(fed), draw), out, index
