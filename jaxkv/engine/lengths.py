"""What follows from prompts' lengths alone, before the model runs: on the host, or as a program takes it."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxkv._values import is_traced
from jaxkv.policies.parts import Parts

Numbers = Int[np.ndarray, " B"] | Int[Array, " B"]
Table = Int[np.ndarray, "L B"] | Int[Array, "L B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLength:
    """Numbers of prompts that follow from their lengths.

    Attributes:
        budget: rows per kv head, averaged over layers.
        most: rows that the cache may grow to, see `Parts.may_hold`.
        forced: rows that stay whatever their score.
        rows: rows per kv head of each layer; None where they follow from the prompts' content.
        recent: the most recent rows that stay in each layer; None likewise.
        reads: tokens of each prompt that are read by layers that do not read everything; None where all layers do.
    """

    budget: Numbers
    most: Numbers
    forced: Numbers
    rows: Table | None = None
    recent: Table | None = None
    reads: Numbers | None = None


def by_length(parts: Parts, lengths: Int[np.ndarray, " B"], layers: int, *, strict: bool = True) -> ByLength:
    """Rows that a policy keeps of prompts of these lengths.

    Args:
        parts: of the policy.
        lengths: tokens of each.
        layers: L.
        strict: refuse budgets below the rows that stay anyway, unless the policy clamps them.

    Returns:
        Its numbers, on the host.

    Raises:
        ValueError: if the budget cannot be honoured for one of the prompts, naming it.
    """
    length = np.asarray(lengths, np.int64)
    forced = parts.keep.counts(length)
    budget = parts.budgets(length, forced, strict=strict)
    rows, recent = None, None
    if not parts.claims:
        rows = parts.layers.rows(budget, length, forced, layers=layers, window=parts.keep.window, weights=None)
        rows = np.minimum(rows, length)
        recent = parts.recents(rows, length, forced)
    return ByLength(
        budget=budget,
        most=parts.may_hold(length, budget),
        forced=forced,
        rows=rows,
        recent=recent,
        reads=None if parts.read is None else np.asarray(parts.read.tokens(length, layers), np.int64),
    )


def rows_by_claims(
    parts: Parts, budget: Numbers, lengths: Numbers, forced: Numbers, claims: Any
) -> tuple[Table, Table]:
    """Rows of each layer where they follow from what layers claim: exact, in 64 bits, on the host or traced.

    Args:
        parts: of the policy.
        budget: `[B]` rows per kv head, averaged over layers.
        lengths: `[B]` tokens of each prompt.
        forced: `[B]` rows that stay whatever their score.
        claims: `f32[L, B]` each layer's claim on the budget.

    Returns:
        `i32[L, B]` rows per kv head of each layer, and the most recent ones that stay among them.
    """
    with jax.enable_x64(True) if is_traced(claims) else contextlib.nullcontext():
        budget, lengths, forced = (each.astype(np.int64) for each in (budget, lengths, forced))
        given = (budget, lengths, forced)
        rows = parts.layers.rows(*given, layers=len(claims), window=parts.keep.window, weights=claims)
        recent = parts.recents(rows, lengths, forced, claims, budget)
        return rows.astype(np.int32), recent.astype(np.int32)
