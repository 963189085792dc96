"""A step's bookkeeping: the weakest row of each segment makes room for the new one, merged into another or dropped.

Everything is a reduction over the rows of segments, written once and run over them as they lie: in one piece where the
pool is a layer's own, in windows where layers share it. Those of all layers are then looked at together.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv._errors import require
from jaxkv.attention.columns import span
from jaxkv.attention.xla import WALK_BLOCK, Form, inside_segments, windows
from jaxkv.models.ordering import behind
from jaxkv.policies.after import ranked
from jaxkv.policies.checks import checked, checked_tuple
from jaxkv.policies.merger import Joined, Merger, Row
from jaxkv.policies.parts import Ongoing
from jaxkv.pools import Pool, put_cells, put_rows, row_norms, take_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments of a layer, or of all layers that share a pool one after the other, as a step sees them.

    Attributes:
        start: `i32[B, K]`.
        length: `i32[B, K]` rows, the new one included.
        limit: `i32[B, K]`.
        recent: `i32[B, K]` most recent rows that stay.
        tau: `f32[B, K, n]` merging's thresholds, or None.
        prompt: `i32[B]` tokens of the prompt.
        seen: `i32[B]` tokens seen, the new one included.
        likely: `i32[B, K]` the row most likely to go at this step, -1 for none known; None if nobody asks.
        choosable: `i32[B, K]` first rows that filter layers choose from; None where every layer reads everything.
    """

    start: Int[Array, "B K"]
    length: Int[Array, "B K"]
    limit: Int[Array, "B K"]
    recent: Int[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    prompt: Int[Array, " B"]
    seen: Int[Array, " B"]
    likely: Int[Array, "B K"] | None = None
    choosable: Int[Array, "B K"] | None = None


class Evicted(NamedTuple):
    """What a step leaves of some segments.

    Attributes:
        pool: their pool.
        length: `i32[B, K]` their rows.
        tau: merging's thresholds, or None.
        likely: `i32[B, K]` the row of each most likely to go next, -1 for none.
    """

    pool: Pool
    length: Int[Array, "B K"]
    tau: Float[Array, "B K n"] | None
    likely: Int[Array, "B K"]


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
    """Runs a reduction over the rows of segments.

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
    pool: Pool, segments: Segments, *, heads: int, ongoing: Ongoing, form: Form, widest: int | None
) -> tuple[Int[Array, "B K"], Bool[Array, "B K"], Int[Array, "B K"]]:
    """The row of each segment that has to go, if one has to; and the one that may have to at the next step.

    Args:
        pool: their pool, its scores up to date.
        segments: which rows.
        heads: segments of one layer.
        ongoing: the policy's.
        form: how segments lie.
        widest: the most rows a segment of a shared pool can have, if that is known.

    Returns:
        The lowest score among rows that may go, the latest position among equals; whether there is any; and, where
        segments are looked at whole, the lowest of the others, -1 for none.
    """
    rank = ongoing.rank
    assert rank is not None
    seen, prompt = segments.seen[:, None, None], segments.prompt[:, None, None]
    last = seen - segments.recent[..., None]

    def body(best, row, inside, pos, *score):
        lowest, latest, *_ = best
        may = inside & ~ongoing.keep.protected(pos, prompt)
        free = may & (pos < last)
        every = ranked(rank, score[0] if score else jnp.zeros(pos.shape, jnp.float32), seen - pos)
        if ongoing.one_set:
            layers = jnp.broadcast_to(every, free.shape).reshape(free.shape[0], -1, heads, free.shape[-1])
            every = jnp.broadcast_to(layers.mean(axis=2, keepdims=True), layers.shape).reshape(free.shape)
        ranks = jnp.where(free, every, jnp.inf)
        mine = ranks.min(axis=-1)
        position = jnp.where(free & (ranks == mine[..., None]), pos, -1).max(axis=-1)
        place = jnp.where(free & (pos == position[..., None]), row, -1).max(axis=-1)
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
    _, _, at, second = fold(body, none, leaves, segments.start, segments.length, form=form, block=widest or WALK_BLOCK)
    return at, at >= 0, second


def nearest(
    rows: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    of: Float[Array, "B K D"],
    but: Int[Array, "B K"],
    segments: Segments,
    *,
    form: Form,
    norm: Float[Array, "B P"] | None = None,
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """The row of each segment with the largest cosine to a given one.

    Args:
        rows: keys or values of the pool.
        pos: their positions.
        of: what they are compared with.
        but: a row that does not count: the given one itself.
        segments: which rows to look at.
        form: how they lie.
        norm: lengths of the rows, if they are known.

    Returns:
        The cosine, and the row: the earliest position among equals.
    """

    def body(best, row, inside, rows, pos, *norm):
        wide = rows.astype(jnp.float32)
        cosine = _cosines(_dots(of, wide), of, norm[0] if norm else row_norms(wide))
        found = _most(cosine, pos, row, inside & (row != but[..., None]))
        better = (found[0] > best[0]) | ((found[0] == best[0]) & (found[1] < best[1]))
        return tuple(jnp.where(better, new, old) for new, old in zip(found, best, strict=True))

    shape = of.shape[:2]
    carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32),
        jnp.full(shape, -1, jnp.int32),
    )
    leaves = (rows, pos) if norm is None else (rows, pos, norm)
    cosine, _, at = fold(body, carry, leaves, segments.start, segments.length, form=form, block=WALK_BLOCK)
    return cosine, at


def nearest_of_products(
    pool: Pool,
    of: Float[Array, "B K D"],
    but: Int[Array, "B K"],
    products: Float[Array, "B K n"],
    wrong: Bool[Array, "B K"],
    segments: Segments,
) -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
    """`nearest` among keys whose products are known for most segments: only the others' rows are read.

    Args:
        pool: their pool.
        of: the key of each segment that is compared.
        but: its row.
        products: what attention found while it read the keys, in the rows of `attention.columns.span`.
        wrong: segments where that was another row's key.
        segments: which rows to look at.

    Returns:
        As `nearest`.
    """
    assert pool.norm is not None
    first, width = span(segments.start, pool.rows, products.shape[-1])
    at = lambda a, b, s: lax.dynamic_slice(a, (b, s, *(0,) * (a.ndim - 2)), (1, 1, *a.shape[2:]))  # noqa: E731

    def mend(state):
        wrong, products = state
        index = jnp.argmax(wrong.reshape(-1)).astype(jnp.int32)
        b, s = index // wrong.shape[1], index % wrong.shape[1]
        keys = lax.dynamic_slice(pool.k, (b, first[b, s], 0), (1, width, pool.k.shape[2])).astype(jnp.float32)
        product = _dots(at(of, b, s), keys[:, None])
        return wrong.at[b, s].set(False), lax.dynamic_update_slice(products, product, (b, s, 0))

    _, products = lax.while_loop(lambda state: state[0].any(), mend, (wrong, products))
    row = first[..., None] + jnp.arange(width, dtype=jnp.int32)
    inside = (row >= segments.start[..., None]) & (row < (segments.start + segments.length)[..., None])
    pos, norm = (windows(leaf, first, width) for leaf in (pool.pos, pool.norm))
    cosine, _, found = _most(_cosines(products, of, norm), pos, row, inside & (row != but[..., None]))
    return cosine, found


def _cosines(products: Float[Array, "B K n"], of: Float[Array, "B K D"], length: Float[Array, "B _ n"]) -> Array:
    return products / (row_norms(of)[..., None] * length)


def _most(cosine: Array, pos: Array, row: Array, counts: Bool[Array, "B K n"]) -> tuple[Array, Array, Array]:
    """The largest cosine, its position, the earliest among equals, and its row."""
    cosine = jnp.where(counts, cosine, -jnp.inf)
    top = cosine.max(axis=-1)
    none = jnp.iinfo(jnp.int32).max
    position = jnp.where(counts & (cosine == top[..., None]), pos, none).min(axis=-1)
    return top, position, jnp.where(counts & (pos == position[..., None]), row, -1).max(axis=-1)


def _dots(q: Float[Array, "B K D"], rows: Float[Array, "B _ n D"]) -> Float[Array, "B K n"]:
    dot = partial(lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if rows.shape[1] == 1:
        return dot(q, rows[:, 0], (((2,), (2,)), ((0,), (0,))))
    return dot(q, rows, (((2,), (3,)), ((0, 1), (0, 1))))


def _as_joined(merge: Merger, found: Joined, shape: tuple[int, ...], heads: int, dim: int) -> Joined:
    """What a merger says of single rows, checked."""
    checked_tuple(merge, "merge_one", found, Joined)
    by_layer = (shape[0] * shape[1] // heads, heads)
    checked(merge, "merge_one.joins", found.joins, by_layer, "kv head, [N, K]", jnp.bool_)
    for name, new in (("k", found.k), ("v", found.v)):
        if new is not None:
            checked(merge, f"merge_one.{name}", new, (*by_layer, dim), "number of a row, [N, K, D]")
    return found


def evict(
    pool: Pool,
    segments: Segments,
    attended: Float[Array, "B K"],
    *,
    heads: int,
    ongoing: Ongoing,
    form: Form,
    widest: int | None = None,
    products: Float[Array, "B K n"] | None = None,
) -> Evicted:
    """Brings segments that hold one row too many back to their limit.

    Args:
        pool: their pool, its scores up to date; the last row of a segment is the newest.
        segments: which ones.
        attended: any number of each head's attention output: NaN keeps the rows as they are.
        heads: segments of one layer.
        ongoing: the policy's.
        form: how segments lie.
        widest: the most rows a segment of a shared pool can have, if that is known.
        products: those of the likely rows' keys with all keys; the result is the same without.

    Returns:
        What is left.
    """
    victim, there, second = weakest(pool, segments, heads=heads, ongoing=ongoing, form=form, widest=widest)
    over = behind((segments.length > segments.limit) & there, attended)
    last = segments.start + segments.length - 1
    nowhere = jnp.int32(pool.rows)
    # The newest row moves into the victim's place; a finished sequence's rows stay where they are.
    moved = {"k": take_rows(pool.k, last), "v": take_rows(pool.v, last)}
    tau, merge = segments.tau, ongoing.merge
    updates: dict[str, list[tuple[Array, Array]]] = {"k": [], "v": []}
    if merge is not None:
        rows_of = lambda at: Row(take_rows(pool.k, at), take_rows(pool.v, at))  # noqa: E731
        by_layer = lambda a: a.reshape(-1, heads, *a.shape[2:])  # noqa: E731
        dropped = rows_of(jnp.maximum(victim, 0))
        for index, metric in enumerate(merge.compares):
            by_key, one = metric == "k", getattr(dropped, metric)
            if by_key and products is not None:
                wrong = over & (victim != segments.likely)
                cosine, target = nearest_of_products(pool, one, victim, products, wrong, segments)
            else:
                norm = pool.norm if by_key else None
                cosine, target = nearest(getattr(pool, metric), pool.pos, one, victim, segments, form=form, norm=norm)
            target, over = jnp.maximum(target, 0), behind(over, cosine)
            # The heads of a layer may decide together.
            found = merge.merge_one(
                index,
                by_layer(cosine),
                Row(*map(by_layer, dropped)),
                Row(*map(by_layer, rows_of(target))),
                by_layer(over),
                None if tau is None else by_layer(tau),
            )
            found = _as_joined(merge, found, target.shape, heads, dropped.k.shape[-1])
            tau = None if tau is None or found.tau is None else found.tau.reshape(tau.shape)
            joins = found.joins.reshape(over.shape) & over
            for name, new in (("k", found.k), ("v", found.v)):
                if new is None:
                    continue
                remedy = f"two of its comparisons change {name} of one row: let one of them"
                require(not updates[name], "merge", type(merge).__name__, remedy)
                joined = new.reshape(one.shape)
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

    def measured(norm: Array) -> Array:
        parts = [(place, moved["k"]), *updates["k"]]
        new = jnp.concatenate([row_norms(new.astype(pool.k.dtype)) for _, new in parts], axis=1)
        return put_cells(norm, jnp.concatenate([row for row, _ in parts], axis=1), new)

    emptied = jnp.where(over, last, nowhere)
    cells = lambda leaf: jnp.take_along_axis(leaf, last, axis=1)  # noqa: E731
    both = jnp.concatenate([place, emptied], axis=1)
    empty = jnp.full_like(last, -1)
    pos = put_cells(pool.pos, both, jnp.concatenate([cells(pool.pos), empty], axis=1))
    score = pool.score
    if score is not None:
        zero = jnp.zeros(last.shape, jnp.float32)
        score = put_cells(score, both, jnp.concatenate([cells(score), zero], axis=1))
    norm = None if pool.norm is None else measured(pool.norm)
    after = Pool(k=write("k"), v=write("v"), pos=pos, score=score, norm=norm)
    length = segments.length - over.astype(jnp.int32)
    return Evicted(after, length, tau, jnp.where(over, second, victim))
