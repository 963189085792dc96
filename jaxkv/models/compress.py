"""Compression of one layer: score its rows, choose those that stay, merge the others, gather them into a pool."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxkv import attention
from jaxkv._values import Typed
from jaxkv.attention import Implementation
from jaxkv.attention.xla import Form
from jaxkv.policies.budgets import LayerBudgets
from jaxkv.policies.checks import checked, checked_tuple
from jaxkv.policies.merger import UNSET, Merged, Merger
from jaxkv.policies.protocol import Observed, Scorer
from jaxkv.policies.select import HeadBudgets
from jaxkv.pools import Pool, lay_out, segment_of_row

# What a scorer gives one number for.
ROWS = "kv head and row, [B, K, S]"


def observe(
    seen: Observed, forced: Bool[Array, "B S"], *, scorer: Scorer, layers: LayerBudgets
) -> tuple[Float[Array, "B K S"], Float[Array, "B K S"], Float[Array, " B"] | None]:
    """Scores one layer's rows; with the layer's claim on the budget, where budgets follow from scores.

    Args:
        seen: what the scorer may look at.
        forced: rows that stay anyway.
        scorer: the policy's.
        layers: the policy's.

    Returns:
        Scores, what they were made of, and weights or None.

    Raises:
        TypeError: if what the scorer gives is no float32 of the rows' shape.
    """
    return _observe(seen, forced, scorer=Typed(scorer), layers=Typed(layers))


@partial(jax.jit, static_argnames=("scorer", "layers"))
def _observe(seen: Observed, forced: Array, *, scorer: Typed, layers: Typed):
    matters, spread, weight = scorer.part, layers.part, None
    rows = seen.k.shape[:3]
    mass = checked(matters, "observe", matters.observe(seen), rows, ROWS)
    if spread.from_scores:
        inside = jnp.arange(mass.shape[-1], dtype=jnp.int32) < seen.length[:, None]
        weight = spread.weight(mass, (inside & ~forced)[:, None], seen.sums, seen.length)
    return checked(matters, "scores", matters.scores(mass, seen.length), rows, ROWS), mass, weight


@jax.jit
def unordered(scores: Float[Array, "B K S"], length: Int[Array, " B"]) -> Bool[Array, ""]:
    """Whether a score of any row there is is not a number, so that it has no place in an order."""
    inside = jnp.arange(scores.shape[-1], dtype=jnp.int32) < length[:, None, None]
    return (jnp.isnan(scores) & inside).any()


def choose(
    scores: Float[Array, "B K S"],
    forced: Bool[Array, "B S"],
    length: Int[Array, " B"],
    rows: Int[Array, " B"],
    recent: Int[Array, " B"] | None = None,
    norms: Float[Array, "B K S"] | None = None,
    allowed: Bool[Array, "B S"] | None = None,
    *,
    heads: HeadBudgets,
) -> Bool[Array, "B K S"]:
    """Chooses the rows of one layer that stay.

    Args:
        scores: float32, higher stays.
        forced: rows that stay whatever their score.
        length: tokens of each sequence.
        rows: rows per kv head in this layer, forced ones included; K times as many stay.
        recent: last rows that stay, too.
        norms: of the values, for choices that look at them.
        allowed: the only rows that can be chosen, if not all.
        heads: how they spread over heads.

    Returns:
        The mask; ties go to the lowest head, then to the lowest position.
    """
    return _choose(scores, forced, length, rows, recent, norms, allowed, heads=Typed(heads))


@partial(jax.jit, static_argnames=("heads",))
def _choose(scores, forced, length, rows, recent, norms, allowed, *, heads: Typed):
    position = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    inside = position < length[:, None]
    if recent is not None:
        forced = forced | (position >= (length - recent)[:, None])
    forced = forced & inside
    anyway = forced.sum(axis=1, dtype=jnp.int32)
    base = jnp.minimum(rows, length) - anyway
    candidates = inside & ~forced if allowed is None else inside & ~forced & allowed
    return forced[:, None] | heads.part.choose(scores, candidates[:, None], base, anyway, norms)


def merged(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    kept: Bool[Array, "B K S"],
    length: Int[Array, " B"],
    mass: Float[Array, "B K S"],
    key: PRNGKeyArray,
    *,
    merge: Merger,
) -> Merged:
    """Merges a prompt's dropped rows of one layer into those that stay.

    Args:
        k: keys.
        v: values.
        kept: rows that stay.
        length: tokens of each sequence.
        mass: what was observed of each row.
        key: for mergers that draw.
        merge: the policy's.

    Returns:
        Keys, values and thresholds.
    """
    return _merged(k, v, kept, length, mass, key, merge=Typed(merge))


def merged_whole(merger: Merger, k: Array, v: Array, *of: Array | None) -> Merged:
    """What a merger makes of all rows of a layer, checked; see `Merger.merge`."""
    found = checked_tuple(merger, "merge", merger.merge(k, v, *of), Merged)  # type: ignore[arg-type]
    for name, new, old in (("k", found.k, k), ("v", found.v, v)):
        checked(merger, f"merge.{name}", new, old.shape, "number of each row, [B, K, S, D]", old.dtype)
    return found


@partial(jax.jit, static_argnames=("merge",))
def _merged(k, v, kept, length, mass, key, *, merge: Typed) -> Merged:
    merger, (batch, heads, slots, _) = merge.part, k.shape
    inside = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32) < length[:, None, None], kept.shape)
    tau = jnp.full((batch, heads, merger.thresholds), UNSET, jnp.float32) if merger.thresholds else None
    return merged_whole(merger, k, v, kept, inside, mass, tau, key)


@partial(jax.jit, static_argnames=("rows", "form", "implementation"))
def pack(
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    mask: Bool[Array, "B K S"],
    score: Float[Array, "B K S"] | None = None,
    positions: Int[Array, "B K S"] | None = None,
    *,
    rows: int,
    form: Form,
    implementation: Implementation = Implementation.XLA,
) -> tuple[Pool, Int[Array, "B K"], Int[Array, "B K"]]:
    """Gathers one layer's chosen rows into its pool, in the order they come.

    Args:
        k: keys as the pool stores them.
        v: values.
        mask: rows that stay.
        score: what goes with each row, for pools that keep scores.
        positions: of the rows; 0 to S by default.
        rows: P.
        form: how the segments lie; room is spread evenly behind them.
        implementation: kernels gather in one pass.

    Returns:
        The pool, and each segment's first row and length.
    """
    batch, heads, slots, _ = k.shape
    length = mask.sum(axis=-1, dtype=jnp.int32)
    start = lay_out(length, rows, form=form)
    segment = segment_of_row(start, rows)
    offset = jnp.arange(rows, dtype=jnp.int32) - jnp.take_along_axis(start, segment, axis=1)
    real = offset < jnp.take_along_axis(length, segment, axis=1)
    # The offset-th chosen position of a segment is the first whose running count exceeds the offset: bisect for it.
    count = jnp.cumsum(mask, axis=-1, dtype=jnp.int32).reshape(batch, heads * slots)
    low, high = jnp.zeros_like(offset), jnp.full_like(offset, slots - 1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = jnp.take_along_axis(count, segment * slots + middle, axis=1) > offset
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    position, _ = lax.fori_loop(0, max(1, (slots - 1).bit_length()), halve, (low, high))
    source = jnp.where(real, segment * slots + position, -1)
    packed_k, packed_v, pos = attention.packed(k, v, source, implementation=implementation)
    cells = lambda a, empty: jnp.where(  # noqa: E731
        real, jnp.take_along_axis(a.reshape(batch, heads * slots), jnp.maximum(source, 0), axis=1), empty
    )
    if positions is not None:
        pos = cells(positions, -1)
    return Pool(k=packed_k, v=packed_v, pos=pos, score=None if score is None else cells(score, 0.0)), start, length


@partial(jax.jit, donate_argnums=(0,))
def pack_shared(
    pool: Pool,
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    mask: Bool[Array, "B K S"],
    start: Int[Array, "B K"],
    score: Float[Array, "B K S"] | None = None,
    positions: Int[Array, "B K S"] | None = None,
) -> Pool:
    """Scatters one layer's chosen rows into the pool that all layers share.

    Args:
        pool: the shared pool, donated.
        k: keys as the pool stores them.
        v: values.
        mask: rows that stay.
        start: first row of this layer's segments.
        score: what goes with each row, for pools that keep scores.
        positions: of the rows; 0 to S by default.

    Returns:
        The pool with this layer's rows in place.
    """
    batch, heads, slots, dim = k.shape
    rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    row = jnp.where(mask, start[..., None] + rank, pool.rows).reshape(batch, heads * slots)
    index = jnp.arange(batch, dtype=jnp.int32)[:, None]
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, heads, slots))
    put = lambda to, what: to.at[index, row].set(what, mode="drop", unique_indices=True)  # noqa: E731
    flat = lambda a: a.reshape(batch, heads * slots, dim)  # noqa: E731
    return Pool(
        k=put(pool.k, flat(k)),
        v=put(pool.v, flat(v)),
        pos=put(pool.pos, positions.reshape(row.shape)),
        score=None if pool.score is None or score is None else put(pool.score, score.reshape(row.shape)),
    )


def empty_pool(batch: int, rows: int, dim: int, dtype: jnp.dtype, *, scored: bool) -> Pool:
    """A pool without rows.

    Args:
        batch: B.
        rows: P.
        dim: D.
        dtype: of keys and values.
        scored: whether it keeps scores.

    Returns:
        The pool.
    """
    return Pool(
        k=jnp.zeros((batch, rows, dim), dtype),
        v=jnp.zeros((batch, rows, dim), dtype),
        pos=jnp.full((batch, rows), -1, jnp.int32),
        score=jnp.zeros((batch, rows), jnp.float32) if scored else None,
    )
