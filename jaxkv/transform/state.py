"""`CompressedKV`: compressed entries of the layers of any model, and the steps that append, attend and evict.

```
state = jaxkv.compress(k, v, queries=q, length=length, policy=H2O(budget=256), headroom=1)
state, out = state.step(q_new, k_new, v_new)
```
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv._checks import format_non_default_fields, settled, validate_index
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import LogitShaping
from jaxkv.attention.steps import NewEntries
from jaxkv.cache import SegmentTables
from jaxkv.cache.last_tokens import write_last_tokens
from jaxkv.cache.packing import UnpackedEntries
from jaxkv.cache.pools import EntryPool
from jaxkv.engine.bookkeeping import decay_scores, select_layer_segments
from jaxkv.engine.compress import compress_layer_by_layer
from jaxkv.engine.evict import EvictionConfig, evict_entries
from jaxkv.engine.layer_sources import LayerEntrySource
from jaxkv.engine.layers.binding import make_cache_layer
from jaxkv.engine.layers.dense import FullAttentionCacheLayer
from jaxkv.engine.layers.step import StepState
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.progress import run_generator
from jaxkv.engine.recompress import (
    CachedLayer,
    CachedLayerConfig,
    gather_candidates,
    gather_entries_to_pack,
    recount_entries_to_keep,
)
from jaxkv.engine.segments import take_number_per_head
from jaxkv.engine.selection import Candidates, compute_entry_limits
from jaxkv.engine.sparse import create_new_tokens
from jaxkv.engine.tokens import NewTokens, TokenProjections
from jaxkv.models.config import SlidingWindows
from jaxkv.models.values import LayerSpec
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import Append
from jaxkv.transform.array_checks import (
    group_query_heads,
    has_concrete_values,
    validate_keys_values,
    validate_token_counts,
    zero_out_padding,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pools", "tables", "left_out", "shapings", "key"],
    meta_fields=["parts", "sliding_windows", "first", "padded_len"],
)
@frozen_dataclass
class CompressedKV:
    """Immutable pytree of one or several layers' compressed entries, made by `compress`; `step` adds tokens.

    Attributes:
        pools: keys, values and positions of each layer, or a single pool for all layers (`layout.uses_shared_pool`).
        tables: per layer: first row, length and target size of its segments, tokens seen, and the policy's state.
        left_out: `i32[L, B]` tokens without headroom in traced code, which are not in the cache; 0 if it is complete.
            Check it after a `jit`.
        shapings: how each layer changes its attention logits.
        key: random key of a policy that recompresses; None for others.
        parts: the policy's parts.
        sliding_windows: sliding window of each layer of the model in tokens; None for full attention.
        first: index in the model of the first layer.
        padded_len: S, the padded length of the prompts.
    """

    pools: tuple[EntryPool, ...]
    tables: tuple[SegmentTables, ...]
    left_out: Array
    shapings: tuple[LogitShaping, ...]
    key: PRNGKeyArray | None
    parts: Parts
    sliding_windows: SlidingWindows
    first: int
    padded_len: int

    def __repr__(self) -> str:
        parts = format_non_default_fields(self.parts)
        layout = self.decode_config.layout.value
        return f"CompressedKV({len(self.tables)} layers, {parts}, {layout})"

    @property
    def segment_starts(self) -> Int[Array, "L B K"]:
        """First pool row of each segment, one per layer, sequence and kv head, `i32[L, B, K]`."""
        return jnp.concatenate([each.start for each in self.tables])

    @property
    def length(self) -> Int[Array, "L B K"]:
        """Number of entries in each segment, one per layer, sequence and kv head, `i32[L, B, K]`."""
        return jnp.concatenate([each.length for each in self.tables])

    @property
    def seen(self) -> Int[Array, "L B"]:
        """Number of tokens seen per layer and sequence, evicted ones included, `i32[L, B]`: the next position."""
        return jnp.stack([each.seen for each in self.tables])

    @property
    def decode_config(self) -> DecodeAttentionConfig:
        """`DecodeAttentionConfig` of a step: pool layout, entries that layers attend to, eviction or recompression."""
        reading = self.parts.build_read_config(self.sliding_windows, self.padded_len)
        return DecodeAttentionConfig(
            layout=self.parts.cache_layout, reading=reading, ongoing=self.parts.decoding_compression
        )

    def get_layer_pool(self, layer: int = 0) -> EntryPool:
        """Return the `EntryPool` of keys, values and positions of a layer's segments; one for all layers if shared.

        Args:
            layer: index among the state's layers.

        Returns:
            The layer's pool, or the shared one.
        """
        layer = validate_index("layer", layer, len(self.tables))
        return self.pools[self.decode_config.layout.get_pool_index(layer)]

    def sliding_window(self, layer: int) -> int | None:
        """Return the sliding window of the state's layer `layer` in tokens; None for full attention."""
        return self.sliding_windows[self.first + layer]

    def compute_remaining_headroom(self, layer: int = 0) -> Int[Array, " B"]:
        """Return how many more tokens each sequence can append to a layer, `i32[B]`: the minimum over its kv heads.

        Args:
            layer: index among the state's layers.

        Returns:
            `i32[B]`, the headroom of each sequence.
        """
        layer = validate_index("layer", layer, len(self.tables))
        sizes = [pool.row_count for pool in self.pools]
        return self.decode_config.layout.compute_segment_headroom(
            self.segment_starts, self.length, sizes
        )[layer].min(axis=1)

    def positions(self, layer: int = 0) -> list[list[Int[np.ndarray, " n"]]]:
        """Return positions of a layer's entries as numpy arrays, listed by sequence and kv head, in pool order.

        Args:
            layer: index among the state's layers.

        Returns:
            A list per sequence, with an i32 array of length `length[layer, b, h]` for each kv head.
        """
        layer = validate_index("layer", layer, len(self.tables))
        tables = self.tables[layer]
        found = (self.get_layer_pool(layer).pos, tables.start[0], tables.length[0])
        pos, starts, lengths = map(np.asarray, found)
        return [
            [held[start : start + length] for start, length in zip(*each, strict=True)]
            for held, *each in zip(pos, starts, lengths, strict=True)
        ]

    @settled
    def step(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        *,
        count: ArrayLike | None = None,
        layer: int = 0,
    ) -> tuple["CompressedKV", Array]:
        """Append new tokens to a layer, attend, then evict or recompress by policy; return new state, output.

        Pure: it runs under the caller's `jit`, `scan`, `vmap` and `shard_map` (with `check_vma=False` for several
        tokens, windows, pages and `every=n`). Reverse-mode gradients are supported for one token that reads all entries
        where `attend` supports them; rounding to 8 bits has none. Logits are scaled by 1 / sqrt(D); a model that scales
        by s multiplies its queries by s * sqrt(D). Donate the state under your own `jit`, so that pools are updated in
        place; an eager step copies them.

        Args:
            q: `[B, H, N, D]` queries after RoPE at their own positions, from `seen` on.
            k: `[B, K, N, D]` keys after RoPE.
            v: `[B, K, N, D]` values.
            count: `i32[B]` tokens of the N that each sequence has, followed by padding; N by default. A sequence of 0
                tokens is unchanged.
            layer: index among the state's layers.

        Returns:
            The new state, and attention output `[B, H, N, D]` in q's dtype, causal among the N; padding has
            output 0. In traced code, tokens without headroom are not appended but counted in `left_out` and `seen`.

        Raises:
            ValueError: if arrays do not fit, if several tokens are passed to a policy that evicts one by one, or if the
                headroom is too small and the lengths are known.
        """
        layer = validate_index("layer", layer, len(self.tables))
        k, v, written = self._validate_new_tokens(k, v, count, layer)
        grouped = group_query_heads("q", q, k.shape[0], k.shape[1], k)
        _, heads, group, tokens, _ = grouped.shape
        remedy = f"k has {k.shape[2]} tokens: give as many queries"
        require(tokens == k.shape[2], "q", f"{tokens} tokens", remedy)
        state = self.tables[layer].state
        held = state.query_buffers[0].shape[2] if state and state.query_buffers else group
        remedy = f"the prompt's queries had {heads * held}: give as many"
        require(group == held, "q", f"{heads * group} query heads", remedy)
        after, out = _run_compiled_step(
            self, zero_out_padding(grouped, written), k, v, written, layer=layer
        )
        return after, out.astype(grouped.dtype)

    @settled
    def append(
        self, k: ArrayLike, v: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0
    ) -> "CompressedKV":
        """Append tokens to a layer; return the new state. ValueError if the policy does more than append.

        Args:
            k: `[B, K, N, D]` keys after RoPE at their own positions, from `seen` on.
            v: `[B, K, N, D]` values.
            count: `i32[B]` tokens of the N that each sequence has, followed by padding; N by default.
            layer: index among the state's layers.

        Returns:
            The new state; tokens without headroom are handled as in `step`.

        Raises:
            ValueError: if arrays do not fit, for a policy that evicts or selects what is read, or if the headroom is
                too small and the lengths are known.
        """
        layer = validate_index("layer", layer, len(self.tables))
        self._require_append_only("append")
        k, v, written = self._validate_new_tokens(k, v, count, layer)
        new = self._build_new_entries(layer, k, v, written)
        return self._record_appended_tokens(
            layer, self.get_layer_pool(layer).append_entries(new), new.count, written
        )

    @settled
    def attend(self, q: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0) -> Array:
        """Return causal attention output of the last N appended tokens; ValueError if the policy does more than append.

        Reverse-mode gradients are supported, except if layers share a pool or a kv head has 48 query heads or more. In
        these cases a loop over segments runs as many steps as the longest segment needs.

        Args:
            q: `[B, H, N, D]` queries after RoPE of the last N tokens, whose entries are the last N of each segment. One
                or several calls of `append` have added them. Traced code cannot check this: if it does not hold, the
                output includes entries of later tokens.
            count: `i32[B]` tokens of the N that each sequence has, as passed to `append`; N by default.
            layer: index among the state's layers.

        Returns:
            `[B, H, N, D]` in q's dtype; padding has finite output.

        Raises:
            ValueError: if shapes do not fit, for a policy that evicts or selects what is read, or if a sequence has
                more queries than consecutive last positions and these are known.
        """
        layer = validate_index("layer", layer, len(self.tables))
        self._require_append_only("attend")
        pool = self.get_layer_pool(layer)
        tables = self.tables[layer]
        start = tables.start[0]
        length = tables.length[0]
        batch, heads = start.shape
        grouped = group_query_heads("q", q, batch, heads, pool.k)
        tokens = grouped.shape[3]
        written = validate_token_counts("count", count, batch, tokens)
        # Entries are only appended: later tokens are at the end of each segment, except those without headroom.
        last = jnp.take_along_axis(pool.pos, jnp.maximum(start + length - 1, 0), axis=1)
        last = jnp.where(length > 0, last, -1).max(axis=1)
        taken = jnp.clip(last + 1 - (tables.seen - written), 0, written)
        after = jnp.maximum(taken - 1 - jnp.arange(tokens, dtype=jnp.int32)[:, None], 0)
        if tokens > 1 and has_concrete_values(pool.pos, start, length, taken):
            _require_last_positions(pool.pos, start, length, last, taken)

        def attend_one_token(
            q: Float[Array, "B K G D"], after: Int[Array, " B"]
        ) -> Float[Array, "B K G D"]:
            """Return one token's attention output `[B, K, G, D]`, without the last `after` entries of segments."""
            rows = self._view_layer_entries(
                layer, pool, jnp.maximum(length - after[:, None], 0), grouped
            )
            reach = rows.get_attended_range(rows.length)
            attend = self.decode_config.backend.attend_to_segments
            return attend(q, pool.store, reach, shaping=rows.shaping)[0]

        if tokens == 1:
            out = attend_one_token(grouped[:, :, :, 0], after[0])[:, :, :, None]
        else:
            out = jax.vmap(attend_one_token, in_axes=(3, 0), out_axes=3)(grouped, after)
        return out.reshape(batch, -1, tokens, out.shape[-1])

    def _validate_new_tokens(
        self, k: ArrayLike, v: ArrayLike, count: ArrayLike | None, layer: int
    ) -> tuple[Array, Array, Int[Array, " B"]]:
        """Return new tokens' keys and values, 0 in padding, and their number `[B]`; ValueError if they do not fit."""
        k, v = validate_keys_values(k, v)
        tables = self.tables[layer]
        _, batch, heads = tables.start.shape
        held = self.get_layer_pool(layer).k
        tokens = k.shape[2]
        fits = (*k.shape[:2], k.shape[3]) == (batch, heads, held.shape[2])
        remedy = f"wrong shape: give [B, K, N, D] = {[batch, heads, 'N', held.shape[2]]}"
        require(fits, "k", list(k.shape), remedy)
        remedy = f"this state is {held.dtype}: give keys and values of that dtype"
        require(k.dtype == held.dtype, "k", str(k.dtype), remedy)
        single = tokens == 1 or isinstance(self.parts.after, Append)
        remedy = "its policy evicts or recompresses after each token: give one token per call"
        require(single, "k", f"{tokens} tokens", remedy)
        written = validate_token_counts("count", count, batch, tokens)
        free = self.compute_remaining_headroom(layer)
        if has_concrete_values(written, free):
            short = int(np.max(np.asarray(written) - np.asarray(free)))
            remedy = f"{short} more than the headroom: give jaxkv.compress a larger headroom"
            require(short <= 0, "k", f"{tokens} tokens", remedy)
        return zero_out_padding(k, written), zero_out_padding(v, written), written

    def _build_new_entries(
        self, layer: int, k: Array, v: Array, written: Int[Array, " B"]
    ) -> NewEntries:
        """Return `NewEntries`: new tokens' keys, values, positions, segment ends, and counts within headroom."""
        tables = self.tables[layer]
        positions = tables.seen[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)
        end = tables.start[0] + tables.length[0]
        count = jnp.clip(self.compute_remaining_headroom(layer), 0, written)
        return NewEntries(k=k, v=v, positions=positions, count=count, end=end)

    def _view_layer_entries(
        self, layer: int, pool: EntryPool, length: Int[Array, "B K"], q: Float[Array, "B K G N D"]
    ) -> FullAttentionCacheLayer:
        """Return a layer's `FullAttentionCacheLayer`, a view of its entries; ValueError if q misfits sink logits."""
        shaping = self.shapings[layer]
        _, heads, group, _, _ = q.shape
        sinks = shaping.sink_logits
        remedy = (
            f"the state has sink logits of {getattr(sinks, 'size', 0)} query heads: give as many"
        )
        fits = sinks is None or sinks.shape == (heads, group)
        require(fits, "q", f"{heads * group} query heads", remedy)
        given = (self.decode_config, pool, self.tables[layer].start[0], length)
        return make_cache_layer(*given, shaping=shaping, sliding_window=self.sliding_window(layer))

    def _record_appended_tokens(
        self, layer: int, pool: EntryPool, taken: Int[Array, " B"], written: Int[Array, " B"]
    ) -> "CompressedKV":
        """Return a state with a new pool in `layer`: length + `taken`, seen + `written`, left_out + the difference."""
        tables = self.tables[layer]
        length = tables.length + taken[:, None]
        seen = tables.seen + written
        after = self._replace_layer_fields(layer, pool, length=length, seen=seen)
        left_out = self.left_out.at[layer].add(written - taken)
        return dataclasses.replace(after, left_out=left_out)

    def _replace_layer_fields(
        self,
        layer: int,
        pool: EntryPool | None = None,
        state: dict[str, Any] | None = None,
        **of: Any,
    ) -> "CompressedKV":
        """Return the state with a layer's pool, fields of its policy state and fields of its tables replaced."""
        tables = self.tables[layer]
        at = self.decode_config.layout.get_pool_index(layer)
        if state and tables.state is not None:
            of["state"] = dataclasses.replace(tables.state, **state)
        pools = [*self.pools]
        every = [*self.tables]
        pools[at] = pools[at] if pool is None else pool
        every[layer] = dataclasses.replace(tables, **of)
        return dataclasses.replace(self, pools=tuple(pools), tables=tuple(every))

    def _evict_lowest_ranked_entries(
        self, layer: int, attended: Float[Array, "B K"]
    ) -> "CompressedKV":
        """Return the state with the lowest-ranked entry evicted or merged in a layer's segments over their limits."""
        pool = self.get_layer_pool(layer)
        segments = select_layer_segments(self.tables[layer], 0)
        how = EvictionConfig(terms=self.decode_config, heads=attended.shape[1], dtype=pool.dtype)
        pool, left = evict_entries(pool, segments, attended, how)
        tau = None if left.tau is None else left.tau[None]
        return self._replace_layer_fields(layer, pool, {"tau": tau}, length=left.length[None])

    def _update_query_buffer(
        self, layer: int, token: TokenProjections, new: NewTokens
    ) -> "CompressedKV":
        """Return the state with new tokens' queries written to a layer's query buffer; unchanged if it has none."""
        state = self.tables[layer].state
        if state is None or not state.query_buffers:
            return self
        written = write_last_tokens(state.query_buffers[0], token.q, new.positions, new.count)
        return self._replace_layer_fields(layer, state={"query_buffers": (written,)})

    def _recompress_if_due(self, layer: int, every: int) -> "CompressedKV":
        """Return the state, a layer recompressed in sequences with at least `every` entries over a kv head's limit."""
        tables = self.tables[layer]
        due = (tables.length - tables.limit).max(axis=(0, 2)) >= every
        again = partial(CompressedKV._recompress_due_sequences, layer=layer)
        return lax.cond(due.any(), again, lambda state, _: state, self, due)

    def _recompress_due_sequences(self, due: Bool[Array, " B"], layer: int) -> "CompressedKV":
        """Return the state with a layer recompressed in the sequences of mask `due`; other sequences are unchanged."""
        held = StateLayerSource(self, layer)
        parts = self.parts
        tables = self.tables[layer]
        made = run_generator(compress_layer_by_layer(held, parts, key=held.layer.key, due=due))
        at = self.first + layer
        usual = made.length
        if parts.heads.is_uniform:
            usual = jnp.broadcast_to(held.kept_entries[at : at + 1, :, None], usual.shape)
        of = (self.sliding_windows, slice(at, at + 1))
        target = compute_entry_limits(parts.heads, made.length, usual, None, *of)
        return self._replace_layer_fields(
            layer,
            made.pools[0],
            {"tau": made.tau},
            start=made.start,
            length=made.length,
            limit=jnp.where(due[:, None], target, tables.limit),
        )

    def _require_append_only(self, half: str) -> None:
        """Raise ValueError unless the policy only appends new tokens and attends to all entries."""
        plain = isinstance(self.parts.after, Append) and self.parts.read.reads_all_entries
        remedy = f"its policy evicts, or selects what is read, within a step: use step, not {half}"
        require(plain, "state", format_non_default_fields(self.parts), remedy)


@partial(jax.jit, static_argnames="layer")
def _run_compiled_step(
    state: CompressedKV,
    q: Float[Array, "B K G N D"],
    k: Float[Array, "B K N D"],
    v: Float[Array, "B K N D"],
    written: Int[Array, " B"],
    *,
    layer: int,
) -> tuple[CompressedKV, Float[Array, "B H N D"]]:
    """Append to a layer, attend, evict or recompress, compiled, no checks; return state and output, 0 for padding."""
    new = state._build_new_entries(layer, k, v, written)
    (pool,) = decay_scores((state.get_layer_pool(layer),), new.count, state.decode_config)
    rows = state._view_layer_entries(layer, pool, state.tables[layer].length[0], q)
    token = TokenProjections(q=q, k=new.k, v=new.v, stored=new.k).cast_to_dtype(pool.dtype)
    step = StepState(
        new=create_new_tokens(state.decode_config, state.tables[layer], new.count, q.shape[3])
    )
    made = rows.append_tokens_and_attend(token, step)
    after = state._record_appended_tokens(layer, made.pool, new.count, written)
    if state.sliding_window(layer) is None:
        after = after._update_query_buffer(layer, token, step.new)
        if state.decode_config.ongoing.evicts:
            after = after._evict_lowest_ranked_entries(
                layer, take_number_per_head(made.out, len(written))
            )
        if state.parts.recompression_interval:
            after = after._recompress_if_due(layer, state.parts.recompression_interval)
    out = made.out.reshape(len(written), -1, *made.out.shape[3:])
    return after, zero_out_padding(out, written)


class StateLayerSource(LayerEntrySource):
    """`LayerEntrySource` of one layer of a `CompressedKV`, whose entries the engine recompresses."""

    def __init__(self, held: CompressedKV, layer: int):
        """Compute how many entries each sequence keeps now, and collect the layer's pool, tables and query buffer."""
        parts = held.parts
        pool = held.get_layer_pool(layer)
        tables = held.tables[layer]
        assert tables.state is not None and held.key is not None
        query_buffers = tables.state.query_buffers
        at = held.first + layer
        self.indices = (at,)
        self.sliding_windows = held.sliding_windows
        self.size = pool.row_count
        self.parts = parts
        self.kept_entries, self.recents = recount_entries_to_keep(
            parts, tables, held.sliding_windows
        )
        self.static = CachedLayerConfig.from_parts(
            parts, padded_len=pool.row_count, spec=LayerSpec()
        )
        self.shaping = held.shapings[layer]
        self.layer = CachedLayer(
            pool=pool,
            tables=dataclasses.replace(
                tables, state=dataclasses.replace(tables.state, query_buffers=())
            ),
            query_buffer=query_buffers[0] if query_buffers else None,
            row=jnp.int32(0),
            layer=jnp.int32(at),
            key=held.key,
        )

    def get_layer_candidates(self, index: int) -> Candidates:
        """Return the layer's `Candidates`, scored by the policy's rank, or its scorer if the rank is `ByNewScores`."""
        return gather_candidates(self.layer, self.static, self.shaping)

    def compute_pool_size(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Return P, the size in entries of the layer's pool, which recompression does not change."""
        return self.size

    def take_layer_entries(self, index: int) -> UnpackedEntries:
        """Return the layer's `UnpackedEntries`: keys, values and stored scores, sorted by position in each kv head."""
        return gather_entries_to_pack(self.layer, self.static, self.shaping)


def _require_last_positions(
    pos: Array, start: Array, length: Array, last: Array, taken: Array
) -> None:
    """Raise ValueError unless each segment's last `taken` entries have consecutive positions up to `last`."""
    # Entries are in order of position, so comparing the first of them suffices.
    first = jnp.take_along_axis(pos, jnp.maximum(start + length - taken[:, None], 0), axis=1)
    right = (length >= taken[:, None]) & (first == (last + 1 - taken)[:, None])
    wrong = np.asarray((taken > 0) & ~right.all(axis=1))
    at = int(wrong.argmax())
    remedy = (
        f"sequence {at} has evicted one of as many last positions in a kv head: give "
        "fewer queries, or count="
    )
    require(not wrong.any(), "q", f"{taken[at]} tokens", remedy)
