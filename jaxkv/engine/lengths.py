"""Arithmetic of prompt lengths before the model runs: buckets, blocks of tokens, entries that policies keep."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxkv._checks import is_traced, select_array_module
from jaxkv._dataclasses import frozen_dataclass
from jaxkv.models.config import SlidingWindows
from jaxkv.policies.layer_budgets import LayerBudgetInputs, WeightedLayers
from jaxkv.policies.parts import DecodingCompressionConfig, Parts
from jaxkv.policies.reads import LayerReadConfig, count_attended_prompt_tokens

Numbers = Int[np.ndarray, " B"] | Int[Array, " B"]
Table = Int[np.ndarray, "L B"] | Int[Array, "L B"]

# Prompts are padded to buckets, so that shapes repeat: powers of two, multiples of 256, four steps per octave.
_SMALLEST_BUCKET = 16
_OCTAVE_FROM = 1024
QUERY_BLOCK = 256
# Number of tokens, of all prompts together, per block of the projections and the MLP in a GPU's prefill.
_TOKENS_AT_ONCE = 2048
# Maximum number of tokens sampled by one call of the token loop, or run in one chunk on top of a cache.
BLOCK = 256
# Questions on top of a cache are padded to at least this many tokens, so that short ones share programs.
SHORT = 64
# Tokens sampled between two checks for stop strings, streams and progress bars.
LOOK = 8


def round_up_to_bucket(length: int) -> int:
    """Return the padded length in tokens (bucket) of a prompt of `length` >= 1 tokens.

    A power of two up to 256, a multiple of 256 up to 1024, then four steps per octave.
    """
    if length <= QUERY_BLOCK:
        return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    step = QUERY_BLOCK
    if length > _OCTAVE_FROM:
        step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def round_up_to_question(length: int) -> int:
    """Return the padded length in tokens of a question of `length` >= 1 tokens on top of a cache."""
    return max(SHORT, round_up_to_bucket(length))


def list_buckets(longest: int) -> list[tuple[int, int]]:
    """Return `(shortest prompt length, padded length)` of each bucket for prompts up to `longest` tokens, ascending."""
    pairs, padded_len = list[tuple[int, int]](), 0
    while padded_len < longest:
        shortest, padded_len = padded_len + 1, round_up_to_bucket(padded_len + 1)
        pairs.append((shortest, padded_len))
    return pairs


def tokens_per_call(tokens: int) -> int:
    """Return a compiled program's tokens per call, to run `tokens` in all: their bucket, at most 256."""
    return min(BLOCK, round_up_to_bucket(tokens))


def choose_block_size(padded_len: int, sizes: Iterable[int]) -> int:
    """Return the first of the given block sizes that divides `padded_len`; `padded_len` if none does."""
    return next((size for size in sizes if padded_len % size == 0), padded_len)


def choose_prefill_block_size(padded_len: int, batch: int) -> int:
    """Return the tokens per block of projections and MLP in a prefill of `batch` prompts, a divisor of `padded_len`."""
    # Long blocks fill a GPU; the MLP's float32 product of a block, 2 F wide, limits their length.
    sizes = [size for size in (2048, 1024, 512) if size * batch <= _TOKENS_AT_ONCE]
    return choose_block_size(padded_len, [*sizes, QUERY_BLOCK])


def query_buffer_size(queries: int) -> int:
    """Return the size R of a query buffer: `queries`, plus 8 (`LOOK`) for tokens rolled back after a stop string."""
    return queries + LOOK


def count_buffered_queries(
    ongoing: DecodingCompressionConfig, reading: LayerReadConfig, sliding_windows: SlidingWindows
) -> list[int]:
    """Return, per layer, how many last queries the cache keeps in a query buffer; 0 for layers without one."""
    if ongoing.compresses:
        return [0 if width else ongoing.queries for width in sliding_windows]
    return [
        reading.filter_query_count if layer in reading.filters else 0
        for layer in range(len(sliding_windows))
    ]


@jax.tree_util.register_dataclass
@frozen_dataclass
class EntryCounts:
    """Entry counts of a policy per prompt, from its length alone: budget, always-kept entries, entries per layer.

    Attributes:
        budget: entries per kv head, averaged over layers.
        most: maximum entries that the cache may grow to, see `Parts.compute_growth_limits`.
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


def compute_entry_counts(
    parts: Parts,
    lengths: Int[np.ndarray, " B"],
    sliding_windows: SlidingWindows,
    *,
    strict: bool = True,
) -> EntryCounts:
    """Return a policy's `EntryCounts` for prompt lengths; if `strict`, ValueError for budgets below always-kept ones.

    A layer with a window in `sliding_windows` keeps its window's entries. Budgets are divided among the other layers.
    With `strict`, a budget below the number of always-kept entries raises ValueError, unless the policy clamps budgets.
    """
    length = np.asarray(lengths, np.int64)
    always_kept = parts.keep.count_always_kept(length)
    budget = parts.restrict_to_full_attention(sliding_windows).compute_prompt_budgets(
        length, always_kept, strict=strict
    )
    rows = recent = None
    if not parts.uses_layer_weights:
        rows, recent = compute_layer_budgets(parts, budget, length, always_kept, sliding_windows)
    return EntryCounts(
        budget=budget,
        most=parts.compute_growth_limits(budget),
        always_kept=always_kept,
        rows=rows,
        recent=recent,
        reads=count_attended_prompt_tokens(parts.read, length, sliding_windows),
    )


def insert_sliding_window_counts(
    table: Int[np.ndarray, "n B"] | Int[Array, "n B"],
    length: Numbers,
    sliding_windows: SlidingWindows,
) -> Table:
    """Return entry counts `[L, B]`: min(length, window) in sliding-window layers, else the rows of `table` in order."""
    if not any(sliding_windows):
        return table
    xp, others = select_array_module(table), iter(table)
    return xp.stack(
        [next(others) if each is None else xp.minimum(length, each) for each in sliding_windows]
    )


def compute_layer_budgets(
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
    with _enable_64_bits(budget if layer_weights is None else layer_weights):
        parts, layers = (
            parts.restrict_to_full_attention(sliding_windows),
            sliding_windows.count(None),
        )
        budget, lengths, always_kept = (
            each.astype(np.int64) for each in (budget, lengths, always_kept)
        )
        of = LayerBudgetInputs(
            budget, lengths, always_kept, layers, parts.keep.window, layer_weights
        )
        rows = parts.layers.compute_layer_entries(of)
        rows = select_array_module(rows).minimum(rows, lengths)
        recent = parts.count_recent_entries(rows, lengths, always_kept, layer_weights, budget)
        rows, recent = (
            insert_sliding_window_counts(table, lengths, sliding_windows)
            for table in (rows, recent)
        )
        return rows.astype(np.int32), recent.astype(np.int32)


def bound_layer_budgets(
    parts: Parts,
    budget: Numbers,
    lengths: Numbers,
    always_kept: Numbers,
    layer_weights: Any,
    layers: int,
) -> tuple[Table, Table]:
    """Return upper bounds `[n, B]` of kept and recent entries per kv head, from budget weights of the first n layers.

    `layer_weights` are `f32[n, B]`. `compute_layer_budgets` returns no more entries, regardless of the claims of other
    layers.
    """
    with _enable_64_bits(layer_weights):
        budget, lengths, always_kept = (
            each.astype(np.int64) for each in (budget, lengths, always_kept)
        )
        assert isinstance(parts.layers, WeightedLayers)
        of = LayerBudgetInputs(budget, lengths, always_kept, layers, weights=layer_weights)
        rows = parts.layers.bound_lower_layers(of)
        return rows.astype(np.int32), parts.count_recent_entries(rows, lengths, always_kept).astype(
            np.int32
        )


def _enable_64_bits(given: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that enables 64-bit JAX if `given` is traced, else does nothing (numpy is exact)."""
    return jax.enable_x64(True) if is_traced(given) else contextlib.nullcontext()
