"""Weighted sums of a pool's values in the decode kernel, with values unencoded or in 8-bit or 4-bit codes.

A reader accesses the values of one sequence, and sums them by softmax weights. The kernel (`rows`) has the loop over
blocks and the softmax.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import (
    HALF_OFFSET,
    dot,
    exp2_of,
    inverse_of,
    log2_of,
    put_rows,
    store,
)
from pallas_kernels.blocks import Blocks, ByteBlocks, NibbleBlocks, Parts
from pallas_kernels.codes import SMALLEST_SCALE, Coded, Nibbles
from pallas_kernels.keys import Reader, split_halves


class PlainValues(Reader):
    """Reader of one sequence's values in the model's dtype, in a decode kernel: weighted sums, and new entries."""

    name = "v"

    def lifted(
        self, s: jax.Array, at: jax.Array, inside: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return logits plus log2 of the values' scales if they have any; and 1 / scale per row, or None."""
        return s, None

    def lifted_new(self, s: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        """Return logits `[n]` of a new entry for the softmax, and the initial value of the softmax's denominator."""
        return s, jnp.ones_like(s)

    def weights(self, s: jax.Array, top: jax.Array) -> jax.Array:
        """Unnormalised softmax weights 2 ** (s - top) of logits `[n, rows]`; `top` is each query's running maximum."""
        # `exp2_of` has fewer instructions, but compilers then spill registers for some shapes.
        return jnp.exp2(s - top[:, None])

    def begin(self, values: Parts, rows: int, joins: jax.Array | None) -> Parts:
        """Return initial accumulators of `rows` queries, one per part: the new entry's value if `joins`, else 0."""
        shape = (rows, self.columns[0][0].shape[0])
        if joins is None:
            return (jnp.zeros(shape, jnp.float32),) * len(self.columns)
        return tuple(
            jnp.broadcast_to(jnp.where(joins, each, 0.0)[None, :], shape) for each in values
        )

    def add(
        self,
        sums: Parts,
        shrink: jax.Array,
        weights: jax.Array,
        at: jax.Array,
        inside: jax.Array,
    ) -> Parts:
        """Multiply accumulators by `shrink` (online softmax); add weights times the values of rows `at`."""
        values = self.blocks.rows(at, inside)
        return (sums[0] * shrink[:, None] + dot(weights.astype(self.dtype), values),)

    def put_sums(
        self,
        ref: Any,
        query: jax.Array,
        real: jax.Array,
        sums: Parts,
        total: jax.Array,
    ) -> None:
        """Write the accumulators, divided by the softmax's denominator, to the queries' rows of a ref."""
        put_rows(ref, query, real, self.dim, sums[0] / total[:, None])

    def put_new(self, at: Any, values: Parts, writes: jax.Array) -> tuple[Parts, jax.Array | None]:
        """Write a new value to row `at` of the pool if `writes`; return its parts, float32, and their scale.

        The scale is None for unencoded values.
        """
        return self.blocks.put(at, values, writes)


class CodedValues(PlainValues):
    """Reader of one sequence's int8 values, a float16 scale per row, in a decode kernel: weighted sums, new entries.

    Two codes of a row are loaded as a 16-bit word: low bytes are the even columns, high bytes the odd ones, so there
    are two matrices and two accumulators. Products are in float16, whose mantissa holds a code exactly on top of an
    offset. The offset adds `HALF_OFFSET` times the sum of a block's weights, which is subtracted. Weights of a float32
    model are split into a high and a low float16. The scale of a value is added to its logit as a logarithm: weights
    are then those of codes, and the largest is 1 for any scales.
    """

    kind: type[Blocks] = ByteBlocks

    def lifted(
        self, s: jax.Array, at: jax.Array, inside: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return logits plus the base-2 logarithm of the values' scales, and one over these scales."""
        logs, factors = self._of_scales(self.blocks.scales(at, inside))
        return s + logs[None, :], factors

    def lifted_new(self, s: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        """Return logits `[n]` of a new entry plus its value's scale as a logarithm, and one over that scale."""
        logs, factors = self._of_scales(jnp.broadcast_to(scale, s.shape))
        return s + logs, factors

    def weights(self, s: jax.Array, top: jax.Array) -> jax.Array:
        """Unnormalised softmax weights 2 ** (s - top), in two instructions; `top` is each query's running maximum."""
        return exp2_of(s, 1.0, -top[:, None], interpret=self.interpret)

    def add(
        self,
        sums: Parts,
        shrink: jax.Array,
        weights: jax.Array,
        at: jax.Array,
        inside: jax.Array,
    ) -> Parts:
        """Multiply the sum by `shrink`, and add softmax weights times the codes of pool rows `at`."""
        factors = self.blocks.halves(at, inside)
        parts = split_halves(weights, self.dtype)
        # A product with ones sums the rounded weights, so that the offset cancels.
        ones = jnp.ones(factors[0].shape, jnp.float16)
        added = reduce(jnp.add, (dot(half, ones) for half in parts)) * HALF_OFFSET
        # The offset is subtracted first, so that the sum of two accumulators becomes one product.
        begun = (each * shrink[:, None] - added for each in sums)
        return tuple(
            reduce(jnp.add, (dot(half, factor) for half in parts), each)
            for each, factor in zip(begun, factors, strict=True)
        )

    def put_sums(
        self,
        ref: Any,
        query: jax.Array,
        real: jax.Array,
        sums: Parts,
        total: jax.Array,
    ) -> None:
        """Write sums divided by the total weight to the queries' rows of a ref."""
        for (column, exists), each in zip(self.columns, sums, strict=True):
            place, mask = ref.at[query[:, None], column[None, :]], self._mask(real, exists)
            store(place, each / total[:, None], mask=mask)

    def _mask(self, real: jax.Array, exists: jax.Array) -> jax.Array:
        """Mask of valid columns of valid queries."""
        return real[:, None] & exists[None, :]

    def _of_scales(self, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return base-2 logarithms of the values' scales, and reciprocals; scales are >= `SMALLEST_SCALE`."""
        scales = jnp.where(scales < SMALLEST_SCALE, SMALLEST_SCALE, scales)
        return log2_of(scales, interpret=self.interpret), inverse_of(
            scales, interpret=self.interpret
        )


class NibbleValues(CodedValues):
    """Reader of one sequence's 4-bit values (scale and minimum per group of 32) in a decode kernel."""

    kind = NibbleBlocks
    lifted, lifted_new = PlainValues.lifted, PlainValues.lifted_new

    def add(
        self,
        sums: Parts,
        shrink: jax.Array,
        weights: jax.Array,
        at: jax.Array,
        inside: jax.Array,
    ) -> Parts:
        """Multiply the sum by `shrink`, and add softmax weights times the values of pool rows `at`."""
        weights = weights.astype(self.blocks.decodes_to)
        values = self.blocks.decoded(at, inside)
        return tuple(
            each * shrink[:, None] + dot(weights, new)
            for each, new in zip(sums, values, strict=True)
        )

    def _mask(self, real: jax.Array, exists: jax.Array) -> jax.Array:
        """Mask of a group's columns, all valid, of valid queries."""
        return jnp.broadcast_to(real[:, None], (real.shape[0], exists.shape[0]))


VALUES: dict[type, type[PlainValues]] = {Coded: CodedValues, Nibbles: NibbleValues}
