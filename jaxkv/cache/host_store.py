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

from jaxkv.sharding.mesh import Axes, host, put
from jaxkv.sharding.sharded_program import sharded_jit

_HOST = "pinned_host"


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["layers"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStore:
    """Keys and values of whole prompts in host memory, one array `[B, S, 2, K, D]` for each offloaded layer; immutable.

    All copies of a cache share it.

    Attributes:
        rows: one array `[B, S, 2, K, D]` per layer, a token's key and value next to each other.
        layers: layer numbers, ascending.
    """

    rows: tuple[Float[Array, "B S 2 K D"], ...]
    layers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the host store's entries."""
        return sum(each.nbytes for each in self.rows)

    def put_back(self, axes: Axes | None) -> "HostStore":
        """Return the host store in pinned host memory: the same object if it is already, else a copy."""
        pinned = [
            isinstance(rows, jax.Array) and rows.sharding.memory_kind == _HOST for rows in self.rows
        ]
        return self if all(pinned) else self.moved(None, axes)

    def widened(self, dtype: jnp.dtype, axes: Axes | None) -> "HostStore":
        """Return a copy of the host store in another dtype, in pinned host memory; itself if it has that dtype."""
        if dtype == self.rows[0].dtype:
            return self
        rows = tuple(waiting(host(each).astype(dtype), axes) for each in self.rows)
        return dataclasses.replace(self, rows=rows)

    def moved(self, of: Int[np.ndarray, " B"] | None, axes: Axes | None) -> "HostStore":
        """Return the sequences of indices `of` (None: all) as a new host store, sharded by `axes`."""
        rows = [host(each) if of is None else host(each).take(of, axis=0) for each in self.rows]
        return dataclasses.replace(self, rows=tuple(waiting(each, axes) for each in rows))


@dataclasses.dataclass
class Traffic:
    """Mutable counters of transfers from host memory to the device: their number and their bytes."""

    transfers: int = 0
    bytes: int = 0


def host_of(device: jax.Device) -> SingleDeviceSharding:
    """Return the JAX sharding that places an array in a device's pinned host memory."""
    return SingleDeviceSharding(device, memory_kind=_HOST)


def waiting(rows: Any, axes: Axes | None) -> Float[Array, "B S 2 K D"]:
    """Start copying one layer's entries to pinned host memory, sharded on a mesh; return without waiting."""
    if axes is None:
        return jax.device_put(rows, host_of(next(iter(jnp.zeros(()).devices()))))
    sharding = NamedSharding(axes.mesh, axes.spec("B S 2 K D", rows.shape), memory_kind=_HOST)
    return put(rows, sharding)


def committed(tree: Any) -> Any:
    """Commit the arrays of a tree (as by `jax.device_put`) to their device; on a mesh return the tree unchanged.

    JAX compiles separately for committed and uncommitted arrays. Without this, every program of a cache's first step
    would be compiled again for the second. On a mesh all arrays are committed.
    """
    if Axes.of(jax.tree.leaves(tree)[0]) is not None:
        return tree
    return jax.device_put(tree, next(iter(jax.tree.leaves(tree)[0].devices())))


def put_away(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], axes: Axes | None
) -> Float[Array, "B S 2 K D"]:
    """Start copying a layer's keys and values to host memory; return `[B, S, 2, K, D]` without waiting."""
    rows = _by_token(k, v, axes=axes)
    return jax.device_put(rows, rows.sharding.with_memory_kind(_HOST))


@sharded_jit(static=("axes",))
def _by_token(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], *, axes: Axes | None
) -> Float[Array, "B S 2 K D"]:
    """Stack keys and values `[B, K, S, D]` into one array `[B, S, 2, K, D]`, token by token; compiled."""
    return jnp.moveaxis(jnp.stack([k, v]), (0, 3), (2, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """Loader of a `HostStore`: copies entries to the device and counts bytes; one sequence serves any batch."""

    host_store: HostStore
    traffic: Traffic

    @classmethod
    def of(cls, host_store: HostStore | None, traffic: Traffic) -> "Loader | None":
        """Return the `Loader` of `host_store`, whose transfers are counted in `traffic`; None without a host store."""
        return None if host_store is None else cls(host_store=host_store, traffic=traffic)

    def rows(
        self, layers: tuple[int, ...], positions: Int[Array, "B T"]
    ) -> Float[Array, "B n T 2 K D"]:
        """Copy entries at `positions` of n layers to the device, `[B, n, T, 2, K, D]`, and count the transfers.

        The host gathers the entries without a JAX program: a device executes programs in order, so a program would wait
        for those that should overlap with the transfer. On a mesh each device gets the entries of its own heads and
        sequences.
        """
        host_store, axes = self.host_store, Axes.of(positions)
        sources = [host_store.rows[host_store.layers.index(each)] for each in layers]
        parts = _by_device(positions, axes)
        held = [
            {device: _bits(part) for device, part in _by_device(source, axes).items()}
            for source in sources
        ]
        # Without a mesh, `positions` may be on another device than the host store's.
        held = held if axes is not None else [dict.fromkeys(parts, *each.values()) for each in held]
        where, at = list(parts), [np.asarray(part) for part in parts.values()]
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
        list(_threads().map(take, np.ndindex(len(where), batch, len(layers))))
        dtype = host_store.rows[0].dtype
        sent = [
            self._sent(rows.view(dtype), SingleDeviceSharding(device))
            for rows, device in zip(packed, where, strict=True)
        ]
        if axes is None:
            return sent[0]
        whole = (positions.shape[0], len(layers), count, *host_store.rows[0].shape[2:])
        split = NamedSharding(axes.mesh, axes.spec("B n T 2 K D", whole))
        return jax.make_array_from_single_device_arrays(whole, split, sent)

    def whole_layer(self, layer: int, like: Int[Array, " B"]) -> Float[Array, "B 1 S 2 K D"]:
        """Copy all entries of a layer to the devices of `like`, `[B, 1, S, 2, K, D]`, for its B sequences."""
        axes, rows = Axes.of(like), self.host_store.rows[self.host_store.layers.index(layer)]
        if axes is None:
            sent = self._sent(rows, SingleDeviceSharding(next(iter(like.devices()))))
            return jnp.broadcast_to(sent[:, None], (len(like), 1, *rows.shape[1:]))
        sent = self._sent(rows, NamedSharding(axes.mesh, axes.spec("B S 2 K D", rows.shape)))
        return _of_each(sent, like, axes=axes)

    def _sent(self, rows: Array | np.ndarray, sharding: Sharding) -> Array:
        """Start the transfer of entries to a sharding, count it, and return the device array."""
        parts = (
            list(_by_device(rows, Axes.of(rows)).values())
            if isinstance(rows, jax.Array)
            else [rows]
        )
        self.traffic.transfers += len(parts)
        self.traffic.bytes += sum(part.nbytes for part in parts)
        return jax.device_put(rows, sharding)


@sharded_jit(static=("axes",))
def _of_each(
    rows: Float[Array, "#B S 2 K D"], like: Int[Array, " B"], *, axes: Axes | None
) -> Float[Array, "B 1 S 2 K D"]:
    """Broadcast one layer's entries to `[B, 1, S, 2, K, D]`, one sequence for all B of `like`; compiled."""
    return jnp.broadcast_to(rows[:, None], (len(like), 1, *rows.shape[1:]))


def _by_device(leaf: Array, axes: Axes | None) -> dict[jax.Device, Array]:
    """Map each device of this process to its shard of an array."""
    if axes is None:
        return {next(iter(leaf.devices())): leaf}
    return {part.device: part.data for part in leaf.addressable_shards}


def _bits(rows: Array) -> np.ndarray:
    """View a host array's bits as unsigned integers in numpy, which has no bfloat16; no copy."""
    host = np.asarray(rows)
    return host.view(np.uint16 if host.dtype.itemsize == 2 else np.uint32)


@cache
def _threads() -> ThreadPoolExecutor:
    """Thread pool of at most 8 threads that gather entries in host memory; created once."""
    return ThreadPoolExecutor(
        max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="jaxkv-host-store"
    )
