"""Threads of XLA's CPU client: their number, and the number that a mesh of several CPU devices needs.

A collective waits in one thread per device of its mesh, and its computation in parts needs more threads of the same
pool. If all of them wait, none is left for the device that they wait for, and XLA ends the process after 40 seconds:
"Termination timeout for ... exceeded". On a machine of two cores, eight devices have eight threads.
"""

import os
import re

from jax.sharding import Mesh

from jaxkv._checks import warn_once

# XLA uses the first one with a number, when its CPU client starts, instead of the number of cores.
_VARIABLES = ("PJRT_NPROC", "NPROC")
_PER_DEVICE = 3
_MOST = 2**31 - 1


def compute_needed_threads(devices: int) -> int:
    """Return how many threads (NPROC) a process with `devices` CPU devices needs: 3 each, at least one per core."""
    return max(_PER_DEVICE * devices, _count_cores())


def count_client_threads(devices: int) -> int:
    """Return how many threads a pool of XLA's CPU client has: PJRT_NPROC, NPROC or the cores, at least `devices`.

    The client reads the environment once, when it starts.
    """
    found = (_parse_integer(os.environ.get(name)) for name in _VARIABLES)
    return max(devices, next((each for each in found if each is not None), _count_cores()))


def warn_of_few_threads(mesh: Mesh) -> None:
    """Warn, once per process, if XLA has too few threads for a mesh's CPU devices and might deadlock.

    The RuntimeWarning names NPROC, its value and the line that sets it. Other meshes, and those of a single device, do
    not warn.
    """
    first = mesh.devices.flat[0]
    count = len(mesh.local_devices)
    if first.platform != "cpu" or count < 2:
        return
    clients = len(first.client.local_devices())
    threads = count_client_threads(clients)
    wanted = compute_needed_threads(clients)
    if threads >= _PER_DEVICE * count:
        return
    given = (each for each in _VARIABLES if _parse_integer(os.environ.get(each)) is not None)
    name = next(given, _VARIABLES[-1])
    value = os.environ.get(name)
    warn_once(
        RuntimeWarning,
        "mesh",
        f"mesh: {count} CPU devices share {threads} threads, {name} is {'not set' if value is None else repr(value)}:"
        " on a busy machine they may wait for a thread for ever, and XLA ends the process;"
        f" set os.environ[{name!r}] = '{wanted}' before JAX starts, or start with {name}={wanted} python",
    )


def _count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _parse_integer(text: str | None) -> int | None:
    """Parse an environment variable's text as XLA does; None if the text is no 32-bit integer."""
    if text is None or re.fullmatch(r"\s*[+-]?\d+\s*", text, re.ASCII) is None:
        return None
    number = int(text)
    return number if -_MOST <= number <= _MOST else None
