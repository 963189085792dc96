"""Parses `--mesh`: a JAX mesh with the axes data and model."""

import contextlib
import math
import os

import jax

from jaxkv._errors import require
from jaxkv.machine.cpu_threads import threads_for

# With few CPU devices XLA can deadlock when all of them are used; with very many it crashes.
_LEAST, _MOST = 8, 1024


def mesh_sizes(given: str, name: str) -> tuple[int, int]:
    """Numbers of devices by data and by model in text such as 1x8; ValueError, naming the argument, for other text."""
    sizes = given.split("x")
    fine = len(sizes) == 2 and all(
        each.isdecimal() and len(each) < 10 and int(each) for each in sizes
    )
    require(fine, name, given, "give devices by data and model, such as 1x8")
    return int(sizes[0]), int(sizes[1])


def mesh_of(
    given: str | None, platform: str | None = None, *, name: str = "--mesh"
) -> jax.sharding.Mesh | None:
    """JAX mesh (axes data, model) from text such as 1x8, or None; creates CPU devices if it can; ValueError if too few.

    On a CPU, as many devices as the mesh needs are created if JAX is not yet initialised. `platform`, such as "cpu",
    selects the devices; by default JAX's default platform. Errors call the argument `name`.
    """
    if given is None:
        return None
    shape = mesh_sizes(given, name)
    count = math.prod(shape)
    require(count <= _MOST, name, given, f"give {_MOST} devices at most")
    with contextlib.suppress(RuntimeError):  # a backend has begun, with the devices that it has
        jax.config.update("jax_num_cpu_devices", max(_LEAST, count))
        # XLA reads it when the CPU client starts. The user's own number is kept, with a warning if it is too small.
        os.environ.setdefault("NPROC", str(threads_for(max(_LEAST, count))))
    devices = jax.devices(platform)
    kind = "" if platform is None else f"{platform.upper()} "
    remedy = f"there are {len(devices)} {kind}devices here: give a mesh of at most that many"
    require(count <= len(devices), name, given, remedy)
    return jax.make_mesh(shape, ("data", "model"), devices=devices[:count])
