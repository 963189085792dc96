"""Serialises one program with `jax.export`: flat arrays in, flat arrays out, and its manifest entry."""

import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from jaxkv.attention import backend_of
from jaxkv.exporting.exported_programs import BucketSpec
from jaxkv.sharding.logical_axes import hints_of, logical_axes_at
from jaxkv.sharding.sharded_program import ShardedProgram


class Artefact(NamedTuple):
    """A program serialised by `jax.export`: its bytes (`data`), its manifest `entry` and its abstract results."""

    data: bytes
    entry: dict[str, Any]
    out: Any


class Names(NamedTuple):
    """Manifest names of the parameters: embedding and head (`ends`), and each block."""

    ends: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]


def artefact(
    door: ShardedProgram,
    *args: Any,
    spec: BucketSpec,
    names: Names,
    platform: str,
    batch: int,
) -> Artefact:
    """Trace and serialise a program with `jax.export`; return bytes, manifest entry and abstract results."""
    run, leaves, donated = door.apart(*args, spec=spec)
    fn: Any = vars(door)["__wrapped__"]
    # Donated arrays come first; both groups are sorted by name, the fields of `asked` by their own names.
    order = sorted(range(len(leaves)), key=lambda at: (at >= donated, str(_keys(leaves[at][0])[0])))
    leaves = [leaves[at] for at in order]
    outs: list[Any] = []

    def flat(*arrays):
        by_place = dict(zip(order, arrays, strict=True))
        outs[:] = [run(*(by_place[at] for at in range(len(arrays))))]
        return tuple(jax.tree.leaves(outs[0]))

    flat.__name__ = fn.__name__
    jitted = jax.jit(flat, donate_argnums=tuple(range(donated)), keep_unused=True)
    calls = backend_of(spec.implementation).can.custom_calls
    checks = [jax_export.DisabledSafetyCheck.custom_call(each) for each in calls]
    shapes = [_abstract(leaf) for _, _, leaf in leaves]
    exported = jax_export.export(jitted, platforms=[platform], disabled_checks=checks)(*shapes)
    inputs = [_entry(_name(path, names), leaf, logical_axes) for path, logical_axes, leaf in leaves]
    for at, each in enumerate(inputs):
        each["donated"] = at < donated
    out, hint = outs[0], hints_of(fn)["return"]
    results = jax.tree_util.tree_flatten_with_path(out)[0]
    data = bytes(exported.serialize())
    entry = {
        "platform": platform,
        "devices": exported.nr_devices,
        "batch": batch,
        "calling_convention": exported.calling_convention_version,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "inputs": inputs,
        "outputs": [
            _entry(_name(path, names), leaf, logical_axes_at(out, hint, path))
            for path, leaf in results
        ],
    }
    return Artefact(data, entry, abstract(out))


def abstract(tree: Any) -> Any:
    """Replace each array of a pytree by a `ShapeDtypeStruct`; dataclasses are rebuilt without validation."""
    if tree is None or jax.tree_util.all_leaves([tree]):
        return _abstract(tree) if hasattr(tree, "dtype") else tree
    if dataclasses.is_dataclass(tree):
        made = object.__new__(type(tree))
        for each in dataclasses.fields(tree):
            object.__setattr__(made, each.name, abstract(getattr(tree, each.name)))
        return made
    parts = [abstract(each) for each in tree]
    return tuple.__new__(type(tree), parts)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the `ShapeDtypeStruct` of an array: shape, dtype, and sharding if the array is on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    split = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(
        np.shape(leaf), jnp.result_type(leaf), sharding=sharding if split else None
    )


def _keys(path: tuple[Any, ...]) -> list[Any]:
    """List the names and indices along a pytree path, without a leading `asked`."""
    keys = [
        next(getattr(key, each) for each in ("name", "idx", "key") if hasattr(key, each))
        for key in path
    ]
    return keys[1:] if keys[0] == "asked" else keys


def _name(path: tuple[Any, ...], names: Names) -> str:
    """Return the manifest name of an argument or result, such as `pools.0.k`; parameters have their model names."""
    keys = _keys(path)
    if keys[0] == "ends":
        return names.ends[keys[1]]
    if keys[0] == "blocks":
        return names.blocks[keys[1]][keys[2]]
    return ".".join(map(str, keys))


def _entry(name: str, leaf: Any, logical_axes: str | None) -> dict[str, Any]:
    """Return the manifest entry of an array: name, dtype and shape, with "B" as the size of the batch axis."""
    axes = (logical_axes or "").split()
    sequences = axes.index("B") if "B" in axes else None
    shape = ["B" if at == sequences else int(size) for at, size in enumerate(np.shape(leaf))]
    return {"name": name, "shape": shape, "dtype": jnp.result_type(leaf).name}
