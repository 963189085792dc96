"""The context bank: rows of some layers in host memory, and the few that come back for a step."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from jaxkv.sharding.door import program
from jaxkv.sharding.mesh import Axes, host, put

_HOST = "pinned_host"


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["layers"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Bank:
    """Whole prompts of some layers in host memory. It never changes: caches made of one another share it.

    Attributes:
        rows: one `[B, S, 2, K, D]` per layer, keys and values of a token side by side.
        layers: which layers these are, ascending.
    """

    rows: tuple[Float[Array, "B S 2 K D"], ...]
    layers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the rows take; none of them is on the device."""
        return sum(each.nbytes for each in self.rows)

    def put_back(self, axes: Axes | None = None) -> "Bank":
        """The same rows in pinned host memory, wherever `jax.tree.map` or `jax.device_put` has brought them.

        Args:
            axes: of the mesh whose devices they wait for, if they do.

        Returns:
            The bank; the same one if it waits there.
        """
        there = [isinstance(rows, jax.Array) and rows.sharding.memory_kind == _HOST for rows in self.rows]
        if all(there):
            return self
        return self.moved(None, axes)

    def moved(self, of: Int[np.ndarray, " B"] | None, axes: Axes | None) -> "Bank":
        """Rows of some sequences, to wait for other devices.

        Args:
            of: which ones, where there are as many as the cache has; all by default.
            axes: of the mesh; None for the default device.

        Returns:
            The bank there.
        """
        rows = [host(each) if of is None else host(each).take(of, axis=0) for each in self.rows]
        return dataclasses.replace(self, rows=tuple(waiting(each, axes) for each in rows))


@dataclasses.dataclass
class Traffic:
    """What has gone to the device since counting began; every transfer is counted where it is made.

    Attributes:
        transfers: transfers of rows.
        bytes: their bytes.
    """

    transfers: int = 0
    bytes: int = 0


def host_of(device: jax.Device) -> SingleDeviceSharding:
    """A device's pinned host memory."""
    return SingleDeviceSharding(device, memory_kind=_HOST)


def waiting(rows: Any, axes: Axes | None) -> Float[Array, "B S 2 K D"]:
    """A layer's rows in pinned host memory: beside each device of a mesh those that it asks for.

    Args:
        rows: of the host's, or on the devices already.
        axes: of the mesh; None for the default device.

    Returns:
        The rows there, or on their way.
    """
    if axes is None:
        return jax.device_put(rows, host_of(next(iter(jnp.zeros(()).devices()))))
    there = NamedSharding(axes.mesh, axes.spec("B S 2 K D", rows.shape), memory_kind=_HOST)
    return put(rows, there)


def committed(tree: Any) -> Any:
    """Commits arrays to the device where they lie, as rows are that come back from host memory.

    JAX compiles apart for committed and uncommitted arrays: a cache that was not committed from the beginning would
    have every program of its first step compiled again for the second. On a mesh all are.
    """
    if Axes.of(jax.tree.leaves(tree)[0]) is not None:
        return tree
    return jax.device_put(tree, next(iter(jax.tree.leaves(tree)[0].devices())))


def put_away(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], axes: Axes | None = None
) -> Float[Array, "B S 2 K D"]:
    """Starts moving a layer's keys and values to host memory.

    Args:
        k: keys on the device.
        v: values.
        axes: of the mesh that they lie on, if they do.

    Returns:
        An array in host memory; work that does not wait for it goes on meanwhile.
    """
    rows = _by_token(k, v, axes=axes)
    return jax.device_put(rows, rows.sharding.with_memory_kind(_HOST))


@program(static=("axes",))
def _by_token(
    k: Float[Array, "B K S D"], v: Float[Array, "B K S D"], *, axes: Axes | None
) -> Float[Array, "B S 2 K D"]:
    return jnp.moveaxis(jnp.stack([k, v]), (0, 3), (2, 1))


def fetch_rows(
    bank: Bank, layers: tuple[int, ...], positions: Int[Array, "B T"], traffic: Traffic
) -> Float[Array, "B n T 2 K D"]:
    """Brings the same tokens of several layers to the device: one packed gather, one transfer.

    The gather is the host's own work, not a program's: a device executes programs in order, and so it would wait for
    those that it is to run beside. On a mesh each device gets those of its own heads and sequences.

    Args:
        bank: host memory; a bank of one sequence serves any number.
        layers: some of its layers.
        positions: which tokens; waited for.
        traffic: counts the transfers.

    Returns:
        The rows where the positions lie. Nobody has waited for them.
    """
    axes, sources = Axes.of(positions), [bank.rows[bank.layers.index(each)] for each in layers]
    asked = _by_device(positions, axes)
    held = [{device: _bits(part) for device, part in _by_device(source, axes).items()} for source in sources]
    # On a single device it may be another one than the bank's.
    held = held if axes is not None else [dict.fromkeys(asked, *each.values()) for each in held]
    where, at = list(asked), [np.asarray(part) for part in asked.values()]
    batch, count = at[0].shape
    shapes = [(batch, len(layers), count, *held[0][device].shape[2:]) for device in where]
    packed = [np.empty(shape, held[0][where[0]].dtype) for shape in shapes]

    def take(part: tuple[int, int, int]) -> None:
        which, row, index = part
        source = held[index][where[which]]
        np.take(source[row % source.shape[0]], at[which][row], axis=0, out=packed[which][row, index], mode="clip")

    # Copies let other threads run: a sequence's rows of one layer each.
    list(_pool().map(take, np.ndindex(len(where), batch, len(layers))))
    there = [SingleDeviceSharding(device) for device in where]
    dtype = bank.rows[0].dtype
    sent = [_sent(rows.view(dtype), to, traffic) for rows, to in zip(packed, there, strict=True)]
    if axes is None:
        return sent[0]
    whole = (positions.shape[0], len(layers), count, *bank.rows[0].shape[2:])
    split = NamedSharding(axes.mesh, axes.spec("B n T 2 K D", whole))
    return jax.make_array_from_single_device_arrays(whole, split, sent)


def fetch_whole(bank: Bank, layer: int, like: Int[Array, " B"], traffic: Traffic) -> Float[Array, "B 1 S 2 K D"]:
    """Brings the whole of a layer to the device.

    Args:
        bank: host memory; a bank of one sequence serves any number.
        layer: one of its layers.
        like: what each sequence has a number of, where the rows are to go.
        traffic: counts the transfers.

    Returns:
        The rows on the device.
    """
    axes, rows = Axes.of(like), bank.rows[bank.layers.index(layer)]
    there = SingleDeviceSharding(next(iter(like.devices())))
    sent = _sent(rows, there if axes is None else NamedSharding(axes.mesh, axes.spec("B S 2 K D", rows.shape)), traffic)
    if axes is None:
        return jnp.broadcast_to(sent[:, None], (len(like), 1, *rows.shape[1:]))
    return _of_each(sent, like, axes=axes)


@program(static=("axes",))
def _of_each(
    rows: Float[Array, "#B S 2 K D"], like: Int[Array, " B"], *, axes: Axes | None
) -> Float[Array, "B 1 S 2 K D"]:
    return jnp.broadcast_to(rows[:, None], (len(like), 1, *rows.shape[1:]))


def _by_device(leaf: Array, axes: Axes | None) -> dict[jax.Device, Array]:
    """What each device of this process has of an array."""
    if axes is None:
        return {next(iter(leaf.devices())): leaf}
    return {part.device: part.data for part in leaf.addressable_shards}


def _sent(rows: Array | np.ndarray, there: Any, traffic: Traffic) -> Array:
    parts = list(_by_device(rows, Axes.of(rows)).values()) if isinstance(rows, jax.Array) else [rows]
    traffic.transfers += len(parts)
    traffic.bytes += sum(part.nbytes for part in parts)
    return jax.device_put(rows, there)


def _bits(rows: Array) -> np.ndarray:
    """Host memory as it lies there; as integers, which numpy copies whatever they mean."""
    host = np.asarray(rows)
    return host.view(np.uint16 if host.dtype.itemsize == 2 else np.uint32)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="jaxkv-bank")
