"""Room for new rows: how much a cache has, how much it will need, and getting it."""

import numpy as np
from jaxtyping import PRNGKeyArray

from jaxkv.cache import KVCache, repack
from jaxkv.models.again import again, beyond, due
from jaxkv.models.decoder import Flat
from jaxkv.policies.base import Policy


def first_room(policy: Policy, layers: int, lengths: np.ndarray, block: int) -> tuple[int, ...]:
    """Rows to leave behind every segment of each layer when a prompt is prefilled.

    Args:
        policy: the compression.
        layers: L.
        lengths: tokens of each prompt.
        block: tokens drawn at a time.

    Returns:
        One where a row goes for each that comes, as many as come until the policy compresses again, or a block.
    """
    if policy.upkeep is None:
        return (block,) * layers
    budget, every = policy.settings.budget, policy.settings.every
    short = isinstance(budget, int) and bool((np.asarray(lengths) < budget).any())
    if policy.evicts:
        return tuple(block + 1 if short or grows else 1 for grows in policy.layers.unlimited(layers).tolist())
    assert every is not None
    return (max(every, block) if short else every,) * layers


def steps_that_fit(cache: KVCache) -> int:
    """How many tokens can be drawn before rows must be moved or the policy compresses again.

    Args:
        cache: any cache.

    Returns:
        Tokens per sequence; a very large number where a spare row is all it takes.
    """
    policy, free = cache.policy, cache.free()
    if policy.upkeep is None:
        return int(free.min())
    if policy.evicts:
        # One spare row is all that a segment at its limit needs.
        to_limit = (np.asarray(cache.limit, np.int64) - np.asarray(cache.length)).max(axis=(1, 2))
        endless = np.iinfo(np.int32).max
        return int(np.where(free > to_limit, endless, free).min())
    every = policy.settings.every
    assert every is not None
    return int(min(free.min(), every - beyond(cache).max()))


def make_room(flat: Flat, cache: KVCache, block: int, *, key: PRNGKeyArray) -> KVCache:
    """Compresses what is due, and moves the cache to larger buffers where segments have no room to grow.

    Args:
        flat: the decoder's parameters.
        cache: any cache; given up.
        block: tokens drawn at a time.
        key: for policies that draw.

    Returns:
        A cache on which tokens can be drawn.
    """
    policy = cache.policy
    wanted = np.full(cache.config.layers, block)
    if policy.evicts:
        at_limit = (np.asarray(cache.length) >= np.asarray(cache.limit)).all(axis=(1, 2))
        wanted = np.where(at_limit, 1, block + 1)
    elif (every := policy.settings.every) is not None:
        growing = bool((beyond(cache) < 0).any())
        wanted = np.full(cache.config.layers, max(every, block) if growing else every)
    if due(cache).any():
        return again(flat, cache, key=key, room=wanted)
    if (cache.free() >= wanted).all():
        return cache
    return repack(cache, room=np.where(cache.free() >= wanted, 0, wanted), release=True)
