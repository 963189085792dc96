"""What is exported: a prompt's prefill, a question, the loop over tokens, and what a policy does between them.

Each is the library's own code, traced as one program of all layers; arrays go by where they lie in a cache.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, Pool, Tables
from jaxkv.engine import loop
from jaxkv.engine.compress import finished
from jaxkv.engine.decode import extend
from jaxkv.engine.layer_step import Tail
from jaxkv.engine.lengths import ByLength
from jaxkv.engine.loop import Draw, Running
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill import logits_of, read
from jaxkv.engine.recompress import Fixed, recompress
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.policies.policy import Method
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What programs of one bucket are made for.

    Attributes:
        flat: the decoder; of its leaves the shapes alone matter.
        policy: the compression.
        needed: slots, pools and room.
        spec: what decoding is compiled for.
        implementation: what computes attention in prefill.
        steps: tokens that the loop draws at most.
        longest: rows that a text can have.
    """

    flat: Flat
    policy: Method
    needed: PrefillPlan
    spec: Spec
    implementation: Implementation
    steps: int
    longest: int

    @property
    def axes(self) -> Axes | None:
        """Of the mesh that they run on, if they do."""
        return self.flat.axes

    def handle(self, pools: tuple[Pool, ...], tables: Tables) -> KVCache:
        """A cache of a program's arguments."""
        arrays, flat = Cache(pools=pools, tables=tables), self.flat
        return KVCache(
            arrays=arrays,
            layout=self.needed.layout,
            policy=self.policy,
            config=flat.config,
            slots=self.needed.slots,
            axes=flat.axes,
        )


class Beside(NamedTuple):
    """New rows beside the pools, where a program gathers them there, and how many of them each sequence has."""

    tails: tuple[Tail, ...]
    written: Int[Array, " B"]

    def around(self, pools: tuple[Pool, ...], tables: Tables) -> Running:
        """A cache with them, ready to draw."""
        return Running(cache=Cache(pools=pools, tables=tables), tails=self.tails, written=self.written)


class Prompted(NamedTuple):
    """Behind a prompt: its cache, the next token's logits, and whether all scores were numbers."""

    pools: tuple[Pool, ...]
    cache: Tables
    logits: Float[Array, "B V"]
    ordered: Bool[Array, ""]
    beside: Beside | None


class Extended(NamedTuple):
    """Behind more tokens."""

    pools: tuple[Pool, ...]
    cache: Tables
    logits: Float[Array, "B V"]


class Drawn(NamedTuple):
    """Behind tokens drawn; of them -1 behind a sequence's end."""

    pools: tuple[Pool, ...]
    cache: Tables
    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    drawn: Int[Array, "B steps"]
    ran: Int[Array, ""]


class DrawnBeside(NamedTuple):
    """The same where new rows gather beside pools that are only read."""

    beside: Beside
    cache: Tables
    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    drawn: Int[Array, "B steps"]
    ran: Int[Array, ""]


class Moved(NamedTuple):
    """Pools whose rows have moved, and where they lie."""

    pools: tuple[Pool, ...]
    cache: Tables


class Settled(NamedTuple):
    """Pools with what lay beside them, and nothing there."""

    pools: tuple[Pool, ...]
    cache: Tables
    beside: Beside


@program(static=("setting",), on="setting")
def prompt(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    tokens: Int[Array, "B S"],
    length: Int[Array, " B"],
    told: ByLength,
    key: UInt[Array, " two"],
    *,
    setting: Setting,
) -> Prompted:
    """Reads prompts and compresses them."""
    flat = setting.flat.around(ends, blocks)
    of = (flat, tokens, length, told, setting.policy, setting.needed)
    prompts, cache = finished(read(*of, key=_key(key), implementation=setting.implementation))
    logits, nothing = logits_of(ends, prompts.x, graphs=flat.graphs), None
    if setting.spec.tail:
        begun = loop.begin(cache.arrays, spec=setting.spec, size=setting.steps)
        nothing = Beside(begun.tails, begun.written)
    return Prompted(cache.pools, cache.tables, logits, prompts.ordered(), nothing)


@program(static=("setting",), donate=("pools", "cache"), on="setting")
def question(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    cache: Tables,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    setting: Setting,
) -> Extended:
    """Reads a few more tokens; logits stay where a sequence has none of them."""
    flat = setting.flat.around(ends, blocks)
    after, whole = extend(flat, Cache(pools=pools, tables=cache), tokens, count, spec=setting.spec)
    return Extended(whole.pools, whole.tables, jnp.where(count[:, None] > 0, after, logits))


@program(static=("setting",), donate=("pools", "cache"), on="setting")
def again(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    cache: Tables,
    key: UInt[Array, " two"],
    *,
    setting: Setting,
) -> Moved:
    """Compresses sequences that hold more than they may; the others move."""
    flat, mine = setting.flat.around(ends, blocks), setting.flat.config.kv_heads
    stretches = 1 if flat.axes is None else flat.axes.size("K")
    fixed = Fixed(rows=setting.needed.pool_rows(mine, stretches), slots=setting.longest)
    room = np.asarray(setting.needed.room)
    made = recompress(flat, setting.handle(pools, cache), key=_key(key), room=room, fixed=fixed)
    return Moved(made.pools, made.tables)


@program(static=("setting",), donate=("pools", "cache"), on="setting")
def draw(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    cache: Tables,
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    key: UInt[Array, " two"],
    eos: Int[Array, " n"],
    steps: Int[Array, ""],
    sampling: Any,
    *,
    setting: Setting,
) -> Drawn:
    """Draws tokens; each becomes a row before the next one is drawn."""
    none = jnp.zeros_like(cache.seen)
    running = Running(cache=Cache(pools=pools, tables=cache), tails=(), written=none)
    after, now, out, ran = _drawn(ends, blocks, running, logits, done, key, eos, steps, sampling, setting)
    return Drawn(after.cache.pools, after.cache.tables, now.logits, now.done, out, ran)


@program(static=("setting",), donate=("beside", "cache"), on="setting")
def draw_beside(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    beside: Beside,
    pools: tuple[Pool, ...],
    cache: Tables,
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    key: UInt[Array, " two"],
    eos: Int[Array, " n"],
    steps: Int[Array, ""],
    sampling: Any,
    *,
    setting: Setting,
) -> DrawnBeside:
    """Draws tokens whose rows gather beside the pools."""
    running = beside.around(pools, cache)
    after, now, out, ran = _drawn(ends, blocks, running, logits, done, key, eos, steps, sampling, setting)
    written = Beside(after.tails, after.written)
    return DrawnBeside(written, after.cache.tables, now.logits, now.done, out, ran)


@program(static=("setting",), donate=("beside", "pools", "cache"), on="setting")
def settle(beside: Beside, pools: tuple[Pool, ...], cache: Tables, *, setting: Setting) -> Settled:
    """Moves rows from beside the pools into them."""
    moved = loop.settle(beside.around(pools, cache), spec=setting.spec)
    return Settled(moved.pools, moved.tables, Beside(beside.tails, jnp.zeros_like(beside.written)))


def _drawn(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    running: Running,
    logits: Array,
    done: Array,
    key: Array,
    eos: Array,
    steps: Any,
    sampling: Any,
    setting: Setting,
) -> tuple[Running, Draw, Array, Array]:
    flat, now = setting.flat.around(ends, blocks), loop.draw_of(logits, done, _key(key), eos, axes=setting.axes)
    of: dict[str, Any] = {"spec": setting.spec, "sampling": sampling, "size": setting.steps}
    return loop.decode(flat, running, now, steps, **of)


def _key(data: UInt[Array, " two"]) -> Array:
    return jax.random.wrap_key_data(data, impl="threefry2x32")
