"""Exported programs: prefill, a question, recompression, and the decode loop, each with all layers.

They run the engine's own code. Argument and field names become names in the manifest, and must not change.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv.attention import Implementation
from jaxkv.cache import Cache, KVCache, Pool, Tables
from jaxkv.engine import token_loop
from jaxkv.engine.decode import extend
from jaxkv.engine.embedding import logits_of
from jaxkv.engine.lengths import ByLength
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill import Prompts, read
from jaxkv.engine.progress import run_to_end
from jaxkv.engine.recompress import Fixed, recompress
from jaxkv.engine.spec import Spec
from jaxkv.models.decoder import Flat, Leaves
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import Axes
from jaxkv.sharding.sharded_program import sharded_jit

# Data of a random key; logits of the next tokens; pools and blocks of all layers.
KeyData = UInt[Array, " two"]
Logits = Float[Array, "B V"]
Pools = tuple[Pool, ...]
Blocks = tuple[Leaves, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Static config of the exported programs of one bucket of prompt lengths: model, policy, prefill plan.

    Attributes:
        flat: the decoder; only the shapes of its leaves matter.
        policy: compression policy.
        needed: plan of the prefill: padded length, pools and headroom.
        decoding: the engine's static config of decoding.
        implementation: implementation of attention in prefill.
        steps: maximum number of tokens that one call of the decode loop samples.
        longest: upper bound of a segment's entries: padded length, question and new tokens, rounded up to a bucket.
    """

    flat: Flat
    policy: Policy
    needed: PrefillPlan
    decoding: Spec
    implementation: Implementation
    steps: int
    longest: int

    @property
    def axes(self) -> Axes | None:
        """Axes of the mesh that the exported programs run on; None without a mesh."""
        return self.flat.axes


class LoopInputs(NamedTuple):
    """Arguments of an exported decode loop: mask of ended sequences, random key, end ids, number of steps, sampler.

    Sequences that are `done` sample nothing. `key` is random key data, `eos` the ids that end a sequence, `steps` the
    number of tokens to sample, and `sampling` a sampler whose numbers are arrays.
    """

    done: Bool[Array, " B"]
    key: KeyData
    eos: Int[Array, " n"]
    steps: Int[Array, ""]
    sampling: Any


class After(NamedTuple):
    """Result of an exported program: cache, next logits, `ordered` (True if no score is NaN).

    Fields that a program does not compute are None, and are not outputs.
    """

    pools: Pools
    cache: Tables
    logits: Logits | None = None
    ordered: Bool[Array, ""] | None = None


class LoopResult(NamedTuple):
    """Result of an exported decode loop: ids (-1 after an end), steps `ran`, logits, cache, mask of ended sequences."""

    pools: Pools
    cache: Tables
    logits: Logits
    done: Bool[Array, " B"]
    sampled: Int[Array, "B steps"]
    ran: Int[Array, ""]


@sharded_jit(static=("spec",), on="spec")
def prompt(
    ends: Leaves,
    blocks: Blocks,
    tokens: Int[Array, "B S"],
    length: Int[Array, " B"],
    told: ByLength,
    key: KeyData,
    *,
    spec: BucketSpec,
) -> After:
    """Prefill prompts; return compressed cache, next logits, and True if no score is NaN (exported program)."""
    flat = spec.flat.around(ends, blocks)
    needed = dataclasses.replace(spec.needed, numbers=told)
    prompts = Prompts(flat, tokens, length, spec.policy, needed, _key(key), spec.implementation)
    cache = run_to_end(read(prompts))
    logits = logits_of(ends, prompts.x, graphs=flat.graphs)
    return After(cache.pools, cache.tables, logits, prompts.ordered())


@sharded_jit(static=("spec",), donate=("pools", "cache"), on="spec")
def question(
    ends: Leaves,
    blocks: Blocks,
    pools: Pools,
    cache: Tables,
    logits: Logits,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: BucketSpec,
) -> After:
    """Append `count` tokens per sequence to a cache (donated); return cache and next logits (exported program)."""
    flat = spec.flat.around(ends, blocks)
    after, whole = extend(flat, Cache(pools=pools, tables=cache), tokens, count, spec=spec.decoding)
    return After(whole.pools, whole.tables, jnp.where(count[:, None] > 0, after, logits))


@sharded_jit(static=("spec",), donate=("pools", "cache"), on="spec")
def again(
    ends: Leaves,
    blocks: Blocks,
    pools: Pools,
    cache: Tables,
    key: KeyData,
    *,
    spec: BucketSpec,
) -> After:
    """Recompress due sequences; return the cache (donated) with all segments repacked (exported program)."""
    flat = spec.flat.around(ends, blocks)
    handle = KVCache(
        arrays=Cache(pools=pools, tables=cache),
        layout=spec.policy.composed.layout,
        policy=spec.policy,
        config=flat.config,
        dtype=flat.ends[0].dtype.name,
        padded_len=spec.needed.padded_len,
        axes=flat.axes,
    )
    fixed = Fixed(rows=spec.needed.pools, padded_len=spec.longest)
    made = recompress(
        flat, handle, key=_key(key), headroom=np.asarray(spec.needed.headroom), fixed=fixed
    )
    return After(made.pools, made.tables)


@sharded_jit(static=("spec",), donate=("pools", "cache"), on="spec")
def sample(
    ends: Leaves,
    blocks: Blocks,
    pools: Pools,
    cache: Tables,
    logits: Logits,
    asked: LoopInputs,
    *,
    spec: BucketSpec,
) -> LoopResult:
    """Sample tokens and append them to the pools (donated); return a `LoopResult` (exported decode loop)."""
    flat = spec.flat.around(ends, blocks)
    begun = token_loop.first_sampling_state(
        logits, asked.done, _key(asked.key), asked.eos, axes=spec.axes
    )
    after, now, tokens, ran = token_loop.decode(
        flat,
        Cache(pools=pools, tables=cache),
        begun,
        asked.steps,
        spec=spec.decoding,
        sampling=asked.sampling,
        size=spec.steps,
    )
    return LoopResult(after.pools, after.tables, now.logits, now.done, tokens, ran)


def _key(data: KeyData) -> Array:
    """Wrap raw key data as a threefry random key, independent of JAX's default implementation at run time."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")
