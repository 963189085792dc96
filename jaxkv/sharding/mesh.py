"""`ShardingMesh` of a mesh, and the placement of arrays on it by their logical axes."""

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

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.sharding.logical_axes import find_logical_axes, list_logical_axes, require_logical_axes

_DATA, _KV, _REP = NAMES = ("data", "kv", "rep")
_MODEL = (_KV, _REP)
# Mesh axes by logical axis: B sequences; K kv heads, J the kv heads of all layers, and P rows of their pools; G query
# heads of a kv head; H query heads, or key heads of a state, F hidden channels of the MLP and V the vocabulary.
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


@frozen_dataclass
class ShardingMesh:
    """Wrapper of a mesh with axes data, kv and rep, which shards arrays by logical axes; a hashable static argument.

    Attributes:
        mesh: mesh from `make_model_mesh`.
    """

    mesh: Mesh

    @classmethod
    def get_array_mesh(cls, leaf: Any) -> "ShardingMesh | None":
        """Return the `ShardingMesh` that an array is sharded over; None on one device, or on a mesh with other axes."""
        sharding = getattr(leaf, "sharding", None)
        fits = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == NAMES
        return cls(mesh=typing.cast(Any, sharding).mesh) if fits else None

    def __reduce__(self) -> tuple[Callable[..., "ShardingMesh"], tuple[Any, ...]]:
        """Return what pickle stores: the function `_unpickle_mesh` and its arguments, platform and device ids."""
        ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        return _unpickle_mesh, (self.platform, ids.tolist())

    @property
    def axes(self) -> "ShardingMesh":
        """The `ShardingMesh` itself, so that programs accept it in place of a static config with a field `axes`."""
        return self

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices as text, such as cpu or gpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def devices_sharing_memory(self) -> int:
        """Number of this process's mesh devices that share one memory: all on a CPU, else 1."""
        return len(self.mesh.local_devices) if self.platform == "cpu" else 1

    def count_axis_shards(self, logical_axis: str) -> int:
        """Return the number of devices that an axis named `logical_axis` is sharded over; 1 if it is replicated."""
        return math.prod(self.mesh.shape[name] for name in LETTERS.get(logical_axis, ()))

    def get_array_spec(self, logical_axes: str, shape: tuple[int, ...]) -> P:
        """Return an array's PartitionSpec by logical axes and shape; ValueError if devices do not divide a size.

        An axis marked `#` is replicated if its size is 1.
        """
        return _get_cached_spec(self.mesh, logical_axes, tuple(shape))


def _unpickle_mesh(platform: str, ids: list[Any]) -> ShardingMesh:
    """Return the `ShardingMesh` of a platform and device ids from a pickle; ValueError if a device is missing."""
    there = {device.id: device for device in jax.devices(platform)}
    names = np.asarray(ids)
    gone = sorted(set(names.ravel().tolist()) - set(there))
    remedy = (
        f"this process has {len(there)} of {platform}: save the cache, and load it with "
        "jaxkv.load_cache"
    )
    require(not gone, "devices", gone, remedy)
    devices = np.array([there[each] for each in names.flat], object).reshape(names.shape)
    return ShardingMesh(mesh=Mesh(devices, NAMES, axis_types=(AxisType.Auto,) * len(NAMES)))


@functools.lru_cache(maxsize=4096)
def _get_cached_spec(mesh: Mesh, logical_axes: str, shape: tuple[int, ...]) -> P:
    """Return an array's PartitionSpec by logical axes and shape, cached; ValueError if devices do not divide a size."""
    names = logical_axes.split()
    for at, (name, size) in enumerate(zip(names, shape, strict=False)):
        over = LETTERS.get(name.lstrip("#"), ())
        parts = math.prod(mesh.shape[each] for each in over)
        if name.startswith("#") and size == 1:
            names[at] = "_"
        else:
            remedy = f"not divisible over {'x'.join(over)}={parts}: give a multiple of {parts}"
            require(size % parts == 0, name, size, remedy)
    return build_partition_spec(" ".join(names), mesh)


def build_partition_spec(logical_axes: str, mesh: Mesh | AbstractMesh | None = None) -> P:
    """Return the PartitionSpec of logical axes such as "B K D"; with `mesh`, without mesh axes of size 1.

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


def copy_to_host(value: Any) -> np.ndarray:
    """Return an array as numpy on the host, complete on every process: shards of other processes are gathered."""
    if isinstance(value, jax.Array) and not (
        value.is_fully_addressable or value.is_fully_replicated
    ):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)


def place_host_array(
    value: Any, logical_axes: str, axes: ShardingMesh | None, dtype: Any = None
) -> Array:
    """Put an array on a mesh or default device by logical axes, in `dtype` if given; tracers are only cast."""
    if axes is None or isinstance(value, jax.core.Tracer):
        return jnp.asarray(value, dtype)
    array = np.asarray(value, dtype)
    return move_to_sharding(array, get_array_sharding(logical_axes, array.shape, axes))


def get_array_sharding(logical_axes: str, shape: tuple[int, ...], axes: ShardingMesh | None) -> Any:
    """Return the `NamedSharding` of an array by logical axes and shape; None, the default device, without `axes`."""
    return None if axes is None else _get_named_sharding(axes.mesh, logical_axes, tuple(shape))


def is_inside_shard_map() -> bool:
    """True while the code of one device is traced inside `shard_map` over the axes data, kv and rep."""
    return set(NAMES) <= set(jax.sharding.get_abstract_mesh().manual_axes)


@functools.lru_cache(maxsize=4096)
def _get_named_sharding(mesh: Mesh, logical_axes: str, shape: tuple[int, ...]) -> NamedSharding:
    """Return the `NamedSharding` of an array by logical axes and shape, cached."""
    return NamedSharding(mesh, _get_cached_spec(mesh, logical_axes, shape))


def count_padding_sequences(batch: int, axes: ShardingMesh | None) -> int:
    """Return how many padding sequences fill a batch up to a multiple of the mesh's data groups; 0 without a mesh."""
    return 0 if axes is None else -batch % axes.count_axis_shards("B")


def place_dataclass_on_mesh(tree: Any, axes: ShardingMesh | None) -> Any:
    """Return a dataclass, its arrays placed on a mesh by logical axes; unchanged without a mesh or in shard_map."""
    return (
        tree
        if axes is None or is_inside_shard_map()
        else place_tree_on_mesh(tree, type(tree), axes)
    )


def place_tree_on_mesh(value: Any, hint: Any, axes: ShardingMesh) -> Any:
    """Return a pytree with its arrays placed on a mesh by the logical axes of its annotation `hint`."""
    leaves, tree = jax.tree.flatten(value)
    logical_axes = list_logical_axes(value, hint, tree)
    return jax.tree.unflatten(
        tree,
        [
            place_leaf_on_mesh(leaf, each, axes)
            for leaf, each in zip(leaves, logical_axes, strict=True)
        ],
    )


def list_leaves_with_axes(tree: Any) -> list[tuple[Any, str, Any]]:
    """Return a list (path, logical axes, array) of a dataclass's leaves; TypeError if an array has no logical axes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (path, require_logical_axes(find_logical_axes(tree, type(tree), path), leaf), leaf)
        for path, leaf in leaves
    ]


def move_to_sharding(leaf: Any, there: NamedSharding) -> Any:
    """Return an array moved to a sharding, itself if traced or there already; abstract arrays only get the sharding.

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
            move_to_sharding(jax.random.key_data(leaf), there), impl=jax.random.key_impl(leaf)
        )
    # `device_put` would first compare the processes' copies, one round trip per array.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, there, lambda index: whole[index])


def place_leaf_on_mesh(leaf: Any, logical_axes: str | None, axes: ShardingMesh) -> Any:
    """Return an array placed on a mesh by its logical axes; one of axes "..." must be there already, else TypeError."""
    if logical_axes != "...":
        logical_axes = require_logical_axes(logical_axes, leaf)
        return move_to_sharding(leaf, _get_named_sharding(axes.mesh, logical_axes, np.shape(leaf)))
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != axes.mesh:
        raise TypeError(f"a leaf of shape {np.shape(leaf)} is not on {axes.mesh}: place it first")
    return leaf
