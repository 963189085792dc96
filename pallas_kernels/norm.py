"""The residual stream between two matrix products: what one has made is added, and normed for the next, in one pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ._compat import BlockSpec, Launch, call, load, store


@partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def add_norm(
    x: jax.Array,
    added: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    dtype: jnp.dtype | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """A sum of rows, and its root-mean-square norm (arXiv:1910.07467).

    Args:
        x: `[..., E]` float.
        added: `[n, ..., E]` float, of any dtype: n parts of what is to be added, as a product split over what it sums
            over leaves them.
        scale: `[E]` of the norm.
        eps: of the norm.
        dtype: of the sum, x's own by default; the norm is that of the sum as it is then.
        interpret: run on any device, to check it.

    Returns:
        `[..., E]` the sum, and `[..., E]` its norm in the scale's dtype. The arithmetic is float32.
    """
    width, dtype = x.shape[-1], jnp.dtype(x.dtype if dtype is None else dtype)
    flat = lambda a: a.reshape(-1, width)  # noqa: E731
    rows = x.size // width
    padded = 1 << (width - 1).bit_length()

    parts = added.shape[0]

    # Blocks of a program (r): x, sum and norm [E], and added [n, E] of row r; scale [E], whole.
    def kernel(x_ref, added_ref, scale_ref, sum_ref, norm_ref):
        column = jnp.arange(padded, dtype=jnp.int32)
        options = {} if padded == width else {"mask": column < width, "other": 0.0}
        take = lambda ref, *at: load(ref.at[(*at, column)], **options).astype(jnp.float32)  # noqa: E731
        more = take(added_ref, 0)
        for part in range(1, parts):
            more = more + take(added_ref, part)
        total = (take(x_ref) + more).astype(dtype)
        wide = total.astype(jnp.float32)
        normed = wide * lax.rsqrt((wide * wide).sum() / width + eps) * take(scale_ref)
        mask = options.get("mask")
        store(sum_ref.at[column], total, mask=mask)
        store(norm_ref.at[column], normed.astype(scale.dtype), mask=mask)

    row, whole = BlockSpec((None, width), lambda r: (r, 0)), BlockSpec((width,), lambda r: (0,))
    total, normed = call(
        kernel,
        flat(x),
        added.reshape(parts, rows, width),
        scale,
        name="add_norm",
        grid=(rows,),
        inputs=[row, BlockSpec((parts, None, width), lambda r: (0, r, 0)), whole],
        outputs=[row, row],
        shapes=[jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((rows, width), scale.dtype)],
        # Sixteen columns or so for each thread.
        launch=Launch(warps=min(16, max(4, padded // 512)), stages=1),
        interpret=interpret,
    )
    return total.reshape(x.shape), normed.reshape(x.shape)
