"""Room for new entries behind segments: entries that are free, entries that decoding will need, and copies with more room.

Sizes come in buckets, and what has grown by more than `MOST_AHEAD` grows twofold: shapes, and so programs, repeat.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv.cache import KVCache, repack
from jaxkv.engine.lengths import bucket
from jaxkv.engine.plan import widest
from jaxkv.engine.recompress import beyond, due, recompress
from jaxkv.machine import hosts, memory
from jaxkv.models.config import SlidingWindows
from jaxkv.models.decoder import Flat
from jaxkv.policies.parts import Parts
from jaxkv.sharding.mesh import host, missing

# New entries for which there is room from the beginning; longer answers grow into larger buffers on the way.
MOST_AHEAD = 2048
# Least entries that a sliding-window layer gains before those that left its window are dropped, by a copy of those within it.
_LEAST_BEYOND = 256


def headroom_for(
    parts: Parts,
    sliding_windows: SlidingWindows,
    left: Int[np.ndarray, " L"],
    new: int,
    *,
    grown: int = 0,
    slides: bool = True,
    least: int = 1,
) -> Int[np.ndarray, " L"]:
    """Number of free places `[L]` to leave behind each segment for `new` tokens, up to `MOST_AHEAD` or `grown`; bucketed.

    One if each new entry evicts one; the entries until the policy recompresses; or one for each new token, up to
    `MOST_AHEAD`, or up to the entries that the cache has `grown` by if that is more. `left` are the entries that a layer's
    segments may still gain before their limit, under policies that have one. Where a sliding-window layer `slides`, it takes
    as many entries as its window, or 256 or `least`, before those that left the window are dropped.
    """
    ahead = bucket(min(new, max(MOST_AHEAD, grown)))
    if parts.ongoing.compresses:
        left = np.maximum(left, 0)
        growing = np.asarray([bucket(int(rows)) if rows else 0 for rows in np.minimum(left, ahead)])
        # The same for every part of an answer, its last and shortest one too.
        period = parts.every or 1
        headroom = growing + (period if period <= MOST_AHEAD else ahead)
    else:
        headroom = np.full(len(left), ahead)
    return _sliding(headroom, sliding_windows, max(parts.every or 1, least)) if slides else headroom


def _sliding(
    headroom: Int[np.ndarray, " L"], sliding_windows: SlidingWindows, least: int
) -> Int[np.ndarray, " L"]:
    """Entries of room `[L]`: of sliding-window layers no more than their window's entries, or 256, or the `least` that are needed."""
    most = [
        max(_LEAST_BEYOND, bucket(width), least) if width else int(headroom.max())
        for width in sliding_windows
    ]
    return np.minimum(headroom, most)


def first_headroom(
    parts: Parts,
    sliding_windows: SlidingWindows,
    lengths: Int[np.ndarray, " B"],
    new: int,
    *,
    most: int = MOST_AHEAD,
    slides: bool = True,
    least: int = 1,
) -> tuple[int, ...]:
    """Free entries to leave behind each segment at prefill, for up to `most` of the `new` tokens: a tuple, one per layer.

    There is room for up to `most` tokens from the beginning; a slot, which does not grow, has it for all. `sliding_windows` are
    `ModelConfig.sliding_windows`; a sliding-window layer that `slides` has room for its window's entries, or 256 or `least`.
    """
    short = max(0, (parts.reach or 0) - int(np.min(lengths)))
    left = np.where(
        parts.unlimited(sliding_windows) if parts.evicts else np.zeros(len(sliding_windows), bool),
        new,
        short,
    )
    return tuple(
        headroom_for(
            parts, sliding_windows, left, new, grown=most, slides=slides, least=least
        ).tolist()
    )


def steps_that_fit(cache: KVCache) -> int:
    """Number of tokens that can be sampled before entries must be moved or recompressed; the largest int32 if never.

    The largest int32 where one spare row is all that decoding needs.
    """
    parts, free = cache.policy.composed, cache.free()
    if not parts.ongoing.compresses:
        return int(free.min())
    if parts.evicts:
        # One spare row is all that a segment at its limit needs.
        to_limit = _to_limit(cache).max(axis=(1, 2))
        endless = np.iinfo(np.int32).max
        return int(np.where((free > 0) & (free > to_limit), endless, free).min())
    # Sequences that fill up a mesh's groups sample nothing: their entries do not count.
    return int(min(free.min(), (parts.every or 1) - beyond(cache)[: cache.batch].max()))


def ready_to_decode(flat: Flat, cache: KVCache, new: int, *, key: PRNGKeyArray) -> KVCache:
    """Cache ready to sample on: sequences that are due are recompressed, flag `extended` is cleared if outdated.

    The result is `extended` only if a segment may still hold more entries than the policy's bound on prompts.
    """
    if due(cache).any():
        cache = make_headroom(flat, cache, new, key=key)
    if not cache.extended:
        return cache
    most = widest(cache.policy.composed, cache.padded_len, cache.config.sliding_windows)
    holds = max(int(cache.kept.max()), int(host(cache.limit)[:, : cache.batch].max()))
    return dataclasses.replace(cache, extended=most is not None and holds >= most)


def make_headroom(flat: Flat, cache: KVCache, new: int, *, key: PRNGKeyArray) -> KVCache:
    """Cache with room for at least one new token: unchanged, recompressed, or in larger pools (old ones deleted).

    At least one of the `new` tokens can be sampled on the result. Pools of sliding-window layers lose the entries that have left
    their windows.
    """
    parts, sliding_windows, grow_by = (
        cache.policy.composed,
        cache.config.sliding_windows,
        _to_limit(cache).max(axis=(1, 2)),
    )
    # If the policy evicts, any entry of a segment may have been added one by one while sampling.
    grown = int(cache.kept.max()) if parts.evicts else int(beyond(cache).max())
    wanted = headroom_for(parts, sliding_windows, grow_by, new, grown=grown)
    if due(cache).any():
        return recompress(flat, cache, key=key, headroom=wanted)
    # Sliding-window layers run out of entries before others do: these are not copied meanwhile, unless they share a pool.
    enough = cache.free() >= (np.minimum(wanted, 1) if any(sliding_windows) else wanted)
    if any(sliding_windows) and cache.layout.one_pool and not enough.all():
        enough = np.zeros_like(enough)
    return (
        cache if enough.all() else repack(cache, headroom=np.where(enough, 0, wanted), release=True)
    )


def forked(given: KVCache, batch: int, longest: int, new: int) -> KVCache:
    """Copy of a cache for `batch` sequences, with room for a prompt of up to `longest` tokens on top of each.

    Policies that only append leave room for `new` tokens, too. The given cache holds `batch` sequences, or one that is
    repeated. Raises MemoryError if the copy does not fit.
    """
    goes_on, sliding_windows = (
        given.policy.composed.ongoing.compresses,
        given.config.sliding_windows,
    )
    wanted = longest + (1 if goes_on else min(bucket(max(1, new)), MOST_AHEAD))
    # A cache fresh from prefill always gets room: slack varies with the prompt's length, and shapes must not. One that
    # has grown grows twofold, so that turn after turn meets few shapes.
    grown = int(beyond(given).max())
    enough = (
        given.free()
        >= _sliding(np.full(len(sliding_windows), wanted), sliding_windows, longest + 1)
    ) & (grown > 0)
    fits = bool(enough.all())
    headroom = 0 if fits else bucket(wanted)
    twofold = headroom if fits or goes_on else bucket(max(wanted, grown))
    mesh = None if given.axes is None else given.axes.mesh
    device = next(iter(given.seen.sharding.addressable_devices))
    available = hosts.least(memory.available_bytes(device), mesh)
    if twofold > headroom and (
        available is None or _copy_bytes(given, batch, twofold) <= available // 2
    ):
        headroom = twofold
    copied = _copy_bytes(given, batch, max(headroom, 0 if goes_on else bucket(max(1, new))))
    with hosts.together("copying a cache", mesh):
        memory.check_bytes(
            copied, f"a copy of the cache for {batch} prompts and max_new_tokens={new}", device
        )
    headrooms = _sliding(
        np.full(len(sliding_windows), headroom), sliding_windows, bucket(longest + 1)
    )
    # Sliding-window layers run out of entries before others do: these do not grow meanwhile, unless all move in a shared pool.
    apart = any(sliding_windows) and not given.layout.one_pool
    return repack(
        given, headroom=np.where(enough, 0, headrooms) if apart else headrooms, batch=batch
    )


def _copy_bytes(given: KVCache, batch: int, headroom: int) -> int:
    """Bytes of a cache's copy for `batch` sequences with `headroom` more entries per segment, plus entries loaded from the host.

    On a mesh, those on one device; on a CPU's fake devices, on all of them together.
    """
    axes, held = given.axes, len(given.seen)
    batch += missing(batch, axes)
    copied = given.nbytes * batch // held + batch * given.headroom_nbytes(
        [headroom] * given.config.layers
    )
    if given.host_store is not None:
        # Whole layers are loaded for every prompt: one in use, its copy in attention's layout, `ahead` further ones.
        reading = given.policy.composed.reading(
            given.config.sliding_windows, given.host_store.rows[0].shape[1]
        )
        copied += (
            (2 + reading.ahead)
            * batch
            * given.host_store.rows[0].nbytes
            // given.host_store.rows[0].shape[0]
        )
    if axes is None:
        return copied
    return -(-copied // (axes.size("B") * axes.size("K"))) * axes.in_one_memory


def _to_limit(cache: KVCache) -> Int[np.ndarray, "L B K"]:
    """Count `[L, B, K]` of entries each segment may still gain before its limit, negative beyond; no padding sequences."""
    return host(cache.limit)[:, : cache.batch].astype(np.int64) - cache.kept
