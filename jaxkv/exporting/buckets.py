"""Static config of a bucket of prompt lengths: the policy's budgets by length, pool sizes, and headroom."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxkv._errors import invalid, require
from jaxkv.attention import Implementation
from jaxkv.cache.stores import held_dtype
from jaxkv.engine.lengths import (
    ByLength,
    bucket,
    entry_counts,
    rows_of,
    tokens_per_call,
)
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.engine.spec import specialise
from jaxkv.exporting.exported_programs import BucketSpec
from jaxkv.models.config import SlidingWindows
from jaxkv.models.decoder import Flat
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Policy


class BucketLimits(NamedTuple):
    """Maximum number of `question` tokens appended to a cache, and of sampled `new` tokens."""

    question: int
    new: int

    @property
    def every_token(self) -> int:
        """Maximum number of entries that exported programs append to a cache: `question` plus `new` tokens."""
        return self.question + self.new


class Table(NamedTuple):
    """The policy's budgets and entry counts by prompt length, -1 if rejected, and the `allowed` lengths, ascending."""

    numbers: ByLength
    allowed: Int[np.ndarray, " n"]


def table(parts: Parts, sliding_windows: SlidingWindows, padded_len: int) -> Table:
    """Tabulate a policy's budgets for prompts of 1 to `padded_len` tokens; ValueError if all lengths are rejected."""
    lengths = np.arange(1, padded_len + 1)
    allowed = lengths[_allowed(lambda some: _numbers(parts, some, sliding_windows), lengths)]
    if not allowed.size:
        _numbers(parts, lengths[-1:], sliding_windows)
    known = _numbers(parts, allowed, sliding_windows)

    def by_index(numbers: np.ndarray) -> np.ndarray:
        """Spread numbers of allowed lengths into a table `[..., S + 1]` by length, -1 elsewhere."""
        wide = np.full((*numbers.shape[:-1], padded_len + 1), -1, np.int32)
        wide[..., allowed] = numbers
        return wide

    return Table(jax.tree.map(by_index, known), allowed)


def _numbers(
    parts: Parts, lengths: Int[np.ndarray, " N"], sliding_windows: SlidingWindows
) -> ByLength:
    """Return the policy's `ByLength` numbers for some prompt lengths; ValueError if one length is rejected."""
    known = entry_counts(parts, lengths, sliding_windows)
    if parts.layer_weights:
        layer_weights = np.ones((sliding_windows.count(None), len(lengths)))
        rows_of(parts, known.budget, lengths, known.always_kept, sliding_windows, layer_weights)
    return known


def _allowed(
    numbers: Callable[[np.ndarray], object], lengths: np.ndarray
) -> Bool[np.ndarray, " n"]:
    """Mask of the lengths for which `numbers` raises no ValueError, found by bisection."""
    try:
        numbers(lengths)
    except ValueError:
        if len(lengths) == 1:
            return np.zeros(1, bool)
        half = len(lengths) // 2
        return np.concatenate(
            [_allowed(numbers, part) for part in (lengths[:half], lengths[half:])]
        )
    return np.ones(len(lengths), bool)


def spec_of_bucket(
    flat: Flat,
    policy: Policy,
    known: Table,
    limits: BucketLimits,
    *,
    platform: str,
    implementation: Implementation,
) -> BucketSpec:
    """Build the static config (`BucketSpec`) of the exported programs of one bucket, for one platform."""
    parts, padded_len = policy.composed, known.numbers.budget.shape[0] - 1
    dtype = held_dtype(flat.ends[0].dtype, platform)
    # The longest allowed prompt of each bucket up to `padded_len`: shapes depend only on buckets.
    buckets = np.asarray([bucket(int(n)) for n in known.allowed])
    longest = [int(known.allowed[buckets == each].max()) for each in np.unique(buckets)]

    def planned(headroom: int | tuple[int, ...]) -> PrefillPlan:
        """The engine's `PrefillPlan` of the bucket, with `headroom` free places behind every segment."""
        return plan_prefill(
            flat.config,
            policy,
            longest,
            dtype=dtype,
            headroom=headroom,
            implementation=implementation,
            mesh=flat.mesh,
        )

    headroom = _room(parts, known, planned(0), flat.config.sliding_windows, limits)
    return BucketSpec(
        flat=flat,
        policy=policy,
        needed=dataclasses.replace(planned(tuple(headroom.tolist())), padded_len=padded_len),
        decoding=specialise(
            flat,
            parts,
            padded_len=padded_len,
            extended=parts.evicts and not parts.heads.uniform and limits.question > 0,
            implementation=implementation,
        ),
        implementation=implementation,
        steps=tokens_per_call(limits.new),
        longest=bucket(padded_len + limits.every_token),
    )


def _room(
    parts: Parts,
    known: Table,
    bare: PrefillPlan,
    sliding_windows: SlidingWindows,
    limits: BucketLimits,
) -> Int[np.ndarray, " L"]:
    """Headroom `[L]` of every segment, enough for all question and new tokens of any prompt of the bucket."""
    layers = len(sliding_windows)
    if not parts.ongoing.compresses:
        return np.full(layers, limits.every_token)
    numbers, lengths = known.numbers, known.allowed
    assert isinstance(numbers.most, np.ndarray)
    # Segments of prompts below the budget may grow to it; segments of other prompts keep their size.
    most = np.where(numbers.most[lengths] > lengths, numbers.most[lengths], 0)
    kept = (
        np.zeros(layers)
        if numbers.rows is None
        else np.asarray(numbers.rows)[:, lengths].max(axis=1)
    )
    capacity = np.asarray(bare.capacity)
    if parts.layout.one_pool:
        capacity = np.minimum(capacity, layers * bare.padded_len) // layers
    grows = np.maximum(np.maximum(most.max(), kept) - capacity, 0).astype(np.int64)
    grows = grows + limits.every_token * parts.unlimited(sliding_windows)
    return grows + limits.question + (parts.every or 1)


def require_exportable(policy: Policy, sliding_windows: SlidingWindows, padded_len: int) -> None:
    """Raise ValueError for a policy that cannot be exported: offload, chunks, a second pass, a gate, numpy budgets."""
    parts, name = policy.composed, type(policy).__name__
    remedy = (
        f"{name} loads entries from host memory while sampling, which an exported program cannot: "
    )
    remedy += "export OmniKV without offload, or a policy that evicts entries"
    require(not parts.reading(sliding_windows, padded_len).offloaded, "policy", policy, remedy)
    remedy = (
        f"{name} prefills in chunks, whose number depends on the prompt: leave prefill_ratio out"
    )
    require(not parts.read.chunk, "policy", policy, remedy)
    remedy = f"{name} prefills twice in chunks, whose number depends on the prompt: use jaxkv, and save the cache"
    require(parts.needs.replay is None, "policy", policy, remedy)
    remedy = f"{name} reads a gate, which exported programs do not contain: use jaxkv, and save the cache"
    require(not parts.needs.hidden, "policy", policy, remedy)
    if parts.every is not None and not parts.layers.from_scores:
        remedy = "its layer budgets are computed in numpy, but every= needs them on the device: leave one out"
        given = jax.ShapeDtypeStruct((1,), np.int32)
        try:
            jax.eval_shape(lambda n: rows_of(parts, n, n, n, (None, None)), given)
        except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
            raise invalid("policy", policy, remedy) from error


def require_positions(parts: Parts, known: Table, limits: BucketLimits, positions: int) -> None:
    """Raise ValueError if a cache can outgrow the model's positions, for policies whose positions count its entries."""
    of = known.allowed[known.allowed <= positions]
    if not parts.rolling or not of.size:
        return
    numbers, every = known.numbers, parts.every
    assert isinstance(numbers.rows, np.ndarray) and isinstance(numbers.most, np.ndarray)
    held = int(numbers.rows[:, of].max()) + limits.every_token
    held = (
        held if every is None else min(held, int(numbers.most[of].max()) + every + limits.question)
    )
    remedy = f"with question={limits.question} up to {held} entries are kept, but the model has {positions} positions: "
    require(held <= positions, "new", limits.new, remedy + "lower one of them, or use every=64")
