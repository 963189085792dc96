"""The engine's programs traced on abstract arrays: a prefill, and the token loop that runs on its cache."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._checks import is_traced
from jaxkv.attention import Implementation
from jaxkv.cache import KVCache
from jaxkv.engine import token_loop
from jaxkv.engine.embedding import compute_logits
from jaxkv.engine.plan import PrefillPlan
from jaxkv.engine.prefill import PrefillLayerSource, prefill_layers
from jaxkv.engine.progress import run_generator
from jaxkv.engine.sampling import Sampler
from jaxkv.engine.spec import create_cache_spec
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.policies.policy import Policy
from jaxkv.sharding.record import RecordedCall, record_program_calls


class TracedPrefill(NamedTuple):
    """A prefill traced on abstract arrays: the recorded `calls` of its programs, and the `cache` that it returns."""

    calls: list[RecordedCall]
    cache: KVCache


def trace_prefill(
    flat: SplitDecoder,
    policy: Policy,
    needed: PrefillPlan,
    *,
    implementation: Implementation,
    sharding: Any = None,
) -> TracedPrefill:
    """Trace the prefill of a `PrefillPlan` on abstract arrays; run and compile nothing; return `TracedPrefill`.

    `sharding` is that of arrays without a mesh, None for the default device.
    """
    of = jax.ShapeDtypeStruct
    batch = len(needed.budget)

    def run_prefill(tokens: Any, lengths: Any, numbers: Any, key: Any) -> Any:
        """Run prefill on abstract arrays; return cache, logits, and the prompt arrays that live to its end."""
        prompts = PrefillLayerSource(
            flat,
            tokens,
            lengths,
            policy,
            dataclasses.replace(needed, numbers=numbers),
            key,
            implementation,
        )
        cache = run_generator(prefill_layers(prompts))
        logits = compute_logits(flat.ends, prompts.x, graphs=flat.graphs)
        # Angles are a dict by rotary embedding, whose keys JAX cannot sort.
        held = [
            list(each.values()) if isinstance(each, dict) else each
            for each in vars(prompts).values()
        ]
        return cache, logits, [leaf for leaf in jax.tree.leaves(held) if is_traced(leaf)]

    calls, (cache, *_) = record_program_calls(
        run_prefill,
        of((batch, needed.padded_len), jnp.int32),
        of((batch,), jnp.int32),
        jax.tree.map(lambda each: each.astype(np.int32), needed.numbers),
        of((), jax.random.key(0).dtype),
        resident=(flat.ends, flat.blocks),
        sharding=sharding,
    )
    return TracedPrefill(calls, cache)


def trace_token_loop(
    flat: SplitDecoder,
    cache: KVCache,
    *,
    implementation: Implementation,
    sampling: Sampler,
    ends: int,
    size: int,
    sharding: Any = None,
) -> Any:
    """Trace the token loop on a cache of abstract arrays; return `jax.stages.Traced`.

    `ends` is the number of end ids, `size` the maximum number of tokens per call.
    """
    spec = create_cache_spec(flat, cache, implementation)
    state = jax.eval_shape(
        token_loop.create_sampling_state,
        jax.ShapeDtypeStruct((cache.batch, flat.config.vocab), jnp.float32),
        jax.ShapeDtypeStruct((cache.batch,), bool),
        jax.eval_shape(lambda: jax.random.key(0)),
        jax.ShapeDtypeStruct((ends,), jnp.int32),
    )
    given = token_loop.collect_loop_arguments(
        flat, cache.arrays, state, size, sampling, 0, spec=spec
    )
    return token_loop._loop.trace(*make_abstract_arrays(given, sharding), spec=spec, size=size)


def make_abstract_arrays(tree: Any, sharding: Any = None) -> Any:
    """Return a pytree with each array as its `ShapeDtypeStruct`, with `sharding` unless that is None."""

    def describe_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
        """Return the `ShapeDtypeStruct` of one array, with the sharding if set (mapped over the pytree)."""
        known = isinstance(leaf, jax.ShapeDtypeStruct)
        made = leaf if known else jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)
        return made.update(sharding=sharding) if sharding else made

    return jax.tree.map(describe_leaf, tree)
