"""Token loop: a compiled loop over decode steps, or a loop in Python for caches with rows in host memory."""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from jaxkv.cache import Cache, Tables
from jaxkv.cache.bank import Loader, Traffic
from jaxkv.cache.pools import Pool, append
from jaxkv.engine.bookkeeping import scratch_of
from jaxkv.engine.decode import Beside, extend, step
from jaxkv.engine.layer_step import Tail
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.sampling import Sampler, argument
from jaxkv.sharding.collectives import count_of_all, first, gathered
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host, inside, settle_down, where


def _one_command_buffer() -> dict[str, str]:
    """XLA compiler options that make the token loop one GPU command buffer; empty if XLA_FLAGS already sets them.

    The GPU then waits for the host once, not at every token.
    """
    name = "xla_gpu_enable_command_buffer"
    if name in os.environ.get("XLA_FLAGS", ""):
        return {}
    usual = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
    return {name: f"{usual},CONDITIONAL,WHILE"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """State of the token loop between runs: cache arrays, tails or None, loader of rows in host memory or None.

    Attributes:
        cache: arrays of the cache.
        beside: float rows beside pools that are only read; None if new rows join the pools.
        loader: source of rows in host memory, a leaf that no program takes; None if all rows are on the device.
    """

    cache: Cache
    beside: Beside | None = None
    loader: Loader | None = None

    def rewound(self, rows: Int[Array, " B"]) -> "Running":
        """Loop state without the last `rows[b]` rows of sequence b, at most those that the last `decode` added."""
        if self.beside is not None:
            return dataclasses.replace(
                self, beside=self.beside._replace(written=self.beside.written - rows)
            )
        # Rows behind a stop string are the last ones of their segments: none is dropped between two reads of the text.
        tables = self.cache.tables
        length, seen = tables.length - rows[None, :, None], tables.seen - rows
        return dataclasses.replace(self, cache=self.cache.updated(length=length, seen=seen))


def begin(cache: Cache, *, spec: Spec, size: int, loader: Loader | None = None) -> Running:
    """Makes the token loop's `Running` state from a cache, with new empty tails of `size` rows if the spec uses tails.

    Otherwise the cache needs room for `size` rows behind every segment.
    """
    config, axes, (_, batch, heads) = (
        spec.config,
        None if inside() else spec.axes,
        cache.tables.start.shape,
    )
    shape = (batch, heads, size, config.head_dim)

    def zeros() -> Array:
        return jnp.zeros(shape, jnp.float32, device=where("B K T D", shape, axes))

    if not spec.tail:
        return Running(cache=cache, loader=loader)
    tails = tuple(Tail(k=zeros(), v=zeros()) for _ in range(config.layers))
    return Running(cache=cache, beside=Beside(tails, jnp.zeros((batch,), jnp.int32)), loader=loader)


def settle(running: Running, *, spec: Spec, which: Bool[Array, " B"] | None = None) -> Cache:
    """Cache with the tails' rows of the sequences `which` (default all) appended to its pools, which are donated."""
    if running.beside is None:
        return running.cache
    tables, (tails, written) = running.cache.tables, running.beside
    written = written if which is None else jnp.where(which, written, 0)
    pools = _settle(running.cache.pools, tables, tails, written, spec=spec)
    return running.cache.updated(
        pools=pools, length=tables.length + written[None, :, None], seen=tables.seen + written
    )


@program(static=("spec",), donate=("pools",), on="spec")
def _settle(
    pools: tuple[Pool, ...],
    tables: Tables,
    tails: tuple[Tail, ...],
    written: Int[Array, " B"],
    *,
    spec: Spec,
) -> tuple[Pool, ...]:
    """Compiled: pools (donated) with the first `written` rows of each sequence's tails appended to its segments."""
    pools_now = list(pools)
    text = tables.seen[:, None] + jnp.arange(tails[0].k.shape[2], dtype=jnp.int32)
    for layer, tail in enumerate(tails):
        at = spec.layout.pool_of(layer)
        dtype = pools_now[at].k.dtype
        end = tables.start[layer] + tables.length[layer]
        pools_now[at] = append(
            pools_now[at], tail.k.astype(dtype), tail.v.astype(dtype), text, end, written
        )
    return tuple(pools_now)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Sampling state of each sequence: next token's logits, mask of ended ones, tokens left, random key, end ids.

    None of it depends on another sequence.

    Attributes:
        logits: `f32[B, V]` of the next token.
        done: mask of sequences that have ended.
        left: tokens that each may still draw; the last of them ends it, as an end token does.
        key: random keys; each step folds in `row` and the position.
        row: numbers folded into the keys: the index of a sequence among those that share a key.
        ends: ids that end each sequence; -2 is none.
    """

    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    left: Int[Array, " B"]
    key: Key[Array, " B"]
    row: Int[Array, " B"]
    ends: Int[Array, "B n"]

    def after(self, logits: Float[Array, "B V"], done: Bool[Array, " B"]) -> "Draw":
        """Sampling state after a step: new logits and `done` mask, `left` less one; ended sequences keep old logits.

        A token that ends a sequence becomes no row: the logits stay those of the last row.
        """
        left = self.left - (~self.done).astype(jnp.int32)
        return dataclasses.replace(
            self, logits=jnp.where(done[:, None], self.logits, logits), done=done, left=left
        )


@program(static=("axes",))
def draw_of(
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    key: PRNGKeyArray,
    eos: Int[Array, " n"],
    *,
    axes: Axes | None = None,
) -> Draw:
    """Compiled: makes a batch's first sampling state: one random key, one set of end ids `eos`, no limit of tokens."""
    batch = done.shape[0]
    return Draw(
        logits=logits,
        done=done,
        left=jnp.full((batch,), jnp.iinfo(jnp.int32).max, jnp.int32),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.arange(batch, dtype=jnp.int32) + first("B", batch, axes),
        ends=jnp.broadcast_to(eos, (batch, *eos.shape)),
    )


class Drawn(NamedTuple):
    """One token id drawn per sequence, the id to show, mask of ended sequences, and 1 if the token is run (else 0).

    `token` is V for an id outside of the vocabulary; `shown` is -1 for sequences that had ended before; `done` masks
    sequences that have ended now; `fed` is 1 where the token runs through the model.
    """

    token: Int[Array, " B"]
    shown: Int[Array, " B"]
    done: Bool[Array, " B"]
    fed: Int[Array, " B"]


def drawn(draw: Draw, seen: Int[Array, " B"], sampling: Sampler, axes: Axes | None = None) -> Drawn:
    """Samples the next token of each sequence; returns `Drawn`; TypeError unless the sampler gives integers `[B]`."""
    logits = gathered(draw.logits, "V", 1, axes)
    keys = jax.vmap(lambda key, row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(
        draw.key, draw.row, seen
    )
    token = sampling(logits, keys)
    whole = jnp.issubdtype(jnp.asarray(token).dtype, jnp.integer)
    if not whole or jnp.shape(token) != seen.shape:
        found = f"{jnp.asarray(token).dtype}{list(jnp.shape(token))}"
        raise TypeError(
            f"sampling={sampling}: it gives {found}: give one token id for each sequence, int32 [B]"
        )
    vocab = logits.shape[1]
    # V stands for an id outside of the vocabulary, which `Drawing.draw` refuses; -1 would be taken for an end.
    token = jnp.where((token < 0) | (token >= vocab), vocab, token.astype(jnp.int32))
    done = draw.done | (token[:, None] == draw.ends).any(axis=1) | (draw.left <= 1)
    return Drawn(token, jnp.where(draw.done, -1, token), done, (~done).astype(jnp.int32))


@program(static=("axes",))
def next_tokens(draw: Draw, seen: Int[Array, " B"], sampling: Any, *, axes: Axes | None) -> Drawn:
    """Compiled: samples the next token of every sequence; returns `Drawn` (token ids, mask of ended sequences)."""
    return drawn(draw, seen, sampling, axes)


def decode(
    flat: Flat,
    running: Running,
    draw: Draw,
    steps: int | Int[Array, ""],
    *,
    spec: Spec,
    sampling: Sampler,
    size: int,
    idle: int | None = None,
) -> tuple[Running, Draw, Int[Array, "B size"], Int[Array, ""]]:
    """Draws up to `steps` tokens per sequence; returns loop and sampling state, ids `[B, size]`, count of steps run.

    Ids are -1 after a sequence's end; the pools or tails of `running` are donated.
    Runs one compiled loop, or a loop in Python if `running` has a loader.
    A drawn token runs through the model before the next one is drawn, so that the cache holds all that was said; a
    token that ends a sequence does not. Drawing stops early once more than `idle` sequences have ended, by default all.
    `steps`, at most `size`, and `idle` are not compiled in; 0 steps compile everything and change nothing.
    """
    # On a mesh, sequences that fill up its groups have ended, too.
    many = draw.done.shape[0] * (flat.axes.size("B") if flat.axes is not None and inside() else 1)
    idle = many - 1 if idle is None else idle
    if running.loader is not None:
        return _decode_staged(
            flat, running, draw, int(steps), spec=spec, sampling=sampling, size=size, idle=idle
        )
    given = loop_arguments(flat, running, draw, steps, sampling, idle, spec=spec)
    written, still, draw, out, ran = _loop(*given, spec=spec, size=size)
    if still.beside is None:
        return Running(cache=still.cache.updated(pools=written)), draw, out, ran
    cache = still.cache.updated(pools=running.cache.pools)
    return Running(cache=cache, beside=still.beside._replace(tails=written)), draw, out, ran


def loop_arguments(
    flat: Flat,
    running: Running,
    draw: Draw,
    steps: int | Int[Array, ""],
    sampling: Sampler,
    idle: int,
    *,
    spec: Spec,
) -> tuple[Any, ...]:
    """Tuple of the compiled loop's non-static arguments, in order; the second is donated when the loop is called."""
    cache, beside = running.cache, running.beside
    written: tuple[Any, ...] = cache.pools if beside is None else beside.tails
    still = Running(cache=cache.updated(pools=()))
    if beside is not None:
        still = Running(cache=cache, beside=beside._replace(tails=()))
    limits = jnp.int32(steps), jnp.int32(idle)
    return (flat.ends, spec.blocks_of(flat)), written, still, draw, limits, argument(sampling)


@program(static=("spec", "size"), donate=("written",), on="spec", compiler=_one_command_buffer())
def _loop(
    weights: tuple[Leaves, tuple[Leaves, ...]],
    written: tuple[Any, ...],
    still: Running,
    draw: Draw,
    limits: tuple[Int[Array, ""], Int[Array, ""]],
    sampling: Any,
    *,
    spec: Spec,
    size: int,
) -> tuple[tuple[Any, ...], Running, Draw, Int[Array, "B size"], Int[Array, ""]]:
    """Compiled token loop: returns pools or tails written (donated), other loop state, sampling state, ids, steps run.

    It writes pools, or tails beside pools that it only reads.
    `still` are the arrays that are not donated; `limits` are the number of steps, and the number of ended sequences
    above which the loop stops.
    """
    steps, idle = limits
    carried: Any
    # The loop carries the cache; or only tails and query rings, if pools are only read.
    if still.beside is None:
        cache = still.cache.updated(pools=written)
        carried = (cache, scratch_of(cache, spec))
    else:
        carried = (still.cache.tables.state, still.beside._replace(tails=written))

    def going(carry):
        index, _, draw, _ = carry
        # Stops at the requested number of steps, or once more than `idle` sequences have ended.
        return (index < steps) & (count_of_all(draw.done, spec.axes) <= idle)

    def body(carry):
        index, (cache, beside), draw, out = carry
        if still.beside is not None:
            cache = still.cache.updated(state=cache)
        seen = cache.tables.seen if still.beside is None else cache.tables.seen + beside.written
        new = drawn(draw, seen, sampling, spec.axes)
        out = lax.dynamic_update_slice(out, new.shown[:, None], (0, index))
        made = step(*weights, cache, new.token[:, None], new.fed, spec=spec, beside=beside)
        cache = made.cache if still.beside is None else made.cache.tables.state
        return index + 1, (cache, made.beside), draw.after(made.logits, new.done), out

    out = jnp.full((draw.done.shape[0], size), -1, jnp.int32)
    index, (cache, beside), draw, out = lax.while_loop(
        going, body, (jnp.int32(0), carried, draw, out)
    )
    if still.beside is None:
        return cache.pools, Running(cache=cache.updated(pools=())), draw, out, index
    read = Cache(pools=(), tables=dataclasses.replace(still.cache.tables, state=cache))
    return beside.tails, Running(cache=read, beside=beside._replace(tails=())), draw, out, index


def _decode_staged(
    flat: Flat,
    running: Running,
    draw: Draw,
    steps: int,
    *,
    spec: Spec,
    sampling: Sampler,
    size: int,
    idle: int,
) -> tuple[Running, Draw, Int[Array, "B size"], Int[Array, ""]]:
    """`decode` by a Python loop over steps, for rows in host memory; same results; `steps` = 0 only compiles.

    For that it runs one step that counts no token.
    """
    cache, batch, axes, loader = running.cache, draw.done.shape[0], spec.axes, running.loader
    draw = (
        settle_down(draw, axes)
        if axes
        else jax.device_put(draw, next(iter(cache.tables.seen.devices())))
    )
    out, ran, ended = np.full((batch, size), -1, np.int32), 0, host(draw.done)
    assert loader is not None
    if steps == 0:
        new = next_tokens(draw, cache.tables.seen, argument(sampling), axes=axes)
        uncounted = dataclasses.replace(loader, traffic=Traffic())
        logits, cache = extend(
            flat, cache, new.token[:, None], new.fed * 0, spec=spec, loader=uncounted
        )
        jax.block_until_ready(logits)
    while ran < steps and ended.sum() <= idle:
        new = next_tokens(draw, cache.tables.seen, argument(sampling), axes=axes)
        logits, cache = extend(flat, cache, new.token[:, None], new.fed, spec=spec, loader=loader)
        draw = draw.after(logits, new.done)
        # Copied to the host only now, while the device runs the step.
        out[:, ran], ended = host(new.shown), host(new.done)
        ran += 1
    return dataclasses.replace(running, cache=cache), draw, jnp.asarray(out), jnp.int32(ran)
