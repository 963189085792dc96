"""Validation and conversion of the arguments of `generate`, `prefill` and similar functions."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv import _checks
from jaxkv._checks import UnseenQuestionWarning, to_python_scalar, warn_once
from jaxkv._errors import require
from jaxkv.attention import Implementation, parse_attention_implementation
from jaxkv.cache import KVCache
from jaxkv.cache.host_store import commit_to_device
from jaxkv.engine.lengths import compute_entry_counts
from jaxkv.engine.sampling import (
    GREEDY,
    Sampler,
    Sampling,
    get_settings,
    is_greedy,
    require_ids_in_vocabulary,
)
from jaxkv.loading import LanguageModel
from jaxkv.machine import hosts
from jaxkv.models.config import ModelConfig
from jaxkv.policies.policy import Policy
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, place_dataclass_on_mesh
from jaxkv.text.prompts import EncodedPrompts

_SEEDS = 2**32


def validate_model(params: Any, mesh: Any = None) -> LanguageModel:
    """Return a `LanguageModel`, sharded over `mesh` if one is given; raise TypeError for other values."""
    if isinstance(params, LanguageModel):
        return params if mesh is None else params.on(mesh)
    given = f"{params!r}"[:60] if isinstance(params, str) else type(params).__name__
    raise TypeError(
        f"params={given}: not a model. Pass one from jaxkv.load: params = "
        "jaxkv.load('smollm2-135m-instruct')"
    )


def validate_cache(cache: Any) -> KVCache | None:
    """Return a `KVCache` or None, numpy moved to devices; TypeError for others, ValueError if donated or misplaced.

    Raises TypeError unless the value is a `KVCache` or None.
    """
    if cache is None:
        return None
    if not isinstance(cache, KVCache):
        where = (
            "pass its .cache"
            if hasattr(cache, "cache")
            else "pass a cache from prefill or generate"
        )
        raise TypeError(f"cache={type(cache).__name__}: {where}")
    cache.require_live_arrays()
    axes = ShardingMesh.get_array_mesh(cache.seen)
    remedy = (
        f"its arrays are on {getattr(axes, 'mesh', None)}: pass the original cache to "
        "jaxkv.reshard(cache, None)"
    )
    require(axes is None or cache.axes is not None, "cache.axes", cache.axes, remedy)
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(cache)):
        return (
            cache
            if cache.host_store is None
            else dataclasses.replace(
                cache, host_store=cache.host_store.pin_in_host_memory(cache.axes)
            )
        )
    return move_cache_to_device(cache)


def move_cache_to_device(cache: KVCache) -> KVCache:
    """Return a cache with its arrays on its device or mesh, and its offloaded entries in host memory."""
    host_store = (
        None if cache.host_store is None else cache.host_store.pin_in_host_memory(cache.axes)
    )
    device = place_dataclass_on_mesh(
        jax.tree.map(jnp.asarray, dataclasses.replace(cache, host_store=None)), cache.axes
    )
    return (
        device
        if host_store is None
        else dataclasses.replace(commit_to_device(device), host_store=host_store)
    )


def validate_sampler(given: Any, **numbers: Any) -> Sampler:
    """Return the sampler, else `Sampling` of the numbers, else `GREEDY`; TypeError for both or non-samplers."""
    named = {name: value for name, value in numbers.items() if value is not None}
    if named and given is not None:
        raise TypeError(f"{', '.join(named)}: sampling= is set, too. Give one of them.")
    if given is None:
        return Sampling(**named) if named else GREEDY
    if isinstance(given, type):
        raise TypeError(
            f"sampling={given.__name__}: a class. Give an instance, such as {given.__name__}(...)"
        )
    if not isinstance(given, Sampler):
        raise TypeError(f"sampling={given!r}: give jaxkv.Sampling(temperature=0.7), say")
    return given


def validate_stop_strings(given: Any) -> tuple[str, ...]:
    """Return stop strings as a tuple, from one, several or None; ValueError for empty ones, TypeError for non-text."""
    if given is None:
        return ()
    many = isinstance(given, Iterable) and not isinstance(
        given, (str, bytes, bytearray, memoryview, Mapping)
    )
    stops = tuple(given) if many else (given,)
    for stop in stops:
        if not isinstance(stop, str):
            raise TypeError(
                f"stop={given!r}: {stop!r} is not text. Give a string, or a list of strings"
            )
    require(all(stops), "stop", given, "a stop string is empty: give at least one character")
    return tuple(str.__str__(stop) for stop in stops)


def validate_random_key(given: Any, seed: Any = None) -> PRNGKeyArray | None:
    """Return a JAX key from a key, key data or 32-bit seed; None for None; ValueError for seeds out of range.

    ValueError for longer seeds, whose upper bits JAX would drop. The argument may also be named seed.
    """
    if seed is not None:
        if given is not None:
            raise TypeError("seed: key= is set, too. Give one of them.")
        given = seed
    remedy = "give jax.random.key(0), or a seed such as 0"
    if given is None:
        return None
    if isinstance(given, (jax.Array, np.ndarray)) and given.ndim:
        if (
            given.dtype == jnp.uint32
            and given.shape == jax.random.key_data(jax.random.key(0)).shape
        ):
            return jax.random.wrap_key_data(jnp.asarray(given))
        raise TypeError(f"key={given.dtype}{list(given.shape)}: {remedy}")
    if isinstance(given, jax.Array) and jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        return given
    number = to_python_scalar(given)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"key={type(given).__name__}: {remedy}")
    require(0 <= number < _SEEDS, "key", number, f"out of range: give a seed in [0, {_SEEDS})")
    return jax.random.key(number)


def make_random_key(seed: int) -> PRNGKeyArray:
    """Return the JAX random key of a 64-bit seed; up to 32 bits it equals `jax.random.key(seed)`.

    JAX would drop the upper half of longer seeds.
    """
    if -(2**31) <= seed < _SEEDS:
        return jax.random.key(seed)
    low = np.uint32(seed % _SEEDS)
    high = np.uint32(seed // _SEEDS % _SEEDS)
    return jax.random.fold_in(jax.random.key(low), high)


def validate_implementation(given: Any) -> Implementation:
    """Return the attention `Implementation` of a member or name, `AUTO` for None; ValueError for unknown names."""
    return Implementation.AUTO if given is None else parse_attention_implementation(given)


def validate_progress(given: Any) -> bool | None:
    """Validate True or False, which switch progress bars on or off, or None, for terminals only; return it."""
    return None if given is None else _checks.validate_bool("progress", given)


def check_sampling_options(
    params: LanguageModel,
    sampling: Sampler,
    key: PRNGKeyArray | None,
    stops: tuple[str, ...],
    *,
    continues: bool,
) -> None:
    """Raise ValueError for a random sampler without a key, unknown token ids, or stop strings without a tokenizer.

    Also raise it for log-probabilities of a prompt that `continues` a cache.
    """
    top = get_settings(sampling).prompt_logprobs
    remedy = "not supported for a question on a cache or document: leave it out"
    require(top is None or not continues, "prompt_logprobs", top, remedy)
    remedy = f"{sampling} uses random numbers: give key=jax.random.key(0), or seed=0"
    require(is_greedy(sampling) or key is not None, "key", key, remedy)
    require_ids_in_vocabulary(sampling, params.config.vocab)
    shown = stops[0] if len(stops) == 1 else stops
    require(
        not stops or params.text is not None,
        "stop",
        shown,
        "the checkpoint has no tokenizer: stop by eos only",
    )


def require_matching_cache(params: LanguageModel, cache: KVCache, policy: Policy | None) -> None:
    """Raise ValueError for a cache of another model, mesh or policy; policy None accepts any policy."""
    remedy = f"the cache was compressed by {cache.policy}: omit policy, or prefill again"
    require(policy is None or policy.composed == cache.policy.composed, "policy", policy, remedy)
    ours = cache.config == params.config and cache.model == params.fingerprint
    require(
        ours,
        "cache",
        cache.model,
        f"the cache belongs to another model than {params.name!r}: prefill with this one",
    )
    theirs, mine = (None if axes is None else axes.mesh for axes in (cache.axes, params.axes))
    where, mesh = ("one device", None) if mine is None else (mine, "mesh")
    remedy = f"the model is on {where}: pass jaxkv.reshard(cache, {mesh}), or prefill with this one"
    require(theirs == mine, "cache", theirs, remedy)


def require_prompts_fit(
    config: ModelConfig,
    policy: Policy,
    lengths: Int[np.ndarray, " B"],
    new: int,
    cache: KVCache | None,
) -> None:
    """Raise ValueError if cache, prompts, `new` (rolling: entries) exceed positions, or cache batch not 1 or theirs."""
    seen = np.zeros(1, np.int32)
    limit = config.max_positions
    if cache is not None:
        remedy = f"the cache holds {cache.batch} sequences: give as many prompts, or a cache of 1"
        require(cache.batch in (1, len(lengths)), "prompt", f"{len(lengths)} prompts", remedy)
        seen = copy_to_host(cache.seen)[: cache.batch]
    if policy.composed.rolling:
        return _require_rolling_entries_fit(config, policy, lengths, new, cache)
    total = int((seen + lengths).max()) + new
    remedy = f"the model was made for {limit}: shorten the prompt or lower max_new_tokens"
    require(total <= limit, "prompt", f"{total} tokens, {new} new ones included", remedy)


def warn_unseen_question(
    policy: Policy, encoded: EncodedPrompts, budget: Int[np.ndarray, " B"]
) -> None:
    """Warn, once per process and class, if a policy that scores by a document's end evicts entries before a question.

    This applies only to policies that score entries by the attention of the document's end. `budget` is in entries per
    kv head.
    """
    scorer = policy.composed.scorer
    lost = (encoded.prompt_lengths > budget) & np.asarray(encoded.unclosed)
    if not scorer.follows_last_queries or not lost.any() or not hosts.is_first_process():
        return
    name = type(policy).__name__
    warn_once(
        UnseenQuestionWarning,
        name,
        f"policy={name}: it keeps what the prompt's end attends to, so a later question may find its answer evicted. "
        "Use a policy that does not score by the prompt's end, such as KVzip(budget=0.5), or put the question "
        "into the prompt: generate(params, document + '\\n\\n' + question, policy=...)",
    )


def _require_rolling_entries_fit(
    config: ModelConfig, policy: Policy, lengths: np.ndarray, new: int, cache: KVCache | None
) -> None:
    """Raise ValueError if a policy with rolling positions would hold more entries than the model has positions."""
    limit = config.max_positions
    parts = policy.composed
    if cache is None:
        read = int(lengths.max())
        numbers = compute_entry_counts(parts, lengths, config.sliding_windows)
        assert numbers.rows is not None
        now = int(numbers.rows.max())
        target = int(numbers.most.max())
    else:
        read = now = int((cache.kept.max(axis=(0, 2)) + lengths).max())
        target = int(copy_to_host(cache.limit).max())
    if parts.growing_budget is not None:
        before = 0 if cache is None else int(copy_to_host(cache.seen).max())
        target = int(parts.growing_budget.count_entries(before + lengths + new).max())
    remedy = f"the model was made for {limit} at a time: shorten the prompt"
    require(read <= limit, "prompt", f"{read} tokens, those kept included", remedy)
    every = parts.recompression_interval
    most = now + new if every is None else min(now + new, target + every)
    remedy = (
        f"{most} entries would be kept and the model was made for {limit}: lower it, or give "
        "every=64 to the policy"
    )
    require(most <= limit, "max_new_tokens", new, remedy)
