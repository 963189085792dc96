"""Weighted sums of a pool's values in the decode kernel, with values unencoded or in 8-bit or 4-bit codes.

A reader accesses the values of one sequence, and sums them by softmax weights. The kernel (`rows`) has the loop over
blocks and the softmax.
"""

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels._compat import (
    HALF_OFFSET,
    compute_log2,
    compute_reciprocal,
    compute_scaled_exp2,
    multiply_matrices,
    store,
    store_masked_rows,
)
from pallas_kernels.blocks import Int4PoolRowAccess, Int8PoolRowAccess, Parts, PoolRowAccess
from pallas_kernels.codes import SMALLEST_SCALE, Int4Pool, Int8Pool
from pallas_kernels.keys import PoolReader, split_into_float16


class ValueReader(PoolReader):
    """Reader of one sequence's values in the model's dtype: sums by softmax weights, and writes, in a decode kernel."""

    name = "v"

    def add_scales_to_logits(
        self, s: Array, at: Array, inside: Array
    ) -> tuple[Array, Array | None]:
        """Return logits plus log2 of the values' scales, and 1 / scale per row; here unchanged logits and None."""
        return s, None

    def add_scale_to_new_logits(self, s: Array, scale: Any) -> tuple[Array, Array]:
        """Return a new entry's logits `[n]` plus log2 of its value's scale, and 1 / scale; here unchanged and ones."""
        return s, jnp.ones_like(s)

    def compute_weights(self, s: Array, top: Array) -> Array:
        """Return softmax weights 2 ** (s - top) of logits `[n, rows]`, unnormalised; `top` is the maximum so far."""
        # `compute_scaled_exp2` has fewer instructions, but compilers then spill registers for some shapes.
        return jnp.exp2(s - top[:, None])

    def make_accumulators(self, values: Parts, rows: int, joins: Array | None) -> Parts:
        """Return initial output accumulators of `rows` queries, one per part: the new value if `joins`, else 0."""
        shape = (rows, self.columns[0][0].shape[0])
        if joins is None:
            return (jnp.zeros(shape, jnp.float32),) * len(self.columns)
        return tuple(
            jnp.broadcast_to(jnp.where(joins, each, 0.0)[None, :], shape) for each in values
        )

    def accumulate_values(
        self,
        sums: Parts,
        shrink: Array,
        weights: Array,
        at: Array,
        inside: Array,
    ) -> Parts:
        """Multiply accumulators by `shrink` (online softmax), and add weights times the values of pool rows `at`."""
        values = self.blocks.load_rows(at, inside)
        return (sums[0] * shrink[:, None] + multiply_matrices(weights.astype(self.dtype), values),)

    def write_outputs(
        self,
        ref: Any,
        query: Array,
        real: Array,
        sums: Parts,
        total: Array,
    ) -> None:
        """Write the accumulators divided by `total`, the softmax's denominator, to the queries' rows of a ref."""
        store_masked_rows(ref, query, real, self.dim, sums[0] / total[:, None])

    def write_new_value(self, at: Any, values: Parts, writes: Array) -> tuple[Parts, Array | None]:
        """Write a new value to pool row `at` if `writes`; return its parts, float32, and int8 codes' scale or None.

        The scale is None for unencoded values.
        """
        return self.blocks.write_entry(at, values, writes)


class Int8ValueReader(ValueReader):
    """Reader of one sequence's int8 values: sums by softmax weights, and writes, in a decode kernel.

    Two codes of a row are loaded as a 16-bit word: low bytes are the even columns, high bytes the odd ones, so there
    are two matrices and two accumulators. Products are in float16, whose mantissa holds a code exactly on top of an
    offset. The offset adds `HALF_OFFSET` times the sum of a block's weights, which is subtracted. Weights of a float32
    model are split into a high and a low float16. The scale of a value is added to its logit as a logarithm: weights
    are then those of codes, and the largest is 1 for any scales.
    """

    kind: type[PoolRowAccess] = Int8PoolRowAccess

    def add_scales_to_logits(
        self, s: Array, at: Array, inside: Array
    ) -> tuple[Array, Array | None]:
        """Return logits plus log2 of the rows' scales, so that weights multiply codes, and 1 / scale per row."""
        logs, factors = self._log_and_invert_scales(self.blocks.load_scales(at, inside))
        return s + logs[None, :], factors

    def add_scale_to_new_logits(self, s: Array, scale: Any) -> tuple[Array, Array]:
        """Return a new entry's logits `[n]` plus log2 of its value's scale, and 1 / scale for the denominator."""
        logs, factors = self._log_and_invert_scales(jnp.broadcast_to(scale, s.shape))
        return s + logs, factors

    def compute_weights(self, s: Array, top: Array) -> Array:
        """Return softmax weights 2 ** (s - top), unnormalised, in two instructions; `top` is the maximum so far."""
        return compute_scaled_exp2(s, 1.0, -top[:, None], interpret=self.interpret)

    def accumulate_values(
        self,
        sums: Parts,
        shrink: Array,
        weights: Array,
        at: Array,
        inside: Array,
    ) -> Parts:
        """Multiply accumulators by `shrink`; add weights times the int8 codes of pool rows `at`, without offset."""
        factors = self.blocks.load_codes(at, inside)
        parts = split_into_float16(weights, self.dtype)
        # A product with ones sums the rounded weights, so that the offset cancels.
        ones = jnp.ones(factors[0].shape, jnp.float16)
        added = reduce(jnp.add, (multiply_matrices(half, ones) for half in parts)) * HALF_OFFSET
        # The offset is subtracted first, so that the sum of two accumulators becomes one product.
        begun = (each * shrink[:, None] - added for each in sums)
        return tuple(
            reduce(jnp.add, (multiply_matrices(half, factor) for half in parts), each)
            for each, factor in zip(begun, factors, strict=True)
        )

    def write_outputs(
        self,
        ref: Any,
        query: Array,
        real: Array,
        sums: Parts,
        total: Array,
    ) -> None:
        """Write each part's accumulator divided by the denominator `total` to its columns of the queries' rows."""
        for (column, exists), each in zip(self.columns, sums, strict=True):
            place = ref.at[query[:, None], column[None, :]]
            mask = self._mask_columns(real, exists)
            store(place, each / total[:, None], mask=mask)

    def _mask_columns(self, real: Array, exists: Array) -> Array:
        """Return the mask `[n, columns]` of valid columns of valid queries."""
        return real[:, None] & exists[None, :]

    def _log_and_invert_scales(self, scales: Array) -> tuple[Array, Array]:
        """Return log2 and reciprocal of values' scales, raised to `SMALLEST_SCALE` where smaller."""
        scales = jnp.where(scales < SMALLEST_SCALE, SMALLEST_SCALE, scales)
        return compute_log2(scales, interpret=self.interpret), compute_reciprocal(
            scales, interpret=self.interpret
        )


class Int4ValueReader(Int8ValueReader):
    """Reader of one sequence's 4-bit values: sums by softmax weights, and writes, in a decode kernel."""

    kind = Int4PoolRowAccess
    add_scales_to_logits = ValueReader.add_scales_to_logits
    add_scale_to_new_logits = ValueReader.add_scale_to_new_logits

    def accumulate_values(
        self,
        sums: Parts,
        shrink: Array,
        weights: Array,
        at: Array,
        inside: Array,
    ) -> Parts:
        """Multiply accumulators by `shrink`, and add weights times the dequantised values of pool rows `at`."""
        weights = weights.astype(self.blocks.decodes_to)
        values = self.blocks.dequantise_rows(at, inside)
        return tuple(
            each * shrink[:, None] + multiply_matrices(weights, new)
            for each, new in zip(sums, values, strict=True)
        )

    def _mask_columns(self, real: Array, exists: Array) -> Array:
        """Return the mask `[n, columns]` of valid queries; all columns of a group are valid."""
        return jnp.broadcast_to(real[:, None], (real.shape[0], exists.shape[0]))


VALUES: dict[type, type[ValueReader]] = {Int8Pool: Int8ValueReader, Int4Pool: Int4ValueReader}
