"""Searches for the largest batch and the longest context that fit."""

from collections.abc import Callable, Iterator

from jaxkv.engine.lengths import buckets


def largest(sound: Callable[[int], bool], most: int, low: int = 0) -> int:
    """Largest integer up to `most` where the monotone predicate `sound` holds, by doubling and bisection; else `low`.

    `low` is returned where it holds for nothing larger.
    """
    high = max(1, 2 * low)
    while high <= most and sound(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if sound(middle) else (low, middle)
    return low


def lengths_below(limit: int) -> Iterator[int]:
    """Yields prompt lengths to try, longest first: `limit`, then the upper end of each smaller bucket.

    Fitting is not monotone in the length: a short prompt may admit no such budget.
    """
    yield limit
    yield from (slots for _, slots in buckets(limit)[-2::-1])
