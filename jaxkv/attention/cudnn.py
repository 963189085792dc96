"""Backend that prefills by cuDNN through JAX's public functions; everything else is the Pallas kernels'."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.attention.backend import DeviceTraits
from jaxkv.attention.kernels import Kernels

# Compute capability from which cuDNN takes head dims above 128, for want of shared memory before: Hopper.
_WIDE = (9, 0)


class Cudnn(Kernels):
    """Backend with prefill by cuDNN; scoring and decoding by Pallas: cuDNN has no column sums or ragged segments."""

    # Queries, output, and the queries transposed for cuDNN.
    can = dataclasses.replace(Kernels.can, query_copies=3)

    def invalid(self, setting: DeviceTraits) -> str | None:
        """Error text for devices, dtypes and head dims that JAX's cuDNN call rejects; None if it serves them."""
        if not setting.gpu:
            return f"cuDNN needs a GPU, this is {setting.platform}: use auto"
        dtype, dim = setting.dtype, setting.head_dim
        most = 256 if setting.capability is not None and setting.capability >= _WIDE else 128
        if np.dtype(dtype).itemsize == 2 and dim % 8 == 0 and dim <= most:
            return None
        return f"it takes 16 bits and a head dim of at most 128 (256 from Hopper on), not {dtype}, {dim}: use auto"

    def _flash(self, *of: Any, lse: bool, **masking: Any) -> tuple[Array, Array | None]:
        """Causal attention by cuDNN, or by Pallas for queries from a position on, caps of logits and windows."""
        *whole, first = of
        if first is not None or any(each is not None for each in masking.values()):
            return super()._flash(*of, lse=lse, **masking)
        return causal(*whole, lse=lse)


def causal(
    q: Float[Array, "B K G S D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    length: Int[Array, " B"],
    *,
    lse: bool,
) -> tuple[Float[Array, "B K G S D"], Float[Array, "B K G S"] | None]:
    """Causal attention of whole 16-bit prompts by cuDNN; returns output and float32 log-sum-exp (None unless `lse`).

    Queries of padding give 0 and -inf.
    """
    batch, heads, group, padded_len, dim = q.shape

    def by_token(a: Array) -> Array:
        """Transpose `[B, K, .., S, D]` to cuDNN's layout `[B, S, heads, D]`, kv heads and group as one axis."""
        return jnp.swapaxes(a.reshape(batch, -1, padded_len, dim), 1, 2)

    def attend(q: Array, k: Array, v: Array) -> Array:
        """Causal attention output `[B, S, heads, D]` by cuDNN of q, k, v in that layout, padding masked by `length`."""
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
    given, found = (by_token(q), by_token(k), by_token(v)), None
    if lse:
        # The log-sum-exp of return_residual is rounded to q's dtype, 3% of a weight in bfloat16. The residual kept for
        # gradients is not: it is the one float32 array among the leaves of what `jax.vjp` returns.
        out, back = jax.vjp(attend, *given)
        kept = [leaf for leaf in jax.tree.leaves(back) if leaf.dtype == jnp.float32]
        found = _only(kept, (batch, heads * group, padded_len)).reshape(
            batch, heads, group, padded_len
        )
        found = jnp.where(real, found, -jnp.inf)
    else:
        out = attend(*given)
    out = jnp.swapaxes(out, 1, 2).reshape(q.shape)
    return jnp.where(real[..., None], out, 0), found


def _only(kept: list[Array], shape: tuple[int, ...]) -> Array:
    """The one residual array with `shape`, cuDNN's log-sum-exp; NotImplementedError if there is not exactly one."""
    fitting = [leaf for leaf in kept if leaf.shape == shape]
    if len(fitting) != 1:
        raise NotImplementedError(
            f"jax {jax.__version__} keeps {len(fitting)} arrays like cuDNN's log-sum-exp: use implementation='pallas'"
        )
    return fitting[0]
