"""Meshes over several processes: compares their arguments and shares their failures before they compute.

Such processes wait for one another in every compiled program. If one of them fails, or is called with other arguments,
the others would wait for ever. A comparison costs one small program per call, and nothing for a mesh within one
process.
"""

import contextlib
import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._checks import shorten_text
from jaxkv._errors import require
from jaxkv.machine.cpu_threads import warn_of_few_threads
from jaxkv.sharding.mesh import copy_to_host

# Bytes of one message to the other processes, and characters of an error in it.
_BYTES = 2048
_CHARACTERS = 300
_SHOWN = 60
# Larger arrays are compared only by shape and dtype.
_COMPARED = 2**24


def is_first_process() -> bool:
    """Return True in the process of index 0, which alone shows progress bars and writes shared files."""
    return jax.process_index() == 0


def has_several_processes(mesh: Any) -> bool:
    """Return True if a mesh's devices belong to several processes, which must all make the same calls."""
    return isinstance(mesh, Mesh) and mesh.is_multi_process


def require_same_arguments(call: str, params: Any, mesh: Any, **given: Any) -> None:
    """Raise ValueError in all processes of a mesh if the arguments of their calls differ; all must call this in step.

    Args:
        call: name of the called function.
        params: the argument for the model: its mesh, fingerprint and filter layers are compared.
        mesh: the argument for the mesh; None for the model's.
        given: the other arguments, not yet validated.

    Raises:
        ValueError: with the name of the argument, and a process with another value.
    """
    if not isinstance(mesh, Mesh):
        mesh = getattr(getattr(params, "axes", None), "mesh", None)
    if not has_several_processes(mesh):
        return
    weights = [getattr(params, name, None) for name in ("fingerprint", "filter_layers")]
    given = {"mesh": mesh, "params": weights} | given
    digests = {
        name: hashlib.sha256(_describe_value(value).encode()).hexdigest()[:12]
        for name, value in given.items()
    }
    heard = _exchange_messages(mesh, call, digests)
    for name, value in given.items():
        first, *others = heard
        other = next((each for each in others if heard[each][name] != heard[first][name]), None)
        mine = (
            params
            if name == "params"
            else _describe_value(value)
            if isinstance(value, jax.Array)
            else value
        )
        remedy = (
            f"process {other} has another value than process {first}: use the same in all processes"
        )
        require(
            other is None,
            name,
            mine if len(repr(mine)) <= _SHOWN else shorten_text(str(mine), _SHOWN),
            remedy,
        )


@contextlib.contextmanager
def share_failures(what: str, mesh: Any) -> Iterator[None]:
    """Context manager: if the work inside fails in one process of a mesh, all of its processes raise.

    The block must not wait for another process. `what` names the work in errors; with mesh None there is one process.
    """
    if not has_several_processes(mesh):
        yield
        return
    try:
        yield
    except Exception as error:
        _exchange_messages(mesh, what, {"failed": f"{type(error).__name__}: {error}"[:_CHARACTERS]})
        raise
    for process, message in _exchange_messages(mesh, what, {}).items():
        if "failed" in message:
            raise RuntimeError(f"{what} failed in process {process}: {message['failed']}")


def find_process_minimum(number: int | None, mesh: Any) -> int | None:
    """Return the minimum of one number per process over a mesh's processes, ignoring None; None if all are None."""
    if not has_several_processes(mesh):
        return number
    numbers = [
        message["number"]
        for message in _exchange_messages(mesh, "least", {"number": number}).values()
    ]
    return min((each for each in numbers if each is not None), default=None)


def _exchange_messages(mesh: Mesh, call: str, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Send a dict to all processes of a mesh; return a dict of every process's message by process index.

    Raises ValueError if the processes are at different calls.
    """
    text = json.dumps({"call": call} | mine, ensure_ascii=False).encode(errors="replace")
    message = np.zeros((1, _BYTES), np.uint8)
    message[0, : len(text)] = np.frombuffer(text, np.uint8)
    # The exchange below runs a program on all devices, possibly the process's first one.
    warn_of_few_threads(mesh)
    # Sorted by id, because the order of devices in the mesh may differ between processes.
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    flat = Mesh(np.asarray(devices), ("all",), axis_types=(AxisType.Auto,))
    there = NamedSharding(flat, P("all"))
    messages = copy_to_host(
        jax.make_array_from_callback((len(devices), _BYTES), there, lambda index: message)
    )
    texts = {
        device.process_index: bytes(each).rstrip(b"\0")
        for device, each in zip(devices, messages, strict=True)
    }
    heard = {process: json.loads(texts[process]) for process in sorted(texts)}
    calls = {process: each["call"] for process, each in heard.items()}
    require(
        len(set(calls.values())) == 1,
        "call",
        call,
        f"processes are at different calls, {calls}: keep them in step",
    )
    return heard


def _describe_value(value: Any) -> str:
    """Return a text of a value, equal in all processes for equal values; for unknown classes, the class name only."""
    if isinstance(value, (list, tuple)):
        plain = all(type(each) in (int, str) for each in value)
        return repr(list(value)) if plain else f"[{','.join(map(_describe_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_describe_value(key)}:{_describe_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, (jax.Array, np.ndarray)):
        return _describe_array(value)
    if isinstance(value, Mesh):
        return (
            f"{value.axis_names}{value.devices.shape}{[device.id for device in value.devices.flat]}"
        )
    of = value if isinstance(value, type) else type(value)
    name = f"{of.__module__}.{of.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each for each in dataclasses.fields(value) if each.compare]
        return f"{name}({','.join(f'{each.name}={_describe_value(getattr(value, each.name))}' for each in fields)})"
    known = value is None or isinstance(
        value, (bool, int, float, str, bytes, np.generic, enum.Enum)
    )
    return f"{name}:{value!r}" if known else name


def _describe_array(array: jax.Array | np.ndarray) -> str:
    """Return a text of an array's dtype and shape, with a hash of its bytes if it is small and fully addressable."""
    shape = f"{array.dtype}{array.shape}"
    if isinstance(array, jax.Array):
        if array.is_deleted() or not array.is_fully_addressable:
            return shape
        array = (
            jax.random.key_data(array)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            else array
        )
    if array.nbytes > _COMPARED or array.dtype == object:
        return shape
    return shape + hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
