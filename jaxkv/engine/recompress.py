"""Recompress a cache: its policy selects again among the entries of prompt and answer, in order of position."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv._checks import is_traced, namespace
from jaxkv.attention import Shaping
from jaxkv.cache import KVCache, Tables
from jaxkv.cache.layout import Layout
from jaxkv.cache.packing import Unpacked
from jaxkv.cache.pools import Pool
from jaxkv.engine.bookkeeping import segments_of
from jaxkv.engine.compress import compress
from jaxkv.engine.hadamard import keys_of, transformed
from jaxkv.engine.layer_sources import LayerSource
from jaxkv.engine.lengths import bucket, rows_of, with_sliding_windows
from jaxkv.engine.moments import last_moments
from jaxkv.engine.observing import scored
from jaxkv.engine.prefill_layer import value_norms
from jaxkv.engine.progress import run_to_end
from jaxkv.engine.segments import Segments
from jaxkv.engine.selection import Candidates, last_rows, limits_of
from jaxkv.models.config import SlidingWindows
from jaxkv.models.decoder import Flat, Graphs, Leaves
from jaxkv.models.values import LayerSpec
from jaxkv.policies.head_budgets import HeadBudgets, capacity_of, most_rows
from jaxkv.policies.parts import Ongoing, Parts
from jaxkv.policies.rank import Anew, ranked
from jaxkv.policies.scorer import Extras, Observed, Scorer
from jaxkv.sharding.collectives import gathered, most_of_devices, own_shard
from jaxkv.sharding.mesh import Axes, host, place, settle_down
from jaxkv.sharding.sharded_program import sharded_jit

# L1 norms `[B, K, S]` of values `[B, K, S, D]` after the output projection.
Norms = Callable[[Float[Array, "B K S D"]], Float[Array, "B K S"]]


def no_norms(v: Float[Array, "B K S D"]) -> Float[Array, "B K S"]:
    """Raise TypeError: the output projection of a model outside jaxkv is not known."""
    raise TypeError("norms of values: output projection not known. Choose a policy without norms.")


def beyond(cache: KVCache) -> Any:
    """Return the entries `[B]` of each sequence's fullest segment minus its limit; negative below the limit."""
    if is_traced(cache.length):
        return most_of_devices((cache.length - cache.limit).max(axis=(0, 2)), "K", cache.axes)
    return (host(cache.length).astype(np.int64) - host(cache.limit)).max(axis=(0, 2))


def due(cache: KVCache) -> Any:
    """Return the mask `bool[B]` of sequences to recompress; a host array unless traced.

    Their fullest segment exceeds its limit by at least `every` entries, or by any if each new entry evicts one.
    """
    parts = cache.policy.composed
    if not parts.ongoing.compresses:
        return np.zeros(cache.seen.shape, bool)
    return beyond(cache) >= (parts.every or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """Fixed sizes of the caches that `recompress` returns; needed where cache arrays are traced.

    Attributes:
        rows: size P of each pool; on a mesh, of one device's part.
        padded_len: maximum number of entries per segment.
    """

    rows: tuple[int, ...]
    padded_len: int


def recompress(
    flat: Flat,
    cache: KVCache,
    *,
    key: PRNGKeyArray,
    headroom: int | Int[np.ndarray, " L"],
    fixed: Fixed | None = None,
) -> KVCache:
    """Recompress the sequences of a cache that exceed their entry limits; copy the others.

    `cache` itself is unchanged; its policy must recompress after the prompt. Each pool is as small as its fullest
    sequence allows, with `headroom` free places behind every segment. If the cache's tables are traced, `fixed` sets
    the sizes.
    """
    parts, state = cache.policy.composed, cache.state
    assert state is not None
    held = _Held(
        flat,
        cache,
        key,
        np.broadcast_to(np.asarray(headroom, np.int64), (len(cache.start),)),
        fixed,
    )
    now = place(due(cache), "B", flat.axes)
    compressed = run_to_end(compress(held, parts, key=key, headroom=held.headroom, due=now))
    target = limits_of(
        parts.heads, compressed.length, compressed.length, flat.axes, flat.config.sliding_windows
    )
    full = np.asarray([width is None for width in flat.config.sliding_windows])
    renewed = now[:, None] & full[:, None, None]
    if parts.heads.uniform:
        wants = namespace(held.kept_entries).broadcast_to(
            held.kept_entries[..., None], target.shape
        )
        target = place(wants, "L B K", flat.axes, jnp.int32)
    result = cache.updated(
        pools=compressed.pools,
        start=compressed.start,
        length=compressed.length,
        limit=jnp.where(renewed, target, cache.limit),
        state=dataclasses.replace(state, tau=compressed.tau),
    )
    # A head that competes with others may now hold more entries than the prompt has tokens.
    result = dataclasses.replace(
        result, tally=cache.tally.plus(compressed.tally), extended=not parts.heads.uniform
    )
    return settle_down(result, flat.axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldStatic:
    """Static config of the functions that read a cached layer's entries.

    Attributes:
        ongoing: what the policy does after the prompt.
        scorer: computes new scores where the policy has no rank.
        heads: how a layer's entries are divided among its heads.
        layout: layout of the pools.
        padded_len: maximum number of entries per segment.
        spec: static config of the layer.
        axes: axes of the mesh that programs run on; None without a mesh.
    """

    ongoing: Ongoing
    scorer: Scorer
    heads: HeadBudgets
    layout: Layout
    padded_len: int
    spec: LayerSpec
    axes: Axes | None = None

    @classmethod
    def of(cls, parts: Parts, **given: Any) -> "HeldStatic":
        """Return the config of a policy's parts, with the other fields as keyword arguments."""
        return cls(
            ongoing=parts.ongoing,
            scorer=parts.scorer,
            heads=parts.heads,
            layout=parts.layout,
            **given,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldLayer:
    """Arrays of one cached layer: pool, tables, query buffer, index in the cache and in the model, random key."""

    pool: Pool
    tables: Tables
    query_buffer: Float[Array, "B K G R D"] | None
    row: Int[Array, ""]
    layer: Int[Array, ""]
    key: PRNGKeyArray

    @property
    def segments(self) -> Segments:
        """Segments (start, length, limit, ...) of this layer, sliced from the tables of all layers."""
        return segments_of(self.tables.of_layers(self.row[None]), 0)

    @property
    def centre(self) -> Float[Array, "B K D"] | None:
        """Vector `[B, K, D]` subtracted from this layer's keys before their transform; None without a transform."""
        return None if self.tables.centre is None else self.tables.centre[self.row]


class _Held(LayerSource):
    """Layer source for `compress` that reads the entries of an existing cache."""

    def __init__(
        self,
        flat: Flat,
        cache: KVCache,
        key: PRNGKeyArray,
        headroom: Int[np.ndarray, " L"],
        fixed: Fixed | None,
    ):
        """Compute the padded segment length and, per layer, the entries and recent entries to keep."""
        parts, state = cache.policy.composed, cache.state
        assert state is not None
        self.flat, self.cache, self.key, self.headroom, self.fixed = (
            flat,
            cache,
            key,
            headroom,
            fixed,
        )
        self.indices, self.axes = range(len(headroom)), flat.axes
        self.kept_entries, self.recents = counts_again(
            parts, cache.tables, flat.config.sliding_windows, flat.axes
        )
        self.sliding_windows, self.dtype = flat.config.sliding_windows, cache.pools[0].dtype
        self.tables = dataclasses.replace(
            cache.tables, state=dataclasses.replace(state, query_buffers=())
        )
        if fixed is None:
            most = max(pool.rows for pool in cache.pools) // cache.kv_shards
            # Upper bound from the text and the pool: independent of content, and rarely changed by growth.
            heads = cache.start.shape[2] // cache.kv_shards
            padded_len = min(bucket(int(host(cache.seen).max())), cache.layout.widest(most, heads))
        self.parts, self.padded_len = parts, padded_len if fixed is None else fixed.padded_len

    def candidates(self, index: int) -> Candidates:
        """Return one layer's `Candidates`: masks, positions, and scores from the policy's rank or its scorer."""
        return _candidates(self.flat.blocks[index], self._layer(index), **self._static(index))

    def pool_rows(self, group: Sequence[int], kept: Int[Array, "n B K"]) -> int:
        """Return the size P in entries of the new pool with headroom: the policy's target or a bucket of `kept`."""
        if self.fixed is not None:
            return self.fixed.rows[self.cache.layout.pool_of(group[0])]
        part = slice(group[0], group[-1] + 1)
        kv_shards, capacity = self.cache.kv_shards, capacity_of(self.parts.heads)
        heads = kept.shape[2] // kv_shards

        def share(rows: int) -> int:
            """Return the maximum number of entries in one device's heads when their even share is `rows`."""
            return min(most_rows(capacity, rows), kv_shards * rows)

        length, layout = host(kept).astype(np.int64), self.cache.layout
        rows = share(-(-int(layout.takes(length).max()) // kv_shards))
        # A sequence that is not due may hold more entries if the cache comes from another mesh.
        rows = max(rows, layout.fullest(length, heads))
        target = share(int(heads * self.kept_entries[part].sum(axis=0).max()))
        size = heads * bucket(-(-rows // heads))
        return (min(target, size) if rows <= target else size) + heads * int(
            self.headroom[part].sum()
        )

    def rows(self, index: int) -> Unpacked:
        """Return one layer's keys, values, positions and scores as `Unpacked`, gathered from the pool."""
        rows = _unpacked(self.flat.blocks[index], self._layer(index), **self._static(index))
        # Merged entries are rounded to the model's dtype, too.
        return rows if self.parts.merge is None else rows.widened(jnp.dtype(self.cache.dtype))

    def _static(self, index: int) -> dict[str, Any]:
        """Return the static arguments of the programs that read layer `index`."""
        graphs = self.flat.graphs_of(index)
        static = HeldStatic.of(
            self.parts, padded_len=self.padded_len, spec=graphs.spec, axes=self.axes
        )
        return {"graphs": graphs, "static": static}

    def _layer(self, index: int) -> HeldLayer:
        """Return the arrays of layer `index`: pool, tables, query buffer, random key."""
        cache, state, sliding_windows = (
            self.cache,
            self.cache.state,
            self.flat.config.sliding_windows,
        )
        query_buffers = () if sliding_windows[index] or state is None else state.query_buffers
        return HeldLayer(
            pool=cache.pools[cache.layout.pool_of(index)],
            tables=self.tables,
            query_buffer=query_buffers[sliding_windows[:index].count(None)]
            if query_buffers
            else None,
            row=jnp.int32(index),
            layer=jnp.int32(index),
            key=self.key,
        )


def _numbers(table: Array) -> Any:
    """Return an int64 host copy of an array; a traced array unchanged."""
    return table if is_traced(table) else host(table).astype(np.int64)


def counts_again(
    parts: Parts, tables: Tables, sliding_windows: SlidingWindows, axes: Axes | None = None
) -> tuple[Any, Any]:
    """Return two counts `[L, B]`: entries to keep per kv head, and the most recent entries among them.

    The entries are the mean of a layer's limits, or come from the budget schedule for the current length.
    Sliding-window layers keep the entries of their windows.
    """
    state, seen = tables.state, _numbers(tables.seen)
    assert state is not None
    always_kept, xp = parts.keep.counts(seen, _numbers(state.prompt)), namespace(seen)
    by_limits = parts.evicts and parts.heads.limits() is None
    # Segments under a threshold may hold fewer entries than their budget, so their limits give no budget.
    if by_limits or (parts.layers.from_scores and parts.threshold is None):
        limit = _numbers(tables.limit)[np.asarray([width is None for width in sliding_windows])]
        # Heads may have different limits: average over a layer's heads, or over all layers if layers compete.
        of_all = gathered(limit, "K", 2, axes) if is_traced(limit) else limit
        over = (0, 2) if parts.layers.joint else (2,)
        rows = of_all.sum(axis=over, dtype=of_all.dtype) // math.prod(of_all.shape[i] for i in over)
        rows = xp.broadcast_to(rows, of_all.shape[:2])
        if not parts.evicts and not parts.layers.joint:
            # A prompt shorter than its always-kept entries grows until it has all of them.
            rows = xp.maximum(rows, always_kept)
        rows = with_sliding_windows(rows, seen, sliding_windows)
    else:
        now = xp.maximum(xp.minimum(_numbers(state.budget), seen), always_kept)
        rows, _ = rows_of(parts, now, seen, always_kept, sliding_windows)
    # Subtract the other protected entries of each layer from the most recent ones.
    left = xp.maximum(rows - (always_kept - parts.keep.window), parts.keep.window)
    # The recent entries of a prompt below its budget are a share of the budget: layers with a smaller budget hold
    # fewer.
    return rows, xp.minimum(_numbers(state.recent), left)


def taken(layer: HeldLayer, static: HeldStatic) -> Unpacked:
    """Return one layer's entries as `Unpacked`, gathered from its segments, sorted by position and padded."""
    pool, segments = layer.pool, layer.segments
    batch, heads = segments.start.shape
    padded_len = min(static.padded_len, static.layout.widest(pool.rows, heads))
    index = jnp.arange(padded_len, dtype=jnp.int32)
    inside = index < segments.length[..., None]
    row = jnp.where(inside, segments.start[..., None] + index, 0).reshape(batch, heads * padded_len)
    last = jnp.iinfo(jnp.int32).max
    pos = jnp.where(inside, jnp.take_along_axis(pool.pos, row, axis=1).reshape(inside.shape), last)
    order = jnp.argsort(pos, axis=-1)
    row = jnp.take_along_axis(row.reshape(inside.shape), order, axis=-1).reshape(
        batch, heads * padded_len
    )
    k, v = pool.store.take(row).view()
    score = (
        None
        if pool.score is None
        else jnp.take_along_axis(pool.score, row, axis=1).reshape(inside.shape)
    )
    return Unpacked(
        k=k.reshape(*inside.shape, -1),
        v=v.reshape(*inside.shape, -1),
        inside=inside,
        score=score,
        positions=jnp.take_along_axis(pos, order, axis=-1),
        tau=segments.tau,
    )


def _plain(rows: Unpacked, layer: HeldLayer) -> Unpacked:
    """Return entries with their keys and values before the transform; unchanged if the layer has no transform."""
    if layer.centre is None:
        return rows
    return rows._replace(k=keys_of(rows.k, layer.centre), v=transformed(rows.v))


@sharded_jit(static=("graphs", "static"), on="static")
def _unpacked(leaves: Leaves, layer: HeldLayer, *, graphs: Graphs, static: HeldStatic) -> Unpacked:
    """Compiled `rows_again`: one layer's entries to pack, with norms from the model's output projection."""
    block = graphs.block(leaves)
    return rows_again(layer, static, block.shaping, partial(value_norms, block))


@sharded_jit(static=("graphs", "static"), on="static")
def _candidates(
    leaves: Leaves, layer: HeldLayer, *, graphs: Graphs, static: HeldStatic
) -> Candidates:
    """Compiled `candidates_again`: one layer's scores, positions and masks."""
    block = graphs.block(leaves)
    return candidates_again(layer, static, block.shaping, partial(value_norms, block))


def rows_again(
    layer: HeldLayer, static: HeldStatic, shaping: Shaping, norms_of: Norms = no_norms
) -> Unpacked:
    """Return one layer's entries to pack, with new attention mass unless the merger compares entries."""
    rows, merge = taken(layer, static), static.ongoing.merge
    if merge is None or merge.compares:
        return rows
    mass = _observed(layer, _plain(rows, layer), static, shaping, norms_of)[1]
    return rows._replace(mass=mass)


def candidates_again(
    layer: HeldLayer, static: HeldStatic, shaping: Shaping, norms_of: Norms = no_norms
) -> Candidates:
    """Return one layer's `Candidates`: masks, positions, and scores from the policy's rank or its scorer.

    A sliding-window layer keeps the entries of its window and has no scores. `norms_of` computes norms of values, for
    policies that need them.
    """
    rows, ongoing, window = taken(layer, static), static.ongoing, static.spec.sliding_window
    pos, segments = rows.positions, layer.segments
    assert pos is not None
    candidates = Candidates(
        scores=None,
        inside=rows.inside,
        always_kept=ongoing.keep.protected(pos, segments.prompt[:, None, None]),
        positions=pos,
        seen=segments.seen,
    )
    if window is not None:
        return last_rows(candidates, window)
    rows = _plain(rows, layer)
    if isinstance(ongoing.rank, Anew):
        scores, _ = _observed(layer, rows, static, shaping, norms_of)
    else:
        score = jnp.zeros(pos.shape, jnp.float32) if rows.score is None else rows.score
        scores = ranked(ongoing.rank, score, segments.seen[:, None, None] - pos)
    needed = static.heads.needs_norms
    return dataclasses.replace(
        candidates, scores=scores, norms=norms_of(rows.v) if needed else None
    )


def _observed(
    layer: HeldLayer,
    rows: Unpacked,
    static: HeldStatic,
    shaping: Shaping,
    norms_of: Norms,
) -> tuple[Array, Array]:
    """Compute new scores and attention mass `f32[B, K, S]` of one layer's entries from its query buffer."""
    segments, scorer, centre = layer.segments, static.scorer, layer.centre
    k = rows.k
    batch, heads = segments.length.shape
    needs, extras = scorer.needs, Extras()
    window = needs.queries
    if needs.norms:
        extras["norms"], extras["norm_totals"] = _value_norms(norms_of, rows, static.axes)
    if layer.query_buffer is not None:
        position = (segments.seen - window)[:, None] + jnp.arange(window, dtype=jnp.int32)
        slot = position % layer.query_buffer.shape[3]
        remembered = jnp.take_along_axis(layer.query_buffer, slot[:, None, None, :, None], axis=3)
        # The transform is its own inverse.
        remembered = remembered if centre is None else transformed(remembered)
        extras["queries"] = remembered.astype(k.dtype)
        if needs.moments is not None:
            rope = static.spec.rope
            extras["moments"] = last_moments(remembered, segments.seen, rope, needs.moments)
    sinks = shaping.sink_logits
    # If heads hold different numbers of entries, the scorer sees each head as a sequence.
    fold = not static.heads.uniform

    def flat(array: Array) -> Array:
        """Reshape `[B, K, ...]` to `[B * K, 1, ...]` if heads hold different entries; else return the array."""
        return array.reshape(batch * heads, 1, *array.shape[2:]) if fold else array

    length = segments.length.reshape(-1) if fold else segments.length[:, 0]
    seen = Observed(
        q_positions=(length - window)[:, None] + jnp.arange(window, dtype=jnp.int32),
        k=flat(k),
        v=flat(rows.v),
        length=length,
        layer=layer.layer,
        key=layer.key,
        extras=jax.tree.map(flat, extras),
        sink_logits=None if sinks is None else flat(jnp.broadcast_to(sinks, (batch, *sinks.shape))),
        softcap=shaping.softcap,
        axes=None if fold else static.axes,
        group_axes=static.axes,
    )
    scores, mass = scored(scorer, seen, static.axes)
    return scores.reshape(k.shape[:3]), mass.reshape(k.shape[:3])


def _value_norms(norms_of: Norms, rows: Unpacked, axes: Axes | None) -> tuple[Array, Array]:
    """Return two arrays `[B, K, S]`: L1 norms of projected values, and their sums over kv heads per position."""
    assert rows.positions is not None
    norms = norms_of(rows.v)
    of_all = gathered(jnp.where(rows.inside, norms, 0.0), "K", 1, axes)
    where = gathered(rows.positions, "K", 1, axes)
    batch, heads, padded_len = of_all.shape
    # Sorting makes entries of one position adjacent; a head holds each position once.
    order = jnp.argsort(where.reshape(batch, -1), axis=-1, stable=True)
    place = jnp.take_along_axis(where.reshape(batch, -1), order, axis=-1)
    sums = value = jnp.take_along_axis(of_all.reshape(batch, -1), order, axis=-1)
    for shift in (step * side for step in range(1, heads) for side in (1, -1)):
        same = jnp.roll(place, shift, axis=-1) == place
        sums = sums + jnp.where(same, jnp.roll(value, shift, axis=-1), 0.0)
    back = jnp.argsort(order, axis=-1)
    totals = jnp.take_along_axis(sums, back, axis=-1).reshape(batch, heads, padded_len)
    return norms, own_shard(totals, "K", 1, axes)
