"""Names of attention implementations, and the selection of one for a model and a device."""

import enum
import re
from functools import cache
from pkgutil import resolve_name
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._checks import validate_enum
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.attention.backend import AttentionBackend, DeviceTraits


class Implementation(enum.Enum):
    """Enum of attention implementations by name, each but AUTO with the import path of its `AttentionBackend` class.

    Attributes:
        AUTO: the fastest that supports the device, the dtype and the head dim.
        XLA: plain XLA, on every device.
        PALLAS: the GPU kernels of `pallas_kernels`; on a CPU they are interpreted.
        INTERPRETED: the PALLAS kernels as plain JAX operations, for tests; very slow. Never chosen by AUTO.
        CUDNN: prefill by cuDNN, through `jax.nn.dot_product_attention`; scoring and decoding by PALLAS, because cuDNN
            has neither column sums nor ragged segments.
        MOSAIC: prefill by `pallas_kernels.mosaic` on Hopper, in Mosaic GPU; scoring and decoding by PALLAS.
        TPU: prefill by JAX's splash attention, appends and reads of segments by `pallas_kernels.tpu.decode`, the rest
            by XLA. On a CPU its kernels are interpreted.
        TPU_INTERPRETED: the TPU kernels as plain JAX operations, for tests. Never chosen by AUTO.
    """

    AUTO = "auto"
    XLA = "xla", "jaxkv.attention.xla_backend:XlaBackend"
    PALLAS = "pallas", "jaxkv.attention.kernels:PallasBackend"
    INTERPRETED = "pallas (interpreted)", "jaxkv.attention.kernels:InterpretedPallasBackend"
    CUDNN = "cudnn", "jaxkv.attention.cudnn:CudnnBackend"
    MOSAIC = "mosaic", "jaxkv.attention.mosaic:MosaicBackend"
    TPU = "tpu", "jaxkv.attention.tpu:TpuBackend"
    TPU_INTERPRETED = "tpu (interpreted)", "jaxkv.attention.tpu:InterpretedTpuBackend"

    _value_: str
    backend: str

    def __new__(cls, value: Any, backend: str = "") -> Any:
        """Create an `Implementation` member: its value, the name that users pass, and its backend's import path."""
        member = object.__new__(cls)
        member._value_ = value
        member.backend = backend
        return member


# These serve prefill of complete prompts only; scoring and decoding use PALLAS.
PREFILL_ONLY = (Implementation.CUDNN, Implementation.MOSAIC)
# AUTO chooses the first that supports the model and the device.
_FASTEST = (
    Implementation.MOSAIC,
    Implementation.CUDNN,
    Implementation.PALLAS,
    Implementation.TPU,
    Implementation.XLA,
)
# These run on a CPU as plain JAX operations, for tests.
_INTERPRETED = {
    Implementation.PALLAS: Implementation.INTERPRETED,
    Implementation.TPU: Implementation.TPU_INTERPRETED,
}


@cache
def get_attention_backend(implementation: Implementation) -> AttentionBackend:
    """Return the `AttentionBackend` instance of an `Implementation` other than AUTO; imported and created once."""
    backend: AttentionBackend = resolve_name(implementation.backend)()
    return backend


@frozen_dataclass
class PrefillDecodeImplementations:
    """Pair of attention `Implementation` members: `prefill` for complete prompts, `decode` for segments of a pool."""

    prefill: Implementation = Implementation.XLA
    decode: Implementation = Implementation.XLA

    def __str__(self) -> str:
        """Return the attention implementation's name; both names if prefill and decode differ."""
        same = self.prefill is self.decode
        return (
            self.decode.value
            if same
            else f"{self.prefill.value} (prefill), {self.decode.value} (decode)"
        )


def parse_attention_implementation(name: Implementation | str) -> Implementation:
    """Return the `Implementation` member for a name or a member; ValueError for an unknown name."""
    return validate_enum("implementation", name, Implementation)


def choose_attention_implementations(
    name: Implementation | str,
    *,
    platform: str,
    dtype: jnp.dtype,
    head_dim: int,
    entry_dim: int | None = None,
    capability: tuple[int, int] | None = None,
) -> PrefillDecodeImplementations:
    """Return `PrefillDecodeImplementations` by name or AUTO for device, dtype and head dim; ValueError if unsupported.

    `head_dim` is that of attention within a prompt, `entry_dim` that of a cache's entries if it differs.

    `platform` is cpu, gpu (or cuda) or tpu, `capability` a GPU's compute capability such as (9, 0), None if unknown.
    ValueError if the implementation does not exist or does not support the model or the device.
    """
    name = parse_attention_implementation(name)
    setting = DeviceTraits(platform, dtype, head_dim, capability)
    if name is Implementation.AUTO:
        name = next(
            each for each in _FASTEST if get_attention_backend(each).is_auto_candidate(setting)
        )
    elif platform == "cpu":
        name = _INTERPRETED.get(name, name)
    remedy = get_attention_backend(name).get_unsupported_reason(setting)
    require(remedy is None, "implementation", name.value, remedy or "")
    decode = Implementation.PALLAS if name in PREFILL_ONLY else name
    return PrefillDecodeImplementations(
        prefill=name, decode=fit_head_dim(decode, head_dim if entry_dim is None else entry_dim)
    )


def fit_head_dim(implementation: Implementation, head_dim: int) -> Implementation:
    """Return the implementation, or XLA for a head dim that is too large for its kernels."""
    most = get_attention_backend(implementation).can.most_channels
    return implementation if head_dim <= most else Implementation.XLA


def get_cuda_capability(device: jax.Device) -> tuple[int, int] | None:
    """Return a device's CUDA compute capability as a tuple such as (9, 0); None for devices without one."""
    capability = getattr(device, "compute_capability", None)
    if not isinstance(capability, str) or not re.fullmatch(r"\d+\.\d+", capability):
        return None
    major, minor = capability.split(".")
    return int(major), int(minor)
