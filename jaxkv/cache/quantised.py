"""Quantised stores: `Int8Store`, `Int4Store`, `ResidualInt4Store`, and `MixedStore`, 8-bit keys and 4-bit values.

An entry is quantised once, when it is written, with its own scales: gathering, packing, eviction and saving move its
codes. Attention dequantises entries where it reads them.
"""

import abc
import dataclasses
import math
from functools import partial, reduce
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.cache.stores import Store, write_pool_rows

# Scales and minima are float16. The largest element keeps the largest code, by less than half a code, so that decoded
# vectors have the same codes and scales when they are quantised again.
_SCALE = jnp.float16
_SMALLEST = 2.0**-24
# Elements per 4-bit scale: the maximum, and the minimum that saves memory.
_MOST_SHARED = 32
_FEWEST_SHARED = 8
# Kernels read the 4-bit codes of two groups together.
_COLUMNS = 2 * _MOST_SHARED


def _make_float16_scales(width: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return float16 quantisation scales equal to the steps `width`, at least 2**-24; 0 where `width` is 0."""
    return jnp.where(width > 0, jnp.maximum(width, _SMALLEST), width).astype(_SCALE)


def _quantise_to_codes(
    values: Float[Array, "*n m"], scale: Float[Array, "*n"]
) -> Float[Array, "*n m"]:
    """Return groups of m values divided by their group's scale and rounded, as floats; 0 where the scale is 0."""
    wide = scale.astype(jnp.float32)[..., None]
    return jnp.round(jnp.where(wide == 0, 0.0, values / jnp.where(wide == 0, 1.0, wide)))


class QuantisedVectors(abc.ABC):
    """Abstract base class of quantised vectors of D elements: a registered dataclass of arrays `[B, P, ...]`.

    Attributes:
        bits: bits of a code.
    """

    bits: ClassVar[int]

    @classmethod
    @abc.abstractmethod
    def quantise_vectors(cls, rows: Float[Array, "B P D"]) -> "QuantisedVectors":
        """Quantise float vectors `[B, P, D]`; return an instance of this class, codes with scales."""

    @classmethod
    @abc.abstractmethod
    def count_vector_bytes(cls, dim: int) -> int:
        """Return the bytes of one quantised vector of `dim` elements, scales included."""

    @abc.abstractmethod
    def dequantise_vectors(self) -> Float[Array, "B P D"]:
        """Return the dequantised vectors, `f32[B, P, D]`."""


@jax.tree_util.register_dataclass
@frozen_dataclass
class Int8Vectors(QuantisedVectors):
    """Vectors quantised to signed 8-bit integers: codes `i8[B, P, D]` and one float16 scale per vector.

    Attributes:
        code: `i8[B, P, D]` integers from -127 to 127.
        scale: `f16[B, P]` factor of each vector's codes.
        bits: bits of a code.
    """

    bits = 8
    code: Int[Array, "B P D"]
    scale: Float[Array, "B P"]

    @classmethod
    def quantise_vectors(cls, rows: Float[Array, "B P D"]) -> "Int8Vectors":
        """Quantise vectors to `Int8Vectors`: scale the largest absolute value to 127, round to integers."""
        wide = rows.astype(jnp.float32)
        scale = _make_float16_scales(jnp.abs(wide).max(axis=-1) / 127)
        code = jnp.clip(_quantise_to_codes(wide, scale), -127, 127)
        return cls(code=code.astype(jnp.int8), scale=scale)

    def dequantise_vectors(self) -> Float[Array, "B P D"]:
        """Return the dequantised vectors, `f32[B, P, D]`: codes times their vector's scale."""
        return self.code.astype(jnp.float32) * self.scale.astype(jnp.float32)[..., None]

    @classmethod
    def count_vector_bytes(cls, dim: int) -> int:
        """Return the bytes of one quantised vector of `dim` elements: 8-bit codes and a float16 scale."""
        return dim + 2


@jax.tree_util.register_dataclass
@frozen_dataclass
class Int4Vectors(QuantisedVectors):
    """Vectors quantised to 4 bits per element, with a float16 scale and minimum per group of up to 32 elements.

    The n groups have 32 elements each, or fewer if 32 does not divide D. Words hold codes from 0 to 15, the first in
    the lowest bits. A 16-bit word holds element e of four neighbouring groups, the form that kernels read. If 128 does
    not divide D, a byte holds an element of the first half of D and one of the second.

    Attributes:
        code: `u16[B, P, D / 4]` or `u8[B, P, D / 2]` words.
        scale: `f16[B, P, n]` difference between neighbouring codes.
        least: `f16[B, P, n]` value of code 0.
        bits: bits of a code.
    """

    bits = 4
    code: UInt[Array, "B P w"]
    scale: Float[Array, "B P n"]
    least: Float[Array, "B P n"]

    @classmethod
    def quantise_vectors(cls, rows: Float[Array, "B P D"]) -> "Int4Vectors":
        """Quantise vectors to `Int4Vectors`: map each group's range to 0 to 15; ValueError unless 8 divides D."""
        dim = rows.shape[-1]
        wide = rows.astype(jnp.float32).reshape(*rows.shape[:-1], -1, _choose_group_size(dim))
        low = wide.min(axis=-1)
        least = low.astype(_SCALE)
        # Rounding may have raised the minimum: values below it become code 0.
        reach = jnp.maximum(wide.max(axis=-1) - least.astype(jnp.float32), 0)
        scale = _make_float16_scales(reach / 15)
        off = wide - least.astype(jnp.float32)[..., None]
        code = jnp.clip(_quantise_to_codes(off, scale), 0, 15).reshape(rows.shape)
        return cls(code=_pack_codes_in_words(code), scale=scale, least=least)

    def dequantise_vectors(self) -> Float[Array, "B P D"]:
        """Return the dequantised vectors, `f32[B, P, D]`: codes times their group's scale, plus its minimum."""
        words = self.code
        quads = self.code.dtype == jnp.uint16
        if quads:
            words = words.reshape(*words.shape[:-1], -1, 1, _MOST_SHARED)
        parts = [(words >> 4 * index) & 15 for index in range(4 if quads else 2)]
        code = jnp.concatenate(parts, axis=-2 if quads else -1).astype(jnp.float32)
        groups = code.reshape(*self.scale.shape, -1)
        scale, least = (each.astype(jnp.float32)[..., None] for each in (self.scale, self.least))
        return (groups * scale + least).reshape(*self.scale.shape[:-1], -1)

    @classmethod
    def count_vector_bytes(cls, dim: int) -> int:
        """Return the bytes of one quantised vector of `dim` elements: 4-bit codes, groups' scales and minima."""
        return dim // 2 + 4 * (dim // _choose_group_size(dim))


def _pack_codes_in_words(code: Array) -> UInt[Array, "B P w"]:
    """Pack 4-bit codes `[B, P, D]` into `Int4Vectors` words: 4 per uint16, or 2 per uint8 if 128 does not divide D."""
    *lead, dim = code.shape
    if dim % (4 * _MOST_SHARED):
        low, high = jnp.split(code.astype(jnp.uint8), 2, axis=-1)
        return low | (high << 4)
    parts = jnp.moveaxis(code.reshape(*lead, -1, 4, _MOST_SHARED).astype(jnp.uint16), -2, 0)
    return reduce(jnp.bitwise_or, (part << 4 * index for index, part in enumerate(parts))).reshape(
        *lead, dim // 4
    )


def _choose_group_size(dim: int) -> int:
    """Return elements per 4-bit scale: the largest power of 2 up to 32 that divides `dim`; ValueError if below 8."""
    size = math.gcd(dim, _MOST_SHARED)
    remedy = f"head dim {dim} has no 4-bit groups of at least {_FEWEST_SHARED} elements: use 'int8'"
    require(size >= _FEWEST_SHARED, "store", "int4", remedy)
    return size


@frozen_dataclass
class QuantisedStore(Store):
    """Base class of stores with quantised keys and values; subclasses set `keys`, `values` (classes) and `kernels`.

    Attributes:
        keys: class of encoded keys.
        values: class of encoded values.
        k: encoded keys.
        v: encoded values.
        wide: name of the dtype in which `decode_entries` returns entries: the model's, or float32 on a CPU.
    """

    keys: ClassVar[type[QuantisedVectors]]
    values: ClassVar[type[QuantisedVectors]]

    k: QuantisedVectors
    v: QuantisedVectors
    wide: str

    @classmethod
    def encode_entries(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Quantise keys and values `[B, P, D]`, and return a store of P rows."""
        return cls(
            k=cls.keys.quantise_vectors(k), v=cls.values.quantise_vectors(v), wide=str(k.dtype)
        )

    @classmethod
    def compute_entry_bytes(cls, dim: int, itemsize: int) -> int:
        """Return the bytes of one entry: quantised key and value of `dim` elements with scales, for any model dtype."""
        return cls.keys.count_vector_bytes(dim) + cls.values.count_vector_bytes(dim)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the keys and values that `decode_entries` returns: the model's, or float32 on a CPU."""
        return jnp.dtype(self.wide)

    @property
    def element_bytes(self) -> int | float:
        """Bytes of one element's code, the mean of keys and values, without scales: 1 for 8 bits, 0.5 for 4."""
        return (self.keys.bits + self.values.bits) / 16

    @property
    def kernel_inputs(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Keys and values as kernels read them: tuples of codes, scales and, in 4 bits, minima."""
        return tuple(jax.tree.leaves(self.k)), tuple(jax.tree.leaves(self.v))

    def store_kernel_outputs(self, k: tuple[Array, ...], v: tuple[Array, ...]) -> "Store":
        """Return a copy of the store with the codes, scales and minima of keys and values that a kernel returned."""
        keys, values = (
            jax.tree.unflatten(jax.tree.structure(of), each)
            for of, each in ((self.k, k), (self.v, v))
        )
        return dataclasses.replace(self, k=keys, v=values)

    def cast_to_dtype(self, dtype: jnp.dtype) -> "Store":
        """Return a store of the same codes, which `decode_entries` returns in another dtype."""
        return dataclasses.replace(self, wide=jnp.dtype(dtype).name)

    def decode_entries(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Return dequantised keys and values `[B, P, D]` in the store's `dtype`."""
        k = self.k.dequantise_vectors().astype(self.dtype)
        return k, k if self.values_are_keys else self.v.dequantise_vectors().astype(self.dtype)

    def overwrite_entries(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Return the store with keys and values of some rows quantised and overwritten; others are unchanged."""
        k_row, keys = k
        v_row, values = v
        return dataclasses.replace(
            self,
            k=jax.tree.map(
                lambda leaf, new: write_pool_rows(leaf, k_row, new),
                self.k,
                self.keys.quantise_vectors(keys),
            ),
            v=jax.tree.map(
                lambda leaf, new: write_pool_rows(leaf, v_row, new),
                self.v,
                self.values.quantise_vectors(values),
            ),
        )


register_quantised_store = partial(
    jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["wide"]
)


@register_quantised_store
@frozen_dataclass
class Int8Store(QuantisedStore):
    """Store of keys and values as 8-bit integers with one float16 scale per vector."""

    keys = values = Int8Vectors
    kernels = ("bytes", "bytes")
    # Kernels read the 8-bit codes of two columns together.
    columns = 2


@register_quantised_store
@frozen_dataclass
class Int4Store(QuantisedStore):
    """Store of keys and values in 4 bits per element, with a float16 scale and minimum per group of up to 32."""

    keys = values = Int4Vectors
    kernels = ("nibbles", "nibbles")
    columns = _COLUMNS
    transformed = True


@register_quantised_store
@frozen_dataclass
class ResidualInt4Store(QuantisedStore):
    """Store as `Int4Store`; pools also hold the last 32 appended entries in the model's dtype, for attention."""

    keys = values = Int4Vectors
    transformed = True
    residual_length = 32


@register_quantised_store
@frozen_dataclass
class MixedStore(QuantisedStore):
    """Store of keys as 8-bit integers with one scale per vector, and values in 4 bits as in `Int4Store`."""

    keys = Int8Vectors
    values = Int4Vectors
    kernels = ("bytes", "nibbles")
    columns = _COLUMNS
    transformed = True
