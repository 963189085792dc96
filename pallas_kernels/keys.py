"""Products of queries and a pool's keys in the decode kernel, with keys unencoded or in 8-bit or 4-bit codes.

A reader accesses the keys of one sequence. The kernel (`rows`) has the loop over blocks and the softmax.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels._compat import HALF_OFFSET, load, load_masked_rows, multiply_matrices
from pallas_kernels.blocks import Int4PoolRowAccess, Int8PoolRowAccess, Parts, PoolRowAccess
from pallas_kernels.codes import Int4Pool, Int8Pool


class PoolReader:
    """Base class of readers of one sequence's keys or values in a pool, inside a decode kernel.

    Attributes:
        name: name of the keys or values among the kernel's refs.
        kind: class that loads and writes rows.
        blocks: the rows.
        columns: columns of the rows.
    """

    name: str
    kind: type[PoolRowAccess] = PoolRowAccess

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        self.dim = dim
        self.dtype = dtype
        self.interpret = interpret
        self.blocks: Any = self.kind(refs, self.name, sequence, dim, dtype, interpret)
        self.columns = self.blocks.columns


class KeyReader(PoolReader):
    """Reader, in a decode kernel, of a sequence's unquantised keys: computes logits, writes new keys."""

    name = "k"

    def load_queries(self, ref: Any, rows: Array, real: Array) -> Parts:
        """Load query rows from a ref, split in columns as keys are stored; rows where `real` is False are 0."""
        if len(self.columns) == 1:
            return (load_masked_rows(ref, rows, real, self.dim),)
        return tuple(
            load(
                ref.at[rows[:, None], column[None, :]],
                mask=real[:, None] & exists[None, :],
                other=0.0,
            )
            for column, exists in self.columns
        )

    def prepare_queries(self, parts: Parts) -> Any:
        """Return queries, one part `[n, columns]`, in the model's dtype, as operands of `compute_attention_logits`."""
        return parts[0].astype(self.dtype)

    def compute_attention_logits(
        self, queries: Any, at: Array, inside: Array, scale: float
    ) -> Array:
        """Return scaled logits `f32[n, rows]` of queries and keys in pool rows `at`; 0 outside the mask `inside`."""
        return (
            multiply_matrices(queries, self.blocks.load_rows(at, inside), transpose_b=True) * scale
        )

    def write_new_key(self, at: Any, parts: Parts, writes: Array) -> Parts:
        """Write a new key to pool row `at` if `writes`; return its parts as later steps read it, float32."""
        stored, scale = self.blocks.write_entry(at, parts, writes)
        return stored if scale is None else tuple(each * scale for each in stored)


class Int8KeyReader(KeyReader):
    """Reader of one sequence's int8 keys: computes logits and writes new keys, in a decode kernel.

    Two codes of a row are loaded as a 16-bit word. Products are in float16, whose mantissa holds a code exactly on top
    of an offset. The offset adds `HALF_OFFSET` times the sum of the query's elements, which is subtracted. Queries of a
    float32 model are split into a high and a low float16.
    """

    kind = Int8PoolRowAccess

    def prepare_queries(self, parts: Parts) -> Any:
        """Return queries as float16 below 2, the power of two of each, and what the codes' offset adds to logits."""
        scaled, unit = divide_by_power_of_two(parts)
        both = tuple(split_into_float16(each, self.dtype) for each in scaled)
        sums = (half.astype(jnp.float32).sum(axis=1) for each in both for half in each)
        return both, unit, reduce(jnp.add, sums) * HALF_OFFSET

    def compute_attention_logits(
        self, queries: Any, at: Array, inside: Array, scale: float
    ) -> Array:
        """Return scaled logits `f32[n, rows]` of queries and int8 keys, rows `at`; 0 outside the mask `inside`."""
        both, unit, added = queries
        factor = self.blocks.load_scales(at, inside)
        keys = self.blocks.load_codes(at, inside)
        products = (
            multiply_matrices(half, key, transpose_b=True)
            for each, key in zip(both, keys, strict=True)
            for half in each
        )
        return (
            (reduce(jnp.add, products) - added[:, None]) * (unit * scale)[:, None] * factor[None, :]
        )


class Int4KeyReader(KeyReader):
    """Reader of one sequence's 4-bit keys: computes logits and writes new keys, in a decode kernel."""

    kind = Int4PoolRowAccess

    def prepare_queries(self, parts: Parts) -> Any:
        """Return queries scaled below 2, in the dtype of dequantised keys, and the power of two of each."""
        scaled, unit = divide_by_power_of_two(parts)
        return tuple(each.astype(self.blocks.decodes_to) for each in scaled), unit

    def compute_attention_logits(
        self, queries: Any, at: Array, inside: Array, scale: float
    ) -> Array:
        """Return scaled logits `f32[n, rows]` of queries and 4-bit keys, rows `at`; 0 outside the mask `inside`."""
        parts, unit = queries
        keys = self.blocks.dequantise_rows(at, inside)
        products = (
            multiply_matrices(query, key, transpose_b=True)
            for query, key in zip(parts, keys, strict=True)
        )
        return reduce(jnp.add, products) * (unit * scale)[:, None]


def divide_by_power_of_two(parts: Parts) -> tuple[Parts, Array]:
    """Divide each query by the power of two of its largest magnitude; return float32 below 2, and powers `f32[n]`.

    The unit is the exponent of a query's largest magnitude. The division is exact, except for underflow.
    """
    wide = tuple(each.astype(jnp.float32) for each in parts)
    largest = reduce(jnp.maximum, (jnp.abs(each).max(axis=1) for each in wide))
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    bits = jnp.where(bits == 0, jnp.int32(0x3F800000), jnp.minimum(bits, 0x7F000000))
    unit, inverse = (
        jax.lax.bitcast_convert_type(each, jnp.float32) for each in (bits, 0x7F000000 - bits)
    )
    return tuple(each * inverse[:, None] for each in wide), unit


def split_into_float16(x: Array, dtype: Any) -> Parts:
    """Split numbers below 2 into float16 arrays, a tuple: one, or for a float32 model high and low that sum to them."""
    first = x.astype(jnp.float16)
    return (
        (first, (x - first.astype(jnp.float32)).astype(jnp.float16))
        if dtype == jnp.float32
        else (first,)
    )


KEYS: dict[type, type[KeyReader]] = {Int8Pool: Int8KeyReader, Int4Pool: Int4KeyReader}
