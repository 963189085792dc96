"""`CompressedKV`: compressed entries of layers of any model; what a new token adds, reads, and evicts.

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

from jaxkv._checks import brief, settled, whole
from jaxkv._errors import require
from jaxkv.attention import Shaping
from jaxkv.attention.steps import NewRows
from jaxkv.cache import State, Tables
from jaxkv.cache.packing import Unpacked
from jaxkv.cache.pools import Pool
from jaxkv.engine.bookkeeping import faded, segments_of
from jaxkv.engine.choosing import Candidates, limits_of
from jaxkv.engine.compress import compress
from jaxkv.engine.evict import Eviction, evict
from jaxkv.engine.layer_sources import Source
from jaxkv.engine.layers.binding import bound
from jaxkv.engine.layers.dense import DenseLayer
from jaxkv.engine.layers.step import Step
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.recompress import (
    HeldLayer,
    HeldStatic,
    candidates_again,
    counts_again,
    rows_again,
)
from jaxkv.engine.segments import heads_of
from jaxkv.engine.sparse import new_tokens
from jaxkv.engine.tokens import NewTokens, Token, remembered
from jaxkv.engine.walks import finished
from jaxkv.models.config import Windows
from jaxkv.models.values import LayerSpec
from jaxkv.policies.parts import Parts
from jaxkv.policies.phases import Append
from jaxkv.transform.arrays import as_counts, as_grouped, as_keys_values, known, shown


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "pools",
        "start",
        "length",
        "limit",
        "seen",
        "left_out",
        "state",
        "shapings",
        "key",
    ],
    meta_fields=["parts", "windows", "first", "padded_len"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedKV:
    """Immutable pytree of the compressed entries of one or several layers, made by `compress`.

    Attributes:
        pools: each layer's keys, values and positions; a single pool where layers share one (`layout.one_pool`).
        start: `i32[L, B, K]` first row of each segment.
        length: `i32[L, B, K]` entries in each segment.
        limit: `i32[L, B, K]` the policy's target size of each segment, kept by policies that go on compressing.
        seen: `i32[L, B]` tokens each sequence has had, and so the next position; layers differ while a token is on its
            way.
        left_out: `i32[L, B]` tokens for which there was no headroom while numbers were traced: 0 in a cache that lacks
            nothing. Look at it after a `jit`.
        state: what the policy remembers while tokens are added; None if it compresses the prompt only.
        shapings: what each layer does to the logits of its attention.
        key: random key of policies that draw when they compress again.
        parts: of the policy.
        windows: number of last tokens that tokens of each of the model's layers attend to; None for all.
        first: index in the model of the first layer held.
        padded_len: S, tokens of the padded prompts.
    """

    pools: tuple[Pool, ...]
    start: Array
    length: Array
    limit: Array
    seen: Array
    left_out: Array
    state: State | None
    shapings: tuple[Shaping, ...]
    key: PRNGKeyArray
    parts: Parts
    windows: Windows
    first: int
    padded_len: int

    def __repr__(self) -> str:
        numbers = f"seen={_numbers(self.seen)}, left_out={_numbers(self.left_out)}"
        layers = getattr(self.start, "shape", "?")[0]
        return f"CompressedKV({layers} layers, {numbers}, {self.terms.layout.value})"

    @property
    def terms(self) -> Terms:
        """Static config on which new tokens join and read the entries."""
        reading = self.parts.reading(self.windows, self.padded_len)
        return Terms(layout=self.parts.layout, reading=reading, ongoing=self.parts.ongoing)

    def pool(self, layer: int = 0) -> Pool:
        """The `Pool` (keys, values and positions) that holds a layer's segments.

        Args:
            layer: index among the layers held.

        Returns:
            Its keys, values and positions.
        """
        return self.pools[self.terms.layout.pool_of(layer)]

    def window(self, layer: int) -> int | None:
        """Number of last tokens that tokens of a layer attend to; None for all."""
        return self.windows[self.first + layer]

    def free(self, layer: int = 0) -> Int[Array, " B"]:
        """Number of tokens that can still be appended to a layer, `[B]`: the smallest number over its kv heads.

        Args:
            layer: index among the layers held.

        Returns:
            Places, the smallest number over the heads.
        """
        sizes = [pool.rows for pool in self.pools]
        return self.terms.layout.free(self.start, self.length, sizes)[layer].min(axis=1)

    def positions(self, layer: int = 0) -> list[list[Int[np.ndarray, " n"]]]:
        """Original positions of a layer's entries on the host: by sequence and kv head, in the order of the pool.

        Args:
            layer: index among the layers held.

        Returns:
            A list for each sequence, with an i32 array of length `length[layer, b, h]` for each kv head.
        """
        layer = self._held_layer(layer)
        pos, starts, lengths = (
            np.asarray(each)
            for each in (self.pool(layer).pos, self.start[layer], self.length[layer])
        )
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
        """Adds new tokens to a layer: appends, attends, scores, and evicts or compresses again as the policy says.

        Pure: it runs under the caller's `jit`, `scan`, `vmap` and `shard_map`. Logits are scaled by 1 / sqrt(D); a
        model that scales by s multiplies its queries by s * sqrt(D).

        Args:
            q: `[B, H, N, D]` queries after RoPE at their own positions, which `seen` counts.
            k: `[B, K, N, D]` keys after RoPE.
            v: `[B, K, N, D]` values.
            count: `i32[B]` tokens of the N that each sequence has, the others being padding; all by default. Sequences
                of no token stay as they are.
            layer: index among the layers held.

        Returns:
            The new state, and attention output `[B, H, N, D]` in q's dtype, causal among the N; anything finite for
            padding. Where numbers are traced, tokens for which there is no headroom are not appended and counted in
            `left_out`; their positions count as seen.

        Raises:
            ValueError: if arrays do not fit, for several tokens at once where each evicts, or, where numbers are known,
                if there is no headroom.
        """
        layer = self._held_layer(layer)
        new, written = self._joining(k, v, count, layer)
        batch, heads = self.start.shape[1:]
        q = as_grouped("q", q, batch, heads, new.k)
        tokens, terms = q.shape[3], self.terms
        require(q.shape[3] == new.k.shape[2], "q", shown(q), f"k has {new.k.shape[2]} tokens")
        tables = self._tables(layer)
        (pool,) = faded((self.pool(layer),), new.count, terms)
        rows = self._rows(layer, pool, self.length[layer], q)
        token = Token(q=q, k=new.k, v=new.v, stored=new.k).widened(pool.dtype)
        step = Step(new=new_tokens(terms, tables, new.count, tokens))
        made = rows.attended(token, step)
        after = self._with(layer, made.layer.pool, new.count, written)
        if self.window(layer) is None:
            after = after._remembering(layer, token, step.new)
            if terms.ongoing.evicts:
                after = after._evicted(layer, heads_of(made.out, len(written)))
            if self.parts.every:
                after = after._recompressed(layer, self.parts.every)
        out = made.out.reshape(*made.out.shape[:1], -1, *made.out.shape[3:])
        return after, out.astype(q.dtype)

    @settled
    def append(
        self, k: ArrayLike, v: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0
    ) -> "CompressedKV":
        """Appends new tokens' keys and values to a layer: the first half of `step`, of policies that evict nothing.

        Args:
            k: `[B, K, N, D]` keys after RoPE at their own positions, which `seen` counts.
            v: `[B, K, N, D]` values.
            count: `i32[B]` tokens of the N that each sequence has, the others being padding; all by default.
            layer: index among the layers held.

        Returns:
            The state with these behind the others; tokens without headroom as in `step`.

        Raises:
            ValueError: if arrays do not fit, for a policy that evicts or chooses what is read, or, where numbers are
                known, if there is no headroom.
        """
        layer = self._held_layer(layer)
        self._require_plain("append")
        new, written = self._joining(k, v, count, layer)
        return self._with(layer, self.pool(layer).appended(new), new.count, written)

    @settled
    def attend(self, q: ArrayLike, *, count: ArrayLike | None = None, layer: int = 0) -> Array:
        """Attention of the last N appended tokens' queries over a layer, causal among the N: the second half of `step`.

        Reverse-mode gradients are supported, except if layers share a pool or a kv head has 48 query heads or more:
        there a loop walks the segments, with as many steps as the longest needs.

        Args:
            q: `[B, H, N, D]` queries after RoPE of the last N tokens, whose entries are the last N of each segment:
                `append` has put them there, at once or one by one. Where numbers are traced this is not looked at, and
                an output counts entries of later tokens where it does not hold.
            count: `i32[B]` tokens of the N that each sequence has, as given to `append`; all by default.
            layer: index among the layers held.

        Returns:
            `[B, H, N, D]` in q's dtype; anything finite for padding.

        Raises:
            ValueError: if shapes do not fit, for a policy that evicts or chooses what is read, or, where numbers are
                known, if there are more queries of a sequence than its last entries have positions in a line.
        """
        layer = self._held_layer(layer)
        self._require_plain("attend")
        pool, start, length = self.pool(layer), self.start[layer], self.length[layer]
        batch, heads = start.shape
        grouped = as_grouped("q", q, batch, heads, pool.k)
        tokens = grouped.shape[3]
        written = as_counts("count", count, batch, tokens)
        # Entries are only appended: later tokens are at the end of each segment, unless there was no room for them.
        last = jnp.take_along_axis(pool.pos, jnp.maximum(start + length - 1, 0), axis=1)
        last = jnp.where(length > 0, last, -1).max(axis=1)
        taken = jnp.clip(last + 1 - (self.seen[layer] - written), 0, written)
        after = jnp.maximum(taken - 1 - jnp.arange(tokens, dtype=jnp.int32)[:, None], 0)
        if tokens > 1 and known(pool.pos, start, length, taken):
            _require_last(pool.pos, start, length, last, taken)

        def one(q: Float[Array, "B K G D"], after: Int[Array, " B"]) -> Float[Array, "B K G D"]:
            """Output of the queries of one token, behind which `after` later ones are appended."""
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
    ) -> tuple[NewRows, Int[Array, " B"]]:
        """New tokens' entries, as many of each sequence as there is headroom for; and numbers of its tokens."""
        k, v = as_keys_values(k, v)
        batch, heads = self.start.shape[1:]
        held, tokens = self.pool(layer).k, k.shape[2]
        fits = (*k.shape[:2], k.shape[3]) == (batch, heads, held.shape[2])
        remedy = f"this state takes [B, K, N, D] = {[batch, heads, 'N', held.shape[2]]}"
        require(fits, "k", list(k.shape), remedy)
        remedy = f"this state is {held.dtype}: give keys and values of it"
        require(k.dtype == held.dtype, "k", str(k.dtype), remedy)
        single = tokens == 1 or isinstance(self.parts.after, Append)
        remedy = "its policy goes on compressing after each: give one at a time"
        require(single, "k", f"{tokens} tokens", remedy)
        written, free = as_counts("count", count, batch, tokens), self.free(layer)
        if known(written, free):
            short = int(np.max(np.asarray(written) - np.asarray(free)))
            remedy = f"{short} more than there is room for: give jaxkv.compress a larger headroom"
            require(short <= 0, "k", f"{tokens} tokens", remedy)
        positions = self.seen[layer][:, None] + jnp.arange(tokens, dtype=jnp.int32)
        end, taken = self.start[layer] + self.length[layer], jnp.clip(free, 0, written)
        return NewRows(k=k, v=v, positions=positions, count=taken, end=end), written

    def _rows(
        self, layer: int, pool: Pool, length: Int[Array, "B K"], q: Float[Array, "B K G N D"]
    ) -> DenseLayer:
        """View of a layer's entries; ValueError where its sink logits are of other query heads than q's."""
        shaping, (_, heads, group, _, _) = self.shapings[layer], q.shape
        sinks = shaping.sink_logits
        remedy = (
            f"the state has sink logits of {getattr(sinks, 'size', 0)} query heads: give as many"
        )
        fits = sinks is None or sinks.shape == (heads, group)
        require(fits, "q", f"{heads * group} query heads", remedy)
        given = (self.terms, pool, self.start[layer], length)
        return bound(*given, shaping=shaping, window=self.window(layer))

    def _with(
        self, layer: int, pool: Pool, taken: Int[Array, " B"], written: Int[Array, " B"]
    ) -> "CompressedKV":
        """State with a layer's pool, to which `taken` of `written` tokens were appended."""
        return dataclasses.replace(
            self._with_pool(layer, pool),
            length=self.length.at[layer].add(taken[:, None]),
            seen=self.seen.at[layer].add(written),
            left_out=self.left_out.at[layer].add(written - taken),
        )

    def _with_pool(self, layer: int, pool: Pool) -> "CompressedKV":
        """State with another pool of a layer."""
        at = self.terms.layout.pool_of(layer)
        return dataclasses.replace(self, pools=(*self.pools[:at], pool, *self.pools[at + 1 :]))

    def _tables(self, layer: int) -> Tables:
        """Tables of the layers held, with the tokens that one of them has seen."""
        return Tables(
            start=self.start,
            length=self.length,
            limit=self.limit,
            seen=self.seen[layer],
            state=self.state,
        )

    def _evicted(self, layer: int, attended: Float[Array, "B K"]) -> "CompressedKV":
        """State without the entry of lowest rank of each of a layer's segments that is over its limit."""
        pool, heads = self.pool(layer), self.start.shape[2]
        how = Eviction(terms=self.terms, heads=heads, dtype=pool.dtype)
        pool, left = evict(pool, segments_of(self._tables(layer), layer), attended, how)
        state = self.state
        if state is not None and state.tau is not None:
            state = dataclasses.replace(state, tau=state.tau.at[layer].set(left.tau))
        length = self.length.at[layer].set(left.length)
        return dataclasses.replace(self._with_pool(layer, pool), length=length, state=state)

    def _remembering(self, layer: int, token: Token, new: NewTokens) -> "CompressedKV":
        """State whose buffer of a layer's last queries, if it has one, holds the new tokens' queries."""
        state = self.state
        if state is None or not state.rings:
            return self
        rings, at = [*state.rings], self._ring_of(layer)
        rings[at] = remembered(rings[at], token.q, new)
        return dataclasses.replace(self, state=dataclasses.replace(state, rings=tuple(rings)))

    def _ring_of(self, layer: int) -> int:
        """Index of a layer's buffer of last queries: layers with a window have none."""
        return self.windows[self.first : self.first + layer].count(None)

    def _recompressed(self, layer: int, every: int) -> "CompressedKV":
        """State with a layer compressed again in sequences that have `every` entries beyond their limit."""
        due = (self.length[layer] - self.limit[layer]).max(axis=1) >= every
        again = partial(CompressedKV._compressed_again, layer=layer)
        return lax.cond(due.any(), again, lambda state, _: state, self, due)

    def _compressed_again(self, due: Bool[Array, " B"], layer: int) -> "CompressedKV":
        """State with a layer's sequences that are `due` compressed again, over all that they hold."""
        held = HeldAgain(self, layer)
        made = finished(compress(held, self.parts, key=self.key, due=due))
        (pool,), parts, at = made.pools, self.parts, self.first + layer
        rows = jnp.broadcast_to(jnp.asarray(held.kept_rows)[at, :, None], made.length.shape)
        usual = made.length if not parts.heads.uniform else rows
        of = slice(at, at + 1)
        target = limits_of(parts.heads, made.length, usual, None, self.windows, of)[0]
        state = self.state
        if state is not None and state.tau is not None and made.tau is not None:
            state = dataclasses.replace(state, tau=state.tau.at[layer].set(made.tau[0]))
        return dataclasses.replace(
            self._with_pool(layer, pool),
            start=self.start.at[layer].set(made.start[0]),
            length=self.length.at[layer].set(made.length[0]),
            limit=self.limit.at[layer].set(jnp.where(due[:, None], target, self.limit[layer])),
            state=state,
        )

    def _require_plain(self, half: str) -> None:
        """Raises ValueError unless tokens are only appended, and read all entries."""
        plain = isinstance(self.parts.after, Append) and self.parts.read.everything
        remedy = f"its policy evicts, or chooses what is read, in one step: use step, not {half}"
        require(plain, "state", brief(self.parts), remedy)

    def _held_layer(self, layer: Any) -> int:
        """Validates a layer's index among the layers held, and returns it as an int."""
        layers = self.start.shape[0]
        remedy = f"this state holds layers 0 to {layers - 1}"
        layer = whole("layer", layer, remedy, least=0)
        require(layer < layers, "layer", layer, remedy)
        return layer


class HeldAgain(Source):
    """Source of one layer of a state, to compress it again."""

    def __init__(self, held: CompressedKV, layer: int):
        """Counts entries to keep, and gathers what programs read of the layer."""
        parts, pool, state = held.parts, held.pool(layer), held.state
        assert state is not None
        of, at = slice(layer, layer + 1), held.first + layer
        mine = dataclasses.replace(
            state,
            recent=state.recent[of],
            tau=None if state.tau is None else state.tau[of],
            rings=(),
        )
        tables = Tables(
            start=held.start[of],
            length=held.length[of],
            limit=held.limit[of],
            seen=held.seen[layer],
            state=mine,
        )
        self.indices, self.windows, self.size, self.parts = (at,), held.windows, pool.rows, parts
        self.kept_rows, self.recents = counts_again(parts, tables, held.windows)
        self.static = HeldStatic.of(parts, slots=pool.rows, spec=LayerSpec())
        self.shaping = held.shapings[layer]
        self.layer = HeldLayer(
            pool=pool,
            tables=tables,
            ring=state.rings[held._ring_of(layer)] if state.rings else None,
            row=jnp.int32(0),
            layer=jnp.int32(at),
            key=held.key,
        )

    def candidates(self, index: int) -> Candidates:
        """`Candidates` of the layer: scores by the policy's rank, or by its scorer from the last queries."""
        return candidates_again(self.layer, self.static, self.shaping)

    def pool_rows(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Size P in rows of the layer's pool, which does not change."""
        return self.size

    def rows(self, index: int) -> Unpacked:
        """The layer's entries, in order of position."""
        return rows_again(self.layer, self.static, self.shaping)


def _require_last(pos: Array, start: Array, length: Array, last: Array, taken: Array) -> None:
    """Raises ValueError unless the last `taken` rows of each segment have consecutive positions up to `last`."""
    behind = np.arange(int(taken.max(initial=0)))
    row = np.asarray(start + length - 1)[..., None] - behind
    found = np.take_along_axis(np.asarray(pos)[:, None], np.maximum(row, 0), axis=2)
    right = (behind < np.asarray(length)[..., None]) & (
        found == np.asarray(last)[:, None, None] - behind
    )
    wrong = (~right & (behind < np.asarray(taken)[:, None, None])).any(axis=1)
    if wrong.any():
        at = int(wrong.any(axis=1).argmax())
        held = int(wrong[at].argmax())
        remedy = f"of sequence {at} the last rows of each kv head are the last {held} positions: give that many queries"
        raise ValueError(
            f"q={int(taken[at])} tokens: {remedy}, or count= where sequences have fewer than others"
        )


def _numbers(array: Any) -> str:
    """Text of a small array's numbers on one line; its type's name where these cannot be read or are too many."""
    readable = isinstance(array, (jax.Array, np.ndarray)) and known(array) and array.size <= 16
    if readable and isinstance(array, jax.Array):
        # Of arrays that a call was given to keep, and of those on other hosts, nothing can be read.
        readable = not array.is_deleted() and array.is_fully_addressable
    return str(np.asarray(array).tolist()) if readable else type(array).__name__
