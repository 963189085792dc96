"""Arithmetic of prompts' lengths, before the model runs: buckets, blocks of tokens, and rows that policies keep."""

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxkv._checks import is_traced, namespace
from jaxkv.models.config import Windows
from jaxkv.policies.layers import Division, FromScores
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.reading import Reading, tokens_read

Numbers = Int[np.ndarray, " B"] | Int[Array, " B"]
Table = Int[np.ndarray, "L B"] | Int[Array, "L B"]

# Prompts are padded to buckets, so that shapes repeat: powers of two, multiples of 256, four steps to the octave.
_SMALLEST_BUCKET = 16
_OCTAVE_FROM = 1024
QUERY_BLOCK = 256
# Tokens, of all prompts together, that a GPU's prefill takes through the projections and the MLP at once.
_TOKENS_AT_ONCE = 2048
# Tokens drawn by one call of the compiled loop, or read at once on top of a cache, at most.
BLOCK = 256
# Tokens up to which all questions on top of a cache share programs: they are padded to as many.
SHORT = 64
# Tokens drawn between two reads of the text, for stop strings, streams and progress bars.
LOOK = 8


def bucket(length: int) -> int:
    """Bucket size: padded length, in tokens, for a prompt of `length` >= 1 tokens.

    A power of two up to 256, a multiple of 256 up to 1024, then four steps to the octave.
    """
    if length <= QUERY_BLOCK:
        return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    step = QUERY_BLOCK
    if length > _OCTAVE_FROM:
        step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def buckets(longest: int) -> list[tuple[int, int]]:
    """List of `(shortest prompt length, padded length)` per bucket for prompts up to `longest` tokens, ascending."""
    found, slots = list[tuple[int, int]](), 0
    while slots < longest:
        shortest, slots = slots + 1, bucket(slots + 1)
        found.append((shortest, slots))
    return found


def tokens_per_call(tokens: int) -> int:
    """Number of tokens per call of a compiled program when `tokens` are to be drawn or read in all; at most 256."""
    return min(BLOCK, bucket(tokens))


def block_size(slots: int, sizes: Iterable[int]) -> int:
    """First of the given block sizes that divides `slots`; `slots` itself if none does."""
    return next((size for size in sizes if slots % size == 0), slots)


def long_block(slots: int, batch: int) -> int:
    """Tokens per block, dividing `slots`, for projections and MLP when all `batch` prompts are computed together."""
    # Long blocks fill a GPU; the MLP's float32 product of a block, 2 F wide, bounds them.
    sizes = [size for size in (2048, 1024, 512) if size * batch <= _TOKENS_AT_ONCE]
    return block_size(slots, [*sizes, QUERY_BLOCK])


def ring_rows(queries: int) -> int:
    """Size R of a ring buffer of last queries: `queries` to look back on, plus `LOOK` for tokens rolled back."""
    return queries + LOOK


def remembered(ongoing: Ongoing, reading: Reading, windows: Windows) -> list[int]:
    """List with the number of last queries that the cache keeps for each layer; 0 for window layers."""
    if ongoing.compresses:
        return [0 if width else ongoing.queries for width in windows]
    return [reading.ring if layer in reading.filters else 0 for layer in range(len(windows))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLength:
    """Row counts per prompt, from its length alone: budget, growth bound, forced rows, rows of each layer, tokens read.

    Attributes:
        budget: rows per kv head, averaged over layers.
        most: rows that the cache may grow to, see `Parts.may_hold`.
        forced: rows that stay whatever their score.
        rows: rows per kv head of each layer; None where they follow from scores.
        recent: the most recent rows that stay in each layer; None likewise.
        reads: tokens of each prompt that sparse layers read; None where all layers read everything.
    """

    budget: Numbers
    most: Numbers
    forced: Numbers
    rows: Table | None = None
    recent: Table | None = None
    reads: Numbers | None = None


def by_length(
    parts: Parts,
    lengths: Int[np.ndarray, " B"],
    windows: Windows,
    *,
    strict: bool = True,
) -> ByLength:
    """Computes a policy's `ByLength` numbers (budgets, rows of each layer) for prompts of given lengths; host int64.

    `windows` are `ModelConfig.windows`: a window layer keeps its window's rows and takes no part in budgets, which are
    spread over the other layers. With `strict`, a budget below the number of forced rows raises ValueError, unless the
    policy clamps budgets.
    """
    length = np.asarray(lengths, np.int64)
    forced = parts.keep.counts(length)
    budget = parts.among(windows).budgets(length, forced, strict=strict)
    rows = recent = None
    if not parts.claims:
        rows, recent = rows_of(parts, budget, length, forced, windows)
    return ByLength(
        budget=budget,
        most=parts.may_hold(budget),
        forced=forced,
        rows=rows,
        recent=recent,
        reads=tokens_read(parts.read, length, windows),
    )


def beside_windows(
    table: Int[np.ndarray, "n B"] | Int[Array, "n B"],
    length: Numbers,
    windows: Windows,
) -> Table:
    """Row counts `[L, B]` of all layers: of window layers their window's, of the others those in `table`."""
    if not any(windows):
        return table
    xp, others = namespace(table), iter(table)
    return xp.stack(
        [next(others) if each is None else xp.minimum(length, each) for each in windows]
    )


def rows_of(
    parts: Parts,
    budget: Numbers,
    lengths: Numbers,
    forced: Numbers,
    windows: Windows,
    claims: Any = None,
) -> tuple[Table, Table]:
    """Two counts `[L, B]`: rows per kv head that each layer keeps, and most recent rows that stay among them.

    `claims` are `f32[n, B]`, of the n layers without a window among `windows`, where budgets follow from claims.
    Exact in 64 bits, on the host or in a trace; the results are int32.
    """
    with _in_64_bits(budget if claims is None else claims):
        parts, layers = parts.among(windows), windows.count(None)
        budget, lengths, forced = (each.astype(np.int64) for each in (budget, lengths, forced))
        of = Division(budget, lengths, forced, layers, parts.keep.window, claims)
        rows = parts.layers.rows(of)
        rows = namespace(rows).minimum(rows, lengths)
        recent = parts.recents(rows, lengths, forced, claims, budget)
        rows, recent = (beside_windows(table, lengths, windows) for table in (rows, recent))
        return rows.astype(np.int32), recent.astype(np.int32)


def most_by_claims(
    parts: Parts, budget: Numbers, lengths: Numbers, forced: Numbers, claims: Any, layers: int
) -> tuple[Table, Table]:
    """Two counts `[n, B]` from the lowest n layers' claims: upper bounds of their rows, and most recent rows in these.

    `claims` are `f32[n, B]`; the rows of `rows_of` are no more, whatever the other of `layers` layers claim.
    """
    with _in_64_bits(claims):
        budget, lengths, forced = (each.astype(np.int64) for each in (budget, lengths, forced))
        assert isinstance(parts.layers, FromScores)
        of = Division(budget, lengths, forced, layers, weights=claims)
        rows = parts.layers.at_most(of)
        return rows.astype(np.int32), parts.recents(rows, lengths, forced).astype(np.int32)


def _in_64_bits(given: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that switches JAX to 64 bits if `given` is traced; does nothing otherwise (numpy is exact)."""
    return jax.enable_x64(True) if is_traced(given) else contextlib.nullcontext()
