"""A step's bookkeeping: the weakest row of each segment makes room for the new one, merged into another or dropped.

Everything is a reduction over the rows of segments, written once and run over them as they lie: in one piece where the
pool is a layer's own, in windows where layers share it. Those of all layers are then looked at together.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._errors import require
from jaxkv.attention import KERNELS, Implementation
from jaxkv.attention.kernels import kernels_of
from jaxkv.attention.xla import WALK_BLOCK, Walk
from jaxkv.cache.pools import Pool, row_norms
from jaxkv.cache.stores import put_cells
from jaxkv.engine.nearest import nearest, nearest_of_products
from jaxkv.engine.ordering import behind
from jaxkv.engine.segments import Segments, fold
from jaxkv.policies.checks import checked, checked_tuple
from jaxkv.policies.merger import Joined, Merger, Row, told
from jaxkv.policies.parts import Keep, Ongoing
from jaxkv.policies.rank import ByAge, ByAttention, Rank, ranked
from jaxkv.sharding.collectives import mean_of_devices
from jaxkv.sharding.mesh import Axes


class Evicted(NamedTuple):
    """Pool and segments after a step's eviction; key norms, if they are kept, and the rows likely to go next.

    Attributes:
        pool: their pool.
        segments: with the rows and merging's thresholds that are left.
        norms: `f32[B, P]` length of each key, if they are kept.
        likely: `i32[B, K]` the row of each most likely to go next, -1 for none.
    """

    pool: Pool
    segments: Segments
    norms: Float[Array, "B P"] | None
    likely: Int[Array, "B K"]


def weakest(
    pool: Pool,
    segments: Segments,
    *,
    heads: int,
    ongoing: Ongoing,
    walk: Walk,
    widest: int | None,
    axes: Axes | None = None,
    implementation: Implementation = Implementation.XLA,
) -> tuple[Int[Array, "B K"], Bool[Array, "B K"], Int[Array, "B K"]]:
    """The row of each segment that has to go, if one has to; and the one that may have to at the next step.

    Args:
        pool: their pool, its scores up to date.
        segments: which rows.
        heads: segments of one layer.
        ongoing: the policy's.
        walk: how their rows are reached.
        widest: the most rows a segment of a shared pool can have, if that is known.
        axes: of the mesh whose devices have so many heads each, if it runs on one.
        implementation: where kernels are launched, one reduction does for three.

    Returns:
        The lowest score among rows that may go, the latest position among equals; whether there is any; and, where
        segments are looked at whole, the lowest of the others, -1 for none.
    """
    rank = ongoing.rank
    assert rank is not None
    lowest_of = _lowest_at_once if implementation in KERNELS else _lowest
    seen, prompt = segments.seen[:, None, None], segments.prompt[:, None, None]
    last = seen - segments.recent[..., None]

    def body(best, row, inside, pos, *score):
        lowest, latest, *_ = best
        may = inside & ~ongoing.keep.protected(pos, prompt)
        free = may & (pos < last)
        every = ranked(rank, score[0] if score else jnp.zeros(pos.shape, jnp.float32), seen - pos)
        if ongoing.one_set:
            layers = jnp.broadcast_to(every, free.shape).reshape(free.shape[0], -1, heads, free.shape[-1])
            every = mean_of_devices(layers.mean(axis=2, keepdims=True), "K", axes)
            every = jnp.broadcast_to(every, layers.shape).reshape(free.shape)
        mine, position, place = lowest_of(free, every, pos, row)
        # By the next step one more row will have left the most recent ones.
        others = jnp.where(may & (pos <= last) & (row != place[..., None]), every, jnp.inf)
        least = others.min(axis=-1, keepdims=True)
        second = jnp.where((others == least) & (others < jnp.inf), row, -1).max(axis=-1)
        better = (mine < lowest) | ((mine == lowest) & (position > latest))
        found = (mine, position, place, second)
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best, strict=True))

    shape = segments.start.shape
    none = (jnp.full(shape, jnp.inf, jnp.float32), *(jnp.full(shape, -1, jnp.int32) for _ in range(3)))
    leaves = (pool.pos,) if pool.score is None else (pool.pos, pool.score)
    _, _, at, second = fold(body, none, leaves, segments.start, segments.length, walk=walk, block=widest or WALK_BLOCK)
    return at, at >= 0, second


def _lowest(free: Array, every: Array, pos: Array, row: Array) -> tuple[Array, Array, Array]:
    """The lowest rank among free rows, the latest position of those that have it, and its row; -1 for none."""
    ranks = jnp.where(free, every, jnp.inf)
    mine = ranks.min(axis=-1)
    position = jnp.where(free & (ranks == mine[..., None]), pos, -1).max(axis=-1)
    return mine, position, jnp.where(free & (pos == position[..., None]), row, -1).max(axis=-1)


def _lowest_at_once(free: Array, every: Array, pos: Array, row: Array) -> tuple[Array, Array, Array]:
    """`_lowest` as one reduction: of one kernel instead of three, but scalar code on a CPU."""

    def better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
        lower = (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] > other[1]))
        return tuple(jnp.where(lower, mine, its) for mine, its in zip(one, other, strict=True))

    of = (jnp.where(free, every, jnp.inf), jnp.where(free, pos, -1), jnp.where(free, row, -1))
    none = (jnp.float32(jnp.inf), jnp.int32(-1), jnp.int32(-1))
    return lax.reduce(of, none, better, (free.ndim - 1,))


def _as_joined(merge: Merger, found: Joined, dropped: Row, tau: Float[Array, "N K n"] | None) -> Joined:
    """What a merger says of single rows, checked."""
    checked_tuple(merge, "merge_one", found, Joined)
    by_layer = dropped.k.shape[:2]
    checked(merge, "merge_one.joins", found.joins, by_layer, "kv head, [N, K]", jnp.bool_)
    for name, new in (("k", found.k), ("v", found.v)):
        if new is not None:
            checked(merge, f"merge_one.{name}", new, dropped.k.shape, "number of a row, [N, K, D]")
    if tau is not None:
        checked(merge, "merge_one.tau", found.tau, tau.shape, "threshold of each kv head, [N, K, n]")
    return found


class _Writes(NamedTuple):
    """What a step writes where rows go.

    Attributes:
        over: segments that lose a row.
        tau: merging's thresholds, or None.
        newest: keys and values of the newest rows, which take the places of those that go, by name.
        merged: which other rows of the pool are written, and what, by name; those from P on are left out.
    """

    over: Bool[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    newest: dict[str, Float[Array, "B K D"]]
    merged: dict[str, tuple[Int[Array, "B K"], Float[Array, "B K D"]]]

    def all_of(self, name: str, place: Int[Array, "B K"]) -> tuple[Int[Array, "B n"], Float[Array, "B n D"]]:
        """All rows that are written of keys or values, the newest ones at their new places, and what."""
        parts = [(place, self.newest[name]), *([self.merged[name]] if name in self.merged else [])]
        return jnp.concatenate([row for row, _ in parts], axis=1), jnp.concatenate([new for _, new in parts], axis=1)


def evict(
    pool: Pool,
    segments: Segments,
    attended: Float[Array, "B K"],
    *,
    heads: int,
    ongoing: Ongoing,
    walk: Walk,
    widest: int | None = None,
    products: Float[Array, "B K n"] | None = None,
    norms: Float[Array, "B P"] | None = None,
    axes: Axes | None = None,
    implementation: Implementation = Implementation.XLA,
) -> Evicted:
    """Brings segments that hold one row too many back to their limit.

    Args:
        pool: their pool, its scores up to date; the last row of a segment is the newest.
        segments: which ones.
        attended: any number of each head's attention output: NaN keeps the rows as they are. A kernel that finds the
            row by itself needs none: it comes behind attention, as its pool does.
        heads: segments of one layer.
        ongoing: the policy's.
        walk: how their rows are reached.
        widest: the most rows a segment of a shared pool can have, if that is known.
        products: those of the likely rows' keys with all keys; the result is the same without.
        norms: length of each key, if they are kept; the result is the same without.
        axes: of the mesh whose devices have so many heads each, if it runs on one.
        implementation: what moves rows.

    Returns:
        What is left.
    """
    kernels = implementation in KERNELS and pool.store.fused
    if kernels and _in_a_kernel(ongoing):
        return _by_kernel(pool, segments, ongoing, implementation)
    options: Any = {"walk": walk, "widest": widest, "axes": axes, "implementation": implementation}
    victim, there, second = weakest(pool, segments, heads=heads, ongoing=ongoing, **options)
    over = behind((segments.length > segments.limit) & there, attended)
    last = segments.start + segments.length - 1
    # The newest row moves into the victim's place; a finished sequence's rows stay where they are.
    if ongoing.merge is None and kernels:
        length = segments.length - over.astype(jnp.int32)
        moved = _moved(pool, victim, last, over, implementation)
        return Evicted(moved, dataclasses.replace(segments, length=length), norms, jnp.where(over, second, victim))
    newest = _rows_at(pool, last)
    writes = _Writes(over, segments.tau, {"k": newest.k, "v": newest.v}, {})
    if ongoing.merge is not None:
        of = (victim, last, writes, products, norms)
        writes = _merging_dropped(pool, segments, *of, heads=heads, merge=ongoing.merge, walk=walk, axes=axes)
    length = segments.length - writes.over.astype(jnp.int32)
    pool, norms = _written(pool, norms, victim, last, writes)
    segments = dataclasses.replace(segments, length=length, tau=writes.tau)
    return Evicted(pool, segments, norms, jnp.where(writes.over, second, victim))


def _rows_at(pool: Pool, row: Int[Array, "B K"]) -> Row:
    """Keys and values of one row for each segment, float32."""
    k, v = pool.store.take(row).view()
    return Row(k.astype(jnp.float32), v.astype(jnp.float32))


def _merging_dropped(
    pool: Pool,
    segments: Segments,
    victim: Int[Array, "B K"],
    last: Int[Array, "B K"],
    writes: _Writes,
    products: Float[Array, "B K n"] | None,
    norms: Float[Array, "B P"] | None,
    *,
    heads: int,
    merge: Merger,
    walk: Walk,
    axes: Axes | None,
) -> _Writes:
    """What is written where a dropped row is compared with those that stay, and the merger may fold it into one."""
    rows_of = partial(_rows_at, pool)
    by_layer = lambda a: a.reshape(-1, heads, *a.shape[2:])  # noqa: E731
    over, tau, newest, merged = writes
    dropped = rows_of(jnp.maximum(victim, 0))
    tau = None if tau is None else by_layer(tau)
    for index, metric in enumerate(merge.compares):
        by_key, one = metric == "k", getattr(dropped, metric)
        if by_key and products is not None:
            wrong = over & (victim != segments.likely)
            assert norms is not None
            cosine, target = nearest_of_products(pool, norms, one, victim, products, wrong, segments)
        else:
            norm = norms if by_key else None
            cosine, target = nearest(getattr(pool, metric), pool.pos, one, victim, segments, walk=walk, norm=norm)
        target, over = jnp.maximum(target, 0), behind(over, cosine)
        # The heads of a layer may decide together.
        one_of, near = (Row(*map(by_layer, rows)) for rows in (dropped, rows_of(target)))
        decides = (by_layer(cosine), one_of, near, by_layer(over), tau)
        found = merge.merge_one(index, *decides, **told(merge, axes))
        found = _as_joined(merge, found, one_of, tau)
        tau = None if tau is None else found.tau
        joins = found.joins.reshape(over.shape) & over
        for name, new in (("k", found.k), ("v", found.v)):
            if new is None:
                continue
            remedy = f"two of its comparisons change {name} of one row: let one of them"
            require(name not in merged, "merge", type(merge).__name__, remedy)
            joined = new.reshape(one.shape)
            # The newest row may itself be the one that takes the dropped one in.
            takes_in = (joins & (target == last))[..., None]
            newest = newest | {name: jnp.where(takes_in, joined, newest[name])}
            merged = merged | {name: (jnp.where(joins & (target != last), target, jnp.int32(pool.rows)), joined)}
    tau = None if tau is None else tau.reshape(*over.shape, -1)
    return _Writes(over, tau, newest, merged)


@dataclasses.dataclass(frozen=True)
class _Weigh:
    """What rows are compared by and which may go, for a kernel: the rule of `weakest`."""

    rank: Rank
    keep: Keep

    def __call__(self, score: Array, pos: Array, seen: Array, prompt: Array) -> tuple[Array, Array]:
        return ranked(self.rank, score, seen - pos), ~self.keep.protected(pos, prompt)


def _in_a_kernel(ongoing: Ongoing) -> bool:
    """Whether a kernel can find the row that goes: what users' own ranks are made of is not known."""
    return type(ongoing.rank) in (ByAttention, ByAge) and ongoing.merge is None and not ongoing.one_set


def _by_kernel(pool: Pool, segments: Segments, ongoing: Ongoing, implementation: Implementation) -> Evicted:
    """`evict` in one pass; what attention has read is known to come first, as the pool comes from there."""
    kernels, interpret = kernels_of(implementation)
    assert ongoing.rank is not None
    of = (segments.start, segments.length, segments.limit, segments.recent, segments.seen, segments.prompt)
    weigh = _Weigh(ongoing.rank, ongoing.keep)
    rows = (pool.k, pool.v, pool.pos, pool.score)
    k, v, pos, score, moved = kernels.evict_rows(*rows, *of, weigh=weigh, interpret=interpret)
    pool = dataclasses.replace(pool, store=pool.store.of(k, v), pos=pos, score=score)
    segments = dataclasses.replace(segments, length=segments.length - moved)
    return Evicted(pool, segments, None, jnp.full_like(moved, -1))


def _moved(
    pool: Pool,
    victim: Int[Array, "B K"],
    last: Int[Array, "B K"],
    over: Bool[Array, "B K"],
    implementation: Implementation,
) -> Pool:
    """The pool with the newest rows in the places of those that go, by a kernel."""
    kernels, interpret = kernels_of(implementation)
    of = (pool.k, pool.v, pool.pos, pool.score, victim, last, over)
    k, v, pos, score = kernels.replace_rows(*of, interpret=interpret)
    return dataclasses.replace(pool, store=pool.store.of(k, v), pos=pos, score=score)


def _written(
    pool: Pool,
    norms: Float[Array, "B P"] | None,
    victim: Int[Array, "B K"],
    last: Int[Array, "B K"],
    writes: _Writes,
) -> tuple[Pool, Float[Array, "B P"] | None]:
    """Pool and key norms with the newest rows in the places of those that go, and with what was merged."""
    nowhere = jnp.int32(pool.rows)
    place, emptied = (jnp.where(writes.over, row, nowhere) for row in (victim, last))
    both = jnp.concatenate([place, emptied], axis=1)

    def move(leaf: Array, empty: int) -> Array:
        cells = jnp.take_along_axis(leaf, last, axis=1)
        return put_cells(leaf, both, jnp.concatenate([cells, jnp.full_like(cells, empty)], axis=1))

    if norms is not None:
        row, new = writes.all_of("k", place)
        norms = put_cells(norms, row, row_norms(new.astype(pool.k.dtype)))
    store = pool.store.put(writes.all_of("k", place), writes.all_of("v", place))
    score = None if pool.score is None else move(pool.score, 0)
    return Pool(store=store, pos=move(pool.pos, -1), score=score), norms
