"""Stores: encodings of the keys and values of a pool. Other than stores, only fused kernels write these arrays."""

import abc
import dataclasses
from collections.abc import Set
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv._checks import has_overridden_methods
from jaxkv._dataclasses import frozen_dataclass


def choose_cache_dtype(dtype: Any, platform: str) -> jnp.dtype:
    """Return the dtype of entries in a cache on a platform, for a model of `dtype`: float32 on a CPU, else `dtype`.

    The values are equal, because entries are rounded to the model's dtype first.
    """
    return jnp.dtype(jnp.float32 if platform == "cpu" else dtype)


class Store(abc.ABC):
    """Abstract base class of encodings of a pool's keys and values: a dataclass of arrays `[B, P, ...]`, a pytree.

    A subclass defines how entries are encoded (`encode_entries`), decoded (`decode_entries`, of `dtype`) and written
    (`overwrite_entries`), and the bytes per row (`compute_entry_bytes`); `gather_entries` gathers encoded entries.

    Attributes:
        kernels: names in `BackendCapabilities` of the forms of keys and of values in `kernel_inputs`: "rows" (arrays
            as they are), "bytes", "nibbles". Empty: kernels cannot read entries, which are decoded for XLA.
        columns: divisor of the head dim that kernels require.
        transformed: True if entries are transformed by a Hadamard matrix, with the head's mean subtracted from keys,
            unless a policy compares keys.
        values_are_keys: True if one array holds keys and values, which are equal (latents).
        residual_length: number of last appended entries that pools also hold before they are encoded.
    """

    kernels: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[int] = 1
    transformed: ClassVar[bool] = False
    values_are_keys: ClassVar[bool] = False
    residual_length: ClassVar[int] = 0

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `kernels` to () in a new `Store` subclass that overrides methods but declares no `kernels`."""
        super().__init_subclass__(**options)
        if has_overridden_methods(cls, "kernels"):
            cls.kernels = ()

    @classmethod
    def supports_kernels(cls, kernels: Set[str], dim: int) -> bool:
        """True if the forms `kernels` that kernels read include this store's, and `columns` divide `dim`."""
        return bool(cls.kernels) and kernels >= set(cls.kernels) and dim % cls.columns == 0

    @classmethod
    @abc.abstractmethod
    def encode_entries(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Encode keys and values `[B, P, D]`, and return a store of P rows.

        Args:
            k: keys `[B, P, D]`.
            v: values `[B, P, D]`.

        Returns:
            A store of P rows.
        """

    @classmethod
    @abc.abstractmethod
    def compute_entry_bytes(cls, dim: int, itemsize: int) -> int:
        """Return the bytes of one encoded entry: its key and its value of `dim` elements each, with scales.

        Args:
            dim: D.
            itemsize: bytes per element of the model's dtype.

        Returns:
            Bytes.
        """

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Dtype of the keys and values that `decode_entries` returns: the model's, or float32 on a CPU."""

    def cast_to_dtype(self, dtype: jnp.dtype) -> "Store":
        """Return a store that decodes to another dtype; by default entries are decoded, cast and encoded anew.

        Args:
            dtype: the new dtype of `decode_entries`.

        Returns:
            The store.
        """
        return self.encode_entries(*(each.astype(dtype) for each in self.decode_entries()))

    @property
    def element_bytes(self) -> int | float:
        """Bytes of one stored element, mean of keys and values, without scales; by default those of `dtype`."""
        return self.dtype.itemsize

    @abc.abstractmethod
    def decode_entries(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Return decoded keys and values `[B, P, D]` in the store's `dtype`, as attention reads them."""

    @property
    def kernel_inputs(self) -> tuple[Any, Any]:
        """Keys and values as kernels read them: decoded arrays by default, or tuples of codes, scales, minima."""
        return self.decode_entries()

    def store_kernel_outputs(self, k: Any, v: Any) -> "Store":
        """Return the store with the keys and values that a kernel returned, in the form of `kernel_inputs`.

        Args:
            k: keys.
            v: values.

        Returns:
            The updated store.
        """
        return self.encode_entries(k, v)

    @abc.abstractmethod
    def overwrite_entries(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Return the store with keys and values at row indices overwritten; in place if the store is donated.

        Args:
            k: row indices (P or more writes nothing), and keys in any float dtype.
            v: row indices (which may differ from those of `k`), and values.

        Returns:
            The updated store.
        """

    def gather_entries(
        self, row: Int[Array, "B n"], real: Bool[Array, "B n"] | None = None
    ) -> "Store":
        """Gather rows by index into a store of n entries, without decoding; zeros where the mask `real` is False.

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
@frozen_dataclass
class DenseStore(Store):
    """Store of unencoded keys and values in the model's dtype; float32 on a CPU."""

    kernels = ("rows", "rows")
    k: Float[Array, "B P D"]
    v: Float[Array, "B P D"]

    @classmethod
    def encode_entries(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Wrap keys and values `[B, P, D]` as a store of P rows, without a copy."""
        return cls(k=k, v=v)

    @classmethod
    def compute_entry_bytes(cls, dim: int, itemsize: int) -> int:
        """Return the bytes of one entry: a key and a value of `dim` elements of `itemsize` bytes each."""
        return 2 * dim * itemsize

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of a dense store's keys and values: that of the stored arrays."""
        return self.k.dtype

    def decode_entries(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Return the stored arrays of keys and values `[B, P, D]`; nothing is decoded."""
        return self.k, self.v

    def overwrite_entries(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Return the store with keys and values at row indices overwritten, cast to the stored arrays' dtype."""
        k_row, keys = k
        v_row, values = v
        k_leaf = write_pool_rows(self.k, k_row, keys.astype(self.k.dtype))
        v_leaf = write_pool_rows(self.v, v_row, values.astype(self.v.dtype))
        return dataclasses.replace(self, k=k_leaf, v=v_leaf)


def write_pool_rows(leaf: Array, row: Int[Array, "B N"], new: Array) -> Array:
    """Return a pool array `[B, P, ...]` with `new` at unique row indices `[B, N]`; indices from P on are ignored."""
    index = jnp.arange(leaf.shape[0], dtype=jnp.int32)[:, None]
    # Row indices are never negative: without their wrapping, the decode loop has a tenth fewer operations.
    return leaf.at[index, row].set(
        new, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
