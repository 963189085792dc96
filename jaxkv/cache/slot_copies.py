"""Copies of sequences into and out of the slots of a running batch, along the axis that annotations name B."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxkv.sharding.collectives import get_shard_offset
from jaxkv.sharding.mesh import ShardingMesh, list_leaves_with_axes
from jaxkv.sharding.sharded_program import sharded_jit


def _find_batch_axes(tree: Any) -> list[int]:
    """Return the index of each leaf's batch axis B, read from the fields' jaxtyping annotations."""
    return [
        logical_axes.replace("#", "").split().index("B")
        for _, logical_axes, _ in list_leaves_with_axes(tree)
    ]


@sharded_jit(static=("axes",), donate=("running",))
def copy_into_slots(
    running: Any, new: Any, slot: Int[Array, " B"], *, axes: ShardingMesh | None = None
) -> Any:
    """Copy sequences into slots `slot` (-1: skipped) of a running batch (donated); return the batch; compiled.

    Both are dataclasses of the same arrays, with annotations that name an axis B. `slot` is the slot of each new
    sequence, -1 to skip it; on a mesh it is in the sequence's own group.
    """
    leaves, tree = jax.tree.flatten(running)
    slots = leaves[0].shape[_find_batch_axes(running)[0]]
    begin = get_shard_offset("B", slots, axes)
    for index, (axis, given) in enumerate(
        zip(_find_batch_axes(running), jax.tree.leaves(new), strict=True)
    ):
        for sequence in range(slot.shape[0]):
            at = slot[sequence] - begin
            here = (at >= 0) & (at < slots)
            at = jnp.clip(at, 0, slots - 1)
            old = lax.dynamic_slice_in_dim(leaves[index], at, 1, axis)
            put = jnp.where(here, lax.slice_in_dim(given, sequence, sequence + 1, axis=axis), old)
            leaves[index] = lax.dynamic_update_slice_in_dim(leaves[index], put, at, axis)
    return jax.tree.unflatten(tree, leaves)


@sharded_jit(static=("axes",))
def copy_from_slots(
    running: Any, slot: Int[Array, " B"], *, axes: ShardingMesh | None = None
) -> Any:
    """Copy the sequences in slots `slot` of a running batch to new arrays, the inverse of `copy_into_slots`; compiled.

    `slot` holds slot indices; on a mesh one per group, -1 for any slot of the group.
    """
    leaves, tree = jax.tree.flatten(running)
    out = []
    for axis, leaf in zip(_find_batch_axes(running), leaves, strict=True):
        at = jnp.clip(slot - get_shard_offset("B", leaf.shape[axis], axes), 0, leaf.shape[axis] - 1)
        out.append(jnp.take(leaf, at, axis=axis))
    return jax.tree.unflatten(tree, out)


@sharded_jit(static=("slots", "axes"))
def repeat_sequence_in_slots(one: Any, *, slots: int, axes: ShardingMesh | None = None) -> Any:
    """Repeat the first sequence (on a mesh, of each group) into new arrays of a batch of `slots` slots; compiled."""
    each = slots if axes is None else slots // axes.count_axis_shards("B")
    leaves, tree = jax.tree.flatten(one)
    out = [
        jnp.repeat(lax.slice_in_dim(leaf, 0, 1, axis=axis), each, axis=axis)
        for axis, leaf in zip(_find_batch_axes(one), leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, out)
