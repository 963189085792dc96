"""Collectives inside a program on a mesh: sums, maxima and all-gathers over devices; identities without a mesh."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.sharding.mesh import LETTERS, NAMES, ShardingMesh


def _apply_collective(
    collective: Callable[..., Array],
    x: Array,
    logical_axis: str,
    axes: ShardingMesh | None,
    **options: Any,
) -> Array:
    """Return `collective` of `x` over the devices that shard axes named `logical_axis`; `x` if none do."""
    if axes is None or axes.count_axis_shards(logical_axis) == 1:
        return x
    return collective(x, LETTERS[logical_axis], **options)


def sum_over_devices(x: Array, axes: ShardingMesh | None, logical_axis: str = "H") -> Array:
    """Return the elementwise sum of `x` over devices that shard `logical_axis`, by default H; `x` without a mesh."""
    return _apply_collective(lax.psum, x, logical_axis, axes)


def average_over_devices(x: Array, logical_axis: str, axes: ShardingMesh | None) -> Array:
    """Return the elementwise mean of `x` over devices that shard axes named `logical_axis`; `x` without a mesh."""
    return _apply_collective(lax.pmean, x, logical_axis, axes)


def max_over_devices(x: Array, logical_axis: str, axes: ShardingMesh | None) -> Array:
    """Return the elementwise maximum of `x` over devices that shard axes named `logical_axis`; `x` without a mesh."""
    return _apply_collective(lax.pmax, x, logical_axis, axes)


def all_gather_shards(x: Array, logical_axis: str, axis: int, axes: ShardingMesh | None) -> Array:
    """Return the complete array from all devices' shards `x` along `axis`, named `logical_axis`; `x` without a mesh."""
    return _apply_collective(lax.all_gather, x, logical_axis, axes, axis=axis, tiled=True)


def slice_own_shard(x: Array, logical_axis: str, axis: int, axes: ShardingMesh | None) -> Array:
    """Return this device's shard of the complete array `x` along `axis`, named `logical_axis`; `x` without a mesh."""
    if axes is None:
        return x
    size = x.shape[axis] // axes.count_axis_shards(logical_axis)
    return lax.dynamic_slice_in_dim(x, get_shard_offset(logical_axis, size, axes), size, axis)


def get_shard_offset(logical_axis: str, size: int, axes: ShardingMesh | None) -> Any:
    """Return the index along `logical_axis` where this device's `size` elements start, i32; 0 without a mesh."""
    return 0 if axes is None else lax.axis_index(LETTERS[logical_axis]).astype(jnp.int32) * size


def any_over_mesh(flag: Array, axes: ShardingMesh | None) -> Array:
    """Return a bool array: elementwise True if `flag` is set on any device of the mesh; `flag` without a mesh."""
    return flag if axes is None else lax.pmax(flag.astype(jnp.int32), NAMES) > 0


def any_over_devices(flag: Array, logical_axis: str, axes: ShardingMesh | None) -> Array:
    """Return a bool array: True where any device that shards `logical_axis` sets `flag`; `flag` without a mesh."""
    return (
        flag if axes is None else max_over_devices(flag.astype(jnp.int32), logical_axis, axes) > 0
    )


def count_flags_over_mesh(flags: Bool[Array, " B"], axes: ShardingMesh | None) -> Int[Array, ""]:
    """Return the number of set flags `[B]` over all sequences of the mesh, an i32 scalar, equal on every device."""
    return (
        flags.sum(dtype=jnp.int32)
        if axes is None
        else lax.psum(flags.sum(dtype=jnp.int32), NAMES) // axes.count_axis_shards("H")
    )
