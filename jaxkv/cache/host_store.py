"""The host store: cache entries of some layers in host memory, and the transfers that bring them to the device."""

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

    Copies of a cache share it.

    Attributes:
        rows: one `[B, S, 2, K, D]` per layer, key and value of a token side by side.
        layers: layer numbers, ascending.
    """

    rows: tuple[Float[Array, "B S 2 K D"], ...]
    layers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the host store's entries take."""
        return sum(each.nbytes for each in self.rows)

    def put_back(self, axes: Axes | None) -> "HostStore":
        """Host store with all arrays in pinned host memory: the same object if they are there already, else a copy."""
        there = [
            isinstance(rows, jax.Array) and rows.sharding.memory_kind == _HOST for rows in self.rows
        ]
        return self if all(there) else self.moved(None, axes)

    def widened(self, dtype: jnp.dtype, axes: Axes | None) -> "HostStore":
        """Copy of the host store in another dtype, in pinned host memory; itself if it has that dtype."""
        if dtype == self.rows[0].dtype:
            return self
        rows = tuple(waiting(host(each).astype(dtype), axes) for each in self.rows)
        return dataclasses.replace(self, rows=rows)

    def moved(self, of: Int[np.ndarray, " B"] | None, axes: Axes | None) -> "HostStore":
        """Copy of the host store for the sequences of indices `of` (None: all), in pinned host memory, sharded by `axes`."""
        rows = [host(each) if of is None else host(each).take(of, axis=0) for each in self.rows]
        return dataclasses.replace(self, rows=tuple(waiting(each, axes) for each in rows))


@dataclasses.dataclass
class Traffic:
    """Mutable counters of transfers of entries from host memory to the device: their number and their bytes."""

    transfers: int = 0
    bytes: int = 0


def host_of(device: jax.Device) -> SingleDeviceSharding:
    """JAX sharding that places an array in a device's pinned host memory."""
    return SingleDeviceSharding(device, memory_kind=_HOST)


def waiting(rows: Any, axes: Axes | None) -> Float[Array, "B S 2 K D"]:
    """Starts copying one layer's entries to pinned host memory, sharded on a mesh; returns the array without waiting."""
    if axes is None:
        return jax.device_put(rows, host_of(next(iter(jnp.zeros(()).devices()))))
    there = NamedSharding(axes.mesh, axes.spec("B S 2 K D", rows.shape), memory_kind=_HOST)
    return put(rows, there)


def committed(tree: Any) -> Any:
    """The tree with its arrays committed (as by `jax.device_put`) to the device where they lie; unchanged on a mesh.

    JAX compiles apart for committed and uncommitted arrays: a cache that was not committed from the beginning would
    have every program of its first step compiled again for the second. On a mesh all are.
    """
    if Axes.of(jax.tree.leaves(tree)[0]) is not None:
        return tree
    return jax.device_put(tree, next(iter(jax.tree.leaves(tree)[0].devices())))


def put_away(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], axes: Axes | None
) -> Float[Array, "B S 2 K D"]:
    """Starts copying a layer's keys and values to host memory; returns the array `[B, S, 2, K, D]` without waiting."""
    rows = _by_token(k, v, axes=axes)
    return jax.device_put(rows, rows.sharding.with_memory_kind(_HOST))


@sharded_jit(static=("axes",))
def _by_token(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], *, axes: Axes | None
) -> Float[Array, "B S 2 K D"]:
    """Compiled: stacks keys and values `[B, K, S, D]` into one array `[B, S, 2, K, D]`, token by token."""
    return jnp.moveaxis(jnp.stack([k, v]), (0, 3), (2, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """Loader of a `HostStore`: copies entries from host memory to the device, counting bytes; one sequence serves any batch."""

    host_store: HostStore
    traffic: Traffic

    @classmethod
    def of(cls, host_store: HostStore | None, traffic: Traffic) -> "Loader | None":
        """Makes the `Loader` of a `host_store`, which counts its transfers in `traffic`; returns None if `host_store` is None."""
        return None if host_store is None else cls(host_store=host_store, traffic=traffic)

    def rows(
        self, layers: tuple[int, ...], positions: Int[Array, "B T"]
    ) -> Float[Array, "B n T 2 K D"]:
        """Copies entries at `positions` of n layers to the device, `[B, n, T, 2, K, D]`; adds its transfers to `traffic`.

        The gather is the host's own work, not a program's: a device executes programs in order, and so it would wait
        for those that it is to run beside. On a mesh each device gets those of its own heads and sequences.
        """
        host_store, axes = self.host_store, Axes.of(positions)
        sources = [host_store.rows[host_store.layers.index(each)] for each in layers]
        asked = _by_device(positions, axes)
        held = [
            {device: _bits(part) for device, part in _by_device(source, axes).items()}
            for source in sources
        ]
        # Off a mesh, `positions` may be on another device than the one that the host store belongs to.
        held = held if axes is not None else [dict.fromkeys(asked, *each.values()) for each in held]
        where, at = list(asked), [np.asarray(part) for part in asked.values()]
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

        # numpy's copies release the interpreter lock: each task copies one sequence's entries of one layer.
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
        """Copies all entries of a layer to the devices of `like`, `[B, 1, S, 2, K, D]`, repeated for its B sequences."""
        axes, rows = Axes.of(like), self.host_store.rows[self.host_store.layers.index(layer)]
        if axes is None:
            sent = self._sent(rows, SingleDeviceSharding(next(iter(like.devices()))))
            return jnp.broadcast_to(sent[:, None], (len(like), 1, *rows.shape[1:]))
        sent = self._sent(rows, NamedSharding(axes.mesh, axes.spec("B S 2 K D", rows.shape)))
        return _of_each(sent, like, axes=axes)

    def _sent(self, rows: Array | np.ndarray, there: Sharding) -> Array:
        """Starts the transfer of entries to the sharding `there`, adds it to `traffic`, and returns the device array."""
        parts = (
            list(_by_device(rows, Axes.of(rows)).values())
            if isinstance(rows, jax.Array)
            else [rows]
        )
        self.traffic.transfers += len(parts)
        self.traffic.bytes += sum(part.nbytes for part in parts)
        return jax.device_put(rows, there)


@sharded_jit(static=("axes",))
def _of_each(
    rows: Float[Array, "#B S 2 K D"], like: Int[Array, " B"], *, axes: Axes | None
) -> Float[Array, "B 1 S 2 K D"]:
    """Compiled: broadcasts one layer's entries to `[B, 1, S, 2, K, D]`; one sequence is repeated for all B of `like`."""
    return jnp.broadcast_to(rows[:, None], (len(like), 1, *rows.shape[1:]))


def _by_device(leaf: Array, axes: Axes | None) -> dict[jax.Device, Array]:
    """Dict from each device of this process to its part of an array."""
    if axes is None:
        return {next(iter(leaf.devices())): leaf}
    return {part.device: part.data for part in leaf.addressable_shards}


def _bits(rows: Array) -> np.ndarray:
    """Numpy view, without a copy, of a host array's bits as unsigned integers: numpy has no bfloat16."""
    host = np.asarray(rows)
    return host.view(np.uint16 if host.dtype.itemsize == 2 else np.uint32)


@cache
def _threads() -> ThreadPoolExecutor:
    """Thread pool, made once, of at most 8 threads that gather entries in host memory."""
    return ThreadPoolExecutor(
        max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="jaxkv-bank"
    )
