"""`CompressedKV`: compressed entries of the layers of any model, and the steps that append, attend and evict.

```
state = jaxkv.compress(k, v, queries=q, length=length, policy=H2O(budget=256), headroom=64)
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

from jaxkv._checks import brief, index, settled
from jaxkv._errors import require
from jaxkv.attention import Shaping
from jaxkv.attention.steps import NewEntries
from jaxkv.cache import Tables
from jaxkv.cache.packing import Unpacked
from jaxkv.cache.pools import Pool
from jaxkv.engine.bookkeeping import faded, segments_of
from jaxkv.engine.compress import compress
from jaxkv.engine.evict import Eviction, evict
from jaxkv.engine.layer_sources import LayerSource
from jaxkv.engine.layers.binding import bound
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.step import Step
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.progress import run_to_end
from jaxkv.engine.recompress import (
    HeldLayer,
    HeldStatic,
    candidates_again,
    counts_again,
    rows_again,
)
from jaxkv.engine.segments import heads_of
from jaxkv.engine.selection import Candidates, limits_of
from jaxkv.engine.sparse import new_tokens
from jaxkv.engine.tokens import NewTokens, Token, remembered
from jaxkv.models.config import SlidingWindows
from jaxkv.models.values import LayerSpec
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import Append
from jaxkv.transform.array_checks import (
    as_counts,
    as_grouped,
    as_keys_values,
    known,
    without_padding,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pools", "tables", "left_out", "shapings", "key"],
    meta_fields=["parts", "sliding_windows", "first", "padded_len"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedKV:
    """Immutable pytree of the compressed entries of one or several layers, made by `compress`.

    Attributes:
        pools: keys, values and positions of each layer, or a single pool for all layers (`layout.one_pool`).
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

    pools: tuple[Pool, ...]
    tables: tuple[Tables, ...]
    left_out: Array
    shapings: tuple[Shaping, ...]
    key: PRNGKeyArray | None
    parts: Parts
    sliding_windows: SlidingWindows
    first: int
    padded_len: int

    def __repr__(self) -> str:
        return f"CompressedKV({len(self.tables)} layers, {brief(self.parts)}, {self.terms.layout.value})"

    @property
    def start(self) -> Int[Array, "L B K"]:
        """First row of each segment, `i32[L, B, K]`."""
        return jnp.concatenate([each.start for each in self.tables])

    @property
    def length(self) -> Int[Array, "L B K"]:
        """Entries in each segment, `i32[L, B, K]`."""
        return jnp.concatenate([each.length for each in self.tables])

    @property
    def seen(self) -> Int[Array, "L B"]:
        """Tokens seen by each sequence, `i32[L, B]`, which is the next position; layers differ within a step."""
        return jnp.stack([each.seen for each in self.tables])

    @property
    def terms(self) -> Terms:
        """Static config by which new tokens append and read entries."""
        reading = self.parts.reading(self.sliding_windows, self.padded_len)
        return Terms(layout=self.parts.layout, reading=reading, ongoing=self.parts.ongoing)

    def pool(self, layer: int = 0) -> Pool:
        """Return the `Pool` (keys, values and positions) that holds a layer's segments.

        Args:
            layer: index among the state's layers.

        Returns:
            The layer's pool, or the shared one.
        """
        layer = index("layer", layer, len(self.tables))
        return self.pools[self.terms.layout.pool_of(layer)]

    def sliding_window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens; None for full attention."""
        return self.sliding_windows[self.first + layer]

    def free(self, layer: int = 0) -> Int[Array, " B"]:
        """Return the number of tokens that can be appended to a layer, `[B]`: the minimum over its kv heads.

        Args:
            layer: index among the state's layers.

        Returns:
            `i32[B]`, the headroom of each sequence.
        """
        layer, sizes = index("layer", layer, len(self.tables)), [pool.rows for pool in self.pools]
        return self.terms.layout.free(self.start, self.length, sizes)[layer].min(axis=1)

    def positions(self, layer: int = 0) -> list[list[Int[np.ndarray, " n"]]]:
        """Return the original positions of a layer's entries on the host, by sequence and kv head, in pool order.

        Args:
            layer: index among the state's layers.

        Returns:
            A list per sequence, with an i32 array of length `length[layer, b, h]` for each kv head.
        """
        layer = index("layer", layer, len(self.tables))
        tables = self.tables[layer]
        found = (self.pool(layer).pos, tables.start[0], tables.length[0])
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
        """Add new tokens to a layer: append, attend, score, then evict or recompress as the policy declares.

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
        layer = index("layer", layer, len(self.tables))
        k, v, written = self._joining(k, v, count, layer)
        grouped = as_grouped("q", q, k.shape[0], k.shape[1], k)
        _, heads, group, tokens, _ = grouped.shape
        remedy = f"k has {k.shape[2]} tokens: give as many queries"
        require(tokens == k.shape[2], "q", f"{tokens} tokens", remedy)
        state = self.tables[layer].state
        held = state.query_buffers[0].shape[2] if state and state.query_buffers else group
        remedy = f"the prompt's queries had {heads * held}: give as many"
        require(group == held, "q", f"{heads * group} query heads", remedy)
        after, out = _stepped(self, without_padding(grouped, written), k, v, written, layer=layer)
        return after, out.astype(grouped.dtype)

    @settled
    def append(
        self, k: ArrayLike, v: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0
    ) -> "CompressedKV":
        """Append new tokens' keys and values to a layer: the first half of `step`, for policies without eviction.

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
        layer = index("layer", layer, len(self.tables))
        self._require_plain("append")
        k, v, written = self._joining(k, v, count, layer)
        new = self._entries(layer, k, v, written)
        return self._with(layer, self.pool(layer).appended(new), new.count, written)

    @settled
    def attend(self, q: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0) -> Array:
        """Compute attention of the last N appended tokens' queries over a layer, causal: the second half of `step`.

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
        layer = index("layer", layer, len(self.tables))
        self._require_plain("attend")
        pool, tables = self.pool(layer), self.tables[layer]
        start, length = tables.start[0], tables.length[0]
        batch, heads = start.shape
        grouped = as_grouped("q", q, batch, heads, pool.k)
        tokens = grouped.shape[3]
        written = as_counts("count", count, batch, tokens)
        # Entries are only appended: later tokens are at the end of each segment, except those without headroom.
        last = jnp.take_along_axis(pool.pos, jnp.maximum(start + length - 1, 0), axis=1)
        last = jnp.where(length > 0, last, -1).max(axis=1)
        taken = jnp.clip(last + 1 - (tables.seen - written), 0, written)
        after = jnp.maximum(taken - 1 - jnp.arange(tokens, dtype=jnp.int32)[:, None], 0)
        if tokens > 1 and known(pool.pos, start, length, taken):
            _require_last(pool.pos, start, length, last, taken)

        def one(q: Float[Array, "B K G D"], after: Int[Array, " B"]) -> Float[Array, "B K G D"]:
            """Return the output of one token's queries, with `after` later tokens left out."""
            rows = self._rows(layer, pool, jnp.maximum(length - after[:, None], 0), grouped)
            reach, attend = rows.reach(rows.length), self.terms.backend.attend
            return attend(q, pool.store, reach, shaping=rows.shaping)[0]

        if tokens == 1:
            out = one(grouped[:, :, :, 0], after[0])[:, :, :, None]
        else:
            out = jax.vmap(one, in_axes=(3, 0), out_axes=3)(grouped, after)
        return out.reshape(batch, -1, tokens, out.shape[-1])

    def _joining(
        self, k: ArrayLike, v: ArrayLike, count: ArrayLike | None, layer: int
    ) -> tuple[Array, Array, Int[Array, " B"]]:
        """Validate new tokens; return their keys and values without padding, and the sequences' token counts."""
        k, v = as_keys_values(k, v)
        tables = self.tables[layer]
        _, batch, heads = tables.start.shape
        held, tokens = self.pool(layer).k, k.shape[2]
        fits = (*k.shape[:2], k.shape[3]) == (batch, heads, held.shape[2])
        remedy = f"wrong shape: give [B, K, N, D] = {[batch, heads, 'N', held.shape[2]]}"
        require(fits, "k", list(k.shape), remedy)
        remedy = f"this state is {held.dtype}: give keys and values of that dtype"
        require(k.dtype == held.dtype, "k", str(k.dtype), remedy)
        single = tokens == 1 or isinstance(self.parts.after, Append)
        remedy = "its policy evicts or recompresses after each token: give one token per call"
        require(single, "k", f"{tokens} tokens", remedy)
        written, free = as_counts("count", count, batch, tokens), self.free(layer)
        if known(written, free):
            short = int(np.max(np.asarray(written) - np.asarray(free)))
            remedy = f"{short} more than the headroom: give jaxkv.compress a larger headroom"
            require(short <= 0, "k", f"{tokens} tokens", remedy)
        return without_padding(k, written), without_padding(v, written), written

    def _entries(self, layer: int, k: Array, v: Array, written: Int[Array, " B"]) -> NewEntries:
        """Return new tokens' entries, as many of each sequence's `written` ones as fit the headroom."""
        tables = self.tables[layer]
        positions = tables.seen[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)
        end, count = tables.start[0] + tables.length[0], jnp.clip(self.free(layer), 0, written)
        return NewEntries(k=k, v=v, positions=positions, count=count, end=end)

    def _rows(
        self, layer: int, pool: Pool, length: Int[Array, "B K"], q: Float[Array, "B K G N D"]
    ) -> DenseLayer:
        """Return a view of a layer's entries; ValueError if its sink logits and q have different numbers of heads."""
        shaping, (_, heads, group, _, _) = self.shapings[layer], q.shape
        sinks = shaping.sink_logits
        remedy = (
            f"the state has sink logits of {getattr(sinks, 'size', 0)} query heads: give as many"
        )
        fits = sinks is None or sinks.shape == (heads, group)
        require(fits, "q", f"{heads * group} query heads", remedy)
        given = (self.terms, pool, self.tables[layer].start[0], length)
        return bound(*given, shaping=shaping, sliding_window=self.sliding_window(layer))

    def _with(
        self, layer: int, pool: Pool, taken: Int[Array, " B"], written: Int[Array, " B"]
    ) -> "CompressedKV":
        """Return the state with a layer's pool, to which `taken` of `written` tokens were appended."""
        tables = self.tables[layer]
        length, seen = tables.length + taken[:, None], tables.seen + written
        after = self._updated(layer, pool, length=length, seen=seen)
        left_out = self.left_out.at[layer].add(written - taken)
        return dataclasses.replace(after, left_out=left_out)

    def _updated(
        self, layer: int, pool: Pool | None = None, state: dict[str, Any] | None = None, **of: Any
    ) -> "CompressedKV":
        """Return the state with a layer's pool, tables and policy state replaced by name."""
        tables, at = self.tables[layer], self.terms.layout.pool_of(layer)
        if state and tables.state is not None:
            of["state"] = dataclasses.replace(tables.state, **state)
        pools, every = [*self.pools], [*self.tables]
        pools[at] = pools[at] if pool is None else pool
        every[layer] = dataclasses.replace(tables, **of)
        return dataclasses.replace(self, pools=tuple(pools), tables=tuple(every))

    def _evicted(self, layer: int, attended: Float[Array, "B K"]) -> "CompressedKV":
        """Return the state without the lowest-ranked entry of each of a layer's segments above its limit."""
        pool, segments = self.pool(layer), segments_of(self.tables[layer], 0)
        how = Eviction(terms=self.terms, heads=attended.shape[1], dtype=pool.dtype)
        pool, left = evict(pool, segments, attended, how)
        tau = None if left.tau is None else left.tau[None]
        return self._updated(layer, pool, {"tau": tau}, length=left.length[None])

    def _remembering(self, layer: int, token: Token, new: NewTokens) -> "CompressedKV":
        """Return the state with new tokens' queries in a layer's query buffer, if the layer has one."""
        state = self.tables[layer].state
        if state is None or not state.query_buffers:
            return self
        return self._updated(
            layer, state={"query_buffers": (remembered(state.query_buffers[0], token.q, new),)}
        )

    def _recompressed(self, layer: int, every: int) -> "CompressedKV":
        """Return the state with a layer recompressed in sequences that have `every` entries more than their limit."""
        tables = self.tables[layer]
        due = (tables.length - tables.limit).max(axis=(0, 2)) >= every
        again = partial(CompressedKV._recompressed_due, layer=layer)
        return lax.cond(due.any(), again, lambda state, _: state, self, due)

    def _recompressed_due(self, due: Bool[Array, " B"], layer: int) -> "CompressedKV":
        """Return the state with the sequences in mask `due` of a layer recompressed, over all their entries."""
        held, parts, tables = HeldSource(self, layer), self.parts, self.tables[layer]
        made = run_to_end(compress(held, parts, key=held.layer.key, due=due))
        at, usual = self.first + layer, made.length
        if parts.heads.uniform:
            usual = jnp.broadcast_to(held.kept_entries[at : at + 1, :, None], usual.shape)
        of = (self.sliding_windows, slice(at, at + 1))
        target = limits_of(parts.heads, made.length, usual, None, *of)
        return self._updated(
            layer,
            made.pools[0],
            {"tau": made.tau},
            start=made.start,
            length=made.length,
            limit=jnp.where(due[:, None], target, tables.limit),
        )

    def _require_plain(self, half: str) -> None:
        """Raise ValueError unless the policy only appends tokens and reads all entries."""
        plain = isinstance(self.parts.after, Append) and self.parts.read.everything
        remedy = f"its policy evicts, or selects what is read, within a step: use step, not {half}"
        require(plain, "state", brief(self.parts), remedy)


@partial(jax.jit, static_argnames="layer")
def _stepped(
    state: CompressedKV,
    q: Float[Array, "B K G N D"],
    k: Float[Array, "B K N D"],
    v: Float[Array, "B K N D"],
    written: Int[Array, " B"],
    *,
    layer: int,
) -> tuple[CompressedKV, Float[Array, "B H N D"]]:
    """Compiled: `CompressedKV.step` of checked arrays; padding has output 0."""
    new = state._entries(layer, k, v, written)
    (pool,) = faded((state.pool(layer),), new.count, state.terms)
    rows = state._rows(layer, pool, state.tables[layer].length[0], q)
    token = Token(q=q, k=new.k, v=new.v, stored=new.k).widened(pool.dtype)
    step = Step(new=new_tokens(state.terms, state.tables[layer], new.count, q.shape[3]))
    made = rows.attended(token, step)
    after = state._with(layer, made.pool, new.count, written)
    if state.sliding_window(layer) is None:
        after = after._remembering(layer, token, step.new)
        if state.terms.ongoing.evicts:
            after = after._evicted(layer, heads_of(made.out, len(written)))
        if state.parts.every:
            after = after._recompressed(layer, state.parts.every)
    out = made.out.reshape(len(written), -1, *made.out.shape[3:])
    return after, without_padding(out, written)


class HeldSource(LayerSource):
    """Layer source that recompresses one layer of a state."""

    def __init__(self, held: CompressedKV, layer: int):
        """Count the entries to keep, and gather the layer's arrays for the programs."""
        parts, pool, tables = held.parts, held.pool(layer), held.tables[layer]
        assert tables.state is not None and held.key is not None
        query_buffers, at = tables.state.query_buffers, held.first + layer
        self.indices, self.sliding_windows, self.size, self.parts = (
            (at,),
            held.sliding_windows,
            pool.rows,
            parts,
        )
        self.kept_entries, self.recents = counts_again(parts, tables, held.sliding_windows)
        self.static = HeldStatic.of(parts, padded_len=pool.rows, spec=LayerSpec())
        self.shaping = held.shapings[layer]
        self.layer = HeldLayer(
            pool=pool,
            tables=dataclasses.replace(
                tables, state=dataclasses.replace(tables.state, query_buffers=())
            ),
            query_buffer=query_buffers[0] if query_buffers else None,
            row=jnp.int32(0),
            layer=jnp.int32(at),
            key=held.key,
        )

    def candidates(self, index: int) -> Candidates:
        """Return the `Candidates` of the layer: scores by the policy's rank, or by its scorer from the last queries."""
        return candidates_again(self.layer, self.static, self.shaping)

    def pool_rows(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Return P, the size in entries of the layer's pool, which does not change."""
        return self.size

    def rows(self, index: int) -> Unpacked:
        """Return the layer's entries, in order of position."""
        return rows_again(self.layer, self.static, self.shaping)


def _require_last(pos: Array, start: Array, length: Array, last: Array, taken: Array) -> None:
    """Raise ValueError unless the last `taken` entries of each segment have the positions up to `last`."""
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
