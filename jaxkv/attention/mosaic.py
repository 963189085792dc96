"""Backend that prefills by the Mosaic GPU kernels of `pallas_kernels.mosaic`; the rest is the Triton kernels'."""

from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array

from jaxkv.attention.backend import Setting
from jaxkv.attention.kernels import Kernels
from jaxkv.attention.shaping import PLAIN, Shaping

_HOPPER = (9, 0)


class Mosaic(Kernels):
    """Backend with prefill by a Mosaic GPU kernel for Hopper; scoring and decoding by the Triton kernels."""

    @property
    def _mosaic(self) -> ModuleType:
        """Module `pallas_kernels.mosaic`, imported on first use: its compiler loads slower than Triton's."""
        import pallas_kernels.mosaic as mosaic

        return mosaic

    def refusal(self, setting: Setting) -> str | None:
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

    def suits(self, setting: Setting) -> bool:
        """True for models that it takes on devices known to be Hopper GPUs, with a CUDA that compiles it rightly."""
        known = setting.capability == _HOPPER
        return known and self.refusal(setting) is None and self._mosaic.refused_cuda() is None

    def prefill(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Array,
        first: Array | None = None,
        *,
        lse: bool = True,
        shaping: Shaping = PLAIN,
        window: int | None = None,
    ) -> tuple[Array, Array | None]:
        """Causal attention of all prompts in one Mosaic kernel; returns output and log-sum-exp (None unless `lse`).

        That kernel knows no caps of logits and no windows: layers that have one take Triton's.
        """
        if window is not None or shaping.softcap is not None:
            return super().prefill(q, k, v, length, first, lse=lse, shaping=shaping, window=window)
        begin = jnp.zeros_like(length) if first is None else first
        out, found = shaping.joined(*self._mosaic.flash(q, k, v, begin, length))
        return out, found if lse else None
