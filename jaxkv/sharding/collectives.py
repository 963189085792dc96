"""Collectives inside a program on a mesh: sums, maxima and all-gathers over devices; identities without a mesh."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.sharding.mesh import LETTERS, NAMES, Axes


def _across(
    collective: Callable[..., Array], x: Array, logical_axis: str, axes: Axes | None, **options: Any
) -> Array:
    """Apply `collective` to `x` over the devices that shard axes named `logical_axis`; return `x` if none do."""
    if axes is None or axes.size(logical_axis) == 1:
        return x
    return collective(x, LETTERS[logical_axis], **options)


def total(x: Array, axes: Axes | None, logical_axis: str = "H") -> Array:
    """Sum `x` over the devices that shard `logical_axis` (H: heads, MLP, vocabulary); `x` without a mesh."""
    return _across(lax.psum, x, logical_axis, axes)


def mean_of_devices(x: Array, logical_axis: str, axes: Axes | None) -> Array:
    """Mean of `x` over the devices that shard axes named `logical_axis`; `x` without a mesh."""
    return _across(lax.pmean, x, logical_axis, axes)


def most_of_devices(x: Array, logical_axis: str, axes: Axes | None) -> Array:
    """Elementwise maximum of `x` over the devices that shard axes named `logical_axis`; `x` without a mesh."""
    return _across(lax.pmax, x, logical_axis, axes)


def gathered(x: Array, logical_axis: str, axis: int, axes: Axes | None) -> Array:
    """All-gather shards along `axis`, named `logical_axis`, into the complete array; `x` without a mesh."""
    return _across(lax.all_gather, x, logical_axis, axes, axis=axis, tiled=True)


def own_shard(x: Array, logical_axis: str, axis: int, axes: Axes | None) -> Array:
    """Slice this device's shard of a replicated array along `axis`, named `logical_axis`; inverse of `gathered`."""
    if axes is None:
        return x
    size = x.shape[axis] // axes.size(logical_axis)
    return lax.dynamic_slice_in_dim(x, first(logical_axis, size, axes), size, axis)


def first(logical_axis: str, size: int, axes: Axes | None) -> Any:
    """Index in `logical_axis` of the first of this device's `size` elements; 0 without a mesh."""
    return 0 if axes is None else lax.axis_index(LETTERS[logical_axis]).astype(jnp.int32) * size


def anywhere(flag: Array, axes: Axes | None) -> Array:
    """Bool array: `flag`, or on a mesh True if it is set on any device."""
    return flag if axes is None else lax.pmax(flag.astype(jnp.int32), NAMES) > 0


def any_of_devices(flag: Array, logical_axis: str, axes: Axes | None) -> Array:
    """Bool array: `flag`, or on a mesh True if it is set on any device that shards axes named `logical_axis`."""
    return flag if axes is None else most_of_devices(flag.astype(jnp.int32), logical_axis, axes) > 0


def count_of_all(flags: Bool[Array, " B"], axes: Axes | None) -> Int[Array, ""]:
    """Number of set flags among all sequences of the mesh, i32, equal on every device."""
    return (
        flags.sum(dtype=jnp.int32)
        if axes is None
        else lax.psum(flags.sum(dtype=jnp.int32), NAMES) // axes.size("H")
    )
