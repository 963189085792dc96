"""One set of JAX settings for jaxkv's own arithmetic, whatever a process has chosen for its other work."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import jax

Given = ParamSpec("Given")
Made = TypeVar("Made")


@contextmanager
def own_settings() -> Iterator[None]:
    """32-bit indices and float32 statistics also under `jax_enable_x64`; ranks may differ where shapes broadcast.

    They hold for the calling thread until the block ends, and for what a user's own scorer or sampler computes in it.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


def settled(door: Callable[Given, Made]) -> Callable[Given, Made]:
    """A public function that runs under jaxkv's own settings.

    Args:
        door: the function.

    Returns:
        The same, for any process.
    """

    @functools.wraps(door)
    def run(*args: Given.args, **options: Given.kwargs) -> Made:
        with own_settings():
            return door(*args, **options)

    return run
