"""Programs that are exported: prefill, a question, recompression, and the decode loop, each with all layers.

They are the engine's own code. Argument and field names become names in the manifest, and so must not change.
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
from jaxkv.engine.decode import Beside, extend
from jaxkv.engine.lengths import ByLength
from jaxkv.engine.loop import Running
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill import logits_of, read
from jaxkv.engine.recompress import Fixed, recompress
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.policies.policy import Method
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Static config of the programs of one bucket of prompt lengths.

    Attributes:
        flat: the decoder; only the shapes of its leaves matter.
        policy: the compression.
        needed: plan of the prefill: slots, pools and room.
        decoding: the engine's static config of decoding.
        implementation: of attention in prefill.
        steps: most tokens that one call of the decode loop draws.
        longest: most rows that a sequence can have, prompt, question and new tokens together.
    """

    flat: Flat
    policy: Method
    needed: PrefillPlan
    decoding: Spec
    implementation: Implementation
    steps: int
    longest: int

    @property
    def axes(self) -> Axes | None:
        """Axes of the mesh that the programs run on; None without a mesh."""
        return self.flat.axes


class Asked(NamedTuple):
    """Arguments of a call of the decode loop; in the manifest these fields go by their own names.

    Sequences that are `done` draw nothing. `key` is random key data, `eos` the ids that end a sequence, `steps` the
    number of tokens to draw, and `sampling` a sampler whose numbers are arrays.
    """

    done: Bool[Array, " B"]
    key: UInt[Array, " two"]
    eos: Int[Array, " n"]
    steps: Int[Array, ""]
    sampling: Any


class After(NamedTuple):
    """Cache that a program returns, the next tokens' `logits` and, of a prompt, `ordered`: True if no score is NaN."""

    pools: tuple[Pool, ...]
    cache: Tables
    logits: Float[Array, "B V"] | None = None
    ordered: Bool[Array, ""] | None = None
    beside: Beside | None = None


class Drawn(NamedTuple):
    """Ids `drawn`, -1 after a sequence's end, the number `ran` of steps, and the cache: pools or rows beside them."""

    beside: Beside | None
    pools: tuple[Pool, ...] | None
    cache: Tables
    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    drawn: Int[Array, "B steps"]
    ran: Int[Array, ""]


@program(static=("spec",), on="spec")
def prompt(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    tokens: Int[Array, "B S"],
    length: Int[Array, " B"],
    told: ByLength,
    key: UInt[Array, " two"],
    *,
    spec: BucketSpec,
) -> After:
    """Prefills and compresses prompts; `told` holds the policy's numbers for their lengths."""
    flat = spec.flat.around(ends, blocks)
    walk = read(flat, tokens, length, told, spec.policy, spec.needed, key=_key(key), implementation=spec.implementation)
    prompts, cache = finished(walk)
    logits = logits_of(ends, prompts.x, graphs=flat.graphs)
    begun = loop.begin(cache.arrays, spec=spec.decoding, size=spec.steps)
    return After(cache.pools, cache.tables, logits, prompts.ordered(), begun.beside)


@program(static=("spec",), donate=("pools", "cache"), on="spec")
def question(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    cache: Tables,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: BucketSpec,
) -> After:
    """Appends the first `count` tokens of each sequence; logits stay where it has none."""
    flat = spec.flat.around(ends, blocks)
    after, whole = extend(flat, Cache(pools=pools, tables=cache), tokens, count, spec=spec.decoding)
    return After(whole.pools, whole.tables, jnp.where(count[:, None] > 0, after, logits))


@program(static=("spec",), donate=("pools", "cache"), on="spec")
def again(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    cache: Tables,
    key: UInt[Array, " two"],
    *,
    spec: BucketSpec,
) -> After:
    """Recompresses the sequences that exceed their limit; the rows of others are packed unchanged."""
    flat = spec.flat.around(ends, blocks)
    heads, parts = flat.config.kv_heads, 1 if flat.axes is None else flat.axes.size("K")
    handle = KVCache(
        arrays=Cache(pools=pools, tables=cache),
        layout=spec.needed.layout,
        policy=spec.policy,
        config=flat.config,
        slots=spec.needed.slots,
        axes=flat.axes,
    )
    fixed = Fixed(rows=spec.needed.pool_rows(heads, parts), slots=spec.longest)
    made = recompress(flat, handle, key=_key(key), room=np.asarray(spec.needed.room), fixed=fixed)
    return After(made.pools, made.tables)


@program(static=("spec",), donate=("pools", "cache"), on="spec")
def draw(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    pools: tuple[Pool, ...],
    cache: Tables,
    logits: Float[Array, "B V"],
    asked: Asked,
    *,
    spec: BucketSpec,
) -> Drawn:
    """Draws tokens; each is appended to the pools before the next one is drawn."""
    return _drawn(ends, blocks, Running(cache=Cache(pools=pools, tables=cache)), logits, asked, spec)


@program(static=("spec",), donate=("beside", "cache"), on="spec")
def draw_beside(
    ends: Leaves,
    blocks: tuple[Leaves, ...],
    beside: Beside,
    pools: tuple[Pool, ...],
    cache: Tables,
    logits: Float[Array, "B V"],
    asked: Asked,
    *,
    spec: BucketSpec,
) -> Drawn:
    """Draws tokens whose rows are kept beside the pools."""
    running = Running(cache=Cache(pools=pools, tables=cache), beside=beside)
    return _drawn(ends, blocks, running, logits, asked, spec)


@program(static=("spec",), donate=("beside", "pools", "cache"), on="spec")
def settle(beside: Beside, pools: tuple[Pool, ...], cache: Tables, *, spec: BucketSpec) -> After:
    """Appends the rows kept beside the pools to them."""
    running = Running(cache=Cache(pools=pools, tables=cache), beside=beside)
    whole = loop.settle(running, spec=spec.decoding)
    empty = Beside(beside.tails, jnp.zeros_like(beside.written))
    return After(whole.pools, whole.tables, beside=empty)


def _drawn(
    ends: Leaves, blocks: tuple[Leaves, ...], running: Running, logits: Array, asked: Asked, spec: BucketSpec
) -> Drawn:
    """Runs the decode loop, and returns the pools or, where they are read-only, the rows beside them."""
    flat = spec.flat.around(ends, blocks)
    begun = loop.draw_of(logits, asked.done, _key(asked.key), asked.eos, axes=spec.axes)
    after, now, tokens, ran = loop.decode(
        flat, running, begun, asked.steps, spec=spec.decoding, sampling=asked.sampling, size=spec.steps
    )
    pools = after.cache.pools if after.beside is None else None
    return Drawn(after.beside, pools, after.cache.tables, now.logits, now.done, tokens, ran)


def _key(data: UInt[Array, " two"]) -> Array:
    """Random key of key data; the implementation is fixed, whatever JAX's default is where it runs."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")
