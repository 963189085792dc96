"""8-bit and 4-bit codes in the decode kernels: operands, and encoding of a new entry."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# As in jaxkv's stores: float16 scales.
_LARGEST, SMALLEST_SCALE = 127, 2.0**-24
# Columns per 4-bit scale and minimum, and the largest 4-bit code.
GROUP, LARGEST_4 = 32, 15


class Coded(NamedTuple):
    """Keys or values of a pool as 8-bit codes, with a scale per row.

    Attributes:
        code: `i8[B, P, D]` from -127 to 127.
        scale: `f16[B, P]` factor of a row's codes.
    """

    code: jax.Array
    scale: jax.Array


class Nibbles(NamedTuple):
    """Keys or values of a pool as 4-bit codes, with a scale and a minimum per group of 32 columns.

    Codes are from 0 to 15, the first in a word's lowest bits. A 16-bit word has column e of groups 4 b to 4 b + 3. An
    8-bit word has column e of group b in its low bits, and of group b + D / 64 in its high bits.

    Attributes:
        code: `u16[B, P, D / 4]` or `u8[B, P, D / 2]` words.
        scale: `f16[B, P, D / 32]` factor of a group's codes.
        least: `f16[B, P, D / 32]` a group's minimum: a value is about code * scale + least.
    """

    code: jax.Array
    scale: jax.Array
    least: jax.Array


Rows = jax.Array | Coded | Nibbles


def shape_of(rows: Rows) -> tuple[int, ...]:
    """Return the shape `(B, P, D)` of a pool's keys or values, encoded or not."""
    if isinstance(rows, Nibbles):
        return (*rows.code.shape[:2], 2 * rows.code.dtype.itemsize * rows.code.shape[2])
    return (rows.code if isinstance(rows, Coded) else rows).shape


def itemsize_of(k: Rows, v: Rows, dtype: Any) -> int | float:
    """Return the bytes of a stored element, mean of keys and values without scales, by which tiles are selected."""
    sizes = {Coded: 1.0, Nibbles: 0.5}
    return sum(sizes.get(type(rows), jnp.dtype(dtype).itemsize) for rows in (k, v)) / 2


def operands(name: str, rows: Rows) -> dict[str, jax.Array]:
    """Return arrays of keys or values by the kernels' names: `name`, for codes also `name_scale`, `name_least`.

    8-bit codes and the scales of 4-bit codes are bitcast to a type of twice the width, without a copy.
    """
    if isinstance(rows, Nibbles):
        return {
            name: rows.code,
            f"{name}_scale": _words(rows.scale, jnp.int32),
            f"{name}_least": _words(rows.least, jnp.int32),
        }
    if not isinstance(rows, Coded):
        return {name: rows}
    return {name: _words(rows.code, jnp.uint16), f"{name}_scale": rows.scale}


def _words(numbers: jax.Array, dtype: Any) -> jax.Array:
    """View pairs of numbers `[B, P, n]` as words `[B, P, n / 2]` of a dtype of twice their bits."""
    return lax.bitcast_convert_type(numbers.reshape(*numbers.shape[:2], -1, 2), dtype)


def half_of_word(words: jax.Array, half: int) -> jax.Array:
    """Return the float16 in the low (`half` 0) or high (1) 16 bits of int32 words, inside a kernel."""
    return lax.bitcast_convert_type((words >> 16 * half).astype(jnp.int16), jnp.float16)


def rebuilt(name: str, found: dict[str, jax.Array], like: Rows) -> Rows:
    """Rebuild keys or values, encoded if `like` is, from a kernel's outputs by the names of `operands`."""
    if isinstance(like, Nibbles):
        words = (found[f"{name}_{each}"] for each in ("scale", "least"))
        return Nibbles(
            found[name],
            *(lax.bitcast_convert_type(w, jnp.float16).reshape(like.scale.shape) for w in words),
        )
    if not isinstance(like, Coded):
        return found[name]
    code = lax.bitcast_convert_type(found[name], jnp.int8).reshape(like.code.shape)
    return Coded(code, found[f"{name}_scale"])


def scale_of(largest: jax.Array, most: int = _LARGEST) -> jax.Array:
    """Return the float16 scale that maps code `most` to `largest`, at least 2**-24; 0 for 0."""
    scale = largest / most
    return jnp.where(scale > 0, jnp.maximum(scale, SMALLEST_SCALE), scale).astype(jnp.float16)


def codes_of(
    numbers: jax.Array, scale: jax.Array, low: int = -_LARGEST, high: int = _LARGEST
) -> jax.Array:
    """Divide by the scale, round half to even and clip to [low, high]; float32, 0 for a scale of 0."""
    wide = scale.astype(jnp.float32)
    code = jnp.where(wide == 0, 0.0, numbers / jnp.where(wide == 0, 1.0, wide))
    # Pallas' Triton backend has no rounding.
    below = jnp.floor(code)
    up = (code - below > 0.5) | ((code - below == 0.5) & (below * 0.5 != jnp.floor(below * 0.5)))
    return jnp.clip(below + up.astype(jnp.float32), low, high)


def groups_of_block(block: int, blocks: int, groups: int) -> tuple[int, ...]:
    """Return the indices of the groups that are packed in a block of `GROUP` words, the lowest bits first."""
    return (
        (block, block + blocks) if groups == 2 * blocks else tuple(range(4 * block, 4 * block + 4))
    )


def bits_of(half: jax.Array) -> jax.Array:
    """Return the bits of a float16 as the low half of an int32."""
    return lax.bitcast_convert_type(half, jnp.int16).astype(jnp.int32) & 0xFFFF
