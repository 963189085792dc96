"""One set of JAX settings for jaxkv's own arithmetic, whatever a process has chosen for its other work."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """32-bit indices and float32 statistics also under `jax_enable_x64`; ranks may differ where shapes broadcast.

    They hold for the calling thread until the block ends, and for what a user's own scorer or sampler computes in it.
    """
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


# Around a public function: it then runs under jaxkv's own settings in any process, entered anew at every call.
settled = own_settings()
