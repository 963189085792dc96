"""One set of JAX settings for jaxkv's own arithmetic, whatever a process has chosen for its other work."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """32-bit indices and float32 statistics also under `jax_enable_x64`; ranks may differ where shapes broadcast.

    Nor do programs run under a mesh of `jax.set_mesh`: they have their own, the model's. All of it holds for the
    calling thread until the block ends, and for what a user's own scorer or sampler computes in it.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), _no_mesh():
        yield


def _no_mesh() -> AbstractContextManager[Any]:
    """No mesh of the surroundings, but for one that a user's own program is being traced on."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # JAX' refusal while a program is traced
        return nullcontext()


# Around a public function: it then runs under jaxkv's own settings in any process, entered anew at every call.
settled = own_settings()
