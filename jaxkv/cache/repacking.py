"""Copies a cache into new buffers with more free rows, or for more sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxkv._errors import require
from jaxkv.cache.kv_cache import KVCache
from jaxkv.cache.layout import Layout, by_sequence
from jaxkv.cache.pools import Pool, segment_of_row
from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host, lettered, missing, settle_down


@program(static=("layout", "rows", "room", "axes"))
def _repacked(
    pool: Pool,
    start: Int[Array, "n B K"],
    length: Int[Array, "n B K"],
    *,
    layout: Layout,
    rows: int,
    room: tuple[int, ...],
    axes: Axes | None,
) -> tuple[Pool, Int[Array, "n B K"]]:
    """Copies a pool to P = `rows` with `room` free rows behind each segment; returns it and first rows `[n, B, K]`."""
    placed = layout.place(length, rows, np.asarray(room, np.int32))
    start, length, new_start = (by_sequence(table) for table in (start, length, placed))
    segment = segment_of_row(new_start, rows)
    first, held, begin = (
        jnp.take_along_axis(a, segment, axis=1) for a in (start, length, new_start)
    )
    offset = jnp.arange(rows, dtype=jnp.int32) - begin
    real = offset < held
    source = jnp.where(real, first + offset, 0)
    pos = jnp.where(real, jnp.take_along_axis(pool.pos, source, axis=1), -1)
    score = (
        None
        if pool.score is None
        else jnp.where(real, jnp.take_along_axis(pool.score, source, axis=1), 0.0)
    )
    # Segments of pools with pages are of equal size, and rows keep their places in them.
    bounds = None if pool.bounds is None else pool.bounds.with_room(rows // start.shape[1])
    return Pool(store=pool.store.take(source, real), pos=pos, score=score, bounds=bounds), placed


def _give_up(pool: Pool, copy: Pool) -> None:
    """Deletes a pool's arrays once its `copy` is there."""
    jax.block_until_ready(copy)
    for leaf in jax.tree.leaves(pool):
        leaf.delete()


def repack(
    cache: KVCache,
    *,
    room: int | Int[np.ndarray, " L"],
    batch: int | None = None,
    release: bool = False,
    sizes: tuple[int, ...] | None = None,
) -> KVCache:
    """Copy of a cache with `room` more free rows per segment; `batch` repeats its sequence, `release` frees old pools.

    `room` is one number, or one per layer; segments of window layers keep the rows of their windows alone, and have at
    least as many free rows. `batch` repeats a cache of one sequence that many times, and on a mesh pads to whole
    groups; ValueError if the cache holds several. `release` gives up the cache: its pools are deleted one by one, so
    that both never exist whole, and those without more `room` are the new cache's. `sizes` are P of window layers' new
    pools (on a mesh, of a device's part), one for each layer, in place of what their `room` asks for.
    """
    copies, padding = 0, cache.padding
    if batch is not None and batch != cache.batch:
        require(
            cache.batch == 1,
            "cache",
            f"{cache.batch} sequences",
            f"give {cache.batch} prompts, or a cache of one",
        )
        padding = missing(batch, cache.axes)
        copies = batch + padding

    def repeat(leaf: Array, axis: int = 0) -> Array:
        """Array with its first sequence repeated `copies` times; the array itself if `copies` is 0."""
        if not copies:
            return leaf
        # Sequences that pad a mesh's groups are stale: only the first one is copied.
        one = lax.slice_in_dim(leaf, 0, 1, axis=axis) if cache.padding else leaf
        return jnp.repeat(one, copies, axis=axis)

    rest = dataclasses.replace(cache.updated(pools=()), bank=None)
    leaves = [repeat(leaf, letters.split().index("B")) for _, letters, leaf in lettered(rest)]
    rest = jax.tree.unflatten(jax.tree.structure(rest), leaves)
    start, length = rest.start, rest.length
    layers, _, heads = start.shape
    rooms = np.broadcast_to(np.asarray(room, np.int32), (layers,))
    pools, placed, lengths, stretches = [], [], length, cache.stretches
    for pool, of in zip(cache.pools, cache.layout.parts(layers), strict=True):
        room_of, widths = tuple(rooms[of].tolist()), cache.config.windows[of]
        stays = not any(room_of) if sizes is None else not any(widths)
        if release and not copies and stays:
            # Pools that stay as they are belong to the new cache.
            pools.append(pool)
            placed.append(start[of])
            continue
        first, held, rows = start[of], length[of], pool.rows + heads * sum(room_of)
        if any(widths):
            most = np.asarray(
                [np.iinfo(np.int32).max if width is None else width for width in widths], np.int32
            )
            held = jnp.minimum(held, most[:, None, None])
            first, lengths = first + length[of] - held, lengths.at[of].set(held)
            if sizes is None:
                least = cache.layout.fullest(host(held), heads // stretches)
                rows = max(pool.rows, stretches * least + heads * sum(room_of))
            else:
                rows = stretches * sizes[of.start]
        copied, first = _repacked(
            jax.tree.map(repeat, pool),  # a user's store need not name its axes
            first,
            held,
            layout=cache.layout,
            rows=rows // stretches,
            room=room_of,
            axes=cache.axes,
        )
        pools.append(copied)
        placed.append(first)
        if release:
            _give_up(pool, copied)
    copy = dataclasses.replace(rest, padding=padding).updated(
        pools=tuple(pools), start=jnp.concatenate(placed), length=lengths
    )
    return dataclasses.replace(settle_down(copy, cache.axes), bank=cache.bank)


def slid(cache: KVCache, rows: tuple[int, ...]) -> KVCache:
    """Copy of a cache whose window layers hold their windows' rows alone, in pools of P = `rows`; old pools deleted.

    `rows` has one size for each layer (on a mesh, of a device's part); layers without a window stay as they are.
    """
    return repack(cache, room=0, release=True, sizes=rows)
