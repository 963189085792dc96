"""`add_norm`: add split-K parts of a product to the residual stream and normalise the sum, in one pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._compat import BlockSpec, LaunchParameters, call_triton_kernel, load, store


@partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def add_norm(
    x: Array,
    added: Array,
    scale: Array,
    *,
    eps: float,
    dtype: jnp.dtype | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Add a product's split-K parts to the residual stream; return the sum, and the sum RMS-normalised and scaled.

    Args:
        x: `[..., E]` float.
        added: `[n, ..., E]` of any float dtype: n split-K parts whose sum is added.
        scale: `[E]` scale of the norm.
        eps: epsilon of the norm.
        dtype: dtype of the sum, by default x's; the norm is that of the rounded sum.
        interpret: True runs on any device, for tests.

    Returns:
        `[..., E]` the sum, and `[..., E]` its norm in the scale's dtype. The arithmetic is float32.
    """
    width = x.shape[-1]
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    rows = x.size // width
    parts = added.shape[0]
    padded = 1 << (width - 1).bit_length()

    # Blocks of a program (r): x, sum and norm [E], and added [n, E] of row r; scale [E], complete.
    def kernel(refs):
        column = jnp.arange(padded, dtype=jnp.int32)
        options = {} if padded == width else {"mask": column < width, "other": 0.0}

        def take(ref, *at):
            return load(ref.at[(*at, column)], **options).astype(jnp.float32)

        more = take(refs.added, 0)
        for part in range(1, parts):
            more = more + take(refs.added, part)
        total = (take(refs.x) + more).astype(dtype)
        wide = total.astype(jnp.float32)
        normed = wide * lax.rsqrt((wide * wide).sum() / width + eps) * take(refs.scale)
        mask = options.get("mask")
        store(refs.sum.at[column], total, mask=mask)
        store(refs.norm.at[column], normed.astype(scale.dtype), mask=mask)

    row = BlockSpec((None, width), lambda r: (r, 0))
    whole = BlockSpec((width,), lambda r: (0,))
    of_parts = BlockSpec((parts, None, width), lambda r: (0, r, 0))
    found = call_triton_kernel(
        kernel,
        name="add_norm",
        grid=(rows,),
        inputs={
            "x": (x.reshape(rows, width), row),
            "added": (added.reshape(parts, rows, width), of_parts),
            "scale": (scale, whole),
        },
        outputs={
            "sum": (jax.ShapeDtypeStruct((rows, width), dtype), row),
            "norm": (jax.ShapeDtypeStruct((rows, width), scale.dtype), row),
        },
        # About sixteen columns per thread.
        launch=LaunchParameters(warps=min(16, max(4, padded // 512)), stages=1),
        interpret=interpret,
    )
    return found["sum"].reshape(x.shape), found["norm"].reshape(x.shape)
