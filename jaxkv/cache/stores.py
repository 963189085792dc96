"""Stores: encodings of the keys and values of a pool. Other than stores, only fused kernels write these arrays."""

import abc
import dataclasses
from collections.abc import Set
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import overrides


def held_dtype(dtype: Any, platform: str) -> jnp.dtype:
    """Dtype in which a cache on a platform holds the entries of a model of `dtype`: float32 on a CPU.

    The values are equal, because entries are rounded to the model's dtype first.
    """
    return jnp.dtype(jnp.float32 if platform == "cpu" else dtype)


class Store(abc.ABC):
    """Abstract store of a pool's keys and values: a dataclass of arrays `[B, P, ...]`, registered as a pytree.

    A subclass defines how entries are encoded (`of`), decoded (`view`, of `dtype`) and written (`put`), and the bytes
    per row (`row_bytes`); `take` gathers encoded entries.

    Attributes:
        kernels: names in `Capabilities` of the forms of keys and of values in `held`: "rows" (arrays as they are),
            "bytes", "nibbles". Empty: kernels cannot read entries, which are decoded for XLA.
        columns: divisor of the head dim that kernels require.
        transformed: True if entries are transformed by a Hadamard matrix, with the head's mean subtracted from keys,
            unless a policy compares keys.
    """

    kernels: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[int] = 1
    transformed: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `kernels` of a subclass that changes the encoding without its own `kernels`."""
        super().__init_subclass__(**options)
        if overrides(cls, "kernels"):
            cls.kernels = ()

    @classmethod
    def read_by(cls, kernels: Set[str], dim: int) -> bool:
        """True if kernels with these names read and write entries of `dim` elements in the store's encoding."""
        return bool(cls.kernels) and kernels >= set(cls.kernels) and dim % cls.columns == 0

    @classmethod
    @abc.abstractmethod
    def of(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Encode keys and values `[B, P, D]` as a store of P rows.

        Args:
            k: keys `[B, P, D]`.
            v: values `[B, P, D]`.

        Returns:
            A store of P rows.
        """

    @classmethod
    @abc.abstractmethod
    def row_bytes(cls, dim: int, itemsize: int) -> int:
        """Bytes of one encoded row: its key and its value.

        Args:
            dim: D.
            itemsize: bytes per element of the model's dtype.

        Returns:
            Bytes.
        """

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Dtype of the keys and values that `view` returns: the model's."""

    def widened(self, dtype: jnp.dtype) -> "Store":
        """Return a copy of the store whose `view` returns entries in another dtype.

        Args:
            dtype: the new dtype of `view`.

        Returns:
            The store.
        """
        return self.of(*(each.astype(dtype) for each in self.view()))

    @property
    def element_bytes(self) -> int | float:
        """Bytes of a stored element, mean of keys and values, without scales; by default those of `dtype`."""
        return self.dtype.itemsize

    @abc.abstractmethod
    def view(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Decoded keys and values `[B, P, D]` in the model's dtype, as attention reads them."""

    @property
    def held(self) -> tuple[Any, Any]:
        """Keys and values as kernels accept them: arrays, or tuples of codes, scales, and minima if any."""
        return self.view()

    def holding(self, k: Any, v: Any) -> "Store":
        """Return the store with the keys and values that a kernel returned, in the form of `held`.

        Args:
            k: keys.
            v: values.

        Returns:
            The updated store.
        """
        return self.of(k, v)

    @abc.abstractmethod
    def put(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Return the store with the keys and values of some entries overwritten, in place if buffers are donated.

        Args:
            k: row indices (P or more writes nothing), and keys in any float dtype.
            v: row indices (which may differ from those of `k`), and values.

        Returns:
            The updated store.
        """

    def take(self, row: Int[Array, "B n"], real: Bool[Array, "B n"] | None = None) -> "Store":
        """Gather entries by index into a store of n entries, encoded; zeros where the mask `real` is False.

        Args:
            row: row indices.
            real: mask of the entries to copy; the others become zeros. By default all are copied.

        Returns:
            A store of n entries.
        """

        def gather(leaf: Array) -> Array:
            wide = (..., *(None,) * (leaf.ndim - 2))
            rows = jnp.take_along_axis(leaf, row[wide], axis=1)
            return rows if real is None else jnp.where(real[wide], rows, jnp.zeros((), leaf.dtype))

        return jax.tree.map(gather, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Store):
    """Store of keys and values without encoding, in the model's dtype; float32 on a CPU."""

    kernels = ("rows", "rows")
    k: Float[Array, "B P D"]
    v: Float[Array, "B P D"]

    @classmethod
    def of(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Wrap keys and values `[B, P, D]` as a store of P rows, without a copy."""
        return cls(k=k, v=v)

    @classmethod
    def row_bytes(cls, dim: int, itemsize: int) -> int:
        """Bytes of one entry: a key and a value of `dim` elements each."""
        return 2 * dim * itemsize

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of keys and values: that of the stored arrays."""
        return self.k.dtype

    def view(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Keys and values in the model's dtype: the stored arrays."""
        return self.k, self.v

    def put(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Return the store with the keys and values of some entries overwritten, cast to the model's dtype."""
        (k_row, keys), (v_row, values) = k, v
        k_leaf = put_cells(self.k, k_row, keys.astype(self.k.dtype))
        v_leaf = put_cells(self.v, v_row, values.astype(self.v.dtype))
        return dataclasses.replace(self, k=k_leaf, v=v_leaf)


def put_cells(leaf: Array, row: Int[Array, "B N"], new: Array) -> Array:
    """Write `new` (one or more numbers per row) to a pool array at row indices `row`; P or more writes nothing."""
    index = jnp.arange(leaf.shape[0], dtype=jnp.int32)[:, None]
    return leaf.at[index, row].set(new, mode="drop", unique_indices=True)
