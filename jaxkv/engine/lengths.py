"""Arithmetic of prompts' lengths, before the model runs: buckets, blocks of tokens, and entries that policies keep."""

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxkv._checks import is_traced, namespace
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.layer_budgets import Division, FromScores
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.reads import Reading, tokens_read

Numbers = Int[np.ndarray, " B"] | Int[Array, " B"]
Table = Int[np.ndarray, "L B"] | Int[Array, "L B"]

# Prompts are padded to buckets, so that shapes repeat: powers of two, multiples of 256, four steps to the octave.
_SMALLEST_BUCKET = 16
_OCTAVE_FROM = 1024
QUERY_BLOCK = 256
# Tokens, of all prompts together, that a GPU's prefill takes through the projections and the MLP at once.
_TOKENS_AT_ONCE = 2048
# Tokens sampled by one call of the compiled loop, or read at once on top of a cache, at most.
BLOCK = 256
# Tokens up to which all questions on top of a cache share programs: they are padded to as many.
SHORT = 64
# Tokens sampled between two reads of the text, for stop strings, streams and progress bars.
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
    found, padded_len = list[tuple[int, int]](), 0
    while padded_len < longest:
        shortest, padded_len = padded_len + 1, bucket(padded_len + 1)
        found.append((shortest, padded_len))
    return found


def tokens_per_call(tokens: int) -> int:
    """Number of tokens per call of a compiled program when `tokens` are to be sampled or read in all; at most 256."""
    return min(BLOCK, bucket(tokens))


def block_size(padded_len: int, sizes: Iterable[int]) -> int:
    """First of the given block sizes that divides `padded_len`; `padded_len` itself if none does."""
    return next((size for size in sizes if padded_len % size == 0), padded_len)


def long_block(padded_len: int, batch: int) -> int:
    """Tokens per block, dividing `padded_len`, for projections and MLP when all `batch` prompts are computed together."""
    # Long blocks fill a GPU; the MLP's float32 product of a block, 2 F wide, bounds them.
    sizes = [size for size in (2048, 1024, 512) if size * batch <= _TOKENS_AT_ONCE]
    return block_size(padded_len, [*sizes, QUERY_BLOCK])


def query_buffer_size(queries: int) -> int:
    """Size R of a query buffer buffer of last queries: `queries` to look back on, plus `LOOK` for tokens rolled back."""
    return queries + LOOK


def remembered(ongoing: Ongoing, reading: Reading, sliding_windows: SlidingWindows) -> list[int]:
    """List with the number of last queries that the cache keeps for each layer; 0 for sliding-window layers."""
    if ongoing.compresses:
        return [0 if width else ongoing.queries for width in sliding_windows]
    return [
        reading.query_buffer if layer in reading.filters else 0
        for layer in range(len(sliding_windows))
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLength:
    """Row counts per prompt, from its length alone: budget, growth bound, forced entries, entries of each layer, tokens read.

    Attributes:
        budget: entries per kv head, averaged over layers.
        most: entries that the cache may grow to, see `Parts.may_hold`.
        always_kept: entries that stay whatever their score.
        rows: entries per kv head of each layer; None where they follow from scores.
        recent: the most recent entries that stay in each layer; None as well.
        reads: tokens of each prompt that sparse layers read; None where all layers read everything.
    """

    budget: Numbers
    most: Numbers
    always_kept: Numbers
    rows: Table | None = None
    recent: Table | None = None
    reads: Numbers | None = None


def by_length(
    parts: Parts,
    lengths: Int[np.ndarray, " B"],
    sliding_windows: SlidingWindows,
    *,
    strict: bool = True,
) -> ByLength:
    """Computes a policy's `ByLength` numbers (budgets, entries of each layer) for prompts of given lengths; host int64.

    `sliding_windows` are `ModelConfig.sliding_windows`: a sliding-window layer keeps its window's entries and takes no part in budgets, which are
    spread over the other layers. With `strict`, a budget below the number of forced entries raises ValueError, unless the
    policy clamps budgets.
    """
    length = np.asarray(lengths, np.int64)
    always_kept = parts.keep.counts(length)
    budget = parts.among(sliding_windows).budgets(length, always_kept, strict=strict)
    rows = recent = None
    if not parts.layer_weights:
        rows, recent = rows_of(parts, budget, length, always_kept, sliding_windows)
    return ByLength(
        budget=budget,
        most=parts.may_hold(budget),
        always_kept=always_kept,
        rows=rows,
        recent=recent,
        reads=tokens_read(parts.read, length, sliding_windows),
    )


def with_sliding_windows(
    table: Int[np.ndarray, "n B"] | Int[Array, "n B"],
    length: Numbers,
    sliding_windows: SlidingWindows,
) -> Table:
    """Row counts `[L, B]` of all layers: of sliding-window layers their window's, of the others those in `table`."""
    if not any(sliding_windows):
        return table
    xp, others = namespace(table), iter(table)
    return xp.stack(
        [next(others) if each is None else xp.minimum(length, each) for each in sliding_windows]
    )


def rows_of(
    parts: Parts,
    budget: Numbers,
    lengths: Numbers,
    always_kept: Numbers,
    sliding_windows: SlidingWindows,
    layer_weights: Any = None,
) -> tuple[Table, Table]:
    """Two counts `[L, B]`: entries per kv head that each layer keeps, and most recent entries that stay among them.

    `layer_weights` are `f32[n, B]`, of the n layers without a window among `sliding_windows`, where budgets follow from claims.
    Exact in 64 bits, on the host or in a trace; the results are int32.
    """
    with _in_64_bits(budget if layer_weights is None else layer_weights):
        parts, layers = parts.among(sliding_windows), sliding_windows.count(None)
        budget, lengths, always_kept = (
            each.astype(np.int64) for each in (budget, lengths, always_kept)
        )
        of = Division(budget, lengths, always_kept, layers, parts.keep.window, layer_weights)
        rows = parts.layers.rows(of)
        rows = namespace(rows).minimum(rows, lengths)
        recent = parts.recents(rows, lengths, always_kept, layer_weights, budget)
        rows, recent = (
            with_sliding_windows(table, lengths, sliding_windows) for table in (rows, recent)
        )
        return rows.astype(np.int32), recent.astype(np.int32)


def most_by_layer_weights(
    parts: Parts,
    budget: Numbers,
    lengths: Numbers,
    always_kept: Numbers,
    layer_weights: Any,
    layers: int,
) -> tuple[Table, Table]:
    """Two counts `[n, B]` from the lowest n layers' claims: upper bounds of their entries, and most recent entries in these.

    `layer_weights` are `f32[n, B]`; the entries of `rows_of` are no more, whatever the other of `layers` layers claim.
    """
    with _in_64_bits(layer_weights):
        budget, lengths, always_kept = (
            each.astype(np.int64) for each in (budget, lengths, always_kept)
        )
        assert isinstance(parts.layers, FromScores)
        of = Division(budget, lengths, always_kept, layers, weights=layer_weights)
        rows = parts.layers.at_most(of)
        return rows.astype(np.int32), parts.recents(rows, lengths, always_kept).astype(np.int32)


def _in_64_bits(given: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that switches JAX to 64 bits if `given` is traced; does nothing otherwise (numpy is exact)."""
    return jax.enable_x64(True) if is_traced(given) else contextlib.nullcontext()
