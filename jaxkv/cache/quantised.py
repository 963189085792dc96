"""Stores of entries in fewer bits: `Int8`, `Int4`, and `Mixed` with keys as the former and values as the latter.

An entry is rounded when it is written, with scales of its own, and never again: gathering, packing, evicting and saving
move its codes. Attention reads entries that were decoded where they are used.
"""

import abc
import dataclasses
import math
from functools import partial, reduce
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from jaxkv._errors import require
from jaxkv.cache.stores import Store, put_cells

# Scales and least values are float16. The largest number keeps the largest code, by less than half a code, so that
# decoded vectors have the same codes and scales again.
_SCALE, _SMALLEST = jnp.float16, 2.0**-24
# Elements that share a scale in 4 bits: the most, and the fewest for which it pays.
_MOST_SHARED, _FEWEST_SHARED = 32, 8
# Kernels read 4-bit codes of two groups at a time.
_COLUMNS = 2 * _MOST_SHARED


def _scale(width: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Float16 quantisation scales for steps of `width`, at least 2**-24; 0 where the width is 0."""
    return jnp.where(width > 0, jnp.maximum(width, _SMALLEST), width).astype(_SCALE)


def _codes(values: Float[Array, "*n m"], scale: Float[Array, "*n"]) -> Float[Array, "*n m"]:
    """Quantisation codes (floats) of groups of m values: divided by their scale and rounded; 0 where the scale is 0."""
    wide = scale.astype(jnp.float32)[..., None]
    return jnp.round(jnp.where(wide == 0, 0.0, values / jnp.where(wide == 0, 1.0, wide)))


class Encoding(abc.ABC):
    """Base of quantised vectors: a registered dataclass of arrays `[B, P, ...]`.

    Attributes:
        bits: of a code.
    """

    bits: ClassVar[int]

    @classmethod
    @abc.abstractmethod
    def of(cls, rows: Float[Array, "B P D"]) -> "Encoding":
        """Quantises vectors."""

    @classmethod
    @abc.abstractmethod
    def size(cls, dim: int) -> int:
        """Bytes that one encoded vector of `dim` elements takes."""

    @abc.abstractmethod
    def decoded(self) -> Float[Array, "B P D"]:
        """Dequantised vectors, `f32[B, P, D]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Vectors(Encoding):
    """Vectors quantised to signed 8-bit integers: codes `i8[B, P, D]` and one float16 scale per vector.

    Attributes:
        code: `i8[B, P, D]` numbers from -127 to 127.
        scale: `f16[B, P]` by which they are multiplied.
        bits: of a code.
    """

    bits = 8
    code: Int[Array, "B P D"]
    scale: Float[Array, "B P"]

    @classmethod
    def of(cls, rows: Float[Array, "B P D"]) -> "Int8Vectors":
        """Quantises vectors to `Int8Vectors`: scales each one's largest absolute value to 127 and rounds to integers."""
        wide = rows.astype(jnp.float32)
        scale = _scale(jnp.abs(wide).max(axis=-1) / 127)
        code = jnp.clip(_codes(wide, scale), -127, 127)
        return cls(code=code.astype(jnp.int8), scale=scale)

    def decoded(self) -> Float[Array, "B P D"]:
        """Dequantised vectors, `f32[B, P, D]`: codes times their vector's scale."""
        return self.code.astype(jnp.float32) * self.scale.astype(jnp.float32)[..., None]

    @classmethod
    def size(cls, dim: int) -> int:
        """Bytes that one encoded vector of `dim` elements takes: 8-bit codes and a float16 scale."""
        return dim + 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Vectors(Encoding):
    """Vectors quantised to 4 bits an element, with a float16 scale and least value per group of elements.

    The n groups have 32 elements each, or fewer where 32 does not divide D. Words hold numbers from 0 to 15, the first
    in the lowest bits: element e of four neighbouring groups in word e of 16 bits, as kernels read them; where 128 does
    not divide D, an element of the first half of D and one of the second in each byte.

    Attributes:
        code: `u16[B, P, D / 4]` or `u8[B, P, D / 2]` words.
        scale: `f16[B, P, n]` distance of neighbouring numbers.
        least: `f16[B, P, n]` value of number 0.
        bits: of a code.
    """

    bits = 4
    code: UInt[Array, "B P w"]
    scale: Float[Array, "B P n"]
    least: Float[Array, "B P n"]

    @classmethod
    def of(cls, rows: Float[Array, "B P D"]) -> "Int4Vectors":
        """Quantises vectors to `Int4Vectors`: maps each group's range to 0 to 15; ValueError unless 8 divides D."""
        dim = rows.shape[-1]
        wide = rows.astype(jnp.float32).reshape(*rows.shape[:-1], -1, _shared(dim))
        low = wide.min(axis=-1)
        least = low.astype(_SCALE)
        # Rounding may have moved the least value up: what lies below it becomes number 0.
        reach = jnp.maximum(wide.max(axis=-1) - least.astype(jnp.float32), 0)
        scale = _scale(reach / 15)
        off = wide - least.astype(jnp.float32)[..., None]
        code = jnp.clip(_codes(off, scale), 0, 15).reshape(rows.shape)
        return cls(code=_words(code), scale=scale, least=least)

    def decoded(self) -> Float[Array, "B P D"]:
        """Dequantised vectors, `f32[B, P, D]`: codes times their group's scale, plus its least value."""
        words, quads = self.code, self.code.dtype == jnp.uint16
        if quads:
            words = words.reshape(*words.shape[:-1], -1, 1, _MOST_SHARED)
        parts = [(words >> 4 * index) & 15 for index in range(4 if quads else 2)]
        code = jnp.concatenate(parts, axis=-2 if quads else -1).astype(jnp.float32)
        groups = code.reshape(*self.scale.shape, -1)
        scale, least = (each.astype(jnp.float32)[..., None] for each in (self.scale, self.least))
        return (groups * scale + least).reshape(*self.scale.shape[:-1], -1)

    @classmethod
    def size(cls, dim: int) -> int:
        """Bytes that one encoded vector of `dim` elements takes: 4-bit codes, scales and least values of its groups."""
        return dim // 2 + 4 * (dim // _shared(dim))


def _words(code: Array) -> UInt[Array, "B P w"]:
    """Numbers from 0 to 15, `[B, P, D]`, as the words of `Int4Vectors`."""
    *lead, dim = code.shape
    if dim % (4 * _MOST_SHARED):
        low, high = jnp.split(code.astype(jnp.uint8), 2, axis=-1)
        return low | (high << 4)
    parts = jnp.moveaxis(code.reshape(*lead, -1, 4, _MOST_SHARED).astype(jnp.uint16), -2, 0)
    return reduce(jnp.bitwise_or, (part << 4 * index for index, part in enumerate(parts))).reshape(
        *lead, dim // 4
    )


def _shared(dim: int) -> int:
    """Elements that share a 4-bit scale: the largest power of 2 up to 32 that divides `dim`; ValueError if below 8."""
    size = math.gcd(dim, _MOST_SHARED)
    remedy = (
        f"at least {_FEWEST_SHARED} elements share a scale in 4 "
        f"bits, and {dim} a head has no such groups: use 'int8'"
    )
    require(size >= _FEWEST_SHARED, "store", "int4", remedy)
    return size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised(Store):
    """Base class of stores with quantised keys and values; subclasses set the `Encoding` of each, and `kernels`.

    Attributes:
        keys: class of encoded keys.
        values: class of encoded values.
        k: encoded keys.
        v: encoded values.
        wide: name of the dtype in which `view` returns entries: the model's, on a CPU float32.
    """

    keys: ClassVar[type[Encoding]]
    values: ClassVar[type[Encoding]]

    k: Encoding
    v: Encoding
    wide: str

    @classmethod
    def of(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Encodes keys and values `[B, P, D]` as a store of P rows."""
        return cls(k=cls.keys.of(k), v=cls.values.of(v), wide=str(k.dtype))

    @classmethod
    def row_bytes(cls, dim: int, itemsize: int) -> int:
        """Bytes that one encoded row takes, scales included; the model's dtype does not matter."""
        return cls.keys.size(dim) + cls.values.size(dim)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the keys and values that `view` returns: the model's."""
        return jnp.dtype(self.wide)

    @property
    def element_bytes(self) -> int | float:
        """Bytes of a code, mean of keys and values, scales left out."""
        return (self.keys.bits + self.values.bits) / 16

    @property
    def held(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Pair of keys and values as kernels take them: tuples of codes, scales and, in 4 bits, least values."""
        return tuple(jax.tree.leaves(self.k)), tuple(jax.tree.leaves(self.v))

    def holding(self, k: tuple[Array, ...], v: tuple[Array, ...]) -> "Store":
        """Store with the codes, scales and least values of keys and values that a kernel returned."""
        keys, values = (
            jax.tree.unflatten(jax.tree.structure(of), each)
            for of, each in ((self.k, k), (self.v, v))
        )
        return dataclasses.replace(self, k=keys, v=values)

    def widened(self, dtype: jnp.dtype) -> "Store":
        """Store of the same codes, decoded to another dtype."""
        return dataclasses.replace(self, wide=jnp.dtype(dtype).name)

    def view(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Pair of decoded keys and values `[B, P, D]` in the model's dtype."""
        return self.k.decoded().astype(self.dtype), self.v.decoded().astype(self.dtype)

    def put(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Store with the keys and values of some entries overwritten, encoded; the other entries' codes are unchanged."""
        (k_row, keys), (v_row, values) = k, v
        return dataclasses.replace(
            self,
            k=jax.tree.map(
                lambda leaf, new: put_cells(leaf, k_row, new), self.k, self.keys.of(keys)
            ),
            v=jax.tree.map(
                lambda leaf, new: put_cells(leaf, v_row, new), self.v, self.values.of(values)
            ),
        )


_registered = partial(
    jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["wide"]
)


@_registered
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Quantised):
    """Store that holds keys and values as 8-bit integers with one scale per vector."""

    keys = values = Int8Vectors
    kernels = ("bytes", "bytes")
    # Kernels read 8-bit codes of two columns at a time.
    columns = 2


@_registered
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(Quantised):
    """Store that holds keys and values in 4 bits an element, with a scale and a least value per group of up to 32."""

    keys = values = Int4Vectors
    kernels = ("nibbles", "nibbles")
    columns = _COLUMNS
    transformed = True


@_registered
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(Quantised):
    """Store that holds keys as 8-bit integers with one scale per vector, and values in 4 bits as `Int4` does."""

    keys, values = Int8Vectors, Int4Vectors
    kernels = ("bytes", "nibbles")
    columns = _COLUMNS
    transformed = True
