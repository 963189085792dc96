"""One program as `jax.export` serialises it: flat arrays in, flat arrays out, and what the manifest says of them."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from jaxkv.attention import backend_of
from jaxkv.exporting.programs import Setting
from jaxkv.sharding.door import Door
from jaxkv.sharding.letters import hints_of, letters_at


class Artefact(NamedTuple):
    """A program that has been serialised.

    Attributes:
        data: its bytes.
        said: what the manifest says of it.
        out: what it gives, as shapes.
    """

    data: bytes
    said: dict[str, Any]
    out: Any


class Names(NamedTuple):
    """What leaves of a model are called, those of the ends and of each block; and a sampler's numbers."""

    ends: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    sampling: tuple[str, ...] = ()


def artefact(door: Door, args: Sequence[Any], setting: Setting, names: Names, platform: str, batch: int) -> Artefact:
    """Traces and serialises a program.

    Args:
        door: the program.
        args: its arguments, as shapes.
        setting: what is static.
        names: of the parameters.
        platform: where it will run.
        batch: sequences.

    Returns:
        The artefact.
    """
    run, leaves, donated = door.apart(*args, setting=setting)
    fn: Any = vars(door)["__wrapped__"]
    outs: list[Any] = []

    def flat(*arrays):
        outs[:] = [run(*arrays)]
        return tuple(jax.tree.leaves(outs[0]))

    flat.__name__ = fn.__name__
    jitted = jax.jit(flat, donate_argnums=tuple(range(donated)), keep_unused=True)
    calls = backend_of(setting.implementation).custom_calls
    checks = [jax_export.DisabledSafetyCheck.custom_call(each) for each in calls]
    shapes = [_struct(leaf) for _, _, leaf in leaves]
    exported = jax_export.export(jitted, platforms=[platform], disabled_checks=checks)(*shapes)
    inputs = [_said(_name(path, names), leaf, letters) for path, letters, leaf in leaves]
    for at, each in enumerate(inputs):
        each["donated"] = at < donated
    out, hint = outs[0], hints_of(fn)["return"]
    given = jax.tree_util.tree_flatten_with_path(out)[0]
    outputs = [_said(_name(path, names), leaf, letters_at(out, hint, path)) for path, leaf in given]
    data = bytes(exported.serialize())
    said = {
        "platform": platform,
        "devices": exported.nr_devices,
        "batch": batch,
        "calling_convention": exported.calling_convention_version,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "inputs": inputs,
        "outputs": outputs,
    }
    return Artefact(data, said, shapes_of(out))


def shapes_of(tree: Any) -> Any:
    """Arrays as shapes, in classes that take arrays alone: made without asking them."""
    if tree is None or jax.tree_util.all_leaves([tree]):
        return _struct(tree) if hasattr(tree, "dtype") else tree
    if dataclasses.is_dataclass(tree):
        made = object.__new__(type(tree))
        for each in dataclasses.fields(tree):
            object.__setattr__(made, each.name, shapes_of(getattr(tree, each.name)))
        return made
    parts = [shapes_of(each) for each in tree]
    return tuple.__new__(type(tree), parts)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    split = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf), sharding=sharding if split else None)


def _name(path: tuple[Any, ...], names: Names) -> str:
    keys = [next(getattr(key, each) for each in ("name", "idx", "key") if hasattr(key, each)) for key in path]
    if keys[0] == "ends":
        return names.ends[keys[1]]
    if keys[0] == "blocks":
        return names.blocks[keys[1]][keys[2]]
    if keys[0] == "sampling":
        return f"sampling.{names.sampling[keys[1]]}"
    return ".".join(map(str, keys))


def _said(name: str, leaf: Any, letters: str | None) -> dict[str, Any]:
    axes = (letters or "").split()
    sequences = axes.index("B") if "B" in axes else None
    shape = ["B" if at == sequences else int(size) for at, size in enumerate(np.shape(leaf))]
    return {"name": name, "shape": shape, "dtype": jnp.result_type(leaf).name}
