"""Stores of latents (multi-head latent attention): one vector per entry, which is its key and its value.

Attention multiplies weights by whole vectors; the model drops the channels of its output that belong to keys alone.
"""

import dataclasses
from collections.abc import Set
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.cache.quantised import (
    Int4Vectors,
    Int8Vectors,
    QuantisedStore,
    QuantisedVectors,
    register_quantised_store,
)
from jaxkv.cache.stores import DenseStore, Store, write_pool_rows


class LatentStore(Store):
    """Abstract base class of stores of latents: values are the keys, and what is given as values is not written."""

    kernels: ClassVar[tuple[str, ...]] = DenseStore.kernels
    values_are_keys = True

    @classmethod
    def supports_kernels(cls, kernels: Set[str], dim: int) -> bool:
        """Return False: no kernel reads keys and values from one array."""
        return False


@jax.tree_util.register_dataclass
@frozen_dataclass
class DenseLatentStore(LatentStore):
    """Store of unencoded latents in the model's dtype; float32 on a CPU."""

    kernels = LatentStore.kernels
    k: Float[Array, "B P D"]

    @classmethod
    def encode_entries(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Wrap latents `[B, P, D]` as a store of P rows, without a copy."""
        return cls(k=k)

    @classmethod
    def compute_entry_bytes(cls, dim: int, itemsize: int) -> int:
        """Return the bytes of one entry: a vector of `dim` elements of `itemsize` bytes each."""
        return dim * itemsize

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the stored latents."""
        return self.k.dtype

    def decode_entries(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Return the stored latents twice, as keys and as values."""
        return self.k, self.k

    def overwrite_entries(
        self,
        k: tuple[Int[Array, "B n"], Float[Array, "B n D"]],
        v: tuple[Int[Array, "B m"], Float[Array, "B m D"]],
    ) -> "Store":
        """Return the store with latents at the row indices of `k` overwritten, cast to the stored array's dtype."""
        row, latents = k
        return dataclasses.replace(self, k=write_pool_rows(self.k, row, latents.astype(self.dtype)))

    def cast_to_dtype(self, dtype: jnp.dtype) -> "Store":
        """Return a store of the latents in another dtype."""
        return dataclasses.replace(self, k=self.k.astype(dtype))


@jax.tree_util.register_dataclass
@frozen_dataclass
class AbsentVectors(QuantisedVectors):
    """Values of latents: nothing is stored."""

    bits = 0

    @classmethod
    def quantise_vectors(cls, rows: Float[Array, "B P D"]) -> "AbsentVectors":
        """Return an instance, without arrays."""
        return cls()

    @classmethod
    def count_vector_bytes(cls, dim: int) -> int:
        """Return 0."""
        return 0

    def dequantise_vectors(self) -> Float[Array, "B P D"]:
        """Raise NotImplementedError: latents are dequantised from keys."""
        raise NotImplementedError


@frozen_dataclass
class QuantisedLatentStore(LatentStore, QuantisedStore):
    """Base class of stores of quantised latents, the keys; subclasses set `keys`, the class of `k`."""

    kernels = ()
    values = AbsentVectors
    v: QuantisedVectors = AbsentVectors()


@register_quantised_store
@frozen_dataclass
class Int8LatentStore(QuantisedLatentStore):
    """Store of latents as 8-bit integers with one float16 scale per vector."""

    keys = Int8Vectors


@register_quantised_store
@frozen_dataclass
class Int4LatentStore(QuantisedLatentStore):
    """Store of latents in 4 bits per element, with a float16 scale and minimum per group of up to 32."""

    keys = Int4Vectors
