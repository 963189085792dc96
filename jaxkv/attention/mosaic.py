"""Backend that prefills by the Mosaic GPU kernels of `pallas_kernels.mosaic`; the rest is the Triton kernels'."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxkv.attention.backend import DeviceTraits
from jaxkv.attention.kernels import Kernels, firsts

_HOPPER = (9, 0)


class Mosaic(Kernels):
    """Backend with prefill by a Mosaic GPU kernel for Hopper; scoring and decoding by the Triton kernels."""

    @property
    def _mosaic(self) -> ModuleType:
        """Module `pallas_kernels.mosaic`, imported on first use: its compiler loads slower than Triton's."""
        import pallas_kernels.mosaic as mosaic

        return mosaic

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Error text for devices known not to be Hopper GPUs and for unsupported dtypes and head dims; else None."""
        if not setting.gpu:
            remedy = f"it needs a GPU, this is {setting.platform}"
        elif setting.capability not in (None, _HOPPER):
            found = ".".join(map(str, setting.capability or ()))
            remedy = f"it is made for compute capability 9.0, Hopper's, not {found}"
        elif jnp.dtype(setting.dtype).name not in self._mosaic.DTYPES:
            remedy = f"it takes {' and '.join(self._mosaic.DTYPES)}, not {setting.dtype}"
        elif setting.head_dim not in self._mosaic.DIMS:
            remedy = f"it takes a head dim of {' or '.join(map(str, self._mosaic.DIMS))}, not {setting.head_dim}"
        else:
            return None
        return f"{remedy}: use auto or pallas"

    def suits(self, setting: DeviceTraits) -> bool:
        """True for models that it takes on devices known to be Hopper GPUs, with a CUDA that compiles it rightly."""
        known = setting.capability == _HOPPER
        return known and self.invalid(setting) is None and self._mosaic.refused_cuda() is None

    def _flash(self, *of: Any, lse: bool, **masking: Any) -> tuple[Array, Array | None]:
        """Causal attention of all prompts in one Mosaic kernel, which knows no caps of logits and no windows.

        Layers that have one take Triton's.
        """
        if any(each is not None for each in masking.values()):
            return super()._flash(*of, lse=lse, **masking)
        q, k, v, length, first = of
        found: tuple[Array, Array] = self._mosaic.flash(q, k, v, firsts(first, length), length)
        return found
