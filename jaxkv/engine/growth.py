"""Room for new rows: how much a cache has, how much it will need, and getting it.

Sizes come in buckets, and what has grown by more than `MOST_AHEAD` grows twofold: shapes, and so programs, repeat.
"""

import numpy as np
from jaxtyping import Int, PRNGKeyArray

from jaxkv.axes import host
from jaxkv.cache import KVCache, repack
from jaxkv.engine.plan import bucket
from jaxkv.engine.recompress import beyond, due, recompress
from jaxkv.models.decoder import Flat
from jaxkv.policies.parts import Parts

# New rows for which there is room from the beginning; longer answers grow into larger buffers on the way.
MOST_AHEAD = 2048


def room_for(parts: Parts, left: Int[np.ndarray, " L"], new: int, *, grown: int = 0) -> Int[np.ndarray, " L"]:
    """Rows to leave behind every segment of each layer, so that tokens can be drawn.

    Args:
        parts: of the policy.
        left: rows by which the layer's segments may still grow towards their limit, where the policy has one.
        new: tokens to draw.
        grown: rows that the cache has grown by so far.

    Returns:
        One where a row goes for each that comes, as many as come until the policy compresses again, or all new ones;
        up to `MOST_AHEAD`, and from there on as many as there are already.
    """
    ahead = bucket(min(new, max(MOST_AHEAD, grown)))
    if parts.ongoing is None:
        return np.full(len(left), ahead)
    left = np.maximum(left, 0)
    growing = np.asarray([bucket(int(rows)) if rows else 0 for rows in np.minimum(left, ahead)])
    # The same for every stretch of an answer, its last and shortest one too.
    period = parts.every or 1
    return growing + (period if period <= MOST_AHEAD else ahead)


def first_room(parts: Parts, layers: int, lengths: Int[np.ndarray, " B"], new: int) -> tuple[int, ...]:
    """Rows to leave behind every segment of each layer when a prompt is prefilled.

    Args:
        parts: of the policy.
        layers: L.
        lengths: tokens of each prompt.
        new: tokens to draw.

    Returns:
        See `room_for`.
    """
    short = 0
    budget = parts.budget
    if isinstance(budget, int):
        short = max(0, budget - int(np.min(lengths)))
    left = np.where(parts.layers.unlimited(layers) if parts.evicts else np.zeros(layers, bool), new, short)
    return tuple(room_for(parts, left, new).tolist())


def steps_that_fit(cache: KVCache) -> int:
    """How many tokens can be drawn before rows must be moved or the policy compresses again.

    Args:
        cache: any cache.

    Returns:
        Tokens per sequence; a very large number where a spare row is all it takes.
    """
    parts, free = cache.policy.parts(), cache.free()
    if parts.ongoing is None:
        return int(free.min())
    if parts.evicts:
        # One spare row is all that a segment at its limit needs.
        to_limit = _to_limit(cache).max(axis=(1, 2))
        endless = np.iinfo(np.int32).max
        return int(np.where((free > 0) & (free > to_limit), endless, free).min())
    return int(min(free.min(), (parts.every or 1) - beyond(cache).max()))


def make_room(flat: Flat, cache: KVCache, new: int, *, key: PRNGKeyArray) -> KVCache:
    """Compresses what is due, and moves the cache to larger buffers where segments have no room to grow.

    Args:
        flat: the decoder's parameters.
        cache: any cache; given up.
        new: tokens still to be drawn.
        key: for policies that draw.

    Returns:
        A cache on which at least one token can be drawn.
    """
    parts, grow_by = cache.policy.parts(), _to_limit(cache).max(axis=(1, 2))
    # Rows below a limit, and of layers without one, have all come one by one.
    grown = int(cache.kept.max()) if parts.evicts else int(beyond(cache).max())
    wanted = room_for(parts, grow_by, new, grown=grown)
    if due(cache).any():
        return recompress(flat, cache, key=key, room=wanted)
    if (cache.free() >= wanted).all():
        return cache
    return repack(cache, room=np.where(cache.free() >= wanted, 0, wanted), release=True)


def _to_limit(cache: KVCache) -> Int[np.ndarray, "L B K"]:
    """Rows that each segment may still grow by; those of sequences that nobody asks stand still."""
    return host(cache.limit)[:, : cache.batch].astype(np.int64) - cache.kept
