"""Serialises one program with `jax.export`: flat arrays in, flat arrays out, and its manifest entry."""

import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from jaxkv.attention import get_attention_backend
from jaxkv.exporting.exported_programs import BucketSpec
from jaxkv.sharding.logical_axes import find_logical_axes, resolve_annotations
from jaxkv.sharding.sharded_program import ShardedProgram


class SerialisedProgram(NamedTuple):
    """A program serialised by `jax.export`: its bytes (`data`), its manifest `entry` and its abstract results."""

    data: bytes
    entry: dict[str, Any]
    out: Any


class ParameterNames(NamedTuple):
    """Names of the model's parameters in the manifest: embedding, norm and head (`ends`), and those of each block."""

    ends: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]


def serialise_program(
    door: ShardedProgram,
    *args: Any,
    spec: BucketSpec,
    names: ParameterNames,
    platform: str,
    batch: int,
) -> SerialisedProgram:
    """Serialise a program with `jax.export`; return a `SerialisedProgram`: bytes, manifest entry, abstract results."""
    run, leaves, donated = door.flatten_call_for_export(*args, spec=spec)
    fn: Any = vars(door)["__wrapped__"]
    # Donated arrays come first; both groups are sorted by name, the fields of `asked` by their own names.
    order = sorted(
        range(len(leaves)), key=lambda at: (at >= donated, str(_list_path_keys(leaves[at][0])[0]))
    )
    leaves = [leaves[at] for at in order]
    outs: list[Any] = []

    def flat(*arrays):
        by_place = dict(zip(order, arrays, strict=True))
        outs[:] = [run(*(by_place[at] for at in range(len(arrays))))]
        return tuple(jax.tree.leaves(outs[0]))

    flat.__name__ = fn.__name__
    jitted = jax.jit(flat, donate_argnums=tuple(range(donated)), keep_unused=True)
    calls = get_attention_backend(spec.implementation).can.custom_calls
    checks = [jax_export.DisabledSafetyCheck.custom_call(each) for each in calls]
    shapes = [_make_array_abstract(leaf) for _, _, leaf in leaves]
    exported = jax_export.export(jitted, platforms=[platform], disabled_checks=checks)(*shapes)
    inputs = [
        _build_manifest_entry(_build_manifest_name(path, names), leaf, logical_axes)
        for path, logical_axes, leaf in leaves
    ]
    for at, each in enumerate(inputs):
        each["donated"] = at < donated
    out = outs[0]
    hint = resolve_annotations(fn)["return"]
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
            _build_manifest_entry(
                _build_manifest_name(path, names), leaf, find_logical_axes(out, hint, path)
            )
            for path, leaf in results
        ],
    }
    return SerialisedProgram(data, entry, make_abstract(out))


def make_abstract(tree: Any) -> Any:
    """Return a pytree with each array replaced by a `ShapeDtypeStruct`; dataclasses are rebuilt without validation."""
    if tree is None or jax.tree_util.all_leaves([tree]):
        return _make_array_abstract(tree) if hasattr(tree, "dtype") else tree
    if dataclasses.is_dataclass(tree):
        made = object.__new__(type(tree))
        for each in dataclasses.fields(tree):
            object.__setattr__(made, each.name, make_abstract(getattr(tree, each.name)))
        return made
    parts = [make_abstract(each) for each in tree]
    return tuple.__new__(type(tree), parts)


def _make_array_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the `ShapeDtypeStruct` of an array: shape, dtype, and sharding if the array is on a mesh."""
    sharding = getattr(leaf, "sharding", None)
    split = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(
        np.shape(leaf), jnp.result_type(leaf), sharding=sharding if split else None
    )


def _list_path_keys(path: tuple[Any, ...]) -> list[Any]:
    """List the names and indices along a pytree path, without a leading `asked`, the loop inputs' argument name."""
    keys = [
        next(getattr(key, each) for each in ("name", "idx", "key") if hasattr(key, each))
        for key in path
    ]
    return keys[1:] if keys[0] == "asked" else keys


def _build_manifest_name(path: tuple[Any, ...], names: ParameterNames) -> str:
    """Return an argument's or result's manifest name, such as `pools.0.k`; a parameter's is looked up in `names`."""
    keys = _list_path_keys(path)
    if keys[0] == "ends":
        return names.ends[keys[1]]
    if keys[0] == "blocks":
        return names.blocks[keys[1]][keys[2]]
    return ".".join(map(str, keys))


def _build_manifest_entry(name: str, leaf: Any, logical_axes: str | None) -> dict[str, Any]:
    """Return an array's manifest entry, a dict of name, dtype and shape, with "B" as the size of the batch axis."""
    axes = (logical_axes or "").split()
    sequences = axes.index("B") if "B" in axes else None
    shape = ["B" if at == sequences else int(size) for at, size in enumerate(np.shape(leaf))]
    return {"name": name, "shape": shape, "dtype": jnp.result_type(leaf).name}
