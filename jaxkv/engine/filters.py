"""Filter layers choose tokens, and the layers above read just those: one set of positions per sequence."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxkv import attention
from jaxkv.attention import KERNELS, Implementation
from jaxkv.attention.xla import MASKED, Walk, inside_segments
from jaxkv.cache.pools import Pool
from jaxkv.policies.reading import Reading, Selector
from jaxkv.policies.topk import sortable, top
from jaxkv.sharding.collectives import most_of_devices
from jaxkv.sharding.mesh import Axes

# Logits that exist at once while tokens are scored.
_LOGITS = 1 << 24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a filter layer has chosen.

    Attributes:
        positions: `i32[B, T]` ascending; beyond `count` anything that exists.
        count: `i32[B]` how many there are.
    """

    positions: Int[Array, "B T"]
    count: Int[Array, " B"]


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


def asking(
    q: Float[Array, "B K G N D"],
    ring: Float[Array, "B K G R D"] | None,
    positions: Int[Array, "B N"],
    count: Int[Array, " B"],
    reading: Reading,
) -> Asking:
    """The queries of a filter layer that choose for one new token; all new ones alike if there are several.

    Args:
        q: the new tokens' queries.
        ring: the last queries, the new one's among them: that of position p in slot p % R; None if only the new count.
        positions: the new tokens' positions.
        count: how many of them are real.
        reading: what the policy says of weights.

    Returns:
        Queries, positions and weights.
    """
    batch, tokens = positions.shape
    if ring is None or tokens > 1:
        real = jnp.arange(tokens, dtype=jnp.int32) < jnp.maximum(count, 1)[:, None]
        return Asking(q=q, positions=jnp.where(real, positions, -1), weights=real.astype(jnp.float32))
    rows, now = ring.shape[3], positions[:, :1]
    stands = now - jnp.arange(reading.window, dtype=jnp.int32)
    slot = jnp.where(stands < 0, 0, stands % rows)
    mine = jnp.take_along_axis(ring, slot[:, None, None, :, None], axis=3)
    weights = jnp.broadcast_to(jnp.asarray(reading.selector.weights(reading.window)), stands.shape)
    return Asking(q=mine.astype(q.dtype), positions=stands, weights=weights)


def choose(
    asked: Asking,
    pool: Pool,
    start: Int[Array, "B K"],
    kept: Int[Array, "B K"],
    candidates: Int[Array, " B"],
    budget: Int[Array, " B"],
    now: Int[Array, " B"],
    reading: Reading,
    *,
    windowed: bool,
    axes: Axes | None = None,
    implementation: Implementation = Implementation.XLA,
) -> Chosen:
    """Chooses the tokens that matter most to the queries asked.

    Args:
        asked: the queries.
        pool: the filter layer's.
        start: first row of each of its segments.
        kept: rows of each that can be chosen.
        candidates: tokens at positions below this can be chosen.
        budget: how many.
        now: position of the newest query.
        reading: what is static.
        windowed: prompt tokens within its window are chosen whatever their score.
        axes: of the mesh whose devices have some of the heads each, if it runs on one.
        implementation: where kernels are launched, tokens are sorted.

    Returns:
        The positions, the same on all devices that have a sequence; ties go to the lowest.

    References:
        OmniKV, equations 3 and 4.
    """
    # Queries and keys of equal position see each other, as in attention; padding and room are no candidates.
    if reading.every_row:
        scores = _by_row(asked, pool.k, candidates, axes)
    else:
        scores = _by_position(asked, pool, start, kept, reading.slots, axes)
    position = jnp.arange(scores.shape[1], dtype=jnp.int32)
    known = position < candidates[:, None]
    keys = jnp.where(known, sortable(scores), jnp.uint32(0))
    if windowed and reading.selector is not Selector.LAST and not reading.include_generated:
        recent = known & (position > (now - reading.window)[:, None])
        keys = jnp.where(recent, jnp.uint32(0xFFFFFFFF), keys)
    count = jnp.minimum(budget, candidates)
    places = _sorted if implementation in KERNELS else _counted
    at = places(keys, count, min(reading.width, scores.shape[1]))
    return Chosen(positions=jnp.minimum(at, scores.shape[1] - 1), count=count)


def _counted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Where the `count` largest keys stand, ascending, by a threshold: a CPU sorts slowly."""
    running = jnp.cumsum(top(keys, count), axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, width + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, method="scan"))(running).astype(jnp.int32)


def _sorted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """The same by two sorts, which a GPU has; the search for a threshold launches a hundred kernels."""
    position = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    _, largest = lax.sort((~keys, position), dimension=1, is_stable=True, num_keys=1)
    inside = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    return lax.sort(jnp.where(inside, largest[:, :width], keys.shape[1]), dimension=1)


def _by_row(
    asked: Asking, k: Float[Array, "B P D"], candidates: Int[Array, " B"], axes: Axes | None
) -> Float[Array, "B n"]:
    """Scores where every segment holds every position, in its row of the same number."""
    batch, heads, group, window, dim = asked.q.shape
    keys = k.reshape(batch, heads, -1, dim)
    rows, queries = keys.shape[2], _scaled(asked.q).reshape(batch, heads, group * window, dim)

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


def _by_position(
    asked: Asking, pool: Pool, start: Int[Array, "B K"], kept: Int[Array, "B K"], slots: int, axes: Axes | None
) -> Float[Array, "B S"]:
    """Scores where each head holds positions of its own: the largest among the heads that hold one, else 0."""
    batch, heads, group, window, dim = asked.q.shape
    inside = inside_segments(jnp.arange(pool.rows, dtype=jnp.int32), start, kept)
    column = jnp.where(pool.pos < 0, slots, pool.pos)[:, None]
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    scaled = _scaled(asked.q)
    # A few queries at a time: such pools are small.
    most = max(1, _LOGITS // (batch * heads * group * pool.rows))
    size = next(each for each in range(min(window, most), 0, -1) if window % each == 0)

    def received(index: Array | int) -> Array:
        of = lambda a, axis: lax.dynamic_slice_in_dim(a, index * size, size, axis)  # noqa: E731
        queries, positions = of(scaled, 3).reshape(batch, -1, dim), of(asked.positions, 1)
        logits = lax.dot_general(queries, pool.k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        logits = logits.reshape(batch, heads, group, size, -1)
        seen = inside[:, :, None, None] & (pool.pos[:, None, None, None] <= positions[:, None, None, :, None])
        by_row = _softmax(logits, seen).max(axis=(1, 2))
        query = jnp.arange(size, dtype=jnp.int32)[:, None]
        by_position = jnp.zeros((batch, size, slots), jnp.float32)
        by_position = by_position.at[sequence, query, column].max(by_row, mode="drop")
        by_position = most_of_devices(by_position, "H", axes)
        return (by_position * of(asked.weights, 1)[..., None]).sum(axis=1)

    first = received(0)
    return first if size == window else lax.fori_loop(1, window // size, lambda i, total: total + received(i), first)


def _scaled(q: Float[Array, "B K G w D"]) -> Float[Array, "B K G w D"]:
    return (q.astype(jnp.float32) * (1.0 / math.sqrt(q.shape[-1]))).astype(q.dtype)


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


def rows_of(
    chosen: Chosen, pool: Pool, start: Int[Array, "B K"], kept: Int[Array, "B K"], reading: Reading
) -> tuple[Int[Array, "B K T"], Int[Array, "B K"]]:
    """Where each head of a layer holds what was chosen.

    Args:
        chosen: positions, one set per sequence.
        pool: the layer's.
        start: first row of each of its segments.
        kept: rows of each that can be chosen.
        reading: what is static.

    Returns:
        Rows of the pool, those that a head holds first, and how many these are; -1 behind them.
    """
    positions, first = chosen.positions[:, None], start[..., None]
    real = jnp.arange(positions.shape[-1], dtype=jnp.int32) < chosen.count[:, None, None]
    if reading.every_row:
        rows = jnp.where(real, first + positions, -1)
        return rows, jnp.broadcast_to(chosen.count[:, None], start.shape)
    batch, end = start.shape[0], first + kept[..., None]
    shape = (*start.shape, positions.shape[-1])
    low, high = jnp.broadcast_to(first, shape), jnp.broadcast_to(end, shape)
    at = lambda row: jnp.take_along_axis(  # noqa: E731
        pool.pos, jnp.minimum(row, pool.rows - 1).reshape(batch, -1), axis=1
    ).reshape(shape)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = at(middle) >= positions
        return jnp.where(enough | (low >= high), low, middle + 1), jnp.where(enough & (low < high), middle, high)

    # Rows of a segment ascend in position: bisect for each.
    row, _ = lax.fori_loop(0, pool.rows.bit_length(), halve, (low, high))
    held = real & (row < end) & (at(row) == positions)
    order = jnp.argsort(~held, axis=-1, stable=True)
    return jnp.take_along_axis(jnp.where(held, row, -1), order, axis=-1), held.sum(axis=-1, dtype=jnp.int32)


def gathered(
    pool: Pool, rows: Int[Array, "B K T"], implementation: Implementation
) -> tuple[Float[Array, "B KT D"], Float[Array, "B KT D"]]:
    """A few rows of a pool, T for each head.

    Args:
        pool: a layer's.
        rows: which of its rows, from `rows_of`.
        implementation: kernels gather in one pass.

    Returns:
        Keys and values.
    """
    source = rows.reshape(rows.shape[0], -1)
    k, v, _ = attention.packed(pool.k[:, None], pool.v[:, None], source, implementation=implementation)
    return k, v


def over_gathered(
    q: Float[Array, "B K R D"],
    k: Float[Array, "B KT D"],
    v: Float[Array, "B KT D"],
    count: Int[Array, "B K"],
    implementation: Implementation,
) -> tuple[Float[Array, "B K R D"], Float[Array, "B K R"]]:
    """Attention to rows that lie head by head, as many for each, of which `count` are real."""
    heads = q.shape[1]
    start = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.int32) * (k.shape[1] // heads), count.shape)
    return attention.over_pool(q, k, v, start, count, walk=Walk.STRIDES, implementation=implementation)
