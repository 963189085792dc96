"""Free bytes of devices and of the machine, and the refusal of allocations that do not fit."""

import jax
import jax.numpy as jnp

_SMALLER = "lower the budget, the batch or the prompt's length"


def check_bytes(
    needed: int, what: str, device: jax.Device | None = None, *, detail: str = "", remedy: str = _SMALLER
) -> None:
    """Refuses an allocation of `needed` bytes that the device, by default JAX's own choice, cannot hold.

    The MemoryError names `what` needs them, the bytes and `detail`, those available, and `remedy`.
    """
    device = default_device() if device is None else device
    available = available_bytes(device)
    if needed > available:
        raise MemoryError(f"{what} needs {needed:,} bytes{detail} and {device} has {available:,} free: {remedy}")


def available_bytes(device: jax.Device) -> int:
    """Bytes that the device can still allocate: its allocator's free bytes, on a CPU the machine's free memory."""
    own = allocator_bytes(device)
    return machine_bytes() if own is None else own


def allocator_bytes(device: jax.Device) -> int | None:
    """Bytes that the device's own allocator can still give; None on a CPU, whose allocator has no limit."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def default_device() -> jax.Device:
    """The device of arrays that are not placed."""
    return next(iter(jnp.zeros(()).devices()))


def machine_bytes() -> int:
    """Bytes of the machine's memory that processes can still have."""
    import psutil

    return psutil.virtual_memory().available
