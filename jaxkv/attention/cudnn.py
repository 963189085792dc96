"""Backend with prefill by cuDNN through JAX's public functions; the rest by the Pallas kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.attention.backend import DeviceTraits
from jaxkv.attention.kernels import PallasBackend

# Compute capability from which cuDNN supports head dims above 128, which need more shared memory: Hopper.
_WIDE = (9, 0)


class CudnnBackend(PallasBackend):
    """Backend with prefill by cuDNN; scoring and decoding by Pallas: cuDNN has no column sums or ragged segments."""

    # The queries, the output, and the queries transposed for cuDNN.
    can = dataclasses.replace(PallasBackend.can, query_copies=3)

    def get_unsupported_reason(self, setting: DeviceTraits) -> str | None:
        """Return an error text for devices, dtypes and head dims that cuDNN attention does not support; else None."""
        if not setting.is_nvidia_gpu:
            return f"not supported on {setting.platform}: cuDNN needs a GPU. Use auto"
        dtype = setting.dtype
        dim = setting.head_dim
        most = 256 if setting.capability is not None and setting.capability >= _WIDE else 128
        if np.dtype(dtype).itemsize == 2 and dim % 8 == 0 and dim <= most:
            return None
        return (
            f"not supported for {dtype}, head dim {dim}: use 16 bits and at most 128 (256 "
            "from Hopper on), or auto"
        )

    def _compute_flash_attention(
        self, *of: Any, lse: bool, **masking: Any
    ) -> tuple[Array, Array | None]:
        """Return causal attention and lse by cuDNN (None unless `lse`), by Pallas for a `first`, softcap or window."""
        *whole, first = of
        if first is not None or any(each is not None for each in masking.values()):
            return super()._compute_flash_attention(*of, lse=lse, **masking)
        return compute_cudnn_attention(*whole, lse=lse)


def compute_cudnn_attention(
    q: Float[Array, "B K G S D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    length: Int[Array, " B"],
    *,
    lse: bool,
) -> tuple[Float[Array, "B K G S D"], Float[Array, "B K G S"] | None]:
    """Compute causal attention of complete 16-bit prompts by cuDNN; return output, log-sum-exp (None unless `lse`).

    Padding queries return 0 and -inf.
    """
    batch, heads, group, padded_len, dim = q.shape

    def transpose_to_cudnn(a: Array) -> Array:
        """Transpose `[B, K, .., S, D]` to cuDNN's layout `[B, S, heads, D]`, kv heads and group as one axis."""
        return jnp.swapaxes(a.reshape(batch, -1, padded_len, dim), 1, 2)

    def run_cudnn_attention(q: Array, k: Array, v: Array) -> Array:
        """Return causal attention output `[B, S, heads, D]` of q, k, v in that layout, masked to `length` tokens."""
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_seq_lengths=length,
            key_value_seq_lengths=length,
            implementation="cudnn",
        )

    real = (jnp.arange(padded_len, dtype=jnp.int32) < length[:, None])[:, None, None]
    given = (transpose_to_cudnn(q), transpose_to_cudnn(k), transpose_to_cudnn(v))
    found = None
    if lse:
        # The log-sum-exp of return_residual is rounded to q's dtype, 3% of a weight in bfloat16. The residual for
        # gradients is not rounded: it is the only float32 array among the leaves that `jax.vjp` returns.
        out, back = jax.vjp(run_cudnn_attention, *given)
        kept = [leaf for leaf in jax.tree.leaves(back) if leaf.dtype == jnp.float32]
        found = _find_lse_residual(kept, (batch, heads * group, padded_len)).reshape(
            batch, heads, group, padded_len
        )
        found = jnp.where(real, found, -jnp.inf)
    else:
        out = run_cudnn_attention(*given)
    out = jnp.swapaxes(out, 1, 2).reshape(q.shape)
    return jnp.where(real[..., None], out, 0), found


def _find_lse_residual(kept: list[Array], shape: tuple[int, ...]) -> Array:
    """Return the only residual of `shape`, cuDNN's log-sum-exp; NotImplementedError if none or several have it."""
    fitting = [leaf for leaf in kept if leaf.shape == shape]
    if len(fitting) != 1:
        raise NotImplementedError(
            f"jax {jax.__version__} has {len(fitting)} arrays like cuDNN's log-sum-exp: use "
            "implementation='pallas'"
        )
    return fitting[0]
