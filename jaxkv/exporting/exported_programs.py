"""Exported programs: prefill, a question, recompression, and the decode loop, each with all layers.

They run the engine's own code. Argument and field names become names in the manifest, and must not change.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.attention import Implementation
from jaxkv.cache import CacheArrays, EntryPool, KVCache, SegmentTables
from jaxkv.engine import token_loop
from jaxkv.engine.decode import run_new_tokens
from jaxkv.engine.embedding import compute_logits
from jaxkv.engine.lengths import EntryCounts
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill import PrefillLayerSource, prefill_layers
from jaxkv.engine.progress import run_generator
from jaxkv.engine.recompress import FixedSizes, recompress
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.split_decoder import Leaves, SplitDecoder
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import ShardingMesh
from jaxkv.sharding.sharded_program import sharded_jit

# Data of a random key; logits of the next tokens; pools and blocks of all layers.
KeyData = UInt[Array, " two"]
Logits = Float[Array, "B V"]
Pools = tuple[EntryPool, ...]
Blocks = tuple[Leaves, ...]


@frozen_dataclass
class BucketSpec:
    """Static config of one bucket's exported programs: decoder, policy, prefill plan, decode config, loop length.

    Attributes:
        flat: the decoder; only the shapes of its leaves matter.
        policy: compression policy.
        needed: plan of the prefill: padded length, pools and headroom.
        decoding: the engine's static config of decoding.
        implementation: implementation of attention in prefill.
        steps: maximum number of tokens that one call of the decode loop samples.
        longest: upper bound of a segment's entries: padded length, question and new tokens, rounded up to a bucket.
    """

    flat: SplitDecoder
    policy: Policy
    needed: PrefillPlan
    decoding: DecodeSpec
    implementation: Implementation
    steps: int
    longest: int

    @property
    def axes(self) -> ShardingMesh | None:
        """`ShardingMesh` of the mesh that the exported programs run on; None without a mesh."""
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


class ProgramResult(NamedTuple):
    """Result of an exported program: cache (pools, tables), and if computed next logits, `ordered` (no score is NaN).

    Fields that a program does not compute are None, and are not outputs.
    """

    pools: Pools
    cache: SegmentTables
    logits: Logits | None = None
    ordered: Bool[Array, ""] | None = None


class LoopResult(NamedTuple):
    """Result of an exported decode loop: ids (-1 after an end), steps `ran`, logits, cache, mask of ended sequences."""

    pools: Pools
    cache: SegmentTables
    logits: Logits
    done: Bool[Array, " B"]
    sampled: Int[Array, "B steps"]
    ran: Int[Array, ""]


@sharded_jit(static=("spec",), on="spec")
def prefill_prompts(
    ends: Leaves,
    blocks: Blocks,
    tokens: Int[Array, "B S"],
    length: Int[Array, " B"],
    told: EntryCounts,
    key: KeyData,
    *,
    spec: BucketSpec,
) -> ProgramResult:
    """Prefill prompts (exported program); return a `ProgramResult`: cache, next logits, True if no score is NaN."""
    flat = spec.flat.replace_arrays(ends, blocks)
    needed = dataclasses.replace(spec.needed, numbers=told)
    prompts = PrefillLayerSource(
        flat, tokens, length, spec.policy, needed, _wrap_key_data(key), spec.implementation
    )
    cache = run_generator(prefill_layers(prompts))
    logits = compute_logits(ends, prompts.x, graphs=flat.graphs)
    return ProgramResult(cache.pools, cache.tables, logits, prompts.has_no_nan_scores())


@sharded_jit(static=("spec",), donate=("pools", "cache"), on="spec")
def append_question(
    ends: Leaves,
    blocks: Blocks,
    pools: Pools,
    cache: SegmentTables,
    logits: Logits,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    *,
    spec: BucketSpec,
) -> ProgramResult:
    """Append `count` tokens a sequence to a donated cache (exported program); return it and logits, old for count 0."""
    flat = spec.flat.replace_arrays(ends, blocks)
    after, whole = run_new_tokens(
        flat, CacheArrays(pools=pools, tables=cache), tokens, count, spec=spec.decoding
    )
    return ProgramResult(whole.pools, whole.tables, jnp.where(count[:, None] > 0, after, logits))


@sharded_jit(static=("spec",), donate=("pools", "cache"), on="spec")
def recompress_due_sequences(
    ends: Leaves,
    blocks: Blocks,
    pools: Pools,
    cache: SegmentTables,
    key: KeyData,
    *,
    spec: BucketSpec,
) -> ProgramResult:
    """Recompress a donated cache's due sequences, repack all segments; return a `ProgramResult` (exported program)."""
    flat = spec.flat.replace_arrays(ends, blocks)
    handle = KVCache(
        arrays=CacheArrays(pools=pools, tables=cache),
        layout=spec.policy.composed.cache_layout,
        policy=spec.policy,
        config=flat.config,
        dtype=flat.ends[0].dtype.name,
        padded_len=spec.needed.padded_len,
        axes=flat.axes,
    )
    fixed = FixedSizes(rows=spec.needed.pools, padded_len=spec.longest)
    made = recompress(
        flat,
        handle,
        key=_wrap_key_data(key),
        headroom=np.asarray(spec.needed.headroom),
        fixed=fixed,
    )
    return ProgramResult(made.pools, made.tables)


@sharded_jit(static=("spec",), donate=("pools", "cache"), on="spec")
def run_exported_loop(
    ends: Leaves,
    blocks: Blocks,
    pools: Pools,
    cache: SegmentTables,
    logits: Logits,
    asked: LoopInputs,
    *,
    spec: BucketSpec,
) -> LoopResult:
    """Sample up to `asked.steps` tokens per sequence (exported program); donate the cache; return a `LoopResult`."""
    flat = spec.flat.replace_arrays(ends, blocks)
    begun = token_loop.create_sampling_state(
        logits, asked.done, _wrap_key_data(asked.key), asked.eos, axes=spec.axes
    )
    after, now, tokens, ran, _ = token_loop.decode(
        flat,
        CacheArrays(pools=pools, tables=cache),
        begun,
        asked.steps,
        spec=spec.decoding,
        sampling=asked.sampling,
        size=spec.steps,
    )
    return LoopResult(after.pools, after.tables, now.logits, now.done, tokens, ran)


def _wrap_key_data(data: KeyData) -> Array:
    """Wrap raw key data as a threefry random key, independent of JAX's default implementation at run time."""
    return jax.random.wrap_key_data(data, impl="threefry2x32")
