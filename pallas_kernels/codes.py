"""Rows in 8-bit and 4-bit codes within the decode kernels: their operands, and how a new row is encoded."""

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import store

# As jaxkv's stores have them: float16 scales.
_LARGEST, SMALLEST_SCALE = 127, 2.0**-24
# Columns that share a scale and a least value in 4 bits, and the largest such code.
GROUP, _LARGEST_4 = 32, 15


class Coded(NamedTuple):
    """Keys or values of a pool as 8-bit codes, with a scale for each row.

    Attributes:
        code: `i8[B, P, D]` from -127 to 127.
        scale: `f16[B, P]` by which a row's codes are multiplied.
    """

    code: jax.Array
    scale: jax.Array


class Nibbles(NamedTuple):
    """Keys or values of a pool as 4-bit codes, with a scale and a least value for each group of 32 columns.

    Codes are from 0 to 15, the first in a word's lowest bits. A word of 16 bits has column e of groups 4 b to 4 b + 3;
    one of 8 bits column e of group b, and in its high bits of group b + D / 64.

    Attributes:
        code: `u16[B, P, D / 4]` or `u8[B, P, D / 2]` words.
        scale: `f16[B, P, D / 32]` by which a group's codes are multiplied.
        least: `f16[B, P, D / 32]` a group's minimum: a number is about code * scale + least.
    """

    code: jax.Array
    scale: jax.Array
    least: jax.Array


Rows = jax.Array | Coded | Nibbles


def shape_of(rows: Rows) -> tuple[int, ...]:
    """Shape `(B, P, D)` of a pool's keys or values, encoded or not."""
    if isinstance(rows, Nibbles):
        return (*rows.code.shape[:2], 2 * rows.code.dtype.itemsize * rows.code.shape[2])
    return (rows.code if isinstance(rows, Coded) else rows).shape


def itemsize_of(k: Rows, v: Rows, dtype: Any) -> int | float:
    """Bytes of a stored element, by which tiles are chosen: mean of keys' and values', scales left out."""
    sizes = {Coded: 1.0, Nibbles: 0.5}
    return sum(sizes.get(type(rows), jnp.dtype(dtype).itemsize) for rows in (k, v)) / 2


def operands(name: str, rows: Rows) -> dict[str, jax.Array]:
    """Arrays of keys or values by the names that kernels know them by: `name`, of codes also `name_scale`, `_least`.

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
    """Pairs of numbers `[B, P, n]` seen as words `[B, P, n / 2]` of a dtype of twice their bits."""
    return lax.bitcast_convert_type(numbers.reshape(*numbers.shape[:2], -1, 2), dtype)


def half_of_word(words: jax.Array, half: int) -> jax.Array:
    """Float16 in the low (`half` 0) or high (1) 16 bits of int32 words, inside a kernel."""
    return lax.bitcast_convert_type((words >> 16 * half).astype(jnp.int16), jnp.float16)


def rebuilt(name: str, found: dict[str, jax.Array], like: Rows) -> Rows:
    """Keys or values, encoded if `like` is, from a kernel's outputs of the names that `operands` gives them."""
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
    """Float16 scale by which code `most` stands for `largest`, at least 2**-24; 0 for 0."""
    scale = largest / most
    return jnp.where(scale > 0, jnp.maximum(scale, SMALLEST_SCALE), scale).astype(jnp.float16)


def codes_of(
    numbers: jax.Array, scale: jax.Array, low: int = -_LARGEST, high: int = _LARGEST
) -> jax.Array:
    """Numbers over their scale, rounded half to even and clipped to [low, high]; still float32, 0 for a scale of 0."""
    wide = scale.astype(jnp.float32)
    code = jnp.where(wide == 0, 0.0, numbers / jnp.where(wide == 0, 1.0, wide))
    # Pallas has no rounding in Triton.
    below = jnp.floor(code)
    up = (code - below > 0.5) | ((code - below == 0.5) & (below * 0.5 != jnp.floor(below * 0.5)))
    return jnp.clip(below + up.astype(jnp.float32), low, high)


def put_bytes(
    refs: Any,
    name: str,
    at: tuple[Any, Any],
    parts: tuple[jax.Array, ...],
    exists: jax.Array,
    writes: jax.Array,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Encodes a key or value in 8 bits, writes it to row `at` of the pool if `writes`; returns its codes and its scale.

    Parts are the even- and the odd-indexed columns, float32; `exists` masks those that exist. Codes are float32, too.
    """
    scale = scale_of(
        reduce(jnp.maximum, (jnp.where(exists, jnp.abs(each), 0.0).max() for each in parts))
    )
    codes = tuple(codes_of(each, scale) for each in parts)
    low, high = (each.astype(jnp.int32) & 255 for each in codes)
    word = jnp.arange(exists.shape[0], dtype=jnp.int32)
    store(
        getattr(refs, f"pool_{name}").at[*at, word],
        (low | (high << 8)).astype(jnp.uint16),
        mask=exists & writes,
    )
    store(getattr(refs, f"pool_{name}_scale").at[at], scale, mask=writes)
    return codes, scale.astype(jnp.float32)


def groups_of_block(block: int, blocks: int, groups: int) -> tuple[int, ...]:
    """Indices of the groups that are packed in a block of `GROUP` words, those in the lowest bits first."""
    return (
        (block, block + blocks) if groups == 2 * blocks else tuple(range(4 * block, 4 * block + 4))
    )


def put_nibbles(
    refs: Any, name: str, at: tuple[Any, Any], parts: tuple[jax.Array, ...], writes: jax.Array
) -> tuple[jax.Array, ...]:
    """Encodes a key or value in 4 bits, writes it to row `at` of the pool if `writes`; returns it as stored, float32.

    Parts are groups of columns, in the order of `groups_of_block`.
    """
    ref, word = getattr(refs, f"pool_{name}"), jnp.arange(GROUP, dtype=jnp.int32)
    blocks = ref.shape[-1] // GROUP
    order = [groups_of_block(block, blocks, len(parts)) for block in range(blocks)]
    codes, scales, leasts, stored = {}, {}, {}, []
    for group, part in zip((group for each in order for group in each), parts, strict=True):
        wide = part.astype(jnp.float32)
        leasts[group] = wide.min().astype(jnp.float16)
        off = wide - leasts[group].astype(jnp.float32)
        # Rounding may have moved the least value up: what lies below it becomes code 0.
        scales[group] = scale_of(jnp.maximum(off.max(), 0.0), _LARGEST_4)
        codes[group] = codes_of(off, scales[group], 0, _LARGEST_4)
        stored.append(
            codes[group] * scales[group].astype(jnp.float32) + leasts[group].astype(jnp.float32)
        )
    for block, groups in enumerate(order):
        bits = (codes[group].astype(jnp.int32) << 4 * index for index, group in enumerate(groups))
        store(
            ref.at[*at, block * GROUP + word],
            reduce(jnp.bitwise_or, bits).astype(ref.dtype),
            mask=(word < GROUP) & writes,
        )
    for each, halves in (("scale", scales), ("least", leasts)):
        for pair in range(len(parts) // 2):
            first, second = (_bits(halves[2 * pair + index]) for index in (0, 1))
            store(
                getattr(refs, f"pool_{name}_{each}").at[*at, jnp.int32(pair)],
                first | (second << 16),
                mask=writes,
            )
    return tuple(stored)


def _bits(half: jax.Array) -> jax.Array:
    """Bits of a float16, as the low half of an int32."""
    return lax.bitcast_convert_type(half, jnp.int16).astype(jnp.int32) & 0xFFFF
