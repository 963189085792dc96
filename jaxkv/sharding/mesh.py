"""`Axes` of a mesh, and the placement of arrays on it by their logical axes."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxkv._errors import require
from jaxkv.sharding.logical_axes import known, logical_axes_at, logical_axes_of

_DATA, _KV, _REP = NAMES = ("data", "kv", "rep")
_MODEL = (_KV, _REP)
# Mesh axes by logical axis: B sequences; K kv heads, J the kv heads of all layers, and P rows of their pools; G query
# heads of a kv head; H query heads, F hidden channels of the MLP and V the vocabulary.
LETTERS = {
    "B": (_DATA,),
    "K": (_KV,),
    "J": (_KV,),
    "P": (_KV,),
    "G": (_REP,),
    "H": _MODEL,
    "F": _MODEL,
    "V": _MODEL,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """A mesh with the axes data, kv and rep, over which arrays are sharded by logical axes; a static argument.

    Attributes:
        mesh: mesh from `model_mesh`.
    """

    mesh: Mesh

    @classmethod
    def of(cls, leaf: Any) -> "Axes | None":
        """Return the `Axes` of an array's mesh; None on a single device, or on a mesh with other axes."""
        sharding = getattr(leaf, "sharding", None)
        fits = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == NAMES
        return cls(mesh=typing.cast(Any, sharding).mesh) if fits else None

    def __reduce__(self) -> tuple[Callable[..., "Axes"], tuple[Any, ...]]:
        """Pickle the mesh as platform and device ids, because devices belong to a process."""
        ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        return _of_devices, (self.platform, ids.tolist())

    @property
    def axes(self) -> "Axes":
        """The mesh axes themselves, so that programs accept either `Axes` or a static config with a field `axes`."""
        return self

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices as text, such as cpu or gpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def in_one_memory(self) -> int:
        """Number of this process's devices that share one memory: all on a CPU, else 1."""
        return len(self.mesh.local_devices) if self.platform == "cpu" else 1

    def size(self, logical_axis: str) -> int:
        """Return the number of shards of an array axis named `logical_axis`; 1 if it is replicated."""
        return math.prod(self.mesh.shape[name] for name in LETTERS.get(logical_axis, ()))

    def spec(self, logical_axes: str, shape: tuple[int, ...]) -> P:
        """Return the PartitionSpec of an array by logical axes and shape; ValueError if a size does not divide.

        An axis marked `#` is replicated if its size is 1.
        """
        return _spec(self.mesh, logical_axes, tuple(shape))


def _of_devices(platform: str, ids: list[Any]) -> Axes:
    """Unpickle `Axes` from a platform and device ids; ValueError if this process lacks a device."""
    there, names = {device.id: device for device in jax.devices(platform)}, np.asarray(ids)
    gone = sorted(set(names.ravel().tolist()) - set(there))
    remedy = (
        f"this process has {len(there)} of {platform}: save the cache, and load it with "
        "jaxkv.load_cache"
    )
    require(not gone, "devices", gone, remedy)
    devices = np.array([there[each] for each in names.flat], object).reshape(names.shape)
    return Axes(mesh=Mesh(devices, NAMES, axis_types=(AxisType.Auto,) * len(NAMES)))


@functools.lru_cache(maxsize=4096)
def _spec(mesh: Mesh, logical_axes: str, shape: tuple[int, ...]) -> P:
    """Return the PartitionSpec of an array by logical axes and shape, cached; ValueError if a size does not divide."""
    names = logical_axes.split()
    for at, (name, size) in enumerate(zip(names, shape, strict=False)):
        over = LETTERS.get(name.lstrip("#"), ())
        parts = math.prod(mesh.shape[each] for each in over)
        if name.startswith("#") and size == 1:
            names[at] = "_"
        else:
            remedy = f"not divisible over {'x'.join(over)}={parts}: give a multiple of {parts}"
            require(size % parts == 0, name, size, remedy)
    return partition_spec(" ".join(names), mesh)


def partition_spec(logical_axes: str, mesh: Mesh | AbstractMesh | None = None) -> P:
    """Return the PartitionSpec of logical axes such as "B K D"; with `mesh`, without its axes of size 1.

    Trailing replicated axes are omitted.
    """
    found = [LETTERS.get(name.lstrip("#")) for name in logical_axes.split()]
    split = [
        [name for name in names or () if mesh is None or mesh.shape[name] > 1] for names in found
    ]
    while split and not split[-1]:
        split.pop()
    return P(
        *(None if not names else tuple(names) if len(names) > 1 else names[0] for names in split)
    )


def host(value: Any) -> np.ndarray:
    """Copy an array to the host as numpy; gather its shards if several processes hold them."""
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)


def place(value: Any, logical_axes: str, axes: Axes | None, dtype: Any = None) -> Array:
    """Place a host array on the devices, sharded by its logical axes; on the default device without `axes`."""
    if axes is None or isinstance(value, jax.core.Tracer):
        return jnp.asarray(value, dtype)
    array = np.asarray(value, dtype)
    return put(array, where(logical_axes, array.shape, axes))


def where(logical_axes: str, shape: tuple[int, ...], axes: Axes | None) -> Any:
    """Return the sharding of an array by logical axes and shape; None, the default device, without `axes`."""
    return None if axes is None else _there(axes.mesh, logical_axes, tuple(shape))


def inside() -> bool:
    """True while code for one device of the mesh is traced, inside `shard_map`."""
    return set(NAMES) <= set(jax.sharding.get_abstract_mesh().manual_axes)


@functools.lru_cache(maxsize=4096)
def _there(mesh: Mesh, logical_axes: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return the `NamedSharding` of an array by logical axes and shape, cached."""
    return NamedSharding(mesh, _spec(mesh, logical_axes, shape))


def missing(batch: int, axes: Axes | None) -> int:
    """Return the number of padding sequences that fill a batch up to a multiple of the mesh's data groups."""
    return 0 if axes is None else -batch % axes.size("B")


def settle_down(tree: Any, axes: Axes | None) -> Any:
    """Place a dataclass's arrays on a mesh by the logical axes of its fields; no-op without a mesh or in a program."""
    return tree if axes is None or inside() else tree_placed(tree, type(tree), axes)


def tree_placed(value: Any, hint: Any, axes: Axes) -> Any:
    """Place a pytree's arrays on a mesh by the logical axes of its annotation `hint`."""
    leaves, tree = jax.tree.flatten(value)
    logical_axes = logical_axes_of(value, hint, tree)
    return jax.tree.unflatten(
        tree,
        [leaf_placed(leaf, each, axes) for leaf, each in zip(leaves, logical_axes, strict=True)],
    )


def with_logical_axes(tree: Any) -> list[tuple[Any, str, Any]]:
    """List (path, logical axes, array) of a dataclass's leaves; TypeError for an array without logical axes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (path, known(logical_axes_at(tree, type(tree), path), leaf), leaf) for path, leaf in leaves
    ]


def put(leaf: Any, there: NamedSharding) -> Any:
    """Move an array to a sharding; return it unchanged if it has it. Abstract arrays get the sharding.

    Every process must hold all of a host array or a single-device array.
    """
    if isinstance(leaf, jax.core.Tracer) or getattr(leaf, "sharding", None) == there:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=there)
    keys = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    # Programs return random keys with an equivalent but unequal spec.
    if (
        keys
        and isinstance(leaf.sharding, NamedSharding)
        and leaf.sharding.is_equivalent_to(there, leaf.ndim)
    ):
        return leaf
    if there.is_fully_addressable or (
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ):
        return jax.device_put(leaf, there)
    if keys:
        return jax.random.wrap_key_data(
            put(jax.random.key_data(leaf), there), impl=jax.random.key_impl(leaf)
        )
    # `device_put` would first compare the processes' copies, one round trip per array.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, there, lambda index: whole[index])


def leaf_placed(leaf: Any, logical_axes: str | None, axes: Axes) -> Any:
    """Place an array on a mesh by its logical axes; TypeError if one annotated "..." is not on the mesh."""
    if logical_axes != "...":
        logical_axes = known(logical_axes, leaf)
        return put(leaf, _there(axes.mesh, logical_axes, np.shape(leaf)))
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != axes.mesh:
        raise TypeError(f"a leaf of shape {np.shape(leaf)} is not on {axes.mesh}: place it first")
    return leaf
