"""Eviction after a decode step: each new entry replaces the lowest-ranked entry of its segment.

The evicted entry is dropped or merged into another one. Every operation is a reduction over the entries of segments:
over a whole pool if it belongs to one layer, in windows if layers share it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import checked, instance
from jaxkv._errors import require
from jaxkv.attention import Backend
from jaxkv.attention.xla import WALK_BLOCK
from jaxkv.cache.pools import Pool
from jaxkv.cache.stores import put_cells
from jaxkv.engine.layers.terms import Terms
from jaxkv.engine.nearest import nearest
from jaxkv.engine.segments import Segments, after_read, fold
from jaxkv.policies.keep import Keep
from jaxkv.policies.merger import Joined, Merger, Row, axes_for
from jaxkv.policies.parts import Ongoing
from jaxkv.policies.rank import Rank, ranked
from jaxkv.sharding.collectives import mean_of_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eviction:
    """Static config of eviction.

    Attributes:
        terms: static config of the entries.
        heads: kv heads per layer; on a mesh, per device.
        dtype: dtype of the model, to which merged entries are rounded.
    """

    terms: Terms
    heads: int
    dtype: Any = jnp.float32


def weakest(pool: Pool, segments: Segments, how: Eviction) -> Int[Array, "B K"]:
    """Return per segment the index of the lowest-ranked entry that may be evicted, -1 for none.

    Ties go to the latest position. The pool's scores must be up to date.
    """
    rank, keep = how.terms.ongoing.rank, how.terms.ongoing.keep
    lowest_of = _lowest_at_once if how.terms.backend.can.few_launches else _lowest
    seen, prompt = segments.seen[:, None, None], segments.prompt[:, None, None]
    last = seen - segments.recent[..., None]

    def body(best, row, inside, pos, *score):
        lowest, latest, _ = best
        free = inside & ~keep.protected(pos, prompt) & (pos < last)
        every = ranked(rank, score[0] if score else jnp.zeros(pos.shape, jnp.float32), seen - pos)
        if how.terms.ongoing.one_set:
            layers = jnp.broadcast_to(every, free.shape).reshape(
                free.shape[0], -1, how.heads, free.shape[-1]
            )
            every = mean_of_devices(layers.mean(axis=2, keepdims=True), "K", how.terms.axes)
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
    return fold(body, none, leaves, *lies, walk=how.terms.layout.walk, block=block)[2]


def _lowest(free: Array, every: Array, pos: Array, row: Array) -> tuple[Array, Array, Array]:
    """Return per segment the lowest rank in mask `free` (inf for none), its latest position, index (-1 for none)."""
    ranks = jnp.where(free, every, jnp.inf)
    lowest = ranks.min(axis=-1)
    position = jnp.where(free & (ranks == lowest[..., None]), pos, -1).max(axis=-1)
    return lowest, position, jnp.where(free & (pos == position[..., None]), row, -1).max(axis=-1)


def _lowest_at_once(
    free: Array, every: Array, pos: Array, row: Array
) -> tuple[Array, Array, Array]:
    """`_lowest` as a single reduction: one kernel instead of three on a GPU, but scalar code on a CPU."""

    def better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        lower = (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] > other[1]))
        return tuple(jnp.where(lower, mine, its) for mine, its in zip(one, other, strict=True))

    operands = (jnp.where(free, every, jnp.inf), jnp.where(free, pos, -1), jnp.where(free, row, -1))
    none = (jnp.float32(jnp.inf), jnp.int32(-1), jnp.int32(-1))
    return lax.reduce(operands, none, better, (free.ndim - 1,))


class _Writes(NamedTuple):
    """Entries to write in an eviction: the newest entries replace the evicted ones in segments `over`; merged entries.

    `newest` and `merged` have the keys "k" and "v". Merged entries come with their indices; an index of P or more
    writes nothing.
    """

    over: Bool[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    newest: dict[str, Float[Array, "B K D"]]
    merged: dict[str, tuple[Int[Array, "B K"], Float[Array, "B K D"]]]

    def all_of(
        self, name: str, place: Int[Array, "B K"]
    ) -> tuple[Int[Array, "B n"], Float[Array, "B n D"]]:
        """Return indices and contents of all keys ("k") or values ("v") to write; the newest entries go to `place`."""
        parts = [(place, self.newest[name]), *([self.merged[name]] if name in self.merged else [])]
        return jnp.concatenate([row for row, _ in parts], axis=1), jnp.concatenate(
            [new for _, new in parts], axis=1
        )


def evict(
    pool: Pool, segments: Segments, attended: Float[Array, "B K"], how: Eviction
) -> tuple[Pool, Segments]:
    """Evict or merge the lowest-ranked entry of each segment over its limit; move the newest entry to its place.

    `attended` is any number of each head's attention output, which orders the writes after attention. NaN keeps a
    segment's entries. A kernel that finds the entry does not need it: its pool is an output of attention.
    """
    backend, ongoing = how.terms.backend, how.terms.ongoing
    fused = pool.store.read_by(backend.can.evicts, 0)
    # A single kernel finds and drops the entry if heads evict independently and nothing is merged.
    if fused and ongoing.rank.in_kernels and ongoing.merge is None and not ongoing.one_set:
        return _evict_by_kernel(pool, segments, ongoing, backend)
    victim = weakest(pool, segments, how)
    over = after_read((segments.length > segments.limit) & (victim >= 0), attended)
    last = segments.start + segments.length - 1
    # The newest entry moves into the victim's place; a finished sequence is unchanged.
    if ongoing.merge is None and fused:
        k, v, pos, score = backend.replace_rows(
            pool.k, pool.v, pool.pos, pool.score, victim, last, over
        )
        pool = dataclasses.replace(pool, store=pool.store.of(k, v), pos=pos, score=score)
        return pool, dataclasses.replace(segments, length=segments.length - over.astype(jnp.int32))
    newest = _rows_at(pool, last)
    writes = _Writes(over, segments.tau, {"k": newest.k, "v": newest.v}, {})
    if ongoing.merge is not None:
        writes = _merging_dropped(pool, segments, how, victim, last, writes)
    length = segments.length - writes.over.astype(jnp.int32)
    segments = dataclasses.replace(segments, length=length, tau=writes.tau)
    return _written(pool, victim, last, writes), segments


def _rows_at(pool: Pool, row: Int[Array, "B K"]) -> Row:
    """Return the float32 key and value `[B, K, D]` of one entry per segment, given pool row indices."""
    k, v = pool.store.take(row).view()
    return Row(k.astype(jnp.float32), v.astype(jnp.float32))


def _merging_dropped(
    pool: Pool,
    segments: Segments,
    how: Eviction,
    victim: Int[Array, "B K"],
    last: Int[Array, "B K"],
    writes: _Writes,
) -> _Writes:
    """Return `_Writes` with evicted entries merged into the most similar ones, if the merger decides so."""

    def by_layer(array: Array) -> Array:
        """Reshape `[B, L * K, ...]`, the heads of L layers adjacent, to `[B * L, K, ...]`."""
        return array.reshape(-1, how.heads, *array.shape[2:])

    merge = how.terms.ongoing.merge
    assert merge is not None
    over, tau, newest, merged = writes
    dropped = _rows_at(pool, jnp.maximum(victim, 0))
    tau = None if tau is None else by_layer(tau)
    for index, metric in enumerate(merge.compares):
        one = getattr(dropped, metric)
        among = (getattr(pool, metric), pool.pos, one, victim, segments)
        cosine, target = nearest(*among, walk=how.terms.layout.walk)
        target, over = jnp.maximum(target, 0), after_read(over, cosine)
        # A merger may decide jointly for the heads of a layer.
        one_of, near = (Row(*map(by_layer, rows)) for rows in (dropped, _rows_at(pool, target)))
        returned = merge.merge_one(
            index,
            by_layer(cosine),
            one_of,
            near,
            by_layer(over),
            tau,
            **axes_for(merge, how.terms.axes),
        )
        result = _checked_joined(merge, returned, one_of, tau)
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
                name: (jnp.where(joins & (target != last), target, jnp.int32(pool.rows)), joined)
            }
    tau = None if tau is None else tau.reshape(*over.shape, -1)
    return _Writes(over, tau, newest, merged)


def _checked_joined(
    merge: Merger, found: Joined, dropped: Row, tau: Float[Array, "N K n"] | None
) -> Joined:
    """Return a merger's result for single entries; raise TypeError for a wrong shape or dtype."""
    name = f"{type(merge).__name__}.merge_one"
    instance(name, found, Joined, "return Joined(joins, k, v, tau)")
    checked(
        merge, "merge_one.joins", found.joins, dropped.k.shape[:2], "kv head, [N, K]", jnp.bool_
    )
    for name, new in (("k", found.k), ("v", found.v)):
        if new is not None:
            checked(
                merge, f"merge_one.{name}", new, dropped.k.shape, "number of an entry, [N, K, D]"
            )
    if tau is not None:
        checked(
            merge, "merge_one.tau", found.tau, tau.shape, "threshold of each kv head, [N, K, n]"
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Weigh:
    """Rank and eviction mask of a policy, as the eviction kernel calls them; the same as in `weakest`."""

    rank: Rank
    keep: Keep

    def __call__(self, score: Array, pos: Array, seen: Array, prompt: Array) -> tuple[Array, Array]:
        """Return the rank of each entry, and the mask of entries that are not protected."""
        return ranked(self.rank, score, seen - pos), ~self.keep.protected(pos, prompt)


def _evict_by_kernel(
    pool: Pool, segments: Segments, ongoing: Ongoing, backend: Backend
) -> tuple[Pool, Segments]:
    """`evict` by one backend kernel; it needs no ordering barrier, as the pool is an output of attention."""
    k, v, pos, score, dropped = backend.evict_rows(
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
        weigh=_Weigh(ongoing.rank, ongoing.keep),
    )
    pool = dataclasses.replace(pool, store=pool.store.of(k, v), pos=pos, score=score)
    return pool, dataclasses.replace(segments, length=segments.length - dropped)


def _written(
    pool: Pool, victim: Int[Array, "B K"], last: Int[Array, "B K"], writes: _Writes
) -> Pool:
    """Return the pool with the newest entries in the places of evicted ones, and with merged entries."""
    nowhere = jnp.int32(pool.rows)
    place, emptied = (jnp.where(writes.over, row, nowhere) for row in (victim, last))
    both = jnp.concatenate([place, emptied], axis=1)

    def move(leaf: Array, empty: int) -> Array:
        """Copy each last cell of positions or scores over the evicted entry's; set the last cell to `empty`."""
        cells = jnp.take_along_axis(leaf, last, axis=1)
        return put_cells(leaf, both, jnp.concatenate([cells, jnp.full_like(cells, empty)], axis=1))

    store = pool.store.put(writes.all_of("k", place), writes.all_of("v", place))
    score = None if pool.score is None else move(pool.score, 0)
    return Pool(store=store, pos=move(pool.pos, -1), score=score)
