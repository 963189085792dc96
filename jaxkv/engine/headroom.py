"""Headroom of segments: free places, places that decoding will need, and copies with more headroom.

Sizes are bucketed, and growth beyond `MOST_AHEAD` doubles, so that shapes repeat and programs are reused.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv.cache import KVCache, repack_cache
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.engine.plan import bound_segment_length
from jaxkv.engine.recompress import count_entries_over_limit, find_due_sequences, recompress
from jaxkv.machine import hosts, memory
from jaxkv.models.config import SlidingWindows
from jaxkv.models.split_decoder import SplitDecoder
from jaxkv.policies.parts import Parts
from jaxkv.sharding.mesh import copy_to_host, count_padding_sequences

# New tokens with headroom from prefill; longer answers grow into larger buffers during decoding.
MOST_AHEAD = 2048
# Minimum growth of a sliding-window layer before a copy evicts the entries outside its window.
_LEAST_BEYOND = 256


def compute_headroom(
    parts: Parts,
    sliding_windows: SlidingWindows,
    left: Int[np.ndarray, " L"],
    new: int,
    *,
    grown: int = 0,
    slides: bool = True,
    least: int = 1,
) -> Int[np.ndarray, " L"]:
    """Return bucketed headroom `[L]` for `new` tokens, at most max(2,048, `grown`); less with eviction or windows.

    One place if each new entry evicts one; the places until the next recompression; or one per new token, up to the
    larger of `MOST_AHEAD` and the entries `grown`. `left` are the entries that a layer's segments may gain before their
    limit, under policies with limits. A sliding-window layer that `slides` gains as many entries as its window, or 256
    or `least`, before the entries outside its window are evicted.
    """
    ahead = round_up_to_bucket(min(new, max(MOST_AHEAD, grown)))
    if parts.decoding_compression.compresses:
        left = np.maximum(left, 0)
        growing = np.asarray(
            [round_up_to_bucket(int(rows)) if rows else 0 for rows in np.minimum(left, ahead)]
        )
        # The same for every part of an answer, including its last and shortest one.
        period = parts.recompression_interval or 1
        headroom = growing + (period if period <= MOST_AHEAD else ahead)
    else:
        headroom = np.full(len(left), ahead)
    return (
        _cap_sliding_window_headroom(
            headroom, sliding_windows, max(parts.recompression_interval or 1, least)
        )
        if slides
        else headroom
    )


def _cap_sliding_window_headroom(
    headroom: Int[np.ndarray, " L"], sliding_windows: SlidingWindows, least: int
) -> Int[np.ndarray, " L"]:
    """Return headroom `[L]`, in sliding-window layers at most max(bucketed window, 256, `least`)."""
    most = [
        max(_LEAST_BEYOND, round_up_to_bucket(width), least) if width else int(headroom.max())
        for width in sliding_windows
    ]
    return np.minimum(headroom, most)


def compute_prefill_headroom(
    parts: Parts,
    sliding_windows: SlidingWindows,
    lengths: Int[np.ndarray, " B"],
    new: int,
    *,
    most: int = MOST_AHEAD,
    slides: bool = True,
    least: int = 1,
) -> tuple[int, ...]:
    """Return the free places behind each segment after prefill, one number per layer, for up to `most` of `new` tokens.

    They suffice for up to `most` of the `new` tokens; a slot, which does not grow, has places for all.
    `sliding_windows` are those of all layers. A sliding-window layer that `slides` has places for its window, 256 or
    `least` entries.
    """
    short = max(0, (parts.growth_limit or 0) - int(np.min(lengths)))
    left = np.where(
        parts.mask_layers_without_eviction(sliding_windows)
        if parts.evicts_while_decoding
        else np.zeros(len(sliding_windows), bool),
        new,
        short,
    )
    return tuple(
        compute_headroom(
            parts, sliding_windows, left, new, grown=most, slides=slides, least=least
        ).tolist()
    )


def count_steps_until_full(cache: KVCache) -> int:
    """Return the number of tokens that every sequence can sample before pools must grow or be recompressed.

    The largest int32 if decoding needs a single spare place only.
    """
    parts = cache.policy.composed
    free = cache.compute_layer_headroom()
    if not parts.decoding_compression.compresses:
        return int(free.min())
    if parts.evicts_while_decoding:
        # A segment at its limit needs a single spare place.
        to_limit = _count_entries_to_limit(cache).max(axis=(1, 2))
        endless = np.iinfo(np.int32).max
        return int(np.where((free > 0) & (free > to_limit), endless, free).min())
    # Copies that fill up a mesh's groups sample nothing, so their entries do not count.
    return int(
        min(
            free.min(),
            (parts.recompression_interval or 1)
            - count_entries_over_limit(cache)[: cache.batch].max(),
        )
    )


def count_places_for_evicting_tokens(cache: KVCache, tokens: int) -> int:
    """Return how many free places every segment needs for `tokens` that evict an entry each at the segment's limit."""
    to_limit = int(_count_entries_to_limit(cache).max())
    return min(tokens, max(0, to_limit) + 1)


def prepare_cache_for_decoding(
    flat: SplitDecoder, cache: KVCache, new: int, *, key: PRNGKeyArray
) -> KVCache:
    """Return a cache ready for sampling: due sequences recompressed, and `extended` cleared if outdated.

    The result is `extended` only if a segment may hold more entries than the policy's bound on prompts.
    """
    if find_due_sequences(cache).any():
        cache = make_headroom(flat, cache, new, key=key)
    if not cache.extended:
        return cache
    most = bound_segment_length(
        cache.policy.composed, cache.padded_len, cache.config.sliding_windows
    )
    holds = max(int(cache.kept.max()), int(copy_to_host(cache.limit)[:, : cache.batch].max()))
    return dataclasses.replace(cache, extended=most is not None and holds >= most)


def make_headroom(flat: SplitDecoder, cache: KVCache, new: int, *, key: PRNGKeyArray) -> KVCache:
    """Return a cache with headroom for one new token or more: unchanged, recompressed, or repacked (old pools deleted).

    Larger pools replace the old ones, which are deleted. Pools of sliding-window layers lose the entries outside their
    windows.
    """
    parts = cache.policy.composed
    sliding_windows = cache.config.sliding_windows
    grow_by = _count_entries_to_limit(cache).max(axis=(1, 2))
    # If the policy evicts, any entry of a segment may have been appended during decoding.
    grown = (
        int(cache.kept.max())
        if parts.evicts_while_decoding
        else int(count_entries_over_limit(cache).max())
    )
    wanted = compute_headroom(parts, sliding_windows, grow_by, new, grown=grown)
    if find_due_sequences(cache).any():
        return recompress(flat, cache, key=key, headroom=wanted)
    # Sliding-window layers run out of places first: do not copy other layers then, unless all share a pool.
    enough = cache.compute_layer_headroom() >= (
        np.minimum(wanted, 1) if any(sliding_windows) else wanted
    )
    if any(sliding_windows) and cache.layout.uses_shared_pool and not enough.all():
        enough = np.zeros_like(enough)
    return (
        cache
        if enough.all()
        else repack_cache(cache, headroom=np.where(enough, 0, wanted), release=True)
    )


def fork_cache(cache: KVCache, batch: int, longest: int, new: int) -> KVCache:
    """Copy a cache for `batch` sequences (one is repeated), with headroom for `longest` more tokens; or MemoryError.

    Policies that only append also get headroom for `new` tokens. The given cache holds `batch` sequences, or one to
    repeat. Raise MemoryError if the copy does not fit.
    """
    renews = cache.policy.composed.decoding_compression.compresses
    sliding_windows = cache.config.sliding_windows
    wanted = longest + (1 if renews else min(round_up_to_bucket(max(1, new)), MOST_AHEAD))
    # A cache from prefill always gets headroom: its slack varies with the prompt's length, and shapes must not. A cache
    # that has grown doubles, so that conversations produce few shapes.
    grown = int(count_entries_over_limit(cache).max())
    enough = (
        cache.compute_layer_headroom()
        >= _cap_sliding_window_headroom(
            np.full(len(sliding_windows), wanted), sliding_windows, longest + 1
        )
    ) & (grown > 0)
    fits = bool(enough.all())
    headroom = 0 if fits else round_up_to_bucket(wanted)
    twofold = headroom if fits or renews else round_up_to_bucket(max(wanted, grown))
    mesh = None if cache.axes is None else cache.axes.mesh
    device = next(iter(cache.seen.sharding.addressable_devices))
    available = hosts.find_process_minimum(memory.available_bytes(device), mesh)
    if twofold > headroom and (
        available is None or _estimate_copy_bytes(cache, batch, twofold) <= available // 2
    ):
        headroom = twofold
    copied = _estimate_copy_bytes(
        cache, batch, max(headroom, 0 if renews else round_up_to_bucket(max(1, new)))
    )
    with hosts.share_failures("copying a cache", mesh):
        memory.require_free_bytes(
            copied, f"a copy of the cache for {batch} prompts and max_new_tokens={new}", device
        )
    headrooms = _cap_sliding_window_headroom(
        np.full(len(sliding_windows), headroom), sliding_windows, round_up_to_bucket(longest + 1)
    )
    # Sliding-window layers run out of places first: other layers do not grow then, unless all share a pool.
    apart = any(sliding_windows) and not cache.layout.uses_shared_pool
    return repack_cache(
        cache, headroom=np.where(enough, 0, headrooms) if apart else headrooms, batch=batch
    )


def _estimate_copy_bytes(cache: KVCache, batch: int, headroom: int) -> int:
    """Return a device's bytes for a cache's copy: `batch` sequences, `headroom` more per segment, loaded host entries.

    Includes entries loaded from the host. On a mesh, bytes per device; on a CPU's virtual devices, of all together.
    """
    axes = cache.axes
    held = len(cache.seen)
    batch += count_padding_sequences(batch, axes)
    copied = cache.nbytes * batch // held + batch * cache.headroom_nbytes(
        [headroom] * cache.config.layers
    )
    if cache.host_store is not None:
        # Per prompt, whole layers are loaded: one in use, its copy in attention's layout, and `ahead` more.
        reading = cache.policy.composed.build_read_config(
            cache.config.sliding_windows, cache.host_store.rows[0].shape[1]
        )
        copied += (
            (2 + reading.ahead)
            * batch
            * cache.host_store.rows[0].nbytes
            // cache.host_store.rows[0].shape[0]
        )
    if axes is None:
        return copied
    return (
        -(-copied // (axes.count_axis_shards("B") * axes.count_axis_shards("K")))
        * axes.devices_sharing_memory
    )


def _count_entries_to_limit(cache: KVCache) -> Int[np.ndarray, "L B K"]:
    """Return how many entries each segment may gain before its limit, `i64[L, B, K]` on the host; negative above it."""
    return copy_to_host(cache.limit)[:, : cache.batch].astype(np.int64) - cache.kept
