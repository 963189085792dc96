"""How a program of the decode kernel multiplies a pool's rows: as they are (`Plain`), or from 8-bit codes (`Codes`).

Both know the rows of one sequence. They compute logits of queries, and add up values times softmax weights; the loop
over blocks of rows, and the softmax itself, are the kernel's (`rows`).
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from ._compat import (
    HALF_OFFSET,
    dot,
    halves_of,
    halves_of_byte,
    inverse_of,
    load,
    log2_of,
    pad_dim,
    put_rows,
    store,
    take_rows,
)
from .codes import SMALLEST_SCALE, codes_of, put_row, scale_of


class Plain:
    """Rows in the model's dtype.

    Attributes:
        value_columns: for each part of a value its columns, and the mask of those that exist; here one part.
    """

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        column = jnp.arange(pad_dim(dim), dtype=jnp.int32)
        self.refs, self.sequence, self.dim, self.dtype = refs, sequence, dim, dtype
        self.value_columns: tuple[tuple[jax.Array, jax.Array], ...] = ((column, column < dim),)

    def queries(self, q: jax.Array) -> Any:
        """Queries `[n, D]` as `logits` takes them."""
        return q.astype(self.dtype)

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside of mask `inside` are 0."""
        keys = take_rows(self.refs.k, at, inside, self.dim, self.sequence).astype(self.dtype)
        return dot(queries, keys, transpose_b=True) * scale

    def lifted(self, s: jax.Array, at: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Logits for the softmax, and factors `[rows]` by which its weights are then too small, or None for none."""
        return s, None

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
        self, at: Any, key: jax.Array, values: tuple[jax.Array, ...], writes: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
        """Writes a new row to the pool if `writes`; returns its key and its value's parts, float32, and their scale.

        The scale is None where values need none.
        """
        ((column, real),), pools = self.value_columns, (self.refs.pool_k, self.refs.pool_v)
        rounded = tuple(each.astype(self.dtype) for each in (key, values[0]))
        for pool, each in zip(pools, rounded, strict=True):
            store(pool.at[*at, column], each, mask=real & writes)
        key, value = (each.astype(jnp.float32) for each in rounded)
        return key, (value,), None

    def lifted_new(self, s: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        """Logits `[n]` of a new row for the softmax, and the weight that each then begins with."""
        return s, jnp.ones_like(s)


class Codes(Plain):
    """Rows in 8-bit codes with a scale each, read as they lie: four values of a row are one 32-bit word.

    Both products are of float16, whose mantissa holds a code exactly on top of an offset (`HALF_OFFSET`). What that
    adds, a query's sum or the sum of a block's weights, is taken off again. Queries and weights of a float32 model are
    two halves each, the second what the first one lacks. Byte j of all words is a matrix of its own, with every fourth
    column of the values: so a value has four parts, and there are four sums. The scale of a value is added to its row's
    logit as a logarithm: weights are then those of codes, the largest 1 whatever the scales are.
    """

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        super().__init__(refs, sequence, dim, dtype, interpret)
        # At least 32 columns: with as many columns as a tile's 16 queries Triton has every warp compute all of them.
        self.words, self.interpret = max(32, pad_dim(dim // 4)), interpret
        self.word = jnp.arange(self.words, dtype=jnp.int32)
        self.exists = self.word < dim // 4
        self.value_columns = tuple((4 * self.word + byte, self.exists) for byte in range(4))

    def queries(self, q: jax.Array) -> Any:
        """Queries as `logits` takes them: as float16 below 2, their unit, and what codes' offset adds to products."""
        q = q.astype(jnp.float32)
        # A unit is the power of two in a query's largest number, by whose inverse nothing is rounded.
        bits = jax.lax.bitcast_convert_type(jnp.abs(q).max(axis=1), jnp.int32) & 0x7F800000
        bits = jnp.where(bits == 0, jnp.int32(0x3F800000), jnp.minimum(bits, 0x7F000000))
        unit, inverse = (jax.lax.bitcast_convert_type(each, jnp.float32) for each in (bits, 0x7F000000 - bits))
        halves = self._halves(q * inverse[:, None])
        return halves, unit, sum(each.astype(jnp.float32).sum(axis=1) for each in halves) * HALF_OFFSET

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside of mask `inside` are 0."""
        halves, unit, added = queries
        codes = take_rows(self.refs.k, at, inside, self.dim, self.sequence)
        keys, factor = halves_of(codes, interpret=self.interpret), self._scales("k", at, inside)
        products = sum(dot(each, keys, transpose_b=True) for each in halves)
        return (products - added[:, None]) * (unit * scale)[:, None] * factor[None, :]

    def lifted(self, s: jax.Array, at: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Logits plus the base-2 logarithm of the values' scales, and one over these scales."""
        logs, factors = self._of_scales(self._scales("v", at, inside))
        return s + logs[None, :], factors

    def lifted_new(self, s: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        """Logits `[n]` of a new row plus its value's scale as a logarithm, and one over that scale."""
        logs, factors = self._of_scales(jnp.broadcast_to(scale, s.shape))
        return s + logs, factors

    def begin(self, values: tuple[jax.Array, ...], rows: int, joins: jax.Array | None) -> Any:
        """Sums of the four parts of values before any row was read."""
        zeros = jnp.zeros((rows, self.words), jnp.float32)
        return (zeros,) * 4 if joins is None else tuple(_where(joins, each, zeros.shape) for each in values)

    def add(self, sums: Any, shrink: jax.Array, weights: jax.Array, at: jax.Array, inside: jax.Array) -> Any:
        """Sums times `shrink`, plus softmax weights times the codes of pool rows `at`."""
        mask = inside[:, None] & self.exists[None, :]
        words = load(self.refs.v.at[self.sequence, at[:, None], self.word[None, :]], mask=mask, other=0)
        words = words ^ jnp.int32(-0x7F7F7F80)
        factors = [halves_of_byte(words, byte, interpret=self.interpret) for byte in range(4)]
        halves = self._halves(weights)
        # Rounded weights are added up by the tensor cores, as their products with codes are.
        ones = jnp.ones(words.shape, jnp.float16)
        added = reduce(jnp.add, (dot(half, ones) for half in halves)) * HALF_OFFSET
        products = (reduce(jnp.add, (dot(half, factor) for half in halves)) for factor in factors)
        return tuple(each * shrink[:, None] + (new - added) for each, new in zip(sums, products, strict=True))

    def put_sums(self, ref: Any, query: jax.Array, real: jax.Array, sums: Any, total: jax.Array) -> None:
        """Writes sums over the total weight to the queries' rows of a ref."""
        for (column, exists), each in zip(self.value_columns, sums, strict=True):
            mask = real[:, None] & exists[None, :]
            store(ref.at[query[:, None], column[None, :]], each / total[:, None], mask=mask)

    def put_new(
        self, at: Any, key: jax.Array, values: tuple[jax.Array, ...], writes: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None]:
        """Encodes a new row and writes it to the pool if `writes`; returns key, its value's four parts, their scale.

        The key is float32 as stored, the parts are codes, float32, too.
        """
        key = put_row(self.refs, at, key.astype(self.dtype).astype(jnp.float32), self.dim, writes)
        values = tuple(each.astype(self.dtype).astype(jnp.float32) for each in values)
        scale = scale_of(reduce(jnp.maximum, (jnp.where(self.exists, jnp.abs(each), 0.0).max() for each in values)))
        codes = tuple(codes_of(each, scale) for each in values)
        word = reduce(jnp.bitwise_or, ((each.astype(jnp.int32) & 255) << 8 * byte for byte, each in enumerate(codes)))
        store(self.refs.pool_v.at[*at, self.word], word, mask=self.exists & writes)
        store(self.refs.pool_v_scale.at[at], scale, mask=writes)
        return key, codes, scale.astype(jnp.float32)

    def _of_scales(self, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logarithms to base 2 of scales of values, and one over these; a scale of 0 counts as the smallest one."""
        scales = jnp.where(scales < SMALLEST_SCALE, SMALLEST_SCALE, scales)
        return log2_of(scales, interpret=self.interpret), inverse_of(scales, interpret=self.interpret)

    def _halves(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Float16 of numbers of at most 2; for a float32 model also what that lacks, as float16."""
        first = x.astype(jnp.float16)
        return (first, (x - first.astype(jnp.float32)).astype(jnp.float16)) if self.dtype == jnp.float32 else (first,)

    def _scales(self, name: str, at: jax.Array, inside: jax.Array) -> jax.Array:
        """Scales `f32[rows]` of keys or values of pool rows `at`; 0 where `inside` is False."""
        ref = getattr(self.refs, f"{name}_scale")
        return load(ref.at[self.sequence, at], mask=inside, other=0.0).astype(jnp.float32)


def _where(joins: jax.Array, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Values `[columns]` in each row if `joins`, else 0."""
    return jnp.broadcast_to(jnp.where(joins, values, 0.0)[None, :], shape)
