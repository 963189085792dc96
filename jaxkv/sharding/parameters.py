"""Placement of a model's parameters on a mesh, and the mesh that a model is sharded over."""

import math
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._errors import build_value_error, require
from jaxkv.machine.cpu_threads import warn_of_few_threads
from jaxkv.models.config import ModelConfig
from jaxkv.sharding.mesh import NAMES, build_partition_spec

_AXES = ("data", "model")
# Logical axes by the last part of a parameter's name.
_PARAMETERS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_OF_GROUPS = ("_scales", "_leasts")


def get_parameter_spec(path: str, mesh: Mesh | AbstractMesh | None = None) -> P:
    """Return the PartitionSpec of a parameter such as `blocks.0.attention.q`; with `mesh`, without axes of size 1."""
    name = path.rsplit(".", 1)[-1]
    logical_axes = _PARAMETERS.get(name, "")
    if name.endswith("_scale"):
        # An int8 weight has a scale per output: the weight's axes without the last.
        logical_axes = _PARAMETERS[name.removesuffix("_scale")].rpartition(" ")[0]
    elif name.endswith(_OF_GROUPS):
        # A 4-bit weight has a scale and a minimum per group: the weight's axes, the last by groups.
        logical_axes = _PARAMETERS[name.removesuffix("_scales").removesuffix("_leasts")]
    return build_partition_spec(logical_axes, mesh)


def compute_shard_shape(
    path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> tuple[int, ...]:
    """Return the shape of a parameter's shard on a device; ValueError if 4-bit weights' groups do not divide evenly."""
    spec = get_parameter_spec(path)
    if path.endswith(_OF_GROUPS) and len(spec) == len(shape) and spec[-1] is not None:
        split = math.prod(
            mesh.shape[name] for name in ([spec[-1]] if isinstance(spec[-1], str) else spec[-1])
        )
        remedy = (
            f"{split} devices cannot split rows of {shape[-1]} groups of 32: use "
            "'int8', or fewer devices"
        )
        require(shape[-1] % split == 0, "weights", "int4", remedy)
    return NamedSharding(mesh, spec).shard_shape(shape)


def make_model_mesh(mesh: Any, config: ModelConfig) -> Mesh:
    """Make a mesh (data, kv, rep) from a mesh (data, model): `model` devices shard kv heads first, then query heads.

    If rep has more than one device, kv heads are replicated over rep. TypeError for an object that is not a mesh.
    ValueError for other axes, or for a number of devices that does not divide the model; the message names numbers that
    do. Warns once per process if CPU devices have too few threads.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={type(mesh).__name__}: give jax.make_mesh((2, 4), ('data', 'model')), say"
        )
    remedy = "wrong axes: give a mesh with the axes 'data' and 'model', of size 1 for no sharding"
    require(set(mesh.axis_names) == set(_AXES), "mesh", mesh.axis_names, remedy)
    require(mesh.size > 0, "mesh", dict(mesh.shape), "empty: give a mesh of at least one device")
    kv, rep = compute_kv_rep_sizes(config, mesh.shape["model"])
    warn_of_few_threads(mesh)
    devices = np.moveaxis(mesh.devices, [mesh.axis_names.index(name) for name in _AXES], [0, 1])
    axes = (AxisType.Auto,) * len(NAMES)
    return jax.sharding.Mesh(devices.reshape(-1, kv, rep), NAMES, axis_types=axes)


def make_abstract_mesh(data: int, model: int, config: ModelConfig) -> AbstractMesh:
    """Return the `AbstractMesh` (data, kv, rep) for `data` groups of `model` devices each; no devices are needed."""
    return AbstractMesh(
        (data, *compute_kv_rep_sizes(config, model)),
        NAMES,
        axis_types=(AxisType.Auto,) * len(NAMES),
    )


def compute_kv_rep_sizes(config: ModelConfig, model: int) -> tuple[int, int]:
    """Return mesh sizes (kv, rep) of `model` devices: kv shards kv heads, rep query heads; ValueError if uneven."""
    if not _supports_model_devices(config, model):
        fits = [n for n in range(1, config.heads + 1) if _supports_model_devices(config, n)]
        widths = " and ".join(map(str, config.mlp_widths))
        sizes = f"kv_heads={config.kv_heads}, heads={config.heads}, the MLP's width of {widths}"
        if config.state_layers:
            sizes += f", key_heads={config.state_layers[0].key_heads} of its state layers"
        remedy = f"it does not divide {sizes} and vocab={config.vocab}: give one of {fits}"
        raise build_value_error("mesh.model", model, remedy)
    kv = math.gcd(config.kv_heads, model)
    return kv, model // kv


def _supports_model_devices(config: ModelConfig, model: int) -> bool:
    """True if `model` devices can shard a model's kv heads, query heads, MLP and vocabulary evenly."""
    kv = math.gcd(config.kv_heads, model)
    # A shard of the groups of several kv heads would not be contiguous columns of the output projection.
    rep = model // kv
    split = kv == config.kv_heads and config.group_size % rep == 0
    # A device has all queries of some of the heads that share entries, or some of one's.
    split &= config.heads_per_entry % rep == 0 or rep % config.heads_per_entry == 0
    states = all(each.key_heads % model == 0 for each in config.state_layers)
    widths = all(width % model == 0 for width in config.mlp_widths)
    return (kv == model or split) and widths and config.vocab % model == 0 and states
