"""Loads and writes of a decode kernel's keys or values, unencoded or as words of codes.

8-bit codes are words of two columns, 4-bit codes words of two or four groups.
"""

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels._compat import (
    convert_codes_to_float16,
    dequantise_nibbles,
    load,
    load_masked_rows,
    round_up_head_dim,
    store,
)
from pallas_kernels.codes import (
    GROUP,
    LARGEST_4,
    compute_scale,
    convert_float16_to_bits,
    extract_float16,
    list_block_groups,
    round_to_codes,
)

# Parts of a row: one if unencoded, one each for even and odd columns in 8 bits, one per group in 4 bits.
Parts = tuple[Array, ...]
# Columns of each part, and the mask of valid columns.
Columns = tuple[tuple[Array, Array], ...]


class PoolRowAccess:
    """Accessor in a kernel of one sequence's keys or values in a pool: loads and writes rows in the model's dtype.

    Attributes:
        columns: for each part of a row its columns, and the mask of valid ones; one part if unencoded.
    """

    def __init__(
        self, refs: Any, name: str, sequence: Any, dim: int, dtype: Any, interpret: bool
    ) -> None:
        self.refs = refs
        self.name = name
        self.sequence = sequence
        self.dim = dim
        self.dtype = dtype
        self.interpret = interpret
        self.columns = self._list_part_columns()

    def _list_part_columns(self) -> Columns:
        """Return for each part of a stored row, here one, its channel indices and a mask that excludes padding."""
        column = jnp.arange(round_up_head_dim(self.dim), dtype=jnp.int32)
        return ((column, column < self.dim),)

    def load_rows(self, at: Array, inside: Array) -> Array:
        """Load pool rows `at` as `[n, padded dim]` in the model's dtype; rows outside the mask `inside` are 0."""
        ref = getattr(self.refs, self.name)
        return load_masked_rows(ref, at, inside, self.dim, self.sequence).astype(self.dtype)

    def write_entry(self, at: Any, parts: Parts, writes: Array) -> tuple[Parts, Array | None]:
        """Write a key or value to pool row `at` if `writes`; return its parts as stored, in float32, and None as scale.

        The scale, a factor of the codes, is None for unencoded entries.
        """
        column, real = self.columns[0]
        row = parts[0].astype(self.dtype)
        store(getattr(self.refs, f"pool_{self.name}").at[*at, column], row, mask=real & writes)
        return (row.astype(jnp.float32),), None


class Int8PoolRowAccess(PoolRowAccess):
    """Accessor in a kernel of one sequence's int8 keys or values in a pool: codes, two per 16-bit word, and scales.

    Attributes:
        words: number of words to load of a row; invalid words are 0.
        exists: mask of valid words.
    """

    def _list_part_columns(self) -> Columns:
        """Return the channels of words' lower bytes (even) and higher bytes (odd), each with a mask of valid ones."""
        # At least 32 columns: with 16, as many as a tile's queries, Triton gives every warp the same work.
        self.words = max(32, round_up_head_dim(self.dim // 2))
        self.word = jnp.arange(self.words, dtype=jnp.int32)
        self.exists = self.word < self.dim // 2
        return tuple((2 * self.word + byte, self.exists) for byte in (0, 1))

    def load_codes(self, at: Array, inside: Array) -> Parts:
        """Load codes of pool rows `at`, plus `HALF_OFFSET`, as two float16 arrays: even channels, odd channels."""
        mask = inside[:, None] & self.exists[None, :]
        place = getattr(self.refs, self.name).at[self.sequence, at[:, None], self.word[None, :]]
        words = load(place, mask=mask, other=0)
        return tuple(
            convert_codes_to_float16(words, byte, interpret=self.interpret) for byte in (0, 1)
        )

    def load_scales(self, at: Array, inside: Array) -> Array:
        """Load the scales of pool rows `at` as float32 `[n]`; 0 outside the mask `inside`."""
        place = getattr(self.refs, f"{self.name}_scale").at[self.sequence, at]
        return load(place, mask=inside, other=0.0).astype(jnp.float32)

    def write_entry(self, at: Any, parts: Parts, writes: Array) -> tuple[Parts, Array | None]:
        """Write a key's or value's int8 codes and scale to row `at` if `writes`; return both, in float32."""
        rounded = [each.astype(self.dtype).astype(jnp.float32) for each in parts]
        largest = (jnp.where(self.exists, jnp.abs(each), 0.0).max() for each in rounded)
        scale = compute_scale(reduce(jnp.maximum, largest))
        codes = tuple(round_to_codes(each, scale) for each in rounded)
        low, high = (each.astype(jnp.int32) & 255 for each in codes)
        pool, scales = (getattr(self.refs, f"pool_{self.name}{each}") for each in ("", "_scale"))
        place = pool.at[*at, self.word]
        store(place, (low | (high << 8)).astype(jnp.uint16), mask=self.exists & writes)
        store(scales.at[at], scale, mask=writes)
        return codes, scale.astype(jnp.float32)


class Int4PoolRowAccess(PoolRowAccess):
    """Accessor in a kernel that loads and writes one sequence's 4-bit keys or values in a pool, in 32-channel groups.

    A word has one code of each of two or four groups, so `GROUP` words unpack to two or four complete groups. These are
    matrices for tensor cores, in float16, or in float32 for a float32 model. Parts are groups, in the order of
    `dequantise_rows`.

    Attributes:
        decodes_to: dtype of dequantised groups.
    """

    def _list_part_columns(self) -> Columns:
        """Return each group's channel indices, in the order of unpacked words, with a mask that is True everywhere."""
        self.words = getattr(self.refs, self.name)
        self.word = jnp.arange(GROUP, dtype=jnp.int32)
        self.blocks = self.words.shape[-1] // GROUP
        self.groups = self.dim // GROUP
        self.decodes_to = jnp.float32 if self.dtype == jnp.float32 else jnp.float16
        groups = (
            group
            for block in range(self.blocks)
            for group in list_block_groups(block, self.blocks, self.groups)
        )
        return tuple((group * GROUP + self.word, self.word < GROUP) for group in groups)

    def dequantise_rows(self, at: Array, inside: Array) -> Parts:
        """Load and dequantise pool rows `at`: one array `[n, GROUP]` per group; 0 outside the mask `inside`."""
        scales, leasts = (
            self._load_group_floats(f"{self.name}_{each}", at, inside)
            for each in ("scale", "least")
        )
        mask = jnp.broadcast_to(inside[:, None], (at.shape[0], GROUP))
        found = []
        for block in range(self.blocks):
            place = self.words.at[self.sequence, at[:, None], (block * GROUP + self.word)[None, :]]
            words = load(place, mask=mask, other=0)
            for index, group in enumerate(list_block_groups(block, self.blocks, self.groups)):
                scale, least = (
                    jnp.broadcast_to(each[group][:, None], mask.shape) for each in (scales, leasts)
                )
                found.append(self._dequantise_codes(words, scale, least, index))
        return tuple(found)

    def _dequantise_codes(self, words: Array, scale: Array, least: Array, index: int) -> Array:
        """Return 4-bit code `index` of each word, times its scale plus its minimum, in the dtype `decodes_to`."""
        if self.decodes_to == jnp.float16:
            return dequantise_nibbles(words, scale, least, index=index, interpret=self.interpret)
        code = ((words.astype(jnp.int32) >> 4 * index) & 15).astype(jnp.float32)
        return code * scale.astype(jnp.float32) + least.astype(jnp.float32)

    def _load_group_floats(self, name: str, at: Array, inside: Array) -> list[Array]:
        """Load the scales or minima of pool rows `at`, stored in pairs; return a list with one `f16[n]` per group."""
        ref = getattr(self.refs, name)
        pairs = [
            load(ref.at[self.sequence, at, pair], mask=inside, other=0)
            for pair in range(self.groups // 2)
        ]
        return [extract_float16(pairs[group // 2], group % 2) for group in range(self.groups)]

    def write_entry(self, at: Any, parts: Parts, writes: Array) -> tuple[Parts, Array | None]:
        """Encode a key or value in 4 bits, write it to row `at` if `writes`; return (dequantised groups, None)."""
        order = [list_block_groups(block, self.blocks, self.groups) for block in range(self.blocks)]
        codes = {}
        scales = {}
        leasts = {}
        stored = []
        narrow = [each.astype(self.dtype) for each in parts]
        for group, part in zip((group for each in order for group in each), narrow, strict=True):
            wide = part.astype(jnp.float32)
            leasts[group] = wide.min().astype(jnp.float16)
            off = wide - leasts[group].astype(jnp.float32)
            # Rounding may have raised the minimum: values below it become code 0.
            scales[group] = compute_scale(jnp.maximum(off.max(), 0.0), LARGEST_4)
            codes[group] = round_to_codes(off, scales[group], 0, LARGEST_4)
            stored.append(
                codes[group] * scales[group].astype(jnp.float32) + leasts[group].astype(jnp.float32)
            )
        pool = getattr(self.refs, f"pool_{self.name}")
        for block, groups in enumerate(order):
            bits = (codes[each].astype(jnp.int32) << 4 * index for index, each in enumerate(groups))
            place = pool.at[*at, block * GROUP + self.word]
            words = reduce(jnp.bitwise_or, bits).astype(pool.dtype)
            store(place, words, mask=(self.word < GROUP) & writes)
        for name, halves in (("scale", scales), ("least", leasts)):
            of_pairs = getattr(self.refs, f"pool_{self.name}_{name}")
            for pair in range(self.groups // 2):
                first, second = (
                    convert_float16_to_bits(halves[2 * pair + index]) for index in (0, 1)
                )
                store(of_pairs.at[*at, jnp.int32(pair)], first | (second << 16), mask=writes)
        return tuple(stored), None
