"""The host store: cache entries of some layers in host memory, and their transfers to the device."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.sharding.mesh import ShardingMesh, copy_to_host, move_to_sharding
from jaxkv.sharding.sharded_program import sharded_jit

_HOST = "pinned_host"


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["layers"])
@frozen_dataclass
class HostStore:
    """Keys and values of complete prompts in host memory, one array `[B, S, 2, K, D]` per offloaded layer; immutable.

    All copies of a cache share it.

    Attributes:
        rows: one array `[B, S, 2, K, D]` per layer, a token's key and value next to each other.
        layers: layer numbers, ascending.
    """

    rows: tuple[Float[Array, "B S 2 K D"], ...]
    layers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the host store's arrays, over all offloaded layers."""
        return sum(each.nbytes for each in self.rows)

    def pin_in_host_memory(self, axes: ShardingMesh | None) -> "HostStore":
        """Return the host store in pinned host memory: itself if it is there already, else a copy sharded by `axes`."""
        pinned = [
            isinstance(rows, jax.Array) and rows.sharding.memory_kind == _HOST for rows in self.rows
        ]
        return self if all(pinned) else self.copy_sequences(None, axes)

    def cast_to_dtype(self, dtype: jnp.dtype, axes: ShardingMesh | None) -> "HostStore":
        """Return a copy of the host store in another dtype, in pinned host memory; itself if it has that dtype."""
        if dtype == self.rows[0].dtype:
            return self
        rows = tuple(
            start_copy_to_host(copy_to_host(each).astype(dtype), axes) for each in self.rows
        )
        return dataclasses.replace(self, rows=rows)

    def copy_sequences(
        self, of: Int[np.ndarray, " B"] | None, axes: ShardingMesh | None
    ) -> "HostStore":
        """Copy the sequences at indices `of` (None: all) to a new host store in pinned memory, sharded by `axes`."""
        rows = [
            copy_to_host(each) if of is None else copy_to_host(each).take(of, axis=0)
            for each in self.rows
        ]
        return dataclasses.replace(
            self, rows=tuple(start_copy_to_host(each, axes) for each in rows)
        )


@dataclasses.dataclass
class TransferCounter:
    """Mutable counters of transfers from host memory to devices: their number and their bytes."""

    transfers: int = 0
    bytes: int = 0


def make_host_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Return the JAX sharding that places an array in a device's pinned host memory."""
    return SingleDeviceSharding(device, memory_kind=_HOST)


def start_copy_to_host(rows: Any, axes: ShardingMesh | None) -> Float[Array, "B S 2 K D"]:
    """Start copying a layer's entries `[B, S, 2, K, D]` to pinned host memory, sharded by `axes`; return the array."""
    if axes is None:
        return jax.device_put(rows, make_host_sharding(next(iter(jnp.zeros(()).devices()))))
    sharding = NamedSharding(
        axes.mesh, axes.get_array_spec("B S 2 K D", rows.shape), memory_kind=_HOST
    )
    return move_to_sharding(rows, sharding)


def commit_to_device(tree: Any) -> Any:
    """Return a tree with its arrays committed to the first one's device by `jax.device_put`; on a mesh unchanged.

    JAX compiles separately for committed and uncommitted arrays. Without this, every program of a cache's first step
    would be compiled again for the second. On a mesh all arrays are committed.
    """
    if ShardingMesh.get_array_mesh(jax.tree.leaves(tree)[0]) is not None:
        return tree
    return jax.device_put(tree, next(iter(jax.tree.leaves(tree)[0].devices())))


def offload_layer_entries(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], axes: ShardingMesh | None
) -> Float[Array, "B S 2 K D"]:
    """Start copying a layer's keys and values to pinned host memory, `[B, S, 2, K, D]`; return it without waiting."""
    rows = _stack_by_token(k, v, axes=axes)
    return jax.device_put(rows, rows.sharding.with_memory_kind(_HOST))


@sharded_jit(static=("axes",))
def _stack_by_token(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], *, axes: ShardingMesh | None
) -> Float[Array, "B S 2 K D"]:
    """Stack keys and values `[B, K, S, D]` into one array `[B, S, 2, K, D]`, token by token; compiled."""
    return jnp.moveaxis(jnp.stack([k, v]), (0, 3), (2, 1))


@frozen_dataclass
class HostStoreLoader:
    """Loader of a `HostStore`'s entries to devices that counts transfers; a store of one sequence serves any batch."""

    host_store: HostStore
    traffic: TransferCounter

    @classmethod
    def create_host_loader(
        cls, host_store: HostStore | None, traffic: TransferCounter
    ) -> "HostStoreLoader | None":
        """Return a loader of `host_store` that counts its transfers in `traffic`; None without a host store."""
        return None if host_store is None else cls(host_store=host_store, traffic=traffic)

    def load_entries_by_position(
        self, layers: tuple[int, ...], positions: Int[Array, "B T"]
    ) -> Float[Array, "B n T 2 K D"]:
        """Copy n layers' entries at `positions` `[B, T]` to the device, `[B, n, T, 2, K, D]`, and count the transfers.

        The host gathers the entries without a JAX program: a device executes programs in order, so a program would wait
        for those that should overlap with the transfer. On a mesh each device gets the entries of its own heads and
        sequences.
        """
        host_store = self.host_store
        axes = ShardingMesh.get_array_mesh(positions)
        sources = [host_store.rows[host_store.layers.index(each)] for each in layers]
        parts = _get_shards_by_device(positions, axes)
        held = [
            {
                device: _view_bits_as_integers(part)
                for device, part in _get_shards_by_device(source, axes).items()
            }
            for source in sources
        ]
        # Without a mesh, `positions` may be on another device than the host store's.
        held = held if axes is not None else [dict.fromkeys(parts, *each.values()) for each in held]
        where = list(parts)
        at = [np.asarray(part) for part in parts.values()]
        batch, count = at[0].shape
        shapes = [(batch, len(layers), count, *held[0][device].shape[2:]) for device in where]
        packed = [np.empty(shape, held[0][where[0]].dtype) for shape in shapes]

        def take(part: tuple[int, int, int]) -> None:
            which, row, index = part
            source = held[index][where[which]]
            np.take(
                source[row % source.shape[0]],
                at[which][row],
                axis=0,
                out=packed[which][row, index],
                mode="clip",
            )

        # numpy's copies release the interpreter lock, so tasks, of one sequence and layer each, run in parallel.
        list(_get_gather_threads().map(take, np.ndindex(len(where), batch, len(layers))))
        dtype = host_store.rows[0].dtype
        sent = [
            self._transfer_entries_to_device(rows.view(dtype), SingleDeviceSharding(device))
            for rows, device in zip(packed, where, strict=True)
        ]
        if axes is None:
            return sent[0]
        whole = (positions.shape[0], len(layers), count, *host_store.rows[0].shape[2:])
        split = NamedSharding(axes.mesh, axes.get_array_spec("B n T 2 K D", whole))
        return jax.make_array_from_single_device_arrays(whole, split, sent)

    def load_layer_entries(self, layer: int, like: Int[Array, " B"]) -> Float[Array, "B 1 S 2 K D"]:
        """Copy all of a layer's entries to the devices of `like` `[B]`, as `[B, 1, S, 2, K, D]`; count transfers."""
        axes = ShardingMesh.get_array_mesh(like)
        rows = self.host_store.rows[self.host_store.layers.index(layer)]
        if axes is None:
            sent = self._transfer_entries_to_device(
                rows, SingleDeviceSharding(next(iter(like.devices())))
            )
            return jnp.broadcast_to(sent[:, None], (len(like), 1, *rows.shape[1:]))
        sent = self._transfer_entries_to_device(
            rows, NamedSharding(axes.mesh, axes.get_array_spec("B S 2 K D", rows.shape))
        )
        return _broadcast_layer_entries(sent, like, axes=axes)

    def _transfer_entries_to_device(self, rows: Array | np.ndarray, sharding: Sharding) -> Array:
        """Start copying entries to a device sharding, count transfers and bytes, and return the device array."""
        parts = (
            list(_get_shards_by_device(rows, ShardingMesh.get_array_mesh(rows)).values())
            if isinstance(rows, jax.Array)
            else [rows]
        )
        self.traffic.transfers += len(parts)
        self.traffic.bytes += sum(part.nbytes for part in parts)
        return jax.device_put(rows, sharding)


@sharded_jit(static=("axes",))
def _broadcast_layer_entries(
    rows: Float[Array, "#B S 2 K D"], like: Int[Array, " B"], *, axes: ShardingMesh | None
) -> Float[Array, "B 1 S 2 K D"]:
    """Broadcast a layer's entries, of one sequence or of B, to `[B, 1, S, 2, K, D]` for the B of `like`; compiled."""
    return jnp.broadcast_to(rows[:, None], (len(like), 1, *rows.shape[1:]))


def _get_shards_by_device(leaf: Array, axes: ShardingMesh | None) -> dict[jax.Device, Array]:
    """Return a dict from each device of this process to its shard of an array; without a mesh to the entire array."""
    if axes is None:
        return {next(iter(leaf.devices())): leaf}
    return {part.device: part.data for part in leaf.addressable_shards}


def _view_bits_as_integers(rows: Array) -> np.ndarray:
    """View a host array's bits as numpy uint16 (uint32 for 4 bytes), because numpy has no bfloat16; no copy."""
    host = np.asarray(rows)
    return host.view(np.uint16 if host.dtype.itemsize == 2 else np.uint32)


@cache
def _get_gather_threads() -> ThreadPoolExecutor:
    """Return the process's thread pool, of at most 8 threads, that gathers entries in host memory; created once."""
    return ThreadPoolExecutor(
        max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="jaxkv-host-store"
    )
