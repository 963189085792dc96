"""Rows in codes inside a decode kernel, as words: 8-bit codes of two columns, 4-bit codes of two or four groups."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import halves_of_byte, halves_of_nibbles, load, pad_dim
from pallas_kernels.codes import GROUP, groups_of_block, half_of_word


class ByteBlocks:
    """Keys or values of one sequence in 8-bit codes, two of a row in a word.

    Attributes:
        words: number of words that are loaded of a row; those that do not exist are 0.
        exists: mask of those that exist.
        columns: for the lower and the higher bytes of words their columns, and `exists`.
    """

    def __init__(self, refs: Any, name: str, sequence: Any, dim: int, interpret: bool) -> None:
        self.refs, self.name, self.sequence, self.interpret = refs, name, sequence, interpret
        # At least 32 columns: with 16, as many as a tile's queries, Triton gives every warp the same work.
        self.words = max(32, pad_dim(dim // 2))
        self.word = jnp.arange(self.words, dtype=jnp.int32)
        self.exists = self.word < dim // 2
        self.columns = tuple((2 * self.word + byte, self.exists) for byte in (0, 1))

    def halves(self, at: jax.Array, inside: jax.Array) -> tuple[jax.Array, ...]:
        """Codes `[rows, words]` of pool rows `at`, 0 where masked, plus `HALF_OFFSET`: a float16 array per byte."""
        mask = inside[:, None] & self.exists[None, :]
        place = getattr(self.refs, self.name).at[self.sequence, at[:, None], self.word[None, :]]
        words = load(place, mask=mask, other=0)
        return tuple(halves_of_byte(words, byte, interpret=self.interpret) for byte in (0, 1))

    def scales(self, at: jax.Array, inside: jax.Array) -> jax.Array:
        """Scales `f32[rows]` of pool rows `at`; 0 where `inside` is False."""
        place = getattr(self.refs, f"{self.name}_scale").at[self.sequence, at]
        return load(place, mask=inside, other=0.0).astype(jnp.float32)


class NibbleBlocks:
    """Keys or values of one sequence in 4-bit codes.

    A word has a code of each of two or four groups, so that `GROUP` words unpack to two or four whole groups: matrices
    for tensor cores, as float16, or float32 for a float32 model.

    Attributes:
        columns: for each group, in the order of `decoded`, its columns, and the mask of those that exist: all.
        dtype: of decoded groups.
    """

    def __init__(
        self, refs: Any, name: str, sequence: Any, dim: int, dtype: Any, interpret: bool
    ) -> None:
        self.refs, self.name, self.sequence, self.interpret = refs, name, sequence, interpret
        self.words, self.word = getattr(refs, name), jnp.arange(GROUP, dtype=jnp.int32)
        self.blocks, self.groups = self.words.shape[-1] // GROUP, dim // GROUP
        self.dtype = jnp.float32 if dtype == jnp.float32 else jnp.float16
        groups = (
            group
            for block in range(self.blocks)
            for group in groups_of_block(block, self.blocks, self.groups)
        )
        self.columns = tuple((group * GROUP + self.word, self.word < GROUP) for group in groups)

    def decoded(self, at: jax.Array, inside: jax.Array) -> tuple[jax.Array, ...]:
        """Dequantised rows `at`: a tuple of `[rows, GROUP]`, one per group; 0 where mask `inside` is False."""
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
        """Code `index` of each word, times its scale, plus its least value."""
        if self.dtype == jnp.float16:
            return halves_of_nibbles(words, scale, least, index=index, interpret=self.interpret)
        code = ((words.astype(jnp.int32) >> 4 * index) & 15).astype(jnp.float32)
        return code * scale.astype(jnp.float32) + least.astype(jnp.float32)

    def _of_groups(self, name: str, at: jax.Array, inside: jax.Array) -> list[jax.Array]:
        """List of each group's scales or least values `f16[rows]`, which are packed in pairs."""
        ref = getattr(self.refs, name)
        pairs = [
            load(ref.at[self.sequence, at, pair], mask=inside, other=0)
            for pair in range(self.groups // 2)
        ]
        return [half_of_word(pairs[group // 2], group % 2) for group in range(self.groups)]
