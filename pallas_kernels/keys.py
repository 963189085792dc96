"""How a program of the decode kernel multiplies queries by a pool's keys: as they are, or from 8-bit or 4-bit codes.

A reader knows the keys of one sequence. The loop over blocks of rows, and the softmax, are the kernel's (`rows`).
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
        name: of the keys or values among the kernel's refs.
        kind: how rows are loaded and written.
        blocks: the rows.
        columns: those of the rows.
    """

    name: str
    kind: type[Blocks] = Blocks

    def __init__(self, refs: Any, sequence: Any, dim: int, dtype: Any, interpret: bool) -> None:
        self.dim, self.dtype, self.interpret = dim, dtype, interpret
        self.blocks: Any = self.kind(refs, self.name, sequence, dim, dtype, interpret)
        self.columns = self.blocks.columns


class PlainKeys(Reader):
    """Read one sequence's keys, in the model's dtype, in a decode kernel: logits, and new rows."""

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
        """Queries `[n, columns]`, a part each, as `logits` takes them."""
        return parts[0].astype(self.dtype)

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside of mask `inside` are 0."""
        return dot(queries, self.blocks.rows(at, inside), transpose_b=True) * scale

    def put_new(self, at: Any, parts: Parts, writes: jax.Array) -> Parts:
        """Write a new key to row `at` of the pool if `writes`; return its parts as stored, in float32."""
        stored, scale = self.blocks.put(at, parts, writes)
        return stored if scale is None else tuple(each * scale for each in stored)


class CodedKeys(PlainKeys):
    """Read one sequence's int8 keys, a float16 scale per row, in a decode kernel: logits, and new rows.

    Two codes of a row are loaded as a word of 16 bits. Products are of float16, whose mantissa holds a code exactly on
    top of an offset; what that adds, `HALF_OFFSET` times the sum of the query's elements, is subtracted again. Queries
    of a float32 model are split into a high and a low float16.
    """

    kind = ByteBlocks

    def queries(self, parts: Parts) -> Any:
        """Queries as float16 scaled below 2, their unit, and what the codes' offset adds to each logit."""
        scaled, unit = of_units(parts)
        both = tuple(split_halves(each, self.dtype) for each in scaled)
        sums = (half.astype(jnp.float32).sum(axis=1) for each in both for half in each)
        return both, unit, reduce(jnp.add, sums) * HALF_OFFSET

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside of mask `inside` are 0."""
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
    """Read one sequence's 4-bit keys (scale and least value per group of 32) in a decode kernel: logits, new rows."""

    kind = NibbleBlocks

    def queries(self, parts: Parts) -> Any:
        """Queries as `logits` takes them: in the dtype of decoded keys, below 2, and their unit."""
        scaled, unit = of_units(parts)
        return tuple(each.astype(self.blocks.decodes_to) for each in scaled), unit

    def logits(self, queries: Any, at: jax.Array, inside: jax.Array, scale: float) -> jax.Array:
        """Logits `[n, rows]` of queries and the keys of pool rows `at`; keys outside of mask `inside` are 0."""
        parts, unit = queries
        keys = self.blocks.decoded(at, inside)
        products = (
            dot(query, key, transpose_b=True) for query, key in zip(parts, keys, strict=True)
        )
        return reduce(jnp.add, products) * (unit * scale)[:, None]


def of_units(parts: Parts) -> tuple[Parts, jax.Array]:
    """Queries divided by their unit, float32 below 2, and the unit `f32[n]` of each: a power of two.

    It is the exponent of a query's largest magnitude: dividing by it rounds nothing, but for underflow.
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
    """Numbers below 2 as float16; for a float32 model's `dtype` as a high and a low float16, whose sum they are."""
    first = x.astype(jnp.float16)
    return (
        (first, (x - first.astype(jnp.float32)).astype(jnp.float16))
        if dtype == jnp.float32
        else (first,)
    )


KEYS: dict[type, type[PlainKeys]] = {Coded: CodedKeys, Nibbles: NibbleKeys}
