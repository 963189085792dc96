"""Several processes that run one program on the devices of all of them: what each was given is compared first.

Such processes wait for one another in every compiled program. Where one of them has failed, or was given something
else, the others would wait in vain: so before they begin they tell one another what they were given, and what went
wrong. It costs a small program a call, and nothing where a mesh lies in one process.
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

from jaxkv._errors import require
from jaxkv._values import shortened
from jaxkv.cpu_threads import warn_of_few_threads
from jaxkv.sharding.mesh import host

# Of what a process tells the others at a time, and of the message that may be in it.
_BYTES, _CHARACTERS = 2048, 300
_SHOWN = 60
# Larger arrays are compared by shape and dtype alone.
_COMPARED = 2**24


def speaks() -> bool:
    """Whether this process shows bars: of several, the first one does."""
    return jax.process_index() == 0


def spans(mesh: Any) -> bool:
    """Whether several processes share a mesh; they must then all do the same.

    Args:
        mesh: a mesh, or anything else.

    Returns:
        False for what is no mesh.
    """
    return isinstance(mesh, Mesh) and mesh.is_multi_process


def require_same(call: str, params: Any, mesh: Any, **given: Any) -> None:
    """Refuses, in all processes of a mesh, what was not given to all of them alike. They must come here in step.

    Args:
        call: what was called.
        params: the model, whatever was given as one; it says where it lies, and which weights it has.
        mesh: what was given as the mesh to run on; None for where the model lies.
        given: the other arguments as they came, right or wrong.

    Raises:
        ValueError: naming the argument, and a process to which another one was given.
    """
    if not isinstance(mesh, Mesh):
        mesh = getattr(getattr(params, "axes", None), "mesh", None)
    if not spans(mesh):
        return
    weights = [getattr(params, name, None) for name in ("fingerprint", "filter_layers")]
    given = {"mesh": mesh, "params": weights} | given
    digests = {name: hashlib.sha256(_told(value).encode()).hexdigest()[:12] for name, value in given.items()}
    heard = _exchanged(mesh, call, digests)
    for name, value in given.items():
        first, *others = heard
        other = next((each for each in others if heard[each][name] != heard[first][name]), None)
        mine = params if name == "params" else _told(value) if isinstance(value, jax.Array) else value
        remedy = f"process {other} was given another one than process {first}: give all processes the same"
        require(other is None, name, mine if len(repr(mine)) <= _SHOWN else shortened(str(mine), _SHOWN), remedy)


@contextlib.contextmanager
def together(what: str, mesh: Any) -> Iterator[None]:
    """Around what may fail in one of a mesh's processes: all fail then. Nothing inside may wait for another process.

    Args:
        what: is done inside.
        mesh: the mesh, or None.

    Raises:
        RuntimeError: where another process has failed, naming it and with its message.
    """
    if not spans(mesh):
        yield
        return
    try:
        yield
    except Exception as error:
        _exchanged(mesh, what, {"failed": f"{type(error).__name__}: {error}"[:_CHARACTERS]})
        raise
    for process, told in _exchanged(mesh, what, {}).items():
        if "failed" in told:
            raise RuntimeError(f"{what} failed in process {process}: {told['failed']}")


def least(number: int | None, mesh: Any) -> int | None:
    """The smallest of the numbers that a mesh's processes have, for what they must decide alike.

    Args:
        number: this process'; None for none.
        mesh: the mesh, or None.

    Returns:
        The smallest; None if no process has one.
    """
    if not spans(mesh):
        return number
    numbers = [told["number"] for told in _exchanged(mesh, "least", {"number": number}).values()]
    return min((each for each in numbers if each is not None), default=None)


def _exchanged(mesh: Mesh, call: str, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What each of a mesh's processes says, in their order. Processes that are at different calls are told so."""
    text = json.dumps({"call": call} | mine, ensure_ascii=False).encode(errors="replace")
    line = np.zeros((1, _BYTES), np.uint8)
    line[0, : len(text)] = np.frombuffer(text, np.uint8)
    # It runs a program on all devices, before a model was put there.
    warn_of_few_threads(mesh)
    # In the one order that does not depend on how the mesh was made: that may be what differs.
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    flat = Mesh(np.asarray(devices), ("all",), axis_types=(AxisType.Auto,))
    there = NamedSharding(flat, P("all"))
    lines = host(jax.make_array_from_callback((len(devices), _BYTES), there, lambda index: line))
    said = {device.process_index: bytes(each).rstrip(b"\0") for device, each in zip(devices, lines, strict=True)}
    heard = {process: json.loads(said[process]) for process in sorted(said)}
    calls = {process: told["call"] for process, told in heard.items()}
    require(len(set(calls.values())) == 1, "call", call, f"processes are at different ones, {calls}: keep them in step")
    return heard


def _told(value: Any) -> str:
    """A value in words that are the same in every process; objects of unknown classes by their class alone."""
    if isinstance(value, (list, tuple)):
        plain = all(type(each) in (int, str) for each in value)
        return repr(list(value)) if plain else f"[{','.join(map(_told, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_told(key)}:{_told(each)}' for key, each in value.items())}}}"
    if isinstance(value, (jax.Array, np.ndarray)):
        return _told_array(value)
    if isinstance(value, Mesh):
        return f"{value.axis_names}{value.devices.shape}{[device.id for device in value.devices.flat]}"
    of = value if isinstance(value, type) else type(value)
    name = f"{of.__module__}.{of.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{name}({','.join(f'{each.name}={_told(getattr(value, each.name))}' for each in _fields(value))})"
    known = value is None or isinstance(value, (bool, int, float, str, bytes, np.generic, enum.Enum))
    return f"{name}:{value!r}" if known else name


def _fields(value: Any) -> tuple[dataclasses.Field, ...]:
    return tuple(each for each in dataclasses.fields(value) if each.compare)


def _told_array(array: jax.Array | np.ndarray) -> str:
    told = f"{array.dtype}{array.shape}"
    if isinstance(array, jax.Array):
        if array.is_deleted() or not array.is_fully_addressable:
            return told
        array = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    if array.nbytes > _COMPARED or array.dtype == object:
        return told
    return told + hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
