"""Generators of work in parts: they yield progress, and other work may run between two parts."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")
# A prefill or compression: yields the layers run since the last yield, 0 after a layer was packed.
Walk = Generator[float, None, Result]


def run_generator(
    walk: Generator[Any, None, Result], tick: Callable[[Any], object] = lambda value: None
) -> Result:
    """Run a generator to its end, call `tick` with each value that it yields, and return its result."""
    while True:
        try:
            value = next(walk)
        except StopIteration as end:
            return end.value
        tick(value)


def silence_progress(walk: Walk[Result]) -> Walk[Result]:
    """Generator: run another generator and return its result, but yield 0.0 in place of each of its values."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value
        yield 0.0
