"""Backend with prefill by the Mosaic GPU kernels of `pallas_kernels.mosaic`; the rest by the Triton kernels."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxkv.attention.backend import DeviceTraits
from jaxkv.attention.kernels import PallasBackend, get_first_query_positions

_HOPPER = (9, 0)


class MosaicBackend(PallasBackend):
    """Backend with prefill by a Mosaic GPU kernel for Hopper; scoring and decoding by the Triton kernels."""

    @property
    def _mosaic_kernels(self) -> ModuleType:
        """The module `pallas_kernels.mosaic`, imported on first use because its compiler loads slower than Triton's."""
        import pallas_kernels.mosaic as mosaic

        return mosaic

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return an error text for devices other than Hopper GPUs or unsupported dtypes, head dims; else None."""
        if not setting.is_nvidia_gpu:
            remedy = f"not supported on {setting.platform}: it needs a GPU"
        elif setting.capability not in (None, _HOPPER):
            found = ".".join(map(str, setting.capability or ()))
            remedy = f"not supported on compute capability {found}: it needs 9.0, Hopper's"
        elif jnp.dtype(setting.dtype).name not in self._mosaic_kernels.DTYPES:
            remedy = f"not supported for {setting.dtype}: it needs {' or '.join(self._mosaic_kernels.DTYPES)}"
        elif setting.head_dim not in self._mosaic_kernels.DIMS:
            remedy = (
                f"not supported for head dim {setting.head_dim}: it needs "
                f"{' or '.join(map(str, self._mosaic_kernels.DIMS))}"
            )
        else:
            return None
        return f"{remedy}. Use auto or pallas"

    def is_auto_candidate(self, setting: DeviceTraits) -> bool:
        """True for supported models on known Hopper GPUs, with a CUDA version that compiles the kernel correctly."""
        known = setting.capability == _HOPPER
        return (
            known
            and self.get_unsupported_reason(setting) is None
            and self._mosaic_kernels.find_unsupported_cuda() is None
        )

    def _compute_flash_attention(
        self, *of: Any, lse: bool, **masking: Any
    ) -> tuple[Array, Array | None]:
        """Return causal attention output and log-sum-exp by a Mosaic kernel; by Triton for a softcap or sliding window.

        Layers with either use the Triton kernel.
        """
        if any(each is not None for each in masking.values()):
            return super()._compute_flash_attention(*of, lse=lse, **masking)
        q, k, v, length, first = of
        found: tuple[Array, Array] = self._mosaic_kernels.flash(
            q, k, v, get_first_query_positions(first, length), length
        )
        return found
