"""Checks of arrays from callers outside jaxkv: keys, values, queries, counts, sink logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv._errors import require


def validate_keys_values(k: Any, v: Any) -> tuple[Array, Array]:
    """Return a layer's keys and values `[B, K, S, D]` as JAX arrays; ValueError for wrong shapes or dtypes."""
    k = jnp.asarray(k)
    v = jnp.asarray(v)
    for field, rows in (("k", k), ("v", v)):
        require(
            rows.ndim == 4,
            field,
            list(rows.shape),
            "wrong shape: give [B, K, S, D], that is batch, kv heads, tokens, head dim",
        )
        require(
            jnp.issubdtype(rows.dtype, jnp.floating),
            field,
            str(rows.dtype),
            "not floating point: give floating-point entries",
        )
    require(
        v.shape == k.shape and v.dtype == k.dtype,
        "v",
        format_dtype_and_shape(v),
        f"values and keys differ: give values as the keys are, {format_dtype_and_shape(k)}",
    )
    require(
        k.dtype.itemsize <= 4,
        "k",
        str(k.dtype),
        "dtype not supported: give float32, bfloat16 or float16",
    )
    return k, v


def format_axis_order_hint(k: Array) -> str:
    """Return an error hint to swap axes if `[B, K, S, D]` keys have more heads than tokens; else empty text."""
    heads, tokens = k.shape[1:3]
    return (
        f"; {heads} heads of {tokens} tokens: give [B, S, K, D] as k.swapaxes(1, 2)"
        if heads > tokens
        else ""
    )


def group_query_heads(
    field: str, q: Any, batch: int, heads: int, rows: Array
) -> Float[Array, "B K G N D"]:
    """Return queries `[B, H, N, D]` as `[B, K, G, N, D]`, grouped by kv head; ValueError if they do not fit the keys.

    `field` is the argument's name for errors; `rows` are the keys.
    """
    q = jnp.asarray(q)
    dim = rows.shape[-1]
    shape = list(q.shape)
    require(
        q.ndim == 4,
        field,
        shape,
        "wrong shape: give [B, H, N, D]; q of [B, K, G, N, D] as q.reshape(B, K * G, N, D)",
    )
    fits = (q.shape[0], q.shape[3]) == (batch, dim) and q.shape[1] % heads == 0 and q.size > 0
    require(
        fits,
        field,
        shape,
        f"wrong shape: give [B, H, N, D] with B = {batch}, D = {dim}, and H a multiple of K "
        f"= {heads}",
    )
    require(
        q.dtype == rows.dtype,
        field,
        str(q.dtype),
        f"keys are {rows.dtype}: give queries of the same dtype",
    )
    return q.reshape(batch, heads, -1, *q.shape[2:])


def group_sink_logits(
    given: Any, heads: int, group: int | None = None
) -> Float[Array, "K G"] | None:
    """Return sink logits `[H]` grouped by kv head, `[K, G]`; None without any; ValueError if they do not fit."""
    if given is None:
        return None
    array = jnp.asarray(given)
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    require(
        floats,
        "sink_logits",
        format_dtype_and_shape(array),
        "not floating point: give floating-point numbers",
    )
    wanted = f"a multiple of {heads}" if group is None else heads * group
    fits = array.ndim == 1 and array.size % heads == 0 and group in (None, array.size // heads)
    remedy = f"wrong shape: give one number for each query head, f[H], H = {wanted}"
    require(fits and array.size > 0, "sink_logits", list(array.shape), remedy)
    return array.reshape(heads, -1)


def validate_token_counts(
    field: str, given: Any, batch: int, most: int, hint: str = ""
) -> Int[Array, " B"]:
    """Return token counts as `i32[B]`, or all `most` if None; ValueError for a wrong shape, dtype or (untraced) range.

    `hint` is the end of the error message.
    """
    if given is None:
        return jnp.full((batch,), most, jnp.int32)
    # Host arrays are checked before conversion, which would truncate values to 32 bits.
    counts = given if isinstance(given, jax.Array) else np.asarray(given)
    fits = counts.shape == (batch,) and np.issubdtype(counts.dtype, np.integer)
    require(
        fits,
        field,
        format_dtype_and_shape(counts),
        f"wrong shape or dtype: give one integer for each of {batch} sequences, i32[B]",
    )
    if has_concrete_values(counts):
        numbers = np.asarray(counts)
        inside = bool(((numbers >= 0) & (numbers <= most)).all())
        require(
            inside,
            field,
            numbers.tolist(),
            f"out of range: give 0 to {most} tokens for each sequence{hint}",
        )
    return jnp.asarray(counts, jnp.int32)


def zero_out_padding(
    rows: Float[Array, "... N D"], count: Int[Array, " B"]
) -> Float[Array, "... N D"]:
    """Return keys, values or queries with 0 beyond each sequence's `count` tokens, where NaN would spread in sums."""
    inside = jnp.arange(rows.shape[-2], dtype=jnp.int32) < count[:, None]
    return jnp.where(inside.reshape(len(count), *(1,) * (rows.ndim - 3), -1, 1), rows, 0)


def format_dtype_and_shape(array: Array | np.ndarray) -> str:
    """Return an array's dtype and shape as text for error messages, such as float32[2, 8]."""
    return f"{array.dtype}{list(array.shape)}"


def has_concrete_values(*arrays: Array | np.ndarray) -> bool:
    """Return True if none of the arrays is a JAX tracer, so that their values can be read."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)
