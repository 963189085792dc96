"""Which implementation computes attention, and where."""

import dataclasses
import enum
import re
from functools import cache
from pkgutil import resolve_name
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._errors import require
from jaxkv.attention.backend import Backend, Setting


class Implementation(enum.Enum):
    """What stands behind the door to attention: a name, and the class of the backend that it stands for.

    Attributes:
        AUTO: the fastest that the device and the policy allow.
        XLA: plain XLA, everywhere.
        PALLAS: the GPU kernels of `pallas_kernels`; on a CPU they are interpreted.
        INTERPRETED: those kernels run as plain JAX operations, to check them; very slow. Never chosen by AUTO.
        CUDNN: cuDNN for prefill, through `jax.nn.dot_product_attention`; scores of keys, and decoding, are PALLAS:
            cuDNN has neither them nor ragged segments.
        MOSAIC: prefill by `pallas_kernels.mosaic` on Hopper, in Mosaic GPU; scores of keys, and decoding, are PALLAS.
            Never chosen by AUTO: nobody has measured it.
    """

    AUTO = "auto"
    XLA = "xla", "jaxkv.attention.xla_backend:Xla"
    PALLAS = "pallas", "jaxkv.attention.kernels:Kernels"
    INTERPRETED = "pallas (interpreted)", "jaxkv.attention.kernels:Interpreted"
    CUDNN = "cudnn", "jaxkv.attention.cudnn:Cudnn"
    MOSAIC = "mosaic", "jaxkv.attention.mosaic:Mosaic"

    _value_: str
    backend: str

    def __new__(cls, value: Any, backend: str = "") -> Any:
        """A member whose value is its name for users; its class is imported when it is first asked for."""
        member = object.__new__(cls)
        member._value_, member.backend = value, backend
        return member


# Of whole prompts alone: everything else about attention is then PALLAS.
PREFILL_ONLY = (Implementation.CUDNN, Implementation.MOSAIC)
# What AUTO takes the first of that serves.
_FASTEST = (Implementation.CUDNN, Implementation.PALLAS, Implementation.XLA)


@cache
def backend_of(implementation: Implementation) -> Backend:
    """The functions behind an implementation.

    Args:
        implementation: any but AUTO.

    Returns:
        Its backend.
    """
    backend: Backend = resolve_name(implementation.backend)()
    return backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementations:
    """What runs.

    Attributes:
        prefill: over whole prompts.
        decode: over a cache's segments.
    """

    prefill: Implementation = Implementation.XLA
    decode: Implementation = Implementation.XLA

    def __str__(self) -> str:
        """One name, or both where they differ."""
        same = self.prefill is self.decode
        return self.decode.value if same else f"{self.prefill.value} (prefill), {self.decode.value} (decode)"


def named(asked: Implementation | str) -> Implementation:
    """The implementation of this name.

    Args:
        asked: an `Implementation` or its value.

    Returns:
        The `Implementation`.

    Raises:
        ValueError: if there is none.
    """
    values = [each.value for each in Implementation]
    known = isinstance(asked, Implementation) or asked in values
    require(known, "implementation", asked, f"use one of {', '.join(values)}")
    return Implementation(asked)


def choose(
    asked: Implementation | str,
    *,
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    capability: tuple[int, int] | None = None,
) -> Implementations:
    """Chooses for a model and a device, whatever the policy looks at.

    Args:
        asked: what the caller wants, an `Implementation` or its value.
        platform: `cpu`, `gpu` (or `cuda`), `tpu`.
        dtype: of the model.
        head_dim: D.
        capability: of a GPU, such as (9, 0) for Hopper; None where it is not known.

    Returns:
        What runs.

    Raises:
        ValueError: if what is asked for does not exist, or not here.
    """
    asked, setting = named(asked), Setting(platform, dtype, head_dim, capability)
    if asked is Implementation.AUTO:
        asked = next(each for each in _FASTEST if backend_of(each).refusal(setting) is None)
    elif asked is Implementation.PALLAS and platform == "cpu":
        asked = Implementation.INTERPRETED
    remedy = backend_of(asked).refusal(setting)
    require(remedy is None, "implementation", asked.value, remedy or "")
    return Implementations(prefill=asked, decode=Implementation.PALLAS if asked in PREFILL_ONLY else asked)


def capability_of(device: jax.Device) -> tuple[int, int] | None:
    """A GPU's compute capability; None for other devices.

    Args:
        device: any.

    Returns:
        Such as (9, 0).
    """
    told = getattr(device, "compute_capability", None)
    if not isinstance(told, str) or not re.fullmatch(r"\d+\.\d+", told):
        return None
    major, minor = told.split(".")
    return int(major), int(minor)
