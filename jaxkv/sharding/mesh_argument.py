"""Parser of `--mesh`: a JAX mesh with the axes data and model."""

import contextlib
import math
import os

import jax

from jaxkv._errors import require
from jaxkv.machine.cpu_threads import compute_needed_threads

# XLA can deadlock when all of a few CPU devices are used; with very many devices it crashes.
_LEAST = 8
_MOST = 1024


def parse_mesh_sizes(given: str, name: str) -> tuple[int, int]:
    """Return the device counts (data, model) in text such as 1x8; ValueError, naming the argument, for other text."""
    sizes = given.split("x")
    fine = len(sizes) == 2 and all(
        each.isdecimal() and len(each) < 10 and int(each) for each in sizes
    )
    require(fine, name, given, "give devices by data and model, such as 1x8")
    return int(sizes[0]), int(sizes[1])


def make_mesh_from_text(
    given: str | None, platform: str | None = None, *, name: str = "--mesh"
) -> jax.sharding.Mesh | None:
    """Make a JAX mesh (data, model) from text such as 1x8, creating CPU devices if JAX is uninitialised; None for None.

    On a CPU, the devices of the mesh are created if JAX is not yet initialised. `platform`, such as "cpu", selects the
    devices; by default JAX's default platform. Errors call the argument `name`.
    """
    if given is None:
        return None
    shape = parse_mesh_sizes(given, name)
    count = math.prod(shape)
    require(count <= _MOST, name, given, f"too many: give at most {_MOST} devices")
    with contextlib.suppress(RuntimeError):  # A backend is initialised, and its devices are fixed.
        jax.config.update("jax_num_cpu_devices", max(_LEAST, count))
        # XLA reads the number of threads when the CPU client starts. The user's own number is kept, with a warning if
        # too small.
        os.environ.setdefault("NPROC", str(compute_needed_threads(max(_LEAST, count))))
    devices = jax.devices(platform)
    kind = "" if platform is None else f"{platform.upper()} "
    remedy = f"this process has {len(devices)} {kind}devices: give a mesh of at most that many"
    require(count <= len(devices), name, given, remedy)
    return jax.make_mesh(shape, ("data", "model"), devices=devices[:count])
