"""Which implementation computes attention, and where."""

import dataclasses
import enum
import re

import jax
import jax.numpy as jnp

from jaxkv._errors import require
from jaxkv.attention.cudnn import serves


class Implementation(enum.Enum):
    """What stands behind the door to attention.

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
    XLA = "xla"
    PALLAS = "pallas"
    INTERPRETED = "pallas (interpreted)"
    CUDNN = "cudnn"
    MOSAIC = "mosaic"


KERNELS = (Implementation.PALLAS, Implementation.INTERPRETED)
# Of whole prompts alone: everything else about attention is then PALLAS.
PREFILL_ONLY = (Implementation.CUDNN, Implementation.MOSAIC)
_HOPPER = (9, 0)


def over_rows(implementation: Implementation) -> Implementation:
    """What attends to segments where this one prefills: those that know whole prompts alone leave it to the kernels."""
    return Implementation.PALLAS if implementation in PREFILL_ONLY else implementation


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
    asked = named(asked)
    gpu, cpu = platform in ("gpu", "cuda"), platform == "cpu"
    pallas, cudnn = Implementation.PALLAS, Implementation.CUDNN
    by_cudnn = serves(dtype, head_dim, capability)
    if asked is Implementation.AUTO:
        if not gpu:
            return Implementations()
        prefill = cudnn if by_cudnn else pallas
        return Implementations(prefill=prefill, decode=over_rows(prefill))
    if asked is pallas and cpu:
        asked = Implementation.INTERPRETED
    require(
        asked is not pallas or gpu,
        "implementation",
        asked.value,
        f"these kernels need a GPU, this is {platform}: use xla",
    )
    if asked is cudnn:
        require(gpu, "implementation", "cudnn", f"cuDNN needs a GPU, this is {platform}: use auto")
        remedy = (
            f"it takes 16 bits and a head dim of at most 128 (256 from Hopper on), not {dtype}, {head_dim}: use auto"
        )
        require(by_cudnn, "implementation", "cudnn", remedy)
    if asked is Implementation.MOSAIC:
        _require_mosaic(gpu, platform, dtype, head_dim, capability)
    return Implementations(prefill=asked, decode=over_rows(asked))


def _require_mosaic(
    gpu: bool, platform: str, dtype: jnp.dtype, head_dim: int, capability: tuple[int, int] | None
) -> None:
    def need(condition: bool, remedy: str) -> None:
        require(condition, "implementation", "mosaic", f"{remedy}: use auto or pallas")

    need(gpu, f"it needs a GPU, this is {platform}")
    told = ".".join(map(str, capability or ()))
    need(capability in (None, _HOPPER), f"it is made for compute capability 9.0, Hopper's, not {told}")
    # A second compiler, imported where it is asked for.
    from jaxkv.pallas_kernels import mosaic

    need(jnp.dtype(dtype).name in mosaic.DTYPES, f"it takes {' and '.join(mosaic.DTYPES)}, not {dtype}")
    need(head_dim in mosaic.DIMS, f"it takes a head dim of {' or '.join(map(str, mosaic.DIMS))}, not {head_dim}")


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
