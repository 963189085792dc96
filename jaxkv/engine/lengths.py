"""Arithmetic of prompt lengths before the model runs: buckets, blocks of tokens, entries that policies keep."""

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

# Prompts are padded to buckets, so that shapes repeat: powers of two, multiples of 256, four steps per octave.
_SMALLEST_BUCKET = 16
_OCTAVE_FROM = 1024
QUERY_BLOCK = 256
# Number of tokens, of all prompts together, per block of the projections and the MLP in a GPU's prefill.
_TOKENS_AT_ONCE = 2048
# Maximum number of tokens sampled by one call of the compiled loop, or run in one chunk on top of a cache.
BLOCK = 256
# Questions on top of a cache are padded to at least this many tokens, so that short ones share programs.
SHORT = 64
# Tokens sampled between two checks for stop strings, streams and progress bars.
LOOK = 8


def bucket(length: int) -> int:
    """Return the padded length in tokens of a prompt of `length` >= 1 tokens.

    A power of two up to 256, a multiple of 256 up to 1024, then four steps per octave.
    """
    if length <= QUERY_BLOCK:
        return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    step = QUERY_BLOCK
    if length > _OCTAVE_FROM:
        step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def buckets(longest: int) -> list[tuple[int, int]]:
    """Return `(shortest prompt length, padded length)` per bucket for prompts up to `longest` tokens, ascending."""
    pairs, padded_len = list[tuple[int, int]](), 0
    while padded_len < longest:
        shortest, padded_len = padded_len + 1, bucket(padded_len + 1)
        pairs.append((shortest, padded_len))
    return pairs


def tokens_per_call(tokens: int) -> int:
    """Return the tokens per call of a compiled program that samples or runs `tokens` tokens; at most 256."""
    return min(BLOCK, bucket(tokens))


def block_size(padded_len: int, sizes: Iterable[int]) -> int:
    """Return the first of the given block sizes that divides `padded_len`; `padded_len` if none does."""
    return next((size for size in sizes if padded_len % size == 0), padded_len)


def long_block(padded_len: int, batch: int) -> int:
    """Return the tokens per block, a divisor of `padded_len`, when projections and MLP run `batch` prompts together."""
    # Long blocks fill a GPU; the MLP's float32 product of a block, 2 F wide, limits their length.
    sizes = [size for size in (2048, 1024, 512) if size * batch <= _TOKENS_AT_ONCE]
    return block_size(padded_len, [*sizes, QUERY_BLOCK])


def query_buffer_size(queries: int) -> int:
    """Return the size R of a query buffer: `queries`, plus `LOOK` for tokens rolled back after a stop string."""
    return queries + LOOK


def remembered(ongoing: Ongoing, reading: Reading, sliding_windows: SlidingWindows) -> list[int]:
    """Return the number of last queries that the cache keeps per layer; 0 for sliding-window layers."""
    if ongoing.compresses:
        return [0 if width else ongoing.queries for width in sliding_windows]
    return [
        reading.query_buffer if layer in reading.filters else 0
        for layer in range(len(sliding_windows))
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLength:
    """Entry counts per prompt, from its length alone.

    Attributes:
        budget: entries per kv head, averaged over layers.
        most: maximum entries that the cache may grow to, see `Parts.may_hold`.
        always_kept: entries kept regardless of their scores.
        rows: entries per kv head of each layer; None if these depend on scores.
        recent: most recent entries that each layer keeps; None if these depend on scores.
        reads: tokens of each prompt that sparse layers attend to; None if all layers attend to all tokens.
    """

    budget: Numbers
    most: Numbers
    always_kept: Numbers
    rows: Table | None = None
    recent: Table | None = None
    reads: Numbers | None = None


def entry_counts(
    parts: Parts,
    lengths: Int[np.ndarray, " B"],
    sliding_windows: SlidingWindows,
    *,
    strict: bool = True,
) -> ByLength:
    """Compute a policy's entry counts for prompts of given lengths; host int64.

    A layer with a window in `sliding_windows` keeps its window's entries. Budgets are divided among the other layers.
    With `strict`, a budget below the number of always-kept entries raises ValueError, unless the policy clamps budgets.
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
    """Return entry counts `[L, B]` of all layers: windows of sliding-window layers, else rows of `table`."""
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
    """Return two counts `[L, B]`: entries per kv head that each layer keeps, and most recent entries among these.

    `layer_weights` are `f32[n, B]`, of the n layers without a sliding window, if budgets depend on claims. Exact in 64
    bits, on the host or in a trace; the results are int32.
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
    """Return upper bounds `[n, B]` of entries and of recent entries, from the claims of the lowest n layers.

    `layer_weights` are `f32[n, B]`. `rows_of` returns no more entries, regardless of the claims of other layers.
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
    """Return a context manager that enables 64-bit JAX if `given` is traced, else does nothing (numpy is exact)."""
    return jax.enable_x64(True) if is_traced(given) else contextlib.nullcontext()
