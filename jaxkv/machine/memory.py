"""Free memory of devices and of the machine, and MemoryErrors for allocations that do not fit."""

import contextlib
import ctypes

import jax
import jax.numpy as jnp

_SMALLER = "lower the budget, the batch or the length of the prompt"


def require_free_bytes(
    needed: int,
    what: str,
    device: jax.Device | None = None,
    *,
    detail: str = "",
    remedy: str = _SMALLER,
) -> None:
    """Raise MemoryError unless a device, by default JAX's default device, has `needed` bytes of memory available.

    The MemoryError names `what`, the bytes needed, `detail`, the available bytes and `remedy`.
    """
    device = default_device() if device is None else device
    available = available_bytes(device)
    if needed > available:
        raise MemoryError(
            f"{what} needs {needed:,} bytes{detail} and {device} has {available:,} free: {remedy}"
        )


def available_bytes(device: jax.Device) -> int:
    """Return the bytes that can still be allocated on a device; on a CPU, the machine's free memory."""
    own = get_allocator_bytes(device)
    return get_machine_bytes() if own is None else own


def get_allocator_bytes(device: jax.Device) -> int | None:
    """Return the bytes left of the limit of a device's allocator; None without a limit, as on a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (
        stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None
    )


def default_device() -> jax.Device:
    """Return JAX's default device, for arrays without explicit placement."""
    return next(iter(jnp.zeros(()).devices()))


def get_machine_bytes() -> int:
    """Return the bytes of this machine's main memory that are available to processes."""
    import psutil

    return psutil.virtual_memory().available


def release_freed_memory() -> None:
    """Give freed heap memory of this process back to the operating system, if the C library has `malloc_trim`."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
