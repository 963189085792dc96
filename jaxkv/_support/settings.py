"""JAX settings that jaxkv runs under, independent of those that the process has set."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Context manager and decorator that sets JAX to 32-bit numbers, allowed rank promotion and no current mesh.

    The settings hold for the calling thread until the block ends, also in users' scorers and samplers.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), _no_mesh():
        yield


def _no_mesh() -> AbstractContextManager[Any]:
    """Context manager that unsets JAX's current mesh; does nothing while a user's function is traced on it."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # JAX' refusal while a program is traced
        return nullcontext()


# Decorator of public functions: they run under jaxkv's own settings, entered anew at every call.
settled = own_settings()
