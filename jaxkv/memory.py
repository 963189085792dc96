"""What devices and the machine have free, and the refusal of what does not fit."""

import jax
import jax.numpy as jnp

_SMALLER = "lower the budget, the batch or the prompt's length"


def check_bytes(
    needed: int, what: str, device: jax.Device | None = None, *, detail: str = "", remedy: str = _SMALLER
) -> None:
    """Refuses an allocation that the device cannot hold.

    Args:
        needed: bytes.
        what: what needs them.
        device: where; the default device if None.
        detail: put behind the bytes in the message.
        remedy: what to change.

    Raises:
        MemoryError: naming the bytes, those available and what to change.
    """
    device = default_device() if device is None else device
    available = available_bytes(device)
    if available is not None and needed > available:
        raise MemoryError(f"{what} needs {needed:,} bytes{detail} and {device} has {available:,} free: {remedy}")


def available_bytes(device: jax.Device) -> int | None:
    """Bytes the device can still allocate, or None where nothing says so.

    Args:
        device: any JAX device.

    Returns:
        The allocator's limit less its use; on a CPU the machine's available memory.
    """
    own = allocator_bytes(device)
    return machine_bytes() if own is None else own


def allocator_bytes(device: jax.Device) -> int | None:
    """Bytes that the device's own allocator can still give, or None where there is none that says so: on a CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] - stats["bytes_in_use"] if stats and "bytes_limit" in stats else None


def default_device() -> jax.Device:
    """Where arrays go that nobody places."""
    return next(iter(jnp.zeros(()).devices()))


def machine_bytes() -> int:
    """Bytes of the machine's memory that processes can still have."""
    import psutil

    return psutil.virtual_memory().available
