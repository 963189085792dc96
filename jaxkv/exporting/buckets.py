"""What a bucket of prompts needs: its policy's numbers for every length, its pools, and room for all that comes."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxkv._errors import require
from jaxkv.attention import Implementation
from jaxkv.engine.lengths import ByLength, bucket, by_length, rows_by_claims, tokens_per_call
from jaxkv.engine.plan import PrefillPlan, plan_prefill
from jaxkv.engine.spec import specialise
from jaxkv.exporting.programs import Setting
from jaxkv.models.decoder import Flat
from jaxkv.policies.parts import Parts
from jaxkv.policies.policy import Method


class Asked(NamedTuple):
    """What an export is to serve.

    Attributes:
        question: tokens that can be read on top of a cache.
        new: tokens that can be drawn.
        every_token: what becomes a row and stays, where rows are only added.
    """

    question: int
    new: int

    @property
    def every_token(self) -> int:
        """All of them."""
        return self.question + self.new


class Table(NamedTuple):
    """A policy's numbers for prompts of 0 to S tokens.

    Attributes:
        told: `[..., S + 1]`, -1 where the policy refuses such a prompt.
        allowed: the lengths that it takes, ascending.
    """

    told: ByLength
    allowed: Int[np.ndarray, " n"]


def table(parts: Parts, layers: int, slots: int) -> Table:
    """The numbers of all prompts of a bucket.

    Args:
        parts: of the policy.
        layers: L.
        slots: S.

    Returns:
        The table.

    Raises:
        ValueError: where the policy takes no prompt of the bucket, with its own words for the longest.
    """
    lengths = np.arange(1, slots + 1)
    allowed = lengths[_allowed(lambda of: _numbers(parts, of, layers), lengths)]
    if not allowed.size:
        _numbers(parts, lengths[-1:], layers)
    known = _numbers(parts, allowed, layers)

    def spread(numbers: np.ndarray | None) -> np.ndarray | None:
        if numbers is None:
            return None
        wide = np.full((*numbers.shape[:-1], slots + 1), -1, np.int32)
        wide[..., allowed] = numbers
        return wide

    fields: dict[str, Any] = {each.name: spread(getattr(known, each.name)) for each in dataclasses.fields(ByLength)}
    return Table(ByLength(**fields), allowed)


def _numbers(parts: Parts, lengths: Int[np.ndarray, " N"], layers: int) -> ByLength:
    known = by_length(parts, lengths, layers)
    if parts.claims:
        # What is refused whatever layers claim.
        rows_by_claims(parts, known.budget, lengths, known.forced, np.ones((layers, len(lengths))))
    return known


def _allowed(numbers: Callable[[np.ndarray], object], lengths: np.ndarray) -> np.ndarray:
    """Which of some lengths are taken: those of a stretch that is refused are asked for by halves."""
    try:
        numbers(lengths)
    except ValueError:
        if len(lengths) == 1:
            return np.zeros(1, bool)
        half = len(lengths) // 2
        return np.concatenate([_allowed(numbers, part) for part in (lengths[:half], lengths[half:])])
    return np.ones(len(lengths), bool)


def setting_of(
    flat: Flat, policy: Method, known: Table, asked: Asked, *, platform: str, implementation: Implementation
) -> Setting:
    """What the programs of a bucket are made for.

    Args:
        flat: the decoder.
        policy: the compression.
        known: the bucket's table.
        asked: what is to be served.
        platform: where it will run.
        implementation: what computes attention.

    Returns:
        The setting.
    """
    parts, slots, config = policy.parts(), known.told.budget.shape[0] - 1, flat.config
    dtype = flat.ends[0].dtype
    # The longest of each bucket: shapes follow from buckets alone.
    buckets = np.asarray([bucket(int(n)) for n in known.allowed])
    longest = [int(known.allowed[buckets == each].max()) for each in np.unique(buckets)]
    bare = plan_prefill(config, policy, longest, dtype=dtype, implementation=implementation)
    room = _room(parts, known, bare, config.layers, asked)
    needed = plan_prefill(
        config, policy, longest, dtype=dtype, room=tuple(room.tolist()), implementation=implementation
    )
    return Setting(
        flat=flat,
        policy=policy,
        needed=dataclasses.replace(needed, slots=slots),
        spec=specialise(
            flat,
            parts,
            dtype,
            slots=slots,
            extended=parts.outgrows_prompts and asked.question > 0,
            platform=platform,
            implementation=implementation,
        ),
        implementation=implementation,
        steps=tokens_per_call(asked.new),
        longest=bucket(slots + asked.every_token),
    )


def _room(parts: Parts, known: Table, bare: PrefillPlan, layers: int, asked: Asked) -> Int[np.ndarray, " L"]:
    """Rows behind every segment of each layer, so that no cache of the bucket ever needs a larger pool."""
    if parts.ongoing is None:
        return np.full(layers, asked.every_token)
    told, lengths = known.told, known.allowed
    assert isinstance(told.most, np.ndarray)
    # What segments may grow to: of prompts below the budget that, of others what they kept.
    most = np.where(told.most[lengths] > lengths, told.most[lengths], 0)
    kept = np.zeros(layers) if told.rows is None else np.asarray(told.rows)[:, lengths].max(axis=1)
    capacity = np.asarray(bare.pool_rows(1) * (layers if bare.layout.one_pool else 1))
    capacity = capacity // layers if bare.layout.one_pool else capacity
    grows = np.maximum(np.maximum(most.max(), kept) - capacity, 0).astype(np.int64)
    grows = grows + asked.every_token * parts.layers.unlimited(layers)
    return grows + asked.question + (parts.every or 1)


def require_exportable(policy: Method, layers: int, slots: int) -> None:
    """Refuses policies that programs without a host cannot honour.

    Args:
        policy: the compression.
        layers: L.
        slots: the largest bucket.

    Raises:
        ValueError: naming the policy.
    """
    parts, name = policy.parts(), type(policy).__name__
    read = parts.read
    if read is not None:
        reading = parts.reading(layers, slots)
        away = reading is not None and bool(reading.offloaded)
        remedy = f"{name} brings rows from host memory while tokens are drawn, which a program by itself cannot: "
        require(not away, "policy", policy, remedy + "export OmniKV without offload, or a policy that drops rows")
        remedy = f"{name} reads prompts chunk by chunk, as many as they have: leave prefill_ratio out"
        require(not read.by_chunks, "policy", policy, remedy)
    if parts.every is not None and not parts.layers.from_scores:
        remedy = "this budget over layers is numpy's alone, and every= asks for it on the device: give another, or none"
        require(not _on_host_only(parts), "policy", policy, remedy)


def require_places(parts: Parts, known: Table, asked: Asked, limit: int) -> None:
    """Refuses room for more rows than the model has positions, under policies whose positions are places in the cache.

    Args:
        parts: of the policy.
        known: the bucket's table.
        asked: what is to be served.
        limit: the model's positions.

    Raises:
        ValueError: naming the tokens that can be drawn.
    """
    of = known.allowed[known.allowed <= limit]
    if not parts.rolling or not of.size:
        return
    told, every = known.told, parts.every
    assert isinstance(told.rows, np.ndarray) and isinstance(told.most, np.ndarray)
    held = int(told.rows[:, of].max()) + asked.every_token
    held = held if every is None else min(held, int(told.most[of].max()) + every + asked.question)
    remedy = f"with question={asked.question} up to {held} rows are kept and the model was made for {limit}: "
    require(held <= limit, "new", asked.new, remedy + "lower one of them, or give every=64, say")


def _on_host_only(parts: Parts) -> bool:
    """Whether rows of layers cannot be computed within a program."""
    import jax
    import jax.numpy as jnp

    def rows(n):
        with jax.enable_x64(True):
            of = {"layers": 2, "window": parts.keep.window, "weights": None}
            return parts.layers.rows(n, n, jnp.zeros_like(n), **of)

    try:
        jax.eval_shape(rows, jax.ShapeDtypeStruct((1,), np.int32))
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        return True
    return False
