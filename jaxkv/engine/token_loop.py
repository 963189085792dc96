"""Token loop: compiled over decode steps, or in Python over programs of groups of layers."""

import dataclasses
import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache import CacheArrays, SegmentTables
from jaxkv.cache.host_store import HostStoreLoader, TransferCounter
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.decode import run_decode_step, run_new_tokens
from jaxkv.engine.sampling import Sampler, convert_sampler_to_pytree
from jaxkv.engine.sampling_extras import SampledLogprobs, SamplingExtras, concatenate_logprobs
from jaxkv.engine.spec import DecodeSpec
from jaxkv.models.split_decoder import Leaves, SplitDecoder
from jaxkv.models.states import DeltaState
from jaxkv.sharding.collectives import all_gather_shards, count_flags_over_mesh, get_shard_offset
from jaxkv.sharding.mesh import (
    ShardingMesh,
    copy_to_host,
    is_inside_shard_map,
    place_dataclass_on_mesh,
)
from jaxkv.sharding.sharded_program import sharded_jit


def _get_command_buffer_options() -> dict[str, str]:
    """Return compiler options that run the token loop as one GPU command buffer; empty if XLA_FLAGS sets them.

    The GPU then waits for the host once, not at every token.
    """
    name = "xla_gpu_enable_command_buffer"
    if name in os.environ.get("XLA_FLAGS", ""):
        return {}
    usual = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
    return {name: f"{usual},CONDITIONAL,WHILE"}


@jax.tree_util.register_dataclass
@frozen_dataclass
class SamplingState:
    """Sampling state of each sequence of a batch: next logits, ended mask, tokens left, random keys, end ids.

    Attributes:
        logits: logits of the next token, `f32[B, V]`.
        done: mask of sequences that have ended.
        left: number of tokens that each sequence may sample; the last one ends it, as an end token does.
        key: random keys; each step folds in `row` and the position.
        row: numbers folded into the keys: the index of a sequence among those that share a key.
        ends: ids that end each sequence; -2 is padding.
        extras: arrays for penalties, biases, masks and log-probabilities; None in the plain loop.
    """

    logits: Float[Array, "B V"]
    done: Bool[Array, " B"]
    left: Int[Array, " B"]
    key: Key[Array, " B"]
    row: Int[Array, " B"]
    ends: Int[Array, "B n"]
    extras: SamplingExtras | None = None

    def advance_step(self, logits: Float[Array, "B V"], done: Bool[Array, " B"]) -> "SamplingState":
        """Return the state after a step: `done`, `left` less one unless ended before, new logits unless ended now.

        A token that ends a sequence adds no entry: the logits remain those of the last entry.
        """
        left = self.left - (~self.done).astype(jnp.int32)
        return dataclasses.replace(
            self, logits=jnp.where(done[:, None], self.logits, logits), done=done, left=left
        )


@sharded_jit(static=("axes",))
def create_sampling_state(
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    key: PRNGKeyArray,
    eos: Int[Array, " n"],
    *,
    axes: ShardingMesh | None = None,
) -> SamplingState:
    """Compiled: return a batch's initial `SamplingState`, with one random key, end ids `eos` and no token limit."""
    batch = done.shape[0]
    return SamplingState(
        logits=logits,
        done=done,
        left=jnp.full((batch,), jnp.iinfo(jnp.int32).max, jnp.int32),
        key=jnp.broadcast_to(key, (batch,)),
        row=jnp.arange(batch, dtype=jnp.int32) + get_shard_offset("B", batch, axes),
        ends=jnp.broadcast_to(eos, (batch, *eos.shape)),
    )


class SampledTokens(NamedTuple):
    """One token per sequence, `[B]`: sampled id, id to return (-1 after the end), ended mask, whether it is run.

    Attributes:
        token: sampled id; V for an id outside the vocabulary.
        shown: sampled id; -1 for sequences that had ended before.
        done: mask of sequences that have ended.
        fed: 1 if the token runs through the model, else 0.
        extras: the sampling state's extras after the token.
        logprobs: its `SampledLogprobs`; None in the plain loop.
    """

    token: Int[Array, " B"]
    shown: Int[Array, " B"]
    done: Bool[Array, " B"]
    fed: Int[Array, " B"]
    extras: SamplingExtras | None = None
    logprobs: SampledLogprobs | None = None


def sample_next_tokens(
    sampling_state: SamplingState,
    seen: Int[Array, " B"],
    sampling: Sampler,
    axes: ShardingMesh | None = None,
) -> SampledTokens:
    """Sample each sequence's next token as `SampledTokens`; TypeError unless the sampler returns integers `[B]`."""
    logits = all_gather_shards(sampling_state.logits, "V", 1, axes)
    keys = jax.vmap(lambda key, row, at: jax.random.fold_in(jax.random.fold_in(key, row), at))(
        sampling_state.key, sampling_state.row, seen
    )
    extras = sampling_state.extras
    token = sampling(extras.process_logits(logits) if extras else logits, keys)
    whole = jnp.issubdtype(jnp.asarray(token).dtype, jnp.integer)
    if not whole or jnp.shape(token) != seen.shape:
        found = f"{jnp.asarray(token).dtype}{list(jnp.shape(token))}"
        raise TypeError(
            f"sampling={sampling}: it returns {found}. Return one token id per sequence, int32 [B]."
        )
    vocab = logits.shape[1]
    # V marks an id outside the vocabulary, which `DecodeLoop` rejects; -1 would mean an ended sequence.
    token = jnp.where((token < 0) | (token >= vocab), vocab, token.astype(jnp.int32))
    done = (
        sampling_state.done
        | (token[:, None] == sampling_state.ends).any(axis=1)
        | (sampling_state.left <= 1)
    )
    after = extras.count_and_score(token, ~sampling_state.done, logits) if extras else ()
    shown = jnp.where(sampling_state.done, -1, token)
    return SampledTokens(token, shown, done, (~done).astype(jnp.int32), *after)


@sharded_jit(static=("axes",))
def run_sampling_step(
    sampling_state: SamplingState,
    seen: Int[Array, " B"],
    sampling: Any,
    *,
    axes: ShardingMesh | None,
) -> SampledTokens:
    """Compiled `sample_next_tokens`: sample the next token of every sequence; return `SampledTokens`."""
    return sample_next_tokens(sampling_state, seen, sampling, axes)


def decode(
    flat: SplitDecoder,
    cache: CacheArrays,
    sampling_state: SamplingState,
    steps: int | Int[Array, ""],
    *,
    spec: DecodeSpec,
    sampling: Sampler,
    size: int,
    idle: int | None = None,
    loader: HostStoreLoader | None = None,
) -> tuple[CacheArrays, SamplingState, Int[Array, "B size"], Int[Array, ""], Any]:
    """Sample up to `steps` tokens per sequence; return cache, state, ids `[B, size]`, number of steps, logprobs.

    Runs a compiled loop; or a loop in Python, over programs of layer groups, if `spec.grouped` or with a `loader`
    of entries in host memory. Ids are -1 after a sequence's end; the pools of `cache` are donated. A sampled token
    runs through the model before the next one is sampled: the cache holds all sampled tokens except those that end
    a sequence. Sampling stops early once more than `idle` sequences have ended, by default all. `steps`, at most
    `size`, and `idle` are not compiled in; 0 steps compile a loop, or what a `loader` needs,
    and change nothing. The last result is `SampledLogprobs` if the state has extras, else None.
    """
    # On a mesh, the copies that fill up its groups have ended, too.
    many = sampling_state.done.shape[0] * (
        flat.axes.count_axis_shards("B") if flat.axes is not None and is_inside_shard_map() else 1
    )
    idle = many - 1 if idle is None else idle
    if loader is None and not spec.grouped:
        arguments = collect_loop_arguments(
            flat, cache, sampling_state, steps, sampling, idle, spec=spec
        )
        return _loop(*arguments, spec=spec, size=size)
    step = partial(_run_sampled_step, flat, spec=spec, sampling=convert_sampler_to_pytree(sampling))
    if loader is not None:
        device = next(iter(cache.tables.seen.devices()))
        sampling_state = (
            place_dataclass_on_mesh(sampling_state, flat.axes)
            if flat.axes
            else jax.device_put(sampling_state, device)
        )
        if steps == 0:
            # Compile with a step that adds no token. Groups of layers compile soon enough in the first step.
            spare = dataclasses.replace(loader, traffic=TransferCounter())
            stopped = dataclasses.replace(sampling_state, done=sampling_state.done | True)
            cache, *_ = step(cache, stopped, loader=spare)
            jax.block_until_ready(cache)
    out = np.full((len(sampling_state.done), size), -1, np.int32)
    ran = 0
    ended = copy_to_host(sampling_state.done)
    logprobs = list[Any]()
    while ran < int(steps) and ended.sum() <= idle:
        cache, sampling_state, new = step(cache, sampling_state, loader=loader)
        # Copy to the host only now, while the device runs the step.
        out[:, ran] = copy_to_host(new.shown)
        ended = copy_to_host(new.done)
        logprobs.append(new.logprobs)
        ran += 1
    found = jnp.asarray(out), jnp.int32(ran), concatenate_logprobs(logprobs)
    return cache, sampling_state, *found


def _run_sampled_step(
    flat: SplitDecoder,
    cache: CacheArrays,
    sampling_state: SamplingState,
    *,
    spec: DecodeSpec,
    sampling: Any,
    loader: HostStoreLoader | None,
) -> tuple[CacheArrays, SamplingState, SampledTokens]:
    """Sample one token per sequence and run it by compiled programs; return cache (donated), state, the tokens."""
    axes = flat.axes
    new = run_sampling_step(sampling_state, cache.tables.seen, sampling, axes=axes)
    logits, cache = run_new_tokens(
        flat, cache, new.token[:, None], new.fed, spec=spec, loader=loader
    )
    sampling_state = dataclasses.replace(sampling_state, extras=new.extras)
    return cache, _advance_compiled(sampling_state, logits, new.done, axes=axes), new


@sharded_jit(static=("axes",))
def _advance_compiled(
    sampling_state: SamplingState,
    logits: Float[Array, "B V"],
    done: Bool[Array, " B"],
    *,
    axes: ShardingMesh | None,
) -> SamplingState:
    """Compiled `SamplingState.advance_step`: return the state after a step."""
    return sampling_state.advance_step(logits, done)


def collect_loop_arguments(
    flat: SplitDecoder,
    cache: CacheArrays,
    sampling_state: SamplingState,
    steps: int | Int[Array, ""],
    sampling: Sampler,
    idle: int,
    *,
    spec: DecodeSpec,
) -> tuple[Any, ...]:
    """Return a tuple of the compiled token loop's non-static arguments, in order; pools and states are donated."""
    weights = (flat.ends, spec.collect_block_leaves(flat))
    limits = (jnp.int32(steps), jnp.int32(idle))
    return (
        weights,
        cache.pools,
        cache.states,
        cache.tables,
        sampling_state,
        limits,
        convert_sampler_to_pytree(sampling),
    )


def compile_loop(arguments: tuple[Any, ...], *, spec: DecodeSpec, size: int) -> None:
    """Compile the token loop for the result of `collect_loop_arguments` without running it; nothing is donated."""
    _loop.trace(*arguments, spec=spec, size=size).lower().compile()


@sharded_jit(
    static=("spec", "size"),
    donate=("pools", "states"),
    on="spec",
    compiler=_get_command_buffer_options(),
)
def _loop(
    weights: tuple[Leaves, tuple[Leaves, ...]],
    pools: tuple[EntryPool, ...],
    states: tuple[DeltaState, ...],
    tables: SegmentTables,
    sampling_state: SamplingState,
    limits: tuple[Int[Array, ""], Int[Array, ""]],
    sampling: Any,
    *,
    spec: DecodeSpec,
    size: int,
) -> tuple[CacheArrays, SamplingState, Int[Array, "B size"], Int[Array, ""], Any]:
    """Compiled token loop: sample, then step; return cache (donated), sampling state, ids, number of steps, logprobs.

    `limits` are the number of steps, and the number of ended sequences above which the loop stops.
    """
    steps, idle = limits

    def going(carry):
        index, _, sampling_state, *_ = carry
        # Stops after the requested number of steps, or once more than `idle` sequences have ended.
        return (index < steps) & (count_flags_over_mesh(sampling_state.done, spec.axes) <= idle)

    def body(carry):
        index, cache, sampling_state, out, logprobs = carry
        new = sample_next_tokens(sampling_state, cache.tables.seen, sampling, spec.axes)
        out = lax.dynamic_update_slice(out, new.shown[:, None], (0, index))
        put = partial(lax.dynamic_update_slice_in_dim, start_index=index, axis=1)
        logprobs = jax.tree.map(put, logprobs, new.logprobs)
        logits, cache = run_decode_step(*weights, cache, new.token[:, None], new.fed, spec=spec)
        sampling_state = dataclasses.replace(sampling_state, extras=new.extras)
        return index + 1, cache, sampling_state.advance_step(logits, new.done), out, logprobs

    out = jnp.full((sampling_state.done.shape[0], size), -1, jnp.int32)
    extras = sampling_state.extras
    logprobs = extras.create_logprobs(size) if extras else None
    cache = CacheArrays(pools=pools, tables=tables, states=states)
    begun = jnp.int32(0), cache, sampling_state, out, logprobs
    index, *found, out, logprobs = lax.while_loop(going, body, begun)
    return *found, out, index, logprobs
