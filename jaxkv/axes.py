"""Where arrays lie on a mesh, by the letters of their axes, and the one door through which programs are compiled.

Inside a program every array is one device's part, and the code is the code of one device. What differs stands here: the
functions at the end, which change nothing without a mesh.
"""

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxkv._errors import require
from jaxkv._letters import hints_of, known, letters_at, letters_of
from jaxkv._values import Value

_DATA, _KV, _REP = NAMES = ("data", "kv", "rep")
_MODEL = (_KV, _REP)
# Sequences; kv heads, and rows of their pools; query heads of each; query heads, the MLP's and the vocabulary's rows.
_LETTERS = {"B": (_DATA,), "K": (_KV,), "P": (_KV,), "G": (_REP,), "H": _MODEL, "F": _MODEL, "V": _MODEL}


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
        return math.prod(self.mesh.shape[name] for name in _LETTERS.get(letter, ()))

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
        over = _LETTERS.get(name.lstrip("#"), ())
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
    found = [_LETTERS.get(name.lstrip("#")) for name in letters.split()]
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
    return tree if axes is None or inside() else _as_said(tree, type(tree), axes)


def _as_said(value: Any, hint: Any, axes: Axes) -> Any:
    leaves, tree = jax.tree.flatten(value)
    letters = letters_of(value, hint, tree)
    return jax.tree.unflatten(tree, [_settled(leaf, each, axes) for leaf, each in zip(leaves, letters, strict=True)])


def lettered(tree: Any) -> list[tuple[Any, str, Any]]:
    """The leaves of a dataclass of arrays: where each lies in it, the letters of its axes, and itself."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
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
    if there.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
        return jax.device_put(leaf, there)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), there), impl=jax.random.key_impl(leaf))
    # Every process holds it whole. `device_put` would compare them first, at a round trip for each array.
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, there, lambda index: whole[index])


def _settled(leaf: Any, letters: str | None, axes: Axes) -> Any:
    if letters != "...":
        letters = known(letters, leaf)
        return put(leaf, _there(axes.mesh, letters, np.shape(leaf)))
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != axes.mesh:
        raise TypeError(f"a leaf of shape {np.shape(leaf)} lies elsewhere than on {axes.mesh}")
    return leaf


class Door:
    """A function as a program: `jax.jit`, and on a mesh the same function of each device's parts.

    Where arrays lie follows from the letters in the annotations of the function and of the dataclasses it takes and
    gives; what is annotated "..." stays where it is, parameters say.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static: tuple[str, ...],
        donate: tuple[str, ...],
        on: str,
        compiler: dict[str, str],
    ):
        self._fn, self._static, self._given, self._on = fn, static, donate, on
        self._signature = inspect.signature(fn)
        self._nested: Any = jax.jit(fn, static_argnames=static) if compiler else None
        self._plain: Any = jax.jit(fn, static_argnames=static, donate_argnames=donate, compiler_options=compiler)
        run = functools.wraps(self._run)(lambda *args, **options: self._run(*args, **options))
        # Profiles call it as they do without a mesh.
        run.__name__ = fn.__name__
        statics = ("axes", "ins", "statics")
        self._split: Any = jax.jit(run, static_argnames=statics, donate_argnames=("given",), compiler_options=compiler)
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Runs the program."""
        axes = self._axes(options)
        if axes is None or inside():
            traced = self._nested and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
            return (self._nested if traced else self._plain)(*args, **options)
        given, rest, static = self._bound(axes, args, options)
        return self._split(given, rest, **static)

    def apart(self, *args: Any, **options: Any) -> tuple[Callable[..., Any], list[tuple[Any, str | None, Any]], int]:
        """The program as a function of flat arrays: these with path and letters, and how many it may write first."""
        axes, given, hints = self._axes(options), self._signature.bind(*args, **options).arguments, hints_of(self._fn)
        statics = tuple((name, value) for name, value in given.items() if name in self._static)
        arrays = {name: value for name, value in given.items() if name not in self._static}
        sides = tuple({name: arrays[name] for name in arrays if (name in self._given) == may} for may in (True, False))
        paths, tree = jax.tree_util.tree_flatten_with_path(sides)
        told = [(at[1:], letters_at(given[at[1].key], hints.get(at[1].key), at[2:]), leaf) for at, leaf in paths]
        told = told if axes is None else [(at, letters, _settled(leaf, letters, axes)) for at, letters, leaf in told]
        options = {"axes": axes, "ins": tuple(leaf.sharding.spec for *_, leaf in told if axes), "statics": statics}
        run = self._run if axes is not None else lambda a, b, **_: self._fn(**a, **b, **dict(statics))
        return lambda *flat: run(*jax.tree.unflatten(tree, flat), **options), told, len(jax.tree.leaves(sides[0]))

    def trace(self, *args: Any, **options: Any) -> Any:
        """The program, traced for these arguments; shapes will do, of devices too that are not there."""
        axes = self._axes(options)
        if axes is None:
            return self._plain.trace(*args, **options)
        given, rest, static = self._bound(axes, args, options)
        return self._split.trace(given, rest, **static)

    def lower(self, *args: Any, **options: Any) -> Any:
        """The program, lowered for these arguments."""
        return self.trace(*args, **options).lower()

    def clear_cache(self) -> None:
        """Forgets what has been compiled."""
        self._plain.clear_cache()
        self._split.clear_cache()

    def _axes(self, options: dict[str, Any]) -> Axes | None:
        carrier = options.get(self._on)
        return None if carrier is None else carrier.axes

    def _bound(self, axes: Axes, args: Any, options: Any) -> tuple[dict[str, Any], ...]:
        bound = self._signature.bind(*args, **options)
        bound.apply_defaults()
        hints = hints_of(self._fn)
        given = {name: value for name, value in bound.arguments.items() if name not in self._static}
        arrays = {name: _as_said(value, hints.get(name), axes) for name, value in given.items()}
        given = {name: value for name, value in arrays.items() if name in self._given}
        rest = {name: value for name, value in arrays.items() if name not in self._given}
        statics = tuple((name, value) for name, value in bound.arguments.items() if name in self._static)
        ins = tuple(leaf.sharding.spec for leaf in jax.tree.leaves((given, rest)))
        return given, rest, {"axes": axes, "ins": ins, "statics": statics}

    def _run(
        self, given: dict[str, Any], rest: dict[str, Any], *, axes: Axes, ins: tuple[P, ...], statics: tuple[Any, ...]
    ) -> Any:
        leaves, tree = jax.tree.flatten((given, rest))
        found: dict[str, Any] = {}

        def local(*mine: Array) -> list[Array]:
            donated, others = jax.tree.unflatten(tree, mine)
            out = self._fn(**donated, **others, **dict(statics))
            flat, found["tree"] = jax.tree_util.tree_flatten_with_path(out)
            hint = hints_of(self._fn)["return"]
            found["outs"] = [_out_spec(known(letters_at(out, hint, path), leaf), axes) for path, leaf in flat]
            return [leaf for _, leaf in flat]

        split = functools.partial(jax.shard_map, local, mesh=axes.mesh, in_specs=ins, check_vma=False)
        # Which arrays come out is known once the function has been looked at.
        jax.eval_shape(split(out_specs=P()), *leaves)
        return jax.tree.unflatten(found["tree"], split(out_specs=found["outs"])(*leaves))


def _out_spec(letters: str, axes: Axes) -> P:
    if letters.startswith("..."):
        raise TypeError(f"letters={letters!r}: what a program gives lies where its letters say: name its axes")
    # A part does not show whether an axis behind `#` is one of many: what comes out of a program is.
    return spec_of_letters(letters, axes.mesh)


def program(
    *,
    static: tuple[str, ...] = (),
    donate: tuple[str, ...] = (),
    on: str = "axes",
    compiler: dict[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Door]:
    """The one door to compiled programs.

    Args:
        static: arguments that are compiled in.
        donate: arguments whose buffers are given up.
        on: the static argument, always given by name, that says where it runs: `Axes`, what has them as its `axes`, or
            None.
        compiler: options for the compiler of whichever device it is.

    Returns:
        A decorator.
    """
    return lambda fn: Door(fn, static, donate, on, compiler or {})


# Inside a program: what one device's part is to the whole.


def total(x: Array, axes: Axes | None, letter: str = "H") -> Array:
    """The sum over the devices that share an axis of this letter: by default those of a sequence, heads and MLP."""
    return x if axes is None or axes.size(letter) == 1 else lax.psum(x, _LETTERS[letter])


def mean_of_devices(x: Array, letter: str, axes: Axes | None) -> Array:
    """The mean over the devices that share an axis of this letter."""
    return x if axes is None or axes.size(letter) == 1 else lax.pmean(x, _LETTERS[letter])


def most_of_devices(x: Array, letter: str, axes: Axes | None) -> Array:
    """The largest that any of these devices has."""
    return x if axes is None or axes.size(letter) == 1 else lax.pmax(x, _LETTERS[letter])


def gathered(x: Array, letter: str, axis: int, axes: Axes | None) -> Array:
    """The whole of an axis of this letter, of which each device has its part."""
    return x if axes is None or axes.size(letter) == 1 else lax.all_gather(x, _LETTERS[letter], axis=axis, tiled=True)


def own(x: Array, letter: str, axis: int, axes: Axes | None) -> Array:
    """The device's part of such an axis again."""
    if axes is None:
        return x
    size = x.shape[axis] // axes.size(letter)
    return lax.dynamic_slice_in_dim(x, first(letter, size, axes), size, axis)


def first(letter: str, size: int, axes: Axes | None) -> Any:
    """Where a device's part of such an axis begins, of so many elements."""
    return 0 if axes is None else lax.axis_index(_LETTERS[letter]).astype(jnp.int32) * size


def anywhere(flag: Array, axes: Axes | None) -> Array:
    """Whether it is so on any device."""
    return flag if axes is None else lax.pmax(flag.astype(jnp.int32), NAMES) > 0


def any_of_devices(flag: Array, letter: str, axes: Axes | None) -> Array:
    """Whether it is so on any device that shares an axis of this letter."""
    return flag if axes is None else most_of_devices(flag.astype(jnp.int32), letter, axes) > 0


def everywhere(flag: Array, axes: Axes | None) -> Array:
    """Whether it is so on every device."""
    return flag if axes is None else lax.pmin(flag.astype(jnp.int32), NAMES) > 0
