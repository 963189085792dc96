"""Filter layers choose tokens, and the layers above read just those: one set of positions per sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

from jaxkv.attention import Implementation, backend_of
from jaxkv.attention.filters import Asking, by_position, by_row
from jaxkv.attention.xla import Walk
from jaxkv.cache.pools import Pool
from jaxkv.policies.reading import Reading, Selector
from jaxkv.policies.topk import sortable, top
from jaxkv.sharding.mesh import Axes


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
        implementation: of whose backend it depends whether tokens are sorted or counted.

    Returns:
        The positions, the same on all devices that have a sequence; ties go to the lowest.

    References:
        OmniKV, equations 3 and 4.
    """
    # Queries and keys of equal position see each other, as in attention; padding and room are no candidates.
    if reading.every_row:
        scores = by_row(asked, pool.k, candidates, axes)
    else:
        scores = by_position(asked, pool.k, pool.pos, start, kept, reading.slots, axes)
    position = jnp.arange(scores.shape[1], dtype=jnp.int32)
    known = position < candidates[:, None]
    keys = jnp.where(known, sortable(scores), jnp.uint32(0))
    if windowed and reading.selector is not Selector.LAST and not reading.include_generated:
        recent = known & (position > (now - reading.window)[:, None])
        keys = jnp.where(recent, jnp.uint32(0xFFFFFFFF), keys)
    count = jnp.minimum(budget, candidates)
    places = _sorted if backend_of(implementation).few_launches else _counted
    at = places(keys, count, min(reading.width, scores.shape[1]))
    return Chosen(positions=jnp.minimum(at, scores.shape[1] - 1), count=count)


def _counted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Indices of the `count` largest keys, ascending, by a threshold: a CPU sorts slowly."""
    running = jnp.cumsum(top(keys, count), axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, width + 1, dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, method="scan"))(running).astype(jnp.int32)


def _sorted(keys: UInt[Array, "B S"], count: Int[Array, " B"], width: int) -> Int[Array, "B T"]:
    """Indices of the `count` largest keys, ascending, by two sorts; a threshold takes a hundred launches on a GPU."""
    position = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    _, largest = lax.sort((~keys, position), dimension=1, is_stable=True, num_keys=1)
    inside = jnp.arange(width, dtype=jnp.int32) < count[:, None]
    return lax.sort(jnp.where(inside, largest[:, :width], keys.shape[1]), dimension=1)


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
        implementation: of whose backend the gather is.

    Returns:
        Keys and values.
    """
    source = rows.reshape(rows.shape[0], -1)
    k, v, _ = backend_of(implementation).packed(pool.k[:, None], pool.v[:, None], source)
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
    return backend_of(implementation).attend(q, k, v, start, count, walk=Walk.STRIDES)
