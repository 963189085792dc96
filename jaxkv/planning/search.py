"""How much fits: searches for the largest number of something."""

from collections.abc import Callable, Iterator

from jaxkv.engine.plan import bucket


def largest(sound: Callable[[int], bool], most: int, low: int = 0) -> int:
    """The largest number for which all is well, if it is for those below.

    Args:
        sound: whether it is for a number.
        most: the largest that is tried.
        low: one for which it is known to be.

    Returns:
        The number; `low` where it is for none beyond.
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
    """Prompts' lengths to try, the longest first: a limit, and the ends of the buckets below; shapes follow from these.

    Args:
        limit: tokens.

    Yields:
        Tokens. Those that fit need not be all below one that does: short prompts may have no such budget.
    """
    length = limit
    while length:
        yield length
        length = _before(length)


def _before(length: int) -> int:
    """The largest number of tokens whose bucket is a smaller one."""
    low, high, mine = 0, length, bucket(length)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if bucket(middle) < mine else (low, middle)
    return low
