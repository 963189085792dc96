"""Eviction after a decode step: each new entry replaces the lowest-ranked entry of its segment.

The evicted entry is dropped or merged into another one. Every operation is a reduction over the entries of segments:
over a whole pool if it belongs to one layer, in windows if layers share it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import require_instance, require_shape_and_dtype
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention import AttentionBackend
from jaxkv.attention.xla import WALK_BLOCK
from jaxkv.cache.pools import EntryPool
from jaxkv.cache.stores import write_pool_rows
from jaxkv.engine.layers.terms import DecodeAttentionConfig
from jaxkv.engine.nearest import find_most_similar_entry
from jaxkv.engine.segments import Segments, fold_over_entries, order_after_read
from jaxkv.policies.keep import Keep
from jaxkv.policies.merger import EntryPerSegment, Joined, Merger, build_axes_argument
from jaxkv.policies.parts import DecodingCompressionConfig
from jaxkv.policies.rank import Rank, compute_entry_ranks
from jaxkv.sharding.collectives import average_over_devices


@frozen_dataclass
class EvictionConfig:
    """Static config of evictions after a decode step: `DecodeAttentionConfig`, kv heads per layer, dtype of the model.

    Attributes:
        terms: static config of the entries.
        heads: kv heads per layer; on a mesh, per device.
        dtype: dtype of the model, to which merged entries are rounded.
    """

    terms: DecodeAttentionConfig
    heads: int
    dtype: Any = jnp.float32


def find_lowest_ranked_entry(
    pool: EntryPool, segments: Segments, how: EvictionConfig
) -> Int[Array, "B K"]:
    """Return per segment, `i32[B, K]`, the pool row of the lowest-ranked entry that may be evicted, -1 for none.

    Ties go to the latest position. The pool's scores must be up to date.
    """
    rank = how.terms.ongoing.rank
    keep = how.terms.ongoing.keep
    lowest_of = _find_lowest_rank_fused if how.terms.backend.can.few_launches else _find_lowest_rank
    seen = segments.seen[:, None, None]
    prompt = segments.prompt[:, None, None]
    last = seen - segments.recent[..., None]

    def body(best, row, inside, pos, *score):
        lowest, latest, _ = best
        free = inside & ~keep.mask_protected_positions(pos, prompt) & (pos < last)
        every = compute_entry_ranks(
            rank, score[0] if score else jnp.zeros(pos.shape, jnp.float32), seen - pos
        )
        if how.terms.ongoing.one_set:
            layers = jnp.broadcast_to(every, free.shape).reshape(
                free.shape[0], -1, how.heads, free.shape[-1]
            )
            every = average_over_devices(layers.mean(axis=2, keepdims=True), "K", how.terms.axes)
            every = jnp.broadcast_to(every, layers.shape).reshape(free.shape)
        found = lowest_of(free, every, pos, row)
        better = (found[0] < lowest) | ((found[0] == lowest) & (found[1] > latest))
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best, strict=True))

    shape = segments.start.shape
    none = (
        jnp.full(shape, jnp.inf, jnp.float32),
        *(jnp.full(shape, -1, jnp.int32) for _ in range(2)),
    )
    leaves = (pool.pos,) if pool.score is None else (pool.pos, pool.score)
    block = how.terms.widest or WALK_BLOCK
    lies = segments.start, segments.length
    return fold_over_entries(
        body, none, leaves, *lies, walk=how.terms.layout.segment_read_mode, block=block
    )[2]


def _find_lowest_rank(
    free: Array, every: Array, pos: Array, row: Array
) -> tuple[Array, Array, Array]:
    """Return per segment, in the mask `free`, the lowest rank (inf for none), its latest position, its row (or -1)."""
    ranks = jnp.where(free, every, jnp.inf)
    lowest = ranks.min(axis=-1)
    position = jnp.where(free & (ranks == lowest[..., None]), pos, -1).max(axis=-1)
    return lowest, position, jnp.where(free & (pos == position[..., None]), row, -1).max(axis=-1)


def _find_lowest_rank_fused(
    free: Array, every: Array, pos: Array, row: Array
) -> tuple[Array, Array, Array]:
    """Return per segment lowest rank in mask `free`, its latest position, its row, by one reduction, for GPUs."""

    def better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        lower = (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] > other[1]))
        return tuple(jnp.where(lower, mine, its) for mine, its in zip(one, other, strict=True))

    operands = (jnp.where(free, every, jnp.inf), jnp.where(free, pos, -1), jnp.where(free, row, -1))
    none = (jnp.float32(jnp.inf), jnp.int32(-1), jnp.int32(-1))
    return lax.reduce(operands, none, better, (free.ndim - 1,))


class _EvictionWrites(NamedTuple):
    """Writes of an eviction to segments in mask `over`: newest entries, merged entries, new thresholds.

    `newest` and `merged` have the keys "k" and "v". Merged entries come with their indices; an index of P or more
    writes nothing.
    """

    over: Bool[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    newest: dict[str, Float[Array, "B K D"]]
    merged: dict[str, tuple[Int[Array, "B K"], Float[Array, "B K D"]]]

    def collect_rows_to_write(
        self, name: str, place: Int[Array, "B K"]
    ) -> tuple[Int[Array, "B n"], Float[Array, "B n D"]]:
        """Return pool rows and contents of all keys ("k") or values ("v") to write; the newest go to rows `place`."""
        parts = [(place, self.newest[name]), *([self.merged[name]] if name in self.merged else [])]
        return jnp.concatenate([row for row, _ in parts], axis=1), jnp.concatenate(
            [new for _, new in parts], axis=1
        )


def evict_entries(
    pool: EntryPool, segments: Segments, attended: Float[Array, "B K"], how: EvictionConfig
) -> tuple[EntryPool, Segments]:
    """Evict or merge the lowest-ranked entry of segments over their limit; put the newest there; return pool, segments.

    `attended` is any number of each head's attention output, which orders the writes after attention. NaN keeps a
    segment's entries. A kernel that finds the entry does not need it: its pool is an output of attention.
    """
    backend = how.terms.backend
    ongoing = how.terms.ongoing
    fused = pool.store.supports_kernels(backend.can.evicts, 0)
    # A single kernel finds and drops the entry if heads evict independently and nothing is merged.
    if fused and ongoing.rank.runs_in_kernels and ongoing.merge is None and not ongoing.one_set:
        return _evict_by_kernel(pool, segments, ongoing, backend)
    victim = find_lowest_ranked_entry(pool, segments, how)
    over = order_after_read((segments.length > segments.limit) & (victim >= 0), attended)
    last = segments.start + segments.length - 1
    # The newest entry moves into the victim's place; a finished sequence is unchanged.
    if ongoing.merge is None and fused:
        k, v, pos, score = backend.move_segment_entries(
            pool.k, pool.v, pool.pos, pool.score, victim, last, over
        )
        pool = dataclasses.replace(
            pool, store=pool.store.encode_entries(k, v), pos=pos, score=score
        )
        return pool, dataclasses.replace(segments, length=segments.length - over.astype(jnp.int32))
    newest = _gather_entries_at_rows(pool, last)
    writes = _EvictionWrites(over, segments.tau, {"k": newest.k, "v": newest.v}, {})
    if ongoing.merge is not None:
        writes = _merge_into_nearest(pool, segments, how, victim, last, writes)
    length = segments.length - writes.over.astype(jnp.int32)
    segments = dataclasses.replace(segments, length=length, tau=writes.tau)
    return _write_evictions(pool, victim, last, writes), segments


def _gather_entries_at_rows(pool: EntryPool, row: Int[Array, "B K"]) -> EntryPerSegment:
    """Return the `EntryPerSegment` at pool row indices `[B, K]`: float32 keys and values `[B, K, D]`."""
    k, v = pool.store.gather_entries(row).decode_entries()
    return EntryPerSegment(k.astype(jnp.float32), v.astype(jnp.float32))


def _merge_into_nearest(
    pool: EntryPool,
    segments: Segments,
    how: EvictionConfig,
    victim: Int[Array, "B K"],
    last: Int[Array, "B K"],
    writes: _EvictionWrites,
) -> _EvictionWrites:
    """Return `_EvictionWrites` with evicted entries merged into the most similar ones, if the merger decides so."""

    def split_heads_by_layer(array: Array) -> Array:
        """Reshape `[B, L * K, ...]`, the heads of L layers adjacent, to `[B * L, K, ...]`."""
        return array.reshape(-1, how.heads, *array.shape[2:])

    merge = how.terms.ongoing.merge
    assert merge is not None
    over, tau, newest, merged = writes
    dropped = _gather_entries_at_rows(pool, jnp.maximum(victim, 0))
    tau = None if tau is None else split_heads_by_layer(tau)
    for index, metric in enumerate(merge.compared_tensors):
        one = getattr(dropped, metric)
        among = (getattr(pool, metric), pool.pos, one, victim, segments)
        cosine, target = find_most_similar_entry(*among, walk=how.terms.layout.segment_read_mode)
        target = jnp.maximum(target, 0)
        over = order_after_read(over, cosine)
        # A merger may decide jointly for the heads of a layer.
        one_of, near = (
            EntryPerSegment(*map(split_heads_by_layer, rows))
            for rows in (dropped, _gather_entries_at_rows(pool, target))
        )
        returned = merge.merge_entry_while_decoding(
            index,
            split_heads_by_layer(cosine),
            one_of,
            near,
            split_heads_by_layer(over),
            tau,
            **build_axes_argument(merge, how.terms.axes),
        )
        result = _check_merge_result(merge, returned, one_of, tau)
        tau = None if tau is None else result.tau
        joins = result.joins.reshape(over.shape) & over
        for name, new in (("k", result.k), ("v", result.v)):
            if new is None:
                continue
            remedy = f"two comparisons change {name} of one entry: change it in one of them only"
            require(name not in merged, "merge", type(merge).__name__, remedy)
            joined = new.reshape(one.shape).astype(how.dtype).astype(jnp.float32)
            # The newest entry may itself be the merge target.
            takes_in = (joins & (target == last))[..., None]
            newest = newest | {name: jnp.where(takes_in, joined, newest[name])}
            merged = merged | {
                name: (
                    jnp.where(joins & (target != last), target, jnp.int32(pool.row_count)),
                    joined,
                )
            }
    tau = None if tau is None else tau.reshape(*over.shape, -1)
    return _EvictionWrites(over, tau, newest, merged)


def _check_merge_result(
    merge: Merger, found: Joined, dropped: EntryPerSegment, tau: Float[Array, "N K n"] | None
) -> Joined:
    """Return a merger's result for single entries; raise TypeError for a wrong type, shape or dtype."""
    name = f"{type(merge).__name__}.merge_entry_while_decoding"
    require_instance(name, found, Joined, "return Joined(joins, k, v, tau)")
    require_shape_and_dtype(
        merge,
        "merge_entry_while_decoding.joins",
        found.joins,
        dropped.k.shape[:2],
        "kv head, [N, K]",
        jnp.bool_,
    )
    for name, new in (("k", found.k), ("v", found.v)):
        if new is not None:
            require_shape_and_dtype(
                merge,
                f"merge_entry_while_decoding.{name}",
                new,
                dropped.k.shape,
                "number of an entry, [N, K, D]",
            )
    if tau is not None:
        require_shape_and_dtype(
            merge,
            "merge_entry_while_decoding.tau",
            found.tau,
            tau.shape,
            "threshold of each kv head, [N, K, n]",
        )
    return found


@dataclasses.dataclass(frozen=True)
class _EvictionRanker:
    """Callable for the eviction kernel: ranks of entries and mask of those not protected, from a policy."""

    rank: Rank
    keep: Keep

    def __call__(self, score: Array, pos: Array, seen: Array, prompt: Array) -> tuple[Array, Array]:
        """Return the rank of each entry, and the mask of entries that are not protected."""
        return compute_entry_ranks(
            self.rank, score, seen - pos
        ), ~self.keep.mask_protected_positions(pos, prompt)


def _evict_by_kernel(
    pool: EntryPool,
    segments: Segments,
    ongoing: DecodingCompressionConfig,
    backend: AttentionBackend,
) -> tuple[EntryPool, Segments]:
    """Evict the lowest-ranked entry of segments over their limit by one kernel, not merged; return pool, segments."""
    k, v, pos, score, dropped = backend.evict_lowest_entries(
        pool.k,
        pool.v,
        pool.pos,
        pool.score,
        segments.start,
        segments.length,
        segments.limit,
        segments.recent,
        segments.seen,
        segments.prompt,
        weigh=_EvictionRanker(ongoing.rank, ongoing.keep),
    )
    pool = dataclasses.replace(pool, store=pool.store.encode_entries(k, v), pos=pos, score=score)
    return pool, dataclasses.replace(segments, length=segments.length - dropped)


def _write_evictions(
    pool: EntryPool, victim: Int[Array, "B K"], last: Int[Array, "B K"], writes: _EvictionWrites
) -> EntryPool:
    """Return the pool with the newest entries in the places of evicted ones, and with merged entries."""
    nowhere = jnp.int32(pool.row_count)
    place, emptied = (jnp.where(writes.over, row, nowhere) for row in (victim, last))
    both = jnp.concatenate([place, emptied], axis=1)

    def move_last_cell(leaf: Array, empty: int) -> Array:
        """Return positions or scores with each evicting segment's last one moved to the evicted cell."""
        cells = jnp.take_along_axis(leaf, last, axis=1)
        return write_pool_rows(
            leaf, both, jnp.concatenate([cells, jnp.full_like(cells, empty)], axis=1)
        )

    store = pool.store.overwrite_entries(
        writes.collect_rows_to_write("k", place), writes.collect_rows_to_write("v", place)
    )
    score = None if pool.score is None else move_last_cell(pool.score, 0)
    return EntryPool(store=store, pos=move_last_cell(pool.pos, -1), score=score)
