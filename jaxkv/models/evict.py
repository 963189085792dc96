"""A step's bookkeeping: the weakest row of each segment makes room for the new one, merged into another or dropped.

Everything is a reduction over a layer's rows, written once and run over them as they lie: in one piece where the pool
is the layer's own, in blocks of a dynamic number where layers share it.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.xla import WALK_BLOCK, Form, inside_segments, windows
from jaxkv.cache import Pool, put_cells, put_rows, take_rows
from jaxkv.policies.merging import Merge, unit
from jaxkv.policies.protocol import Upkeep


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """One layer's segments, as a step sees them.

    Attributes:
        start: `i32[B, K]`.
        length: `i32[B, K]` rows, the new one included.
        limit: `i32[B, K]`.
        recent: `i32[B]` most recent rows that stay.
        tau: `f32[B, K, n]` merging's thresholds, or None.
        prompt: `i32[B]` tokens of the prompt.
        seen: `i32[B]` tokens seen, the new one included.
    """

    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    limit: Int[Array, "B K"]
    recent: Int[Array, " B"]
    tau: Float[Array, "B K n"] | None
    prompt: Int[Array, " B"]
    seen: Int[Array, " B"]


def fold(
    body: Callable,
    carry: tuple,
    leaves: tuple[Array, ...],
    start: Int[Array, "B K"],
    length: Array,
    *,
    form: Form,
    block: int,
) -> tuple:
    """Runs a reduction over the rows of a layer's segments.

    Args:
        body: takes the carry, rows `i32[B|1, K|1, n]`, whether each lies in the segment `[B, K, n]`, and each leaf's
            rows `[B, K|1, n, ...]`; gives the carry back.
        carry: what it starts from.
        leaves: of the pool, `[B, P, ...]`.
        start: first rows.
        length: rows of each segment.
        form: how they lie.
        block: rows of a shared pool to look at together.

    Returns:
        The carry.
    """
    batch, heads = start.shape
    pool_rows = leaves[0].shape[1]
    match form:
        case Form.EQUAL:
            each = pool_rows // heads
            offset = jnp.arange(each, dtype=jnp.int32)
            row = (jnp.arange(heads, dtype=jnp.int32)[:, None] * each + offset)[None]
            views = tuple(leaf.reshape(batch, heads, each, *leaf.shape[2:]) for leaf in leaves)
            return body(carry, row, offset < length[..., None], *views)
        case Form.RAGGED:
            row = jnp.arange(pool_rows, dtype=jnp.int32)
            return body(
                carry, row[None, None], inside_segments(row, start, length), *(leaf[:, None] for leaf in leaves)
            )
        case Form.SHARED:
            block = min(block, pool_rows)
            offset = jnp.arange(block, dtype=jnp.int32)

            def step(index, carry):
                begin = start + index * block
                clamped = jnp.clip(begin, 0, pool_rows - block)
                row = clamped[..., None] + offset
                inside = (row >= begin[..., None]) & (row < (start + length)[..., None])
                return body(carry, row, inside, *(windows(leaf, clamped, block) for leaf in leaves))

            return lax.fori_loop(0, (length.max() + block - 1) // block, step, carry)


def weakest(
    pool: Pool, segments: Segments, *, upkeep: Upkeep, form: Form, widest: int | None
) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
    """The row of each segment that has to go, if one has to.

    Args:
        pool: the layer's pool, its scores up to date.
        segments: the layer's segments.
        upkeep: the policy's.
        form: how segments lie.
        widest: the most rows a segment of a shared pool can have, if that is known.

    Returns:
        The lowest score among rows that may go, the latest position among equals; and whether there is any.
    """
    carry = upkeep.carry
    assert carry is not None
    seen, prompt = segments.seen[:, None, None], segments.prompt[:, None, None]
    last = seen - segments.recent[:, None, None]

    def body(best, row, inside, pos, *score):
        lowest, latest, at = best
        free = inside & (pos < last) & ~upkeep.protected(pos, prompt)
        rank = carry.ranked(score[0] if score else jnp.zeros(pos.shape, jnp.float32), seen - pos)
        if upkeep.together:
            rank = jnp.broadcast_to(rank.mean(axis=1, keepdims=True), free.shape)
        rank = jnp.where(free, rank, jnp.inf)
        mine = rank.min(axis=-1)
        position = jnp.where(free & (rank == mine[..., None]), pos, -1).max(axis=-1)
        place = jnp.where(free & (pos == position[..., None]), row, -1).max(axis=-1)
        better = (mine < lowest) | ((mine == lowest) & (position > latest))
        return tuple(jnp.where(better, new, old) for new, old in zip((mine, position, place), best, strict=True))

    shape = segments.start.shape
    none = (jnp.full(shape, jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32), jnp.full(shape, -1, jnp.int32))
    leaves = (pool.pos,) if pool.score is None else (pool.pos, pool.score)
    _, _, at = fold(body, none, leaves, segments.start, segments.length, form=form, block=widest or WALK_BLOCK)
    return at, at >= 0


def nearest(
    rows: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    of: Float[Array, "B K D"],
    but: Int[Array, "B K"],
    segments: Segments,
    *,
    form: Form,
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The row of each segment with the largest cosine to a given one.

    Args:
        rows: keys or values of the pool.
        pos: their positions.
        of: what they are compared with.
        but: a row that does not count: the given one itself.
        segments: the layer's segments.
        form: how they lie.

    Returns:
        The cosine, and the row: the earliest position among equals.
    """
    own = unit(of)

    def body(best, row, inside, rows, pos):
        wide = rows.astype(jnp.float32)
        length = jnp.maximum(jnp.sqrt((wide * wide).sum(axis=-1)), 1e-6)
        cosine = _dots(own, wide) / length
        other = inside & (row != but[..., None])
        cosine = jnp.where(other, cosine, -jnp.inf)
        top = cosine.max(axis=-1)
        none = jnp.iinfo(jnp.int32).max
        position = jnp.where(other & (cosine == top[..., None]), pos, none).min(axis=-1)
        place = jnp.where(other & (pos == position[..., None]), row, -1).max(axis=-1)
        better = (top > best[0]) | ((top == best[0]) & (position < best[1]))
        return tuple(jnp.where(better, new, old) for new, old in zip((top, position, place), best, strict=True))

    shape = of.shape[:2]
    carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32),
        jnp.full(shape, -1, jnp.int32),
    )
    cosine, _, at = fold(body, carry, (rows, pos), segments.start, segments.length, form=form, block=WALK_BLOCK)
    return cosine, at


def _dots(q: Float[Array, "B K D"], rows: Float[Array, "B _ n D"]) -> Float[Array, "B K n"]:
    dot = partial(lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if rows.shape[1] == 1:
        return dot(q, rows[:, 0], (((2,), (2,)), ((0,), (0,))))
    return dot(q, rows, (((2,), (3,)), ((0, 1), (0, 1))))


def evict(
    pool: Pool,
    segments: Segments,
    attended: Float[Array, "B K"],
    *,
    upkeep: Upkeep,
    form: Form,
    widest: int | None = None,
) -> tuple[Pool, Array, Array | None]:
    """Brings segments that hold one row too many back to their limit.

    Args:
        pool: the layer's pool, its scores up to date; the last row of a segment is the newest.
        segments: the layer's segments.
        attended: any number of each head's attention output: NaN keeps the rows as they are.
        upkeep: the policy's.
        form: how segments lie.
        widest: the most rows a segment of a shared pool can have, if that is known.

    Returns:
        The pool, the new lengths `i32[B, K]`, and the thresholds.
    """
    victim, there = weakest(pool, segments, upkeep=upkeep, form=form, widest=widest)
    # Rows are written behind everything that reads them, in place; where XLA sees no order it copies the pool instead.
    over = (segments.length > segments.limit) & there & ~jnp.isnan(attended)
    last = segments.start + segments.length - 1
    nowhere = jnp.int32(pool.rows)
    # The newest row moves into the victim's place; a finished sequence's rows stay where they are.
    moved = {"k": take_rows(pool.k, last), "v": take_rows(pool.v, last)}
    tau, merge = segments.tau, upkeep.merge
    updates: dict[str, list[tuple[Array, Array]]] = {"k": [], "v": []}
    if merge is not None and merge.while_decoding:
        assert isinstance(merge, Merge)
        assert tau is not None
        dropped = {"k": take_rows(pool.k, jnp.maximum(victim, 0)), "v": take_rows(pool.v, jnp.maximum(victim, 0))}
        for index, (metric, targets) in enumerate(merge.targets):
            cosine, target = nearest(getattr(pool, metric), pool.pos, dropped[metric], victim, segments, form=form)
            target, over = jnp.maximum(target, 0), over & ~jnp.isnan(cosine)
            level = merge.moved(tau[..., index], cosine[..., None], over[..., None])
            joins = merge.joins(level, cosine[..., None], over[..., None])[..., 0]
            tau = tau.at[..., index].set(level)
            add, divide, own = merge.shares(cosine)
            for name in targets:
                kept = take_rows(getattr(pool, name), target)
                joined = (own * kept + add[..., None] * dropped[name]) / (own + divide)[..., None]
                # The newest row may itself be the one that takes the dropped one in.
                newest = (joins & (target == last))[..., None]
                moved[name] = jnp.where(newest, joined, moved[name])
                updates[name].append((jnp.where(joins & (target != last), target, nowhere), joined))
    place = jnp.where(over, victim, nowhere)

    def write(name: str) -> Array:
        leaf = getattr(pool, name)
        parts = [(place, moved[name]), *updates[name]]
        row = jnp.concatenate([row for row, _ in parts], axis=1)
        return put_rows(leaf, row, jnp.concatenate([new for _, new in parts], axis=1).astype(leaf.dtype))

    emptied = jnp.where(over, last, nowhere)
    cells = lambda leaf: jnp.take_along_axis(leaf, last, axis=1)  # noqa: E731
    both = jnp.concatenate([place, emptied], axis=1)
    empty = jnp.full_like(last, -1)
    pos = put_cells(pool.pos, both, jnp.concatenate([cells(pool.pos), empty], axis=1))
    score = pool.score
    if score is not None:
        zero = jnp.zeros(last.shape, jnp.float32)
        score = put_cells(score, both, jnp.concatenate([cells(score), zero], axis=1))
    return Pool(k=write("k"), v=write("v"), pos=pos, score=score), segments.length - over.astype(jnp.int32), tau
