"""The context bank: rows of some layers in host memory, and the few that come back for a step."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

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

    def put_back(self) -> "Bank":
        """The same rows in pinned host memory, wherever `jax.tree.map` or `jax.device_put` has brought them."""
        there = [isinstance(rows, jax.Array) and rows.sharding.memory_kind == _HOST for rows in self.rows]
        if all(there):
            return self
        where = host_of(next(iter(jnp.zeros(()).devices())))
        return dataclasses.replace(self, rows=tuple(jax.device_put(rows, where) for rows in self.rows))


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


def committed(tree: Any) -> Any:
    """Commits arrays to the device where they lie, as rows are that come back from host memory.

    JAX compiles apart for committed and uncommitted arrays: a cache that was not committed from the beginning would
    have every program of its first step compiled again for the second.
    """
    return jax.device_put(tree, next(iter(jax.tree.leaves(tree)[0].devices())))


def put_away(k: Float[Array, "B K S D"], v: Float[Array, "B K S D"]) -> Float[Array, "B S 2 K D"]:
    """Starts moving a layer's keys and values to host memory.

    Args:
        k: keys on the device.
        v: values.

    Returns:
        An array in host memory; work that does not wait for it goes on meanwhile.
    """
    rows = _by_token(k, v)
    return jax.device_put(rows, host_of(next(iter(rows.devices()))))


@jax.jit
def _by_token(k: Array, v: Array) -> Array:
    return jnp.moveaxis(jnp.stack([k, v]), (0, 3), (2, 1))


def fetch_rows(
    bank: Bank,
    layers: tuple[int, ...],
    positions: Int[np.ndarray, "B T"],
    device: jax.Device,
    traffic: Traffic,
) -> Float[Array, "B n T 2 K D"]:
    """Brings the same tokens of several layers to the device: one packed gather, one transfer.

    The gather is the host's own work, not a program's: a device executes programs in order, and so it would wait for
    those that it is to run beside.

    Args:
        bank: host memory; a bank of one sequence serves any number.
        layers: some of its layers.
        positions: which tokens.
        device: where to.
        traffic: counts the transfer.

    Returns:
        The rows on the device. Nobody has waited for them.
    """
    sources = [_bits(bank.rows[bank.layers.index(each)]) for each in layers]
    batch, count = positions.shape
    packed = np.empty((batch, len(layers), count, *sources[0].shape[2:]), sources[0].dtype)

    def take(part: tuple[int, int]) -> None:
        row, index = part
        source = sources[index]
        np.take(source[row % source.shape[0]], positions[row], axis=0, out=packed[row, index], mode="clip")

    # Copies let other threads run: a sequence's rows of one layer each.
    list(_pool().map(take, np.ndindex(batch, len(layers))))
    return _sent(packed.view(bank.rows[0].dtype), device, traffic)


def fetch_whole(
    bank: Bank, layer: int, batch: int, device: jax.Device, traffic: Traffic
) -> Float[Array, "B 1 S 2 K D"]:
    """Brings the whole of a layer to the device.

    Args:
        bank: host memory.
        layer: one of its layers.
        batch: B; a bank of one sequence serves any number.
        device: where to.
        traffic: counts the transfer.

    Returns:
        The rows on the device.
    """
    rows = _sent(bank.rows[bank.layers.index(layer)], device, traffic)[:, None]
    return jnp.broadcast_to(rows, (batch, *rows.shape[1:]))


def _sent(rows: Array | np.ndarray, device: jax.Device, traffic: Traffic) -> Array:
    traffic.transfers += 1
    traffic.bytes += rows.nbytes
    return jax.device_put(rows, SingleDeviceSharding(device))


def _bits(rows: Array) -> np.ndarray:
    """Host memory as it lies there; as integers, which numpy copies whatever they mean."""
    host = np.asarray(rows)
    return host.view(np.uint16 if host.dtype.itemsize == 2 else np.uint32)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="jaxkv-bank")
