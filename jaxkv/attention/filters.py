"""How much attention positions receive from the queries of a filter layer, the most of any head."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention.xla import MASKED, inside_segments, scale_queries
from jaxkv.sharding.collectives import most_of_devices
from jaxkv.sharding.mesh import Axes

# Logits that exist at once while tokens are scored.
_LOGITS = 1 << 24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """Queries that choose.

    Attributes:
        q: `[B, K, G, w, D]` rotated, in any order.
        positions: `i32[B, w]` where they stand; negative ones do not exist, and so see nothing.
        weights: `f32[B, w]` what each counts.
    """

    q: Float[Array, "B K G w D"]
    positions: Int[Array, "B w"]
    weights: Float[Array, "B w"]


def by_row(
    asked: Asking, k: Float[Array, "B P D"], candidates: Int[Array, " B"], axes: Axes | None
) -> Float[Array, "B n"]:
    """Score of each position where every segment holds position p in its row p: the most attention of any head.

    Args:
        asked: the queries.
        k: pool rows, rotated keys.
        candidates: positions below this are scored.
        axes: of the mesh whose devices have some of the heads each, if it runs on one.

    Returns:
        Largest probability among the heads, summed over the queries by their weights, float32.
    """
    batch, heads, group, window, dim = asked.q.shape
    keys = k.reshape(batch, heads, -1, dim)
    rows, queries = keys.shape[2], scale_queries(asked.q).reshape(batch, heads, group * window, dim)

    def against(part: Array, first: Array | int) -> tuple[Array, Array]:
        """Logits `[B, K, G, w, n]` of all queries over some keys, and which of them are seen."""
        logits = lax.dot_general(queries, part, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
        row = first + jnp.arange(part.shape[2], dtype=jnp.int32)
        seen = (row <= asked.positions[..., None]) & (row < candidates[:, None, None])
        return logits.reshape(batch, heads, group, window, -1), seen[:, None, None]

    block = max(1, _LOGITS // (batch * heads * group * window))
    if block >= rows:
        return _loudest(_softmax(*against(keys, 0)), asked, axes)
    # Two passes over the keys, however many queries ask: the sums of the softmax, then what is made of it.
    trips = -(-candidates.max() // block)

    def place(index: Array) -> tuple[Array, Array]:
        # The last block begins earlier, with rows that were met before.
        first = jnp.minimum(index * block, rows - block)
        return first, lax.dynamic_slice_in_dim(keys, first, block, axis=2)

    def gather(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        highest, total = sums
        first, part = place(index)
        logits, seen = against(part, first)
        fresh = seen & (first + jnp.arange(block, dtype=jnp.int32) >= index * block)
        logits = jnp.where(fresh, logits, MASKED)
        above = jnp.maximum(highest, logits.max(axis=-1))
        more = jnp.where(fresh, jnp.exp(logits - above[..., None]), 0.0).sum(axis=-1)
        return above, total * jnp.exp(highest - above) + more

    def score(index: Array, scores: Array) -> Array:
        first, part = place(index)
        logits, seen = against(part, first)
        shares = jnp.where(seen, jnp.exp(logits - highest[..., None]), 0.0) / jnp.maximum(total, 1e-30)[..., None]
        return lax.dynamic_update_slice_in_dim(scores, _loudest(shares, asked, axes), first, axis=1)

    shape = (batch, heads, group, window)
    highest, total = lax.fori_loop(0, trips, gather, (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape)))
    return lax.fori_loop(0, trips, score, jnp.zeros((batch, rows), jnp.float32))


def by_position(
    asked: Asking,
    k: Float[Array, "B P D"],
    pos: Int[Array, "B P"],
    start: Int[Array, "B K"],
    kept: Int[Array, "B K"],
    slots: int,
    axes: Axes | None,
) -> Float[Array, "B S"]:
    """Score of each position where heads hold different positions: the most attention of any that holds it, else 0.

    Args:
        asked: the queries.
        k: pool rows, rotated keys.
        pos: position of each row; -1 where no row is.
        start: first row of each segment.
        kept: rows of each segment that are scored.
        slots: S, above all positions.
        axes: of the mesh whose devices have some of the heads each, if it runs on one.

    Returns:
        Largest probability among the heads, summed over the queries by their weights, float32.
    """
    batch, heads, group, window, dim = asked.q.shape
    inside = inside_segments(jnp.arange(pos.shape[1], dtype=jnp.int32), start, kept)
    column = jnp.where(pos < 0, slots, pos)[:, None]
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    scaled = scale_queries(asked.q)
    # A few queries at a time: such pools are small.
    most = max(1, _LOGITS // (batch * heads * group * pos.shape[1]))
    size = next(each for each in range(min(window, most), 0, -1) if window % each == 0)

    def received(index: Array | int) -> Array:
        of = lambda a, axis: lax.dynamic_slice_in_dim(a, index * size, size, axis)  # noqa: E731
        queries, positions = of(scaled, 3).reshape(batch, -1, dim), of(asked.positions, 1)
        logits = lax.dot_general(queries, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        logits = logits.reshape(batch, heads, group, size, -1)
        seen = inside[:, :, None, None] & (pos[:, None, None, None] <= positions[:, None, None, :, None])
        by_row = _softmax(logits, seen).max(axis=(1, 2))
        query = jnp.arange(size, dtype=jnp.int32)[:, None]
        by_position = jnp.zeros((batch, size, slots), jnp.float32)
        by_position = by_position.at[sequence, query, column].max(by_row, mode="drop")
        by_position = most_of_devices(by_position, "H", axes)
        return (by_position * of(asked.weights, 1)[..., None]).sum(axis=1)

    first = received(0)
    return first if size == window else lax.fori_loop(1, window // size, lambda i, total: total + received(i), first)


def _loudest(shares: Float[Array, "B K G w n"], asked: Asking, axes: Axes | None) -> Float[Array, "B n"]:
    """The most that any head pays to each column, summed over the queries by their weights."""
    most = most_of_devices(shares.max(axis=(1, 2)), "H", axes)
    return (most * asked.weights[..., None]).sum(axis=1)


def _softmax(logits: Float[Array, "*n P"], seen: Bool[Array, "*#n P"]) -> Float[Array, "*n P"]:
    """Probabilities among the rows that are seen; 0 everywhere where none is."""
    logits = jnp.where(seen, logits, MASKED)
    highest = logits.max(axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(logits - highest), 0.0)
    return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
