"""How a program of the decode kernel adds up a pool's values: as they are, or from 8-bit or 4-bit codes.

A reader knows the values of one sequence, and adds them up times softmax weights; the loop over blocks of rows, and the
softmax itself, are the kernel's (`rows`).
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from ._compat import (
    HALF_OFFSET,
    dot,
    exp2_of,
    inverse_of,
    log2_of,
    pad_dim,
    put_rows,
    store,
    take_rows,
)
from .blocks import ByteBlocks, NibbleBlocks
from .codes import GROUP, SMALLEST_SCALE, Coded, Nibbles, put_bytes, put_nibbles
from .keys import halves


class PlainValues:
    """Values in the model's dtype.

    Attributes:
        columns: for each part of a value its columns, and the mask of those that exist; here one part.
    """

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
        self.refs, self.sequence, self.dim, self.dtype, self.interpret = refs, sequence, dim, dtype, interpret
        self.columns: tuple[tuple[jax.Array, jax.Array], ...] = ((column, column < dim),)

    def lifted(self, s: jax.Array, at: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Logits for the softmax, and factors `[rows]` by which its weights are then too small, or None for none."""
        return s, None

    def lifted_new(self, s: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        """Logits `[n]` of a new row for the softmax, and the weight that each then begins with."""
        return s, jnp.ones_like(s)

    def weights(self, s: jax.Array, top: jax.Array) -> jax.Array:
        """Softmax weights of logits `[n, rows]` to base 2, of which `top` is the largest: 1 for that."""
        return jnp.exp2(s - top[:, None])

    def begin(self, values: tuple[jax.Array, ...], rows: int, joins: jax.Array | None) -> Any:
        """Sums before any row was read: `values` in each of `rows` queries if `joins`, else 0."""
        wide = (rows, pad_dim(self.dim))
        return jnp.zeros(wide, jnp.float32) if joins is None else _where(joins, values[0], wide)

    def add(self, sums: Any, shrink: jax.Array, weights: jax.Array, at: jax.Array, inside: jax.Array) -> Any:
        """Sums times `shrink`, plus softmax weights times the values of pool rows `at`."""
        values = take_rows(self.refs.v, at, inside, self.dim, self.sequence).astype(self.dtype)
        return sums * shrink[:, None] + dot(weights.astype(self.dtype), values)

    def put_sums(self, ref: Any, query: jax.Array, real: jax.Array, sums: Any, total: jax.Array) -> None:
        """Writes sums over the total weight to the queries' rows of a ref."""
        put_rows(ref, query, real, self.dim, sums / total[:, None])

    def put_new(
        self, at: Any, values: tuple[jax.Array, ...], writes: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Writes a new value to row `at` of the pool if `writes`; returns its parts, float32, and their scale.

        The scale is None where values need none.
        """
        (column, real), value = self.columns[0], values[0].astype(self.dtype)
        store(self.refs.pool_v.at[*at, column], value, mask=real & writes)
        return (value.astype(jnp.float32),), None


class CodedValues(PlainValues):
    """Values in 8-bit codes with a scale each, read as they lie, two of a row in a word of 16 bits.

    Products are of float16, whose mantissa holds a code exactly on top of an offset (`HALF_OFFSET`). What that adds,
    the sum of a block's weights, is taken off again. Weights of a float32 model are two halves each, the second what
    the first one lacks. The lower bytes of all words are a matrix of their own, with every second column of the values,
    the others another: so a value has two parts, and there are two sums. The scale of a value is added to its row's
    logit as a logarithm: weights are then those of codes, the largest 1 whatever the scales are.
    """

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        super().__init__(refs, sequence, dim, dtype, interpret)
        self.blocks = ByteBlocks(refs, "v", sequence, dim, interpret)
        self.columns = self.blocks.columns

    def lifted(self, s: jax.Array, at: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Logits plus the base-2 logarithm of the values' scales, and one over these scales."""
        logs, factors = self._of_scales(self.blocks.scales(at, inside))
        return s + logs[None, :], factors

    def lifted_new(self, s: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        """Logits `[n]` of a new row plus its value's scale as a logarithm, and one over that scale."""
        logs, factors = self._of_scales(jnp.broadcast_to(scale, s.shape))
        return s + logs, factors

    def weights(self, s: jax.Array, top: jax.Array) -> jax.Array:
        """Softmax weights of logits, by fewer instructions; compilers spill registers of some plain kernels by it."""
        return exp2_of(s, 1.0, -top[:, None], interpret=self.interpret)

    def begin(self, values: tuple[jax.Array, ...], rows: int, joins: jax.Array | None) -> Any:
        """Sums of the two parts of values before any row was read."""
        zeros = (jnp.zeros((rows, self.blocks.words), jnp.float32),) * 2
        return zeros if joins is None else tuple(_where(joins, each, zeros[0].shape) for each in values)

    def add(self, sums: Any, shrink: jax.Array, weights: jax.Array, at: jax.Array, inside: jax.Array) -> Any:
        """Sums times `shrink`, plus softmax weights times the codes of pool rows `at`."""
        factors = self.blocks.halves(at, inside)
        parts = halves(weights, self.dtype)
        # Rounded weights are added up by the tensor cores, as their products with codes are.
        ones = jnp.ones(factors[0].shape, jnp.float16)
        added = reduce(jnp.add, (dot(half, ones) for half in parts)) * HALF_OFFSET
        # Begun without what is added then: tensor cores add up in place.
        begun = (each * shrink[:, None] - added for each in sums)
        return tuple(
            reduce(jnp.add, (dot(half, factor) for half in parts), each)
            for each, factor in zip(begun, factors, strict=True)
        )

    def put_sums(self, ref: Any, query: jax.Array, real: jax.Array, sums: Any, total: jax.Array) -> None:
        """Writes sums over the total weight to the queries' rows of a ref."""
        for (column, exists), each in zip(self.columns, sums, strict=True):
            mask = real[:, None] & exists[None, :]
            store(ref.at[query[:, None], column[None, :]], each / total[:, None], mask=mask)

    def put_new(
        self, at: Any, values: tuple[jax.Array, ...], writes: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Encodes a new value and writes it to row `at` of the pool if `writes`; returns its two parts and its scale.

        The parts are codes, float32.
        """
        rounded = tuple(each.astype(self.dtype).astype(jnp.float32) for each in values)
        return put_bytes(self.refs, "v", at, rounded, self.blocks.exists, writes)

    def _of_scales(self, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logarithms to base 2 of scales of values, and one over these; a scale of 0 counts as the smallest one."""
        scales = jnp.where(scales < SMALLEST_SCALE, SMALLEST_SCALE, scales)
        return log2_of(scales, interpret=self.interpret), inverse_of(scales, interpret=self.interpret)


class NibbleValues(PlainValues):
    """Values in 4-bit codes, with a scale and a least value for each group of columns, which is a part of a value."""

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        super().__init__(refs, sequence, dim, dtype, interpret)
        self.blocks = NibbleBlocks(refs, "v", sequence, dim, dtype, interpret)
        self.columns = self.blocks.columns

    def weights(self, s: jax.Array, top: jax.Array) -> jax.Array:
        """Softmax weights of logits, by fewer instructions; compilers spill registers of some plain kernels by it."""
        return exp2_of(s, 1.0, -top[:, None], interpret=self.interpret)

    def begin(self, values: tuple[jax.Array, ...], rows: int, joins: jax.Array | None) -> Any:
        """Sums of each group before any row was read."""
        zeros = (jnp.zeros((rows, GROUP), jnp.float32),) * len(self.columns)
        return zeros if joins is None else tuple(_where(joins, each, (rows, GROUP)) for each in values)

    def add(self, sums: Any, shrink: jax.Array, weights: jax.Array, at: jax.Array, inside: jax.Array) -> Any:
        """Sums times `shrink`, plus softmax weights times the values of pool rows `at`."""
        weights = weights.astype(self.blocks.dtype)
        values = self.blocks.decoded(at, inside)
        return tuple(each * shrink[:, None] + dot(weights, new) for each, new in zip(sums, values, strict=True))

    def put_sums(self, ref: Any, query: jax.Array, real: jax.Array, sums: Any, total: jax.Array) -> None:
        """Writes sums over the total weight to the queries' rows of a ref."""
        for (column, _), each in zip(self.columns, sums, strict=True):
            mask = jnp.broadcast_to(real[:, None], each.shape)
            store(ref.at[query[:, None], column[None, :]], each / total[:, None], mask=mask)

    def put_new(
        self, at: Any, values: tuple[jax.Array, ...], writes: jax.Array
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Encodes a new value and writes it to row `at` of the pool if `writes`; returns it as stored, in float32."""
        return put_nibbles(self.refs, "v", at, tuple(each.astype(self.dtype) for each in values), writes), None


def _where(joins: jax.Array, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Values `[columns]` in each row if `joins`, else 0."""
    return jnp.broadcast_to(jnp.where(joins, values, 0.0)[None, :], shape)


VALUES: dict[type, type[PlainValues]] = {Coded: CodedValues, Nibbles: NibbleValues}
