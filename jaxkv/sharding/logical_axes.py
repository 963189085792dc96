"""Logical axes of arrays, read from the annotations of functions and dataclasses."""

import functools
import types
import typing
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey


@functools.cache
def resolve_annotations(of: Any) -> dict[str, Any]:
    """Return a dict of the resolved type annotations of a class or function, cached."""
    return typing.get_type_hints(of)


def require_logical_axes(logical_axes: str | None, leaf: Any) -> str:
    """Return an array's given logical axes, "" if None for a scalar; TypeError if None for an array with dimensions."""
    if logical_axes is None and np.ndim(leaf):
        raise TypeError(f"no logical axes for an array of shape {np.shape(leaf)}: annotate it")
    return logical_axes or ""


# Logical axes by annotation and tree structure, cached because the lookup takes longer than a small program runs.
_FOUND: dict[tuple[Any, Any], tuple[str | None, ...]] = {}


def list_logical_axes(value: Any, hint: Any, tree: Any) -> tuple[str | None, ...]:
    """Return a tuple of logical axes, such as "B K D", or None, of each leaf of an annotated tree, cached."""
    found = _FOUND.get((hint, tree))
    if found is None:
        paths = jax.tree_util.tree_flatten_with_path(value)[0]
        found = _FOUND[hint, tree] = tuple(
            find_logical_axes(value, hint, path) for path, _ in paths
        )
    return found


def find_logical_axes(value: Any, hint: Any, path: tuple[Any, ...]) -> str | None:
    """Return the logical axes, such as "B K D", that annotations give the leaf at a pytree path; None without any."""
    for key in path:
        if isinstance(key, GetAttrKey):
            kind: Any = type(value)
            hint = resolve_annotations(kind).get(key.name)
            value = getattr(value, key.name)
        elif isinstance(key, SequenceKey):
            hint = _get_tuple_item_annotation(hint, key.idx)
            value = value[key.idx]
        elif isinstance(key, DictKey) and typing.is_typeddict(hint):
            hint = resolve_annotations(hint).get(key.key)
            value = value[key.key]
        else:
            # Keys of other kinds lead to leaves without logical axes.
            return None
    return _read_annotated_axes(hint)


def _get_tuple_item_annotation(hint: Any, index: int) -> Any:
    """Return the type annotation of element `index` of an annotated tuple; None if the annotation is no tuple."""
    of = next(
        (each for each in _list_union_members(hint) if typing.get_origin(each) is tuple), None
    )
    inner = typing.get_args(of)
    return None if not inner else inner[0] if inner[-1] is Ellipsis else inner[index]


def _read_annotated_axes(hint: Any) -> str | None:
    """Return the logical axes of a jaxtyping annotation, such as "B K D"; None for other annotations."""
    return next(
        (each.dim_str for each in _list_union_members(hint) if hasattr(each, "dim_str")), None
    )


def _list_union_members(hint: Any) -> tuple[Any, ...]:
    """Return a tuple of a union annotation's members; for other annotations a tuple of the annotation itself."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)
