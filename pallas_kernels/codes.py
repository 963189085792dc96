"""8-bit and 4-bit codes in the decode kernels: operands, and encoding of a new entry."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# As in jaxkv's stores: float16 scales.
_LARGEST = 127
SMALLEST_SCALE = 2.0**-24
# Columns per 4-bit scale and minimum, and the largest 4-bit code.
GROUP = 32
LARGEST_4 = 15


class Int8Pool(NamedTuple):
    """Keys or values of a pool as int8 codes `[B, P, D]`, with a float16 scale per row.

    Attributes:
        code: `i8[B, P, D]` from -127 to 127.
        scale: `f16[B, P]` factor of a row's codes.
    """

    code: Array
    scale: Array


class Int4Pool(NamedTuple):
    """Keys or values of a pool as 4-bit codes, with a scale and a minimum per group of 32 columns.

    Codes are from 0 to 15, the first in a word's lowest bits. A 16-bit word has column e of groups 4 b to 4 b + 3. An
    8-bit word has column e of group b in its low bits, and of group b + D / 64 in its high bits.

    Attributes:
        code: `u16[B, P, D / 4]` or `u8[B, P, D / 2]` words.
        scale: `f16[B, P, D / 32]` factor of a group's codes.
        least: `f16[B, P, D / 32]` a group's minimum: a value is about code * scale + least.
    """

    code: Array
    scale: Array
    least: Array


Rows = Array | Int8Pool | Int4Pool


def get_pool_shape(rows: Rows) -> tuple[int, ...]:
    """Return the shape `(B, P, D)` of a pool's keys or values, encoded or not."""
    if isinstance(rows, Int4Pool):
        return (*rows.code.shape[:2], 2 * rows.code.dtype.itemsize * rows.code.shape[2])
    return (rows.code if isinstance(rows, Int8Pool) else rows).shape


def compute_mean_itemsize(k: Rows, v: Rows, dtype: Any) -> int | float:
    """Return the mean bytes per element of stored keys and values, without scales, by which tiles are selected."""
    sizes = {Int8Pool: 1.0, Int4Pool: 0.5}
    return sum(sizes.get(type(rows), jnp.dtype(dtype).itemsize) for rows in (k, v)) / 2


def list_pool_operands(name: str, rows: Rows) -> dict[str, Array]:
    """Return a dict of the arrays of keys or values by operand name; 8-bit codes and 4-bit scales are bitcast in pairs.

    8-bit codes and the scales of 4-bit codes are bitcast to a type of twice the width, without a copy.
    """
    if isinstance(rows, Int4Pool):
        return {
            name: rows.code,
            f"{name}_scale": _bitcast_pairs(rows.scale, jnp.int32),
            f"{name}_least": _bitcast_pairs(rows.least, jnp.int32),
        }
    if not isinstance(rows, Int8Pool):
        return {name: rows}
    return {name: _bitcast_pairs(rows.code, jnp.uint16), f"{name}_scale": rows.scale}


def _bitcast_pairs(numbers: Array, dtype: Any) -> Array:
    """Reinterpret pairs of neighbours in `[B, P, n]` as words `[B, P, n / 2]` of a dtype of twice the bits."""
    return lax.bitcast_convert_type(numbers.reshape(*numbers.shape[:2], -1, 2), dtype)


def extract_float16(words: Array, half: int) -> Array:
    """Return the float16 in the low (`half` 0) or high (1) 16 bits of int32 words, inside a kernel."""
    return lax.bitcast_convert_type((words >> 16 * half).astype(jnp.int16), jnp.float16)


def rebuild_pool(name: str, found: dict[str, Array], like: Rows) -> Rows:
    """Rebuild keys or values, encoded as `like` is, from the kernel outputs `name`, `name_scale`, `name_least`."""
    if isinstance(like, Int4Pool):
        words = (found[f"{name}_{each}"] for each in ("scale", "least"))
        return Int4Pool(
            found[name],
            *(lax.bitcast_convert_type(w, jnp.float16).reshape(like.scale.shape) for w in words),
        )
    if not isinstance(like, Int8Pool):
        return found[name]
    code = lax.bitcast_convert_type(found[name], jnp.int8).reshape(like.code.shape)
    return Int8Pool(code, found[f"{name}_scale"])


def compute_scale(largest: Array, most: int = _LARGEST) -> Array:
    """Return largest / most as float16, the scale that maps code `most` to `largest`: at least 2**-24, but 0 for 0."""
    scale = largest / most
    return jnp.where(scale > 0, jnp.maximum(scale, SMALLEST_SCALE), scale).astype(jnp.float16)


def round_to_codes(
    numbers: Array, scale: Array, low: int = -_LARGEST, high: int = _LARGEST
) -> Array:
    """Divide numbers by a scale, round half to even and clip to [low, high]; float32, 0 if the scale is 0."""
    wide = scale.astype(jnp.float32)
    code = jnp.where(wide == 0, 0.0, numbers / jnp.where(wide == 0, 1.0, wide))
    # Pallas' Triton backend has no rounding.
    below = jnp.floor(code)
    up = (code - below > 0.5) | ((code - below == 0.5) & (below * 0.5 != jnp.floor(below * 0.5)))
    return jnp.clip(below + up.astype(jnp.float32), low, high)


def list_block_groups(block: int, blocks: int, groups: int) -> tuple[int, ...]:
    """Return the indices of the 4-bit groups packed in one block of 32 words, those in the lowest bits first."""
    return (
        (block, block + blocks) if groups == 2 * blocks else tuple(range(4 * block, 4 * block + 4))
    )


def convert_float16_to_bits(half: Array) -> Array:
    """Return the bits of a float16 as an int32 whose high half is 0."""
    return lax.bitcast_convert_type(half, jnp.int16).astype(jnp.int32) & 0xFFFF
