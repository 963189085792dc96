"""Loads and writes of a decode kernel's keys or values, unencoded or as words of codes.

8-bit codes are words of two columns, 4-bit codes words of two or four groups.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import (
    halves_of_byte,
    halves_of_nibbles,
    load,
    pad_dim,
    store,
    take_rows,
)
from pallas_kernels.codes import (
    GROUP,
    LARGEST_4,
    bits_of,
    codes_of,
    groups_of_block,
    half_of_word,
    scale_of,
)

# Parts of a row: one if unencoded, one each for even and odd columns in 8 bits, one per group in 4 bits.
Parts = tuple[jax.Array, ...]
# Columns of each part, and the mask of valid columns.
Columns = tuple[tuple[jax.Array, jax.Array], ...]


class Blocks:
    """Keys or values of one sequence inside a kernel, in the model's dtype.

    Attributes:
        columns: for each part of a row its columns, and the mask of valid ones; one part if unencoded.
    """

    def __init__(
        self, refs: Any, name: str, sequence: Any, dim: int, dtype: Any, interpret: bool
    ) -> None:
        self.refs, self.name, self.sequence, self.dim = refs, name, sequence, dim
        self.dtype, self.interpret = dtype, interpret
        self.columns = self._columns()

    def _columns(self) -> Columns:
        """Return, for each part of a stored row (here one), its channel indices and the mask that excludes padding."""
        column = jnp.arange(pad_dim(self.dim), dtype=jnp.int32)
        return ((column, column < self.dim),)

    def rows(self, at: jax.Array, inside: jax.Array) -> jax.Array:
        """Load pool rows `at`; rows outside the mask `inside` are 0."""
        ref = getattr(self.refs, self.name)
        return take_rows(ref, at, inside, self.dim, self.sequence).astype(self.dtype)

    def put(self, at: Any, parts: Parts, writes: jax.Array) -> tuple[Parts, jax.Array | None]:
        """Write a new entry to row `at` of the pool if `writes`; return its parts as stored, float32, and their scale.

        The scale, a factor of the codes, is None for unencoded entries.
        """
        (column, real), row = self.columns[0], parts[0].astype(self.dtype)
        store(getattr(self.refs, f"pool_{self.name}").at[*at, column], row, mask=real & writes)
        return (row.astype(jnp.float32),), None


class ByteBlocks(Blocks):
    """Keys or values of one sequence in 8-bit codes, two codes per word.

    Attributes:
        words: number of words to load of a row; invalid words are 0.
        exists: mask of valid words.
    """

    def _columns(self) -> Columns:
        """Return even channels, the words' lower bytes, and odd ones, the higher; each with a mask of valid ones."""
        # At least 32 columns: with 16, as many as a tile's queries, Triton gives every warp the same work.
        self.words = max(32, pad_dim(self.dim // 2))
        self.word = jnp.arange(self.words, dtype=jnp.int32)
        self.exists = self.word < self.dim // 2
        return tuple((2 * self.word + byte, self.exists) for byte in (0, 1))

    def halves(self, at: jax.Array, inside: jax.Array) -> Parts:
        """Load codes `[rows, words]` of pool rows `at`, 0 where masked, plus `HALF_OFFSET`: float16 per byte."""
        mask = inside[:, None] & self.exists[None, :]
        place = getattr(self.refs, self.name).at[self.sequence, at[:, None], self.word[None, :]]
        words = load(place, mask=mask, other=0)
        return tuple(halves_of_byte(words, byte, interpret=self.interpret) for byte in (0, 1))

    def scales(self, at: jax.Array, inside: jax.Array) -> jax.Array:
        """Load scales `f32[rows]` of pool rows `at`; 0 where `inside` is False."""
        place = getattr(self.refs, f"{self.name}_scale").at[self.sequence, at]
        return load(place, mask=inside, other=0.0).astype(jnp.float32)

    def put(self, at: Any, parts: Parts, writes: jax.Array) -> tuple[Parts, jax.Array | None]:
        """Encode a new entry and write it to row `at` of the pool if `writes`; return its codes and their scale."""
        rounded = [each.astype(self.dtype).astype(jnp.float32) for each in parts]
        largest = (jnp.where(self.exists, jnp.abs(each), 0.0).max() for each in rounded)
        scale = scale_of(reduce(jnp.maximum, largest))
        codes = tuple(codes_of(each, scale) for each in rounded)
        low, high = (each.astype(jnp.int32) & 255 for each in codes)
        pool, scales = (getattr(self.refs, f"pool_{self.name}{each}") for each in ("", "_scale"))
        place = pool.at[*at, self.word]
        store(place, (low | (high << 8)).astype(jnp.uint16), mask=self.exists & writes)
        store(scales.at[at], scale, mask=writes)
        return codes, scale.astype(jnp.float32)


class NibbleBlocks(Blocks):
    """Keys or values of one sequence in 4-bit codes.

    A word has one code of each of two or four groups, so `GROUP` words unpack to two or four complete groups. These are
    matrices for tensor cores, in float16, or in float32 for a float32 model. Parts are groups, in the order of
    `decoded`.

    Attributes:
        decodes_to: dtype of dequantised groups.
    """

    def _columns(self) -> Columns:
        """Return the columns of each group."""
        self.words, self.word = getattr(self.refs, self.name), jnp.arange(GROUP, dtype=jnp.int32)
        self.blocks, self.groups = self.words.shape[-1] // GROUP, self.dim // GROUP
        self.decodes_to = jnp.float32 if self.dtype == jnp.float32 else jnp.float16
        groups = (
            group
            for block in range(self.blocks)
            for group in groups_of_block(block, self.blocks, self.groups)
        )
        return tuple((group * GROUP + self.word, self.word < GROUP) for group in groups)

    def decoded(self, at: jax.Array, inside: jax.Array) -> Parts:
        """Dequantise rows `at`: a tuple of `[rows, GROUP]`, one per group; 0 outside the mask `inside`."""
        scales, leasts = (
            self._of_groups(f"{self.name}_{each}", at, inside) for each in ("scale", "least")
        )
        mask = jnp.broadcast_to(inside[:, None], (at.shape[0], GROUP))
        found = []
        for block in range(self.blocks):
            place = self.words.at[self.sequence, at[:, None], (block * GROUP + self.word)[None, :]]
            words = load(place, mask=mask, other=0)
            for index, group in enumerate(groups_of_block(block, self.blocks, self.groups)):
                scale, least = (
                    jnp.broadcast_to(each[group][:, None], mask.shape) for each in (scales, leasts)
                )
                found.append(self._decoded(words, scale, least, index))
        return tuple(found)

    def _decoded(
        self, words: jax.Array, scale: jax.Array, least: jax.Array, index: int
    ) -> jax.Array:
        """Dequantise code `index` of each word: times its scale, plus its minimum."""
        if self.decodes_to == jnp.float16:
            return halves_of_nibbles(words, scale, least, index=index, interpret=self.interpret)
        code = ((words.astype(jnp.int32) >> 4 * index) & 15).astype(jnp.float32)
        return code * scale.astype(jnp.float32) + least.astype(jnp.float32)

    def _of_groups(self, name: str, at: jax.Array, inside: jax.Array) -> list[jax.Array]:
        """List each group's scales or minima `f16[rows]`, which are packed in pairs."""
        ref = getattr(self.refs, name)
        pairs = [
            load(ref.at[self.sequence, at, pair], mask=inside, other=0)
            for pair in range(self.groups // 2)
        ]
        return [half_of_word(pairs[group // 2], group % 2) for group in range(self.groups)]

    def put(self, at: Any, parts: Parts, writes: jax.Array) -> tuple[Parts, jax.Array | None]:
        """Encode a new entry and write it to row `at` of the pool if `writes`; return its dequantised groups."""
        order = [groups_of_block(block, self.blocks, self.groups) for block in range(self.blocks)]
        codes, scales, leasts, stored = {}, {}, {}, []
        narrow = [each.astype(self.dtype) for each in parts]
        for group, part in zip((group for each in order for group in each), narrow, strict=True):
            wide = part.astype(jnp.float32)
            leasts[group] = wide.min().astype(jnp.float16)
            off = wide - leasts[group].astype(jnp.float32)
            # Rounding may have raised the minimum: values below it become code 0.
            scales[group] = scale_of(jnp.maximum(off.max(), 0.0), LARGEST_4)
            codes[group] = codes_of(off, scales[group], 0, LARGEST_4)
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
                first, second = (bits_of(halves[2 * pair + index]) for index in (0, 1))
                store(of_pairs.at[*at, jnp.int32(pair)], first | (second << 16), mask=writes)
        return tuple(stored), None
