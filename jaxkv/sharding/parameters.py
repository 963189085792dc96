"""Where a model's parameters lie on a mesh, and what a device has of the model."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxkv._errors import require
from jaxkv.cpu_threads import warn_of_few_threads
from jaxkv.models.config import ModelConfig
from jaxkv.sharding.mesh import NAMES, spec_of_letters

_AXES = ("data", "model")
# By the last part of the name; all others lie whole on every device, biases that are added after the sum among them.
_PARAMETERS = {
    "q": "K G D E",
    "q_bias": "K G D",
    "kv": "2 K D E",
    "kv_bias": "2 K D",
    "gate_up": "2 F E",
    "gate_up_bias": "2 F",
    "out": "E H",
    "down": "E F",
    "up": "F E",
    "up_bias": "F",
    "experts_gate_up": "X 2 F E",
    "experts_down": "X E F",
    "embedding": "V E",
    "head": "V E",
}


def spec_of(path: str, mesh: Mesh | AbstractMesh | None = None) -> P:
    """Which axes of the mesh a parameter's axes are split over.

    Args:
        path: the parameter's name, `blocks.0.attention.q` say.
        mesh: from `model_mesh`, whose axes of one device are left out.

    Returns:
        Its spec, on a mesh of `model_mesh`.
    """
    return spec_of_letters(_PARAMETERS.get(path.rsplit(".", 1)[-1], ""), mesh)


def model_mesh(mesh: Any, config: ModelConfig) -> Mesh:
    """A user's mesh as a model splits over it: kv heads first, then the query heads of each.

    Args:
        mesh: with the axes "data" and "model".
        config: the model's shape.

    Returns:
        The same devices with the axes "data", "kv" and "rep"; where "rep" has more than one, kv heads are copied.

    Raises:
        TypeError: for anything but a mesh.
        ValueError: for other axes, and for a number of devices that does not divide the model; it names those that do.

    Warns:
        RuntimeWarning: once per process, for CPU devices that have too few threads.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={type(mesh).__name__}: give jax.make_mesh((2, 4), ('data', 'model')), say")
    remedy = "give a mesh with the axes 'data' and 'model', of size 1 where nothing is split"
    require(set(mesh.axis_names) == set(_AXES), "mesh", mesh.axis_names, remedy)
    require(mesh.size > 0, "mesh", dict(mesh.shape), "give one of at least one device")
    kv, rep = split_of(config, mesh.shape["model"])
    warn_of_few_threads(mesh)
    devices = np.moveaxis(mesh.devices, [mesh.axis_names.index(name) for name in _AXES], [0, 1])
    axes = (AxisType.Auto,) * len(NAMES)
    return jax.sharding.Mesh(devices.reshape(-1, kv, rep), NAMES, axis_types=axes)


def abstract_mesh(data: int, model: int, config: ModelConfig) -> AbstractMesh:
    """What `model_mesh` makes of a mesh of so many devices, without the devices.

    Args:
        data: groups of devices that take a part of the prompts each.
        model: devices of each, which a model is split over.
        config: the model's shape.

    Returns:
        The mesh.

    Raises:
        ValueError: for a number of devices that does not divide the model; it names those that do.
    """
    return AbstractMesh((data, *split_of(config, model)), NAMES, axis_types=(AxisType.Auto,) * len(NAMES))


def split_of(config: ModelConfig, model: int) -> tuple[int, int]:
    """How many devices share the kv heads, and how many the query heads of each.

    Args:
        config: the model's shape.
        model: devices that it is split over.

    Returns:
        Both; their product is `model`.

    Raises:
        ValueError: for a number that does not divide the model; it names those that do.
    """
    fits = [n for n in range(1, config.heads + 1) if _divides(config, n)]
    sizes = f"kv_heads={config.kv_heads}, heads={config.heads}, the MLP's width of {config.hidden}"
    remedy = f"it does not divide {sizes} and vocab={config.vocab}: give one of {fits}"
    require(model in fits, "mesh.model", model, remedy)
    kv = math.gcd(config.kv_heads, model)
    return kv, model // kv


def _divides(config: ModelConfig, model: int) -> bool:
    kv = math.gcd(config.kv_heads, model)
    # Several kv heads with a part of each one's group would be no stretch of the output projection's columns.
    split = kv == config.kv_heads and config.group % (model // kv) == 0
    return (kv == model or split) and config.hidden % model == 0 and config.vocab % model == 0
