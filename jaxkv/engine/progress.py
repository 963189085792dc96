"""Work that is done in pieces, as generators: what they yield is progress, and other work may run in between."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
# Of a prefill or a compression: yields layers done since it last yielded, 0 after a layer was packed.
Walk = Generator[float, None, Result]


def run_to_end(
    walk: Generator[Any, None, Result], tick: Callable[[Any], object] = lambda value: None
) -> Result:
    """Runs a generator to its end, calls `tick` with each value it yields, and returns its result."""
    while True:
        try:
            value = next(walk)
        except StopIteration as end:
            return end.value
        tick(value)


def without_progress(walk: Walk[Result]) -> Walk[Result]:
    """Generator: runs another generator and returns the same result, but yields 0 in place of every value."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value
        yield 0.0
