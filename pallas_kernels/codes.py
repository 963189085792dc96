"""Rows in 8-bit codes within the decode kernels: their operands, and how a new row is encoded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._compat import store

# As jaxkv's store of 8-bit rows has them: float16 scales, rounded up, so that no code lies beyond the largest one.
_LARGEST, SMALLEST_SCALE, _UP = 127, 2.0**-24, 1 + 2.0**-11


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
    """Bytes of a stored element, by which tiles are chosen: 1 of codes, else those of the model's dtype."""
    return 1 if isinstance(rows, Coded) else jnp.dtype(dtype).itemsize


def operands(name: str, rows: jax.Array | Coded) -> dict[str, jax.Array]:
    """Arrays of keys or values by the names that kernels know them by: `name`, and of codes `name_scale`.

    Codes of values are seen as words of four, which moves nothing.
    """
    if not isinstance(rows, Coded):
        return {name: rows}
    code = rows.code
    if code.shape[2] % 4:
        raise ValueError(f"{name}: codes of {code.shape[2]} columns: kernels read four at a time, pad them")
    if name == "v":
        code = lax.bitcast_convert_type(code.reshape(*code.shape[:2], -1, 4), jnp.int32)
    return {name: code, f"{name}_scale": rows.scale}


def rebuilt(name: str, found: dict[str, jax.Array], like: jax.Array | Coded) -> jax.Array | Coded:
    """Keys or values, encoded if `like` is, from a kernel's outputs of the names that `operands` gives them."""
    if not isinstance(like, Coded):
        return found[name]
    code = found[name]
    if code.dtype == jnp.int32:
        code = lax.bitcast_convert_type(code, jnp.int8).reshape(like.code.shape)
    return Coded(code, found[f"{name}_scale"])


def scale_of(largest: jax.Array) -> jax.Array:
    """Float16 scale of a row whose largest magnitude is `largest`; 0 for a row of zeros."""
    scale = largest / _LARGEST
    return jnp.where(scale > 0, jnp.maximum(scale * _UP, SMALLEST_SCALE), scale).astype(jnp.float16)


def codes_of(row: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes of a float32 row, or of a part of it, by the row's scale; still float32."""
    wide = scale.astype(jnp.float32)
    code = jnp.where(wide == 0, 0.0, row / jnp.where(wide == 0, 1.0, wide))
    # Rounds halves to even: Triton has no instruction of JAX's for that.
    below = jnp.floor(code)
    up = (code - below > 0.5) | ((code - below == 0.5) & (below * 0.5 != jnp.floor(below * 0.5)))
    return jnp.clip(below + up.astype(jnp.float32), -_LARGEST, _LARGEST)


def put_row(refs: Any, at: tuple[Any, Any], key: jax.Array, dim: int, writes: jax.Array) -> jax.Array:
    """Encodes a float32 key and writes it to row `at` of the pool if `writes`; returns it as stored, in float32."""
    column = jnp.arange(key.shape[0], dtype=jnp.int32)
    real = column < dim
    scale = scale_of(jnp.where(real, jnp.abs(key), 0.0).max())
    code = codes_of(key, scale)
    store(refs.pool_k.at[*at, column], code.astype(jnp.int8), mask=real & writes)
    store(refs.pool_k_scale.at[at], scale, mask=writes)
    return code * scale.astype(jnp.float32)
