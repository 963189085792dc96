"""Where arrays lie on a mesh, by the letters of their axes, and how they get there."""

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
from jaxkv._values import Value
from jaxkv.sharding.letters import known, letters_at, letters_of

_DATA, _KV, _REP = NAMES = ("data", "kv", "rep")
_MODEL = (_KV, _REP)
# Sequences; kv heads, and rows of their pools; query heads of each; query heads, the MLP's and the vocabulary's rows.
LETTERS = {"B": (_DATA,), "K": (_KV,), "P": (_KV,), "G": (_REP,), "H": _MODEL, "F": _MODEL, "V": _MODEL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes(Value):
    """A mesh whose axes are told by the letters of arrays: static in every program that runs on it.

    Attributes:
        mesh: from `model_mesh`.
    """

    mesh: Mesh

    def __post_init__(self) -> None:
        remedy = "give what model_mesh makes of a mesh with the axes 'data' and 'model'"
        require(isinstance(self.mesh, Mesh) and self.mesh.axis_names == NAMES, "mesh", self.mesh, remedy)

    @classmethod
    def of(cls, leaf: Any) -> "Axes | None":
        """The axes that an array is split over; None for one that lies on a single device, or in a user's own way."""
        sharding = getattr(leaf, "sharding", None)
        fits = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == NAMES
        return cls(mesh=typing.cast(Any, sharding).mesh) if fits else None

    def __reduce__(self) -> tuple[Callable[..., "Axes"], tuple[Any, ...]]:
        """Devices are a process' own: what is pickled of a cache names them."""
        ids = np.vectorize(lambda device: device.id, otypes=[int])(self.mesh.devices)
        return _of_devices, (self.platform, ids.tolist())

    @property
    def axes(self) -> "Axes":
        """These; so that programs can be given them alone, or in what else is static."""
        return self

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    @property
    def in_one_memory(self) -> int:
        """Devices of this process that share their memory: those of a CPU do."""
        return len(self.mesh.local_devices) if self.platform == "cpu" else 1

    @property
    def processes(self) -> int:
        """How many processes the devices belong to."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def size(self, letter: str) -> int:
        """Parts that an axis of this letter is cut into."""
        return math.prod(self.mesh.shape[name] for name in LETTERS.get(letter, ()))

    def spec(self, letters: str, shape: tuple[int, ...]) -> P:
        """Which axes of the mesh a whole array's axes are split over.

        Args:
            letters: of its axes, as its annotation has them; an axis behind `#` may be 1, and is then not split.
            shape: its sizes.

        Returns:
            The spec.

        Raises:
            ValueError: if two letters want the same axis of the mesh, or a size does not divide.
        """
        return _spec(self.mesh, letters, tuple(shape))


def _of_devices(platform: str, ids: list[Any]) -> Axes:
    there, names = {device.id: device for device in jax.devices(platform)}, np.asarray(ids)
    gone = sorted(set(names.ravel().tolist()) - set(there))
    remedy = f"this process has {len(there)} of {platform}: a cache goes to others by its save, and jaxkv.load_cache"
    require(not gone, "devices", gone, remedy)
    devices = np.array([there[each] for each in names.flat], object).reshape(names.shape)
    return Axes(mesh=Mesh(devices, NAMES, axis_types=(AxisType.Auto,) * len(NAMES)))


@functools.lru_cache(maxsize=4096)
def _spec(mesh: Mesh, letters: str, shape: tuple[int, ...]) -> P:
    names = letters.split()
    for at, (name, size) in enumerate(zip(names, shape, strict=False)):
        over = LETTERS.get(name.lstrip("#"), ())
        parts = math.prod(mesh.shape[each] for each in over)
        if name.startswith("#") and size == 1:
            names[at] = "_"
        else:
            remedy = f"it is split over {'x'.join(over)}={parts}: give a multiple of {parts}"
            require(size % parts == 0, name, size, remedy)
    return spec_of_letters(" ".join(names), mesh)


def spec_of_letters(letters: str, mesh: Mesh | AbstractMesh | None = None) -> P:
    """Axes of a mesh for letters, those that are not split at the end left out.

    Args:
        letters: of an array's axes.
        mesh: whose axes of one device are left out, too: what comes out of programs is told without them.

    Returns:
        The spec.

    Raises:
        ValueError: if two letters want the same axis of the mesh.
    """
    found = [LETTERS.get(name.lstrip("#")) for name in letters.split()]
    taken = [name for names in found for name in names or ()]
    remedy = f"two of them want one axis of the mesh ({', '.join(taken)}): give one another letter"
    require(len(taken) == len(set(taken)), "letters", letters, remedy)
    split = [[name for name in names or () if mesh is None or mesh.shape[name] > 1] for names in found]
    while split and not split[-1]:
        split.pop()
    return P(*(None if not names else tuple(names) if len(names) > 1 else names[0] for names in split))


def host(value: Any) -> np.ndarray:
    """The whole of an array, on the host: of every process' parts, where there are several."""
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(value, tiled=True))
    return np.asarray(value)


def place(value: Any, letters: str, axes: Axes | None, dtype: Any = None) -> Array:
    """An array of the host's on the devices.

    Args:
        value: the array.
        letters: of its axes.
        axes: of the mesh; None for the default device.
        dtype: of the result; by default as it is.

    Returns:
        The array.
    """
    if axes is None or isinstance(value, jax.core.Tracer):
        return jnp.asarray(value, dtype)
    array = np.asarray(value, dtype)
    return put(array, where(letters, array.shape, axes))


def where(letters: str, shape: tuple[int, ...], axes: Axes | None) -> Any:
    """Where an array of these letters is to lie: the `device` of `jnp.zeros`, None for the default one."""
    return None if axes is None else _there(axes.mesh, letters, tuple(shape))


def inside() -> bool:
    """Whether what is being traced is the code of one device of a mesh."""
    return set(NAMES) <= set(jax.sharding.get_abstract_mesh().manual_axes)


@functools.lru_cache(maxsize=4096)
def _there(mesh: Mesh, letters: str, shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(mesh, _spec(mesh, letters, shape))


def missing(batch: int, axes: Axes | None) -> int:
    """Sequences that a batch is short of as many for each of a mesh's groups."""
    return 0 if axes is None else -batch % axes.size("B")


def settle_down(tree: Any, axes: Axes | None) -> Any:
    """A dataclass of arrays where its fields' letters say: programs then find them as those before left them."""
    return tree if axes is None or inside() else tree_placed(tree, type(tree), axes)


def tree_placed(value: Any, hint: Any, axes: Axes) -> Any:
    """A pytree whose arrays lie where the letters of its annotation say."""
    leaves, tree = jax.tree.flatten(value)
    letters = letters_of(value, hint, tree)
    return jax.tree.unflatten(tree, [leaf_placed(leaf, each, axes) for leaf, each in zip(leaves, letters, strict=True)])


def lettered(tree: Any) -> list[tuple[Any, str, Any]]:
    """The leaves of a dataclass of arrays: where each lies in it, the letters of its axes, and itself."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(path, known(letters_at(tree, type(tree), path), leaf), leaf) for path, leaf in leaves]


def put(leaf: Any, there: NamedSharding) -> Any:
    """An array there: of the host's or of one device's, which every process holds whole, or one that lies on a mesh.

    Args:
        leaf: the array.
        there: where it is to lie.

    Returns:
        The array; the same one if it lies there.
    """
    if isinstance(leaf, jax.core.Tracer) or getattr(leaf, "sharding", None) == there:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=there)
    keys = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    # Random keys come out of programs with a spec that says the same in other words.
    if keys and isinstance(leaf.sharding, NamedSharding) and leaf.sharding.is_equivalent_to(there, leaf.ndim):
        return leaf
    if there.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, there)
    if keys:
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), there), impl=jax.random.key_impl(leaf))
    # Every process holds it whole. `device_put` would compare them first, at a round trip for each array.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, there, lambda index: whole[index])


def leaf_placed(leaf: Any, letters: str | None, axes: Axes) -> Any:
    """An array that lies where its letters say; one annotated "..." must lie on that mesh already."""
    if letters != "...":
        letters = known(letters, leaf)
        return put(leaf, _there(axes.mesh, letters, np.shape(leaf)))
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != axes.mesh:
        raise TypeError(f"a leaf of shape {np.shape(leaf)} lies elsewhere than on {axes.mesh}")
    return leaf
