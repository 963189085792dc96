"""Products of queries and a pool's keys in the decode kernel, with keys unencoded or in 8-bit or 4-bit codes.

A reader accesses the keys of one sequence. The kernel (`rows`) has the loop over blocks and the softmax.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import HALF_OFFSET, dot, load, take_rows
from pallas_kernels.blocks import Blocks, ByteBlocks, NibbleBlocks, Parts
from pallas_kernels.codes import Coded, Nibbles


class Reader:
    """Base class of a decode kernel's readers of keys and of values: one sequence's refs, head dim, model dtype.

    Attributes:
        name: name of the keys or values among the kernel's refs.
        kind: class that loads and writes rows.
        blocks: the rows.
        columns: columns of the rows.
    """

    name: str
    kind: type[Blocks] = Blocks

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        self.dim, self.dtype, self.interpret = dim, dtype, interpret
        self.blocks: Any = self.kind(refs, self.name, sequence, dim, dtype, interpret)
        self.columns = self.blocks.columns


class PlainKeys(Reader):
    """Reader of one sequence's keys in the model's dtype, in a decode kernel: logits, and new entries."""

    name = "k"

    def take_queries(self, ref: Any, rows: jax.Array, real: jax.Array) -> Parts:
        """Load rows of queries from a ref, in the parts of a key; rows where mask `real` is False are 0."""
        if len(self.columns) == 1:
            return (take_rows(ref, rows, real, self.dim),)
        return tuple(
            load(
                ref.at[rows[:, None], column[None, :]],
                mask=real[:, None] & exists[None, :],
                other=0.0,
            )
            for column, exists in self.columns
        )

    def queries(self, parts: Parts) -> Any:
        """Return queries `[n, columns]`, one array per part, in the form that `logits` accepts."""
        return parts[0].astype(self.dtype)

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Return logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside the mask `inside` are 0."""
        return dot(queries, self.blocks.rows(at, inside), transpose_b=True) * scale

    def put_new(self, at: Any, parts: Parts, writes: jax.Array) -> Parts:
        """Write a new key to row `at` of the pool if `writes`; return its parts as stored, in float32."""
        stored, scale = self.blocks.put(at, parts, writes)
        return stored if scale is None else tuple(each * scale for each in stored)


class CodedKeys(PlainKeys):
    """Reader of one sequence's int8 keys, a float16 scale per row, in a decode kernel: logits, new entries.

    Two codes of a row are loaded as a 16-bit word. Products are in float16, whose mantissa holds a code exactly on top
    of an offset. The offset adds `HALF_OFFSET` times the sum of the query's elements, which is subtracted. Queries of a
    float32 model are split into a high and a low float16.
    """

    kind = ByteBlocks

    def queries(self, parts: Parts) -> Any:
        """Return queries as float16 below 2, their unit, and the contribution of the offset to each logit."""
        scaled, unit = of_units(parts)
        both = tuple(split_halves(each, self.dtype) for each in scaled)
        sums = (half.astype(jnp.float32).sum(axis=1) for each in both for half in each)
        return both, unit, reduce(jnp.add, sums) * HALF_OFFSET

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Return logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside the mask `inside` are 0."""
        both, unit, added = queries
        factor = self.blocks.scales(at, inside)
        keys = self.blocks.halves(at, inside)
        products = (
            dot(half, key, transpose_b=True)
            for each, key in zip(both, keys, strict=True)
            for half in each
        )
        return (
            (reduce(jnp.add, products) - added[:, None]) * (unit * scale)[:, None] * factor[None, :]
        )


class NibbleKeys(PlainKeys):
    """Reader of one sequence's 4-bit keys (scale and minimum per group of 32) in a decode kernel."""

    kind = NibbleBlocks

    def queries(self, parts: Parts) -> Any:
        """Return queries in the dtype of dequantised keys, scaled below 2, and their unit."""
        scaled, unit = of_units(parts)
        return tuple(each.astype(self.blocks.decodes_to) for each in scaled), unit

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Return logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside the mask `inside` are 0."""
        parts, unit = queries
        keys = self.blocks.decoded(at, inside)
        products = (
            dot(query, key, transpose_b=True) for query, key in zip(parts, keys, strict=True)
        )
        return reduce(jnp.add, products) * (unit * scale)[:, None]


def of_units(parts: Parts) -> tuple[Parts, jax.Array]:
    """Return queries divided by their unit, float32 below 2, and the unit `f32[n]` of each: a power of two.

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


def split_halves(x: jax.Array, dtype: Any) -> Parts:
    """Return numbers below 2 as float16; for a float32 model's `dtype` as a high and a low float16 that sum to them."""
    first = x.astype(jnp.float16)
    return (
        (first, (x - first.astype(jnp.float32)).astype(jnp.float16))
        if dtype == jnp.float32
        else (first,)
    )


KEYS: dict[type, type[PlainKeys]] = {Coded: CodedKeys, Nibbles: NibbleKeys}
