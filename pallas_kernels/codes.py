"""Rows in 8-bit codes within the decode kernels: their operands, how they enter products, how a new row is encoded.

A row's scale is a factor of all its products: logits take that of its key, softmax weights that of its value, so codes
go into the tensor cores as they are, exact in bfloat16.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._compat import load, store

# As jaxkv's store of 8-bit rows has them: float16 scales, rounded up, so that no code lies beyond the largest one.
_LARGEST, _SMALLEST, _UP = 127, 2.0**-24, 1 + 2.0**-11


class Coded(NamedTuple):
    """Keys or values of a pool as 8-bit codes, with a scale for each row.

    Attributes:
        code: `i8[B, P, D]` from -127 to 127.
        scale: `f16[B, P]` by which a row's codes are multiplied.
    """

    code: jax.Array
    scale: jax.Array


def shape_of(rows: jax.Array | Coded) -> tuple[int, ...]:
    """Shape `(B, P, D)` of a pool's keys or values, encoded or not."""
    return (rows.code if isinstance(rows, Coded) else rows).shape


def itemsize_of(rows: jax.Array | Coded, dtype: Any) -> int:
    """Bytes of a stored element, by which tiles are chosen; 4 in a float32 model, whose products use registers."""
    wide = jnp.dtype(dtype).itemsize
    return 1 if isinstance(rows, Coded) and wide < 4 else wide


def operands(name: str, rows: jax.Array | Coded) -> dict[str, jax.Array]:
    """Arrays of keys or values by the names that kernels know them by: `name`, and of codes `name_scale`."""
    return {name: rows.code, f"{name}_scale": rows.scale} if isinstance(rows, Coded) else {name: rows}


def rebuilt(name: str, found: dict[str, jax.Array], like: jax.Array | Coded) -> jax.Array | Coded:
    """Keys or values, encoded if `like` is, from a kernel's outputs of the names that `operands` gives them."""
    return Coded(found[name], found[f"{name}_scale"]) if isinstance(like, Coded) else found[name]


def factor_dtype(rows: jax.Array | Coded, dtype: Any) -> Any:
    """Dtype of softmax weights and values in their product: the model's; bfloat16 for codes in a float16 model.

    Weights that are multiplied by a scale would leave float16's range.
    """
    return jnp.bfloat16 if isinstance(rows, Coded) and dtype == jnp.float16 else dtype


def scales_at(refs: Any, name: str, sequence: Any, at: jax.Array, inside: jax.Array) -> jax.Array | None:
    """Loads the float32 scales of rows `at` within a kernel, 0 where `inside` is False; None for rows without codes."""
    ref = getattr(refs, f"{name}_scale", None)
    return None if ref is None else load(ref.at[sequence, at], mask=inside, other=0.0).astype(jnp.float32)


def times(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Products of `x` `[n, rows]` and one scale per row; `x` itself for None."""
    return x if scale is None else x * scale[None, :]


def encoded(row: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes of one float32 row, still float32, and its float16 scale; `real` masks the columns that count."""
    scale = jnp.where(real, jnp.abs(row), 0.0).max() / _LARGEST
    scale = jnp.where(scale > 0, jnp.maximum(scale * _UP, _SMALLEST), scale).astype(jnp.float16)
    wide = scale.astype(jnp.float32)
    code = jnp.where(wide == 0, 0.0, row / jnp.where(wide == 0, 1.0, wide))
    # Rounds halves to even: Triton has no instruction of JAX's for that.
    below = jnp.floor(code)
    up = (code - below > 0.5) | ((code - below == 0.5) & (below * 0.5 != jnp.floor(below * 0.5)))
    return jnp.clip(below + up.astype(jnp.float32), -_LARGEST, _LARGEST), scale


def put_row(
    refs: Any, name: str, at: tuple[Any, Any], vector: jax.Array, *, real: jax.Array, writes: jax.Array, dtype: Any
) -> jax.Array:
    """Writes a key or value to row `at` of the pool if `writes`, as codes if it has those; returns it as stored.

    `vector` is float32, its columns in mask `real` count; it is rounded to the model's `dtype` first. What is returned
    is float32.
    """
    ref, scales = getattr(refs, f"pool_{name}"), getattr(refs, f"pool_{name}_scale", None)
    column, rounded = jnp.arange(vector.shape[0], dtype=jnp.int32), vector.astype(dtype)
    if scales is None:
        store(ref.at[*at, column], rounded, mask=real & writes)
        return rounded.astype(jnp.float32)
    code, scale = encoded(rounded.astype(jnp.float32), real)
    store(ref.at[*at, column], code.astype(jnp.int8), mask=real & writes)
    store(scales.at[at], scale, mask=writes)
    return code * scale.astype(jnp.float32)
