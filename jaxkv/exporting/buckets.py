"""Static config of a bucket of prompt lengths: the policy's budgets by length, pool sizes, and headroom."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxkv._errors import build_value_error, require
from jaxkv.attention import Implementation
from jaxkv.cache.stores import choose_cache_dtype
from jaxkv.engine.lengths import (
    EntryCounts,
    compute_entry_counts,
    compute_layer_budgets,
    round_up_to_bucket,
    tokens_per_call,
)
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.engine.spec import create_decode_spec
from jaxkv.exporting.exported_programs import BucketSpec
from jaxkv.models.config import SlidingWindows
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy


class TokenLimits(NamedTuple):
    """Maximum numbers of tokens of an export: `question` tokens appended to a cache, and sampled `new` tokens."""

    question: int
    new: int

    @property
    def max_added_tokens(self) -> int:
        """Maximum tokens per sequence that exported programs append to a cache: `question` plus `new`."""
        return self.question + self.new


class BudgetTable(NamedTuple):
    """Named tuple: a policy's `EntryCounts` (`numbers`) by prompt length, 0 to S, -1 if rejected; `allowed` lengths."""

    numbers: EntryCounts
    allowed: Int[np.ndarray, " n"]


def tabulate_budgets(parts: Parts, sliding_windows: SlidingWindows, padded_len: int) -> BudgetTable:
    """Return the `BudgetTable` of a policy for 1 to `padded_len` tokens; ValueError if all lengths are rejected."""
    lengths = np.arange(1, padded_len + 1)
    allowed = lengths[
        _find_allowed_lengths(lambda some: _compute_budgets(parts, some, sliding_windows), lengths)
    ]
    if not allowed.size:
        _compute_budgets(parts, lengths[-1:], sliding_windows)
    known = _compute_budgets(parts, allowed, sliding_windows)

    def spread_by_length(numbers: np.ndarray) -> np.ndarray:
        """Spread numbers of the allowed lengths into an array `[..., S + 1]` indexed by length, -1 elsewhere."""
        wide = np.full((*numbers.shape[:-1], padded_len + 1), -1, np.int32)
        wide[..., allowed] = numbers
        return wide

    return BudgetTable(jax.tree.map(spread_by_length, known), allowed)


def _compute_budgets(
    parts: Parts, lengths: Int[np.ndarray, " N"], sliding_windows: SlidingWindows
) -> EntryCounts:
    """Return the policy's `EntryCounts` numbers for the given prompt lengths; ValueError if a length is rejected."""
    known = compute_entry_counts(parts, lengths, sliding_windows)
    if parts.uses_layer_weights:
        layer_weights = np.ones((sliding_windows.count(None), len(lengths)))
        compute_layer_budgets(
            parts, known.budget, lengths, known.always_kept, sliding_windows, layer_weights
        )
    return known


def _find_allowed_lengths(
    numbers: Callable[[np.ndarray], object], lengths: np.ndarray
) -> Bool[np.ndarray, " n"]:
    """Return the mask of the lengths for which the function `numbers` raises no ValueError, by bisection."""
    try:
        numbers(lengths)
    except ValueError:
        if len(lengths) == 1:
            return np.zeros(1, bool)
        half = len(lengths) // 2
        return np.concatenate(
            [_find_allowed_lengths(numbers, part) for part in (lengths[:half], lengths[half:])]
        )
    return np.ones(len(lengths), bool)


def create_bucket_spec(
    flat: SplitDecoder,
    policy: Policy,
    known: BudgetTable,
    limits: TokenLimits,
    *,
    platform: str,
    implementation: Implementation,
) -> BucketSpec:
    """Return the `BucketSpec` of the exported programs of one bucket of prompt lengths, for one platform."""
    parts = policy.composed
    padded_len = known.numbers.budget.shape[0] - 1
    dtype = choose_cache_dtype(flat.ends[0].dtype, platform)
    # The longest allowed prompt of each bucket up to `padded_len`: shapes depend only on buckets.
    buckets = np.asarray([round_up_to_bucket(int(n)) for n in known.allowed])
    longest = [int(known.allowed[buckets == each].max()) for each in np.unique(buckets)]

    def plan_with_headroom(headroom: int | tuple[int, ...]) -> PrefillPlan:
        """Return the `PrefillPlan` of each bucket's longest allowed prompt, with `headroom` free places per segment."""
        return plan_prefill(
            flat.config,
            policy,
            longest,
            dtype=dtype,
            headroom=headroom,
            implementation=implementation,
            mesh=flat.mesh,
        )

    headroom = _compute_headroom(
        parts, known, plan_with_headroom(0), flat.config.sliding_windows, limits
    )
    return BucketSpec(
        flat=flat,
        policy=policy,
        needed=dataclasses.replace(
            plan_with_headroom(tuple(headroom.tolist())), padded_len=padded_len
        ),
        decoding=create_decode_spec(
            flat,
            parts,
            padded_len=padded_len,
            extended=parts.evicts_while_decoding
            and not parts.heads.is_uniform
            and limits.question > 0,
            implementation=implementation,
        ),
        implementation=implementation,
        steps=tokens_per_call(limits.new),
        longest=round_up_to_bucket(padded_len + limits.max_added_tokens),
    )


def _compute_headroom(
    parts: Parts,
    known: BudgetTable,
    bare: PrefillPlan,
    sliding_windows: SlidingWindows,
    limits: TokenLimits,
) -> Int[np.ndarray, " L"]:
    """Return how many free places per segment, `[L]`, question and new tokens need after any prompt, by policy."""
    layers = len(sliding_windows)
    if not parts.decoding_compression.compresses:
        return np.full(layers, limits.max_added_tokens)
    numbers = known.numbers
    lengths = known.allowed
    assert isinstance(numbers.most, np.ndarray)
    # Segments of prompts below the budget may grow to it; segments of other prompts keep their size.
    most = np.where(numbers.most[lengths] > lengths, numbers.most[lengths], 0)
    kept = (
        np.zeros(layers)
        if numbers.rows is None
        else np.asarray(numbers.rows)[:, lengths].max(axis=1)
    )
    capacity = np.asarray(bare.capacity)
    if parts.cache_layout.uses_shared_pool:
        capacity = np.minimum(capacity, layers * bare.padded_len) // layers
    grows = np.maximum(np.maximum(most.max(), kept) - capacity, 0).astype(np.int64)
    grows = grows + limits.max_added_tokens * parts.mask_layers_without_eviction(sliding_windows)
    return grows + limits.question + (parts.recompression_interval or 1)


def require_exportable(policy: Policy, sliding_windows: SlidingWindows, padded_len: int) -> None:
    """Raise ValueError for a policy with offload, chunked or second prefill, a gate, or `every` with NumPy budgets."""
    parts = policy.composed
    name = type(policy).__name__
    remedy = (
        f"{name} loads entries from host memory while sampling, which an exported program cannot: "
    )
    remedy += "export OmniKV without offload, or a policy that evicts entries"
    require(
        not parts.build_read_config(sliding_windows, padded_len).offloaded, "policy", policy, remedy
    )
    remedy = (
        f"{name} prefills in chunks, whose number depends on the prompt: leave prefill_ratio out"
    )
    require(not parts.read.prefill_chunk_tokens, "policy", policy, remedy)
    remedy = f"{name} prefills twice in chunks, whose number depends on the prompt: use jaxkv, and save the cache"
    require(parts.needs.replay is None, "policy", policy, remedy)
    remedy = f"{name} reads a gate, which exported programs do not contain: use jaxkv, and save the cache"
    require(not parts.needs.hidden, "policy", policy, remedy)
    remedy = "exported pools have one size, and the budget grows with the answer: leave grows out"
    require(parts.growing_budget is None, "policy", policy, remedy)
    if parts.recompression_interval is not None and not parts.layers.depends_on_scores:
        remedy = "its layer budgets are computed in numpy, but every= needs them on the device: leave one out"
        given = jax.ShapeDtypeStruct((1,), np.int32)
        try:
            jax.eval_shape(lambda n: compute_layer_budgets(parts, n, n, n, (None, None)), given)
        except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
            raise build_value_error("policy", policy, remedy) from error


def require_enough_positions(
    parts: Parts, known: BudgetTable, limits: TokenLimits, positions: int
) -> None:
    """Raise ValueError if a cache with rolling positions, which count entries, can outgrow the model's positions."""
    of = known.allowed[known.allowed <= positions]
    if not parts.rolling or not of.size:
        return
    numbers = known.numbers
    every = parts.recompression_interval
    assert isinstance(numbers.rows, np.ndarray) and isinstance(numbers.most, np.ndarray)
    held = int(numbers.rows[:, of].max()) + limits.max_added_tokens
    held = (
        held if every is None else min(held, int(numbers.most[of].max()) + every + limits.question)
    )
    remedy = f"with question={limits.question} up to {held} entries are kept, but the model has {positions} positions: "
    require(held <= positions, "new", limits.new, remedy + "lower one of them, or use every=64")
