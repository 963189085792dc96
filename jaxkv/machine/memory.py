"""Free memory of devices and of the machine, and MemoryErrors for allocations that do not fit."""

import contextlib
import ctypes

import jax
import jax.numpy as jnp

_SMALLER = "lower the budget, the batch or the length of the prompt"


def check_bytes(
    needed: int,
    what: str,
    device: jax.Device | None = None,
    *,
    detail: str = "",
    remedy: str = _SMALLER,
) -> None:
    """Raise MemoryError if `needed` bytes do not fit on the device, by default JAX's default device.

    The MemoryError names `what`, the bytes needed, `detail`, the available bytes and `remedy`.
    """
    device = default_device() if device is None else device
    available = available_bytes(device)
    if needed > available:
        raise MemoryError(
            f"{what} needs {needed:,} bytes{detail} and {device} has {available:,} free: {remedy}"
        )


def available_bytes(device: jax.Device) -> int:
    """Return the number of bytes that can still be allocated on the device; on a CPU, the machine's free memory."""
    own = allocator_bytes(device)
    return machine_bytes() if own is None else own


def allocator_bytes(device: jax.Device) -> int | None:
    """Return the number of bytes that the device's allocator has left; None without a limit, as on a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (
        stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
    )


def default_device() -> jax.Device:
    """Return JAX's default device, for arrays without explicit placement."""
    return next(iter(jnp.zeros(()).devices()))


def machine_bytes() -> int:
    """Return the number of bytes of the machine's memory that are available to processes."""
    import psutil

    return psutil.virtual_memory().available


def trim() -> None:
    """Return freed memory to the operating system, if the C library can; compilation leaves gigabytes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
