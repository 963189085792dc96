"""Stores: how a pool holds the keys and values of its rows. Nobody else touches the arrays they are held in."""

import abc
import dataclasses
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Store(abc.ABC):
    """Keys and values of a pool's rows: a dataclass of arrays `[B, P, ...]`, registered as a pytree.

    A subclass says how rows are held (`of`), read (`view`), written (`put`) and what one weighs (`row_bytes`); rows are
    moved without being read (`take`).

    Attributes:
        fused: kernels may read and write what `view` gives in place; else what they fuse is done step by step.
    """

    fused: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def of(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Holds rows.

        Args:
            k: keys `[B, P, D]`.
            v: values `[B, P, D]`.

        Returns:
            The store.
        """

    @classmethod
    @abc.abstractmethod
    def row_bytes(cls, dim: int, itemsize: int) -> int:
        """Bytes of one row's key and value.

        Args:
            dim: D.
            itemsize: bytes of a number of the model's dtype.

        Returns:
            Bytes.
        """

    @abc.abstractmethod
    def view(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """Keys and values in the model's dtype, as attention reads them."""

    @abc.abstractmethod
    def put(
        self, k: tuple[Int[Array, "B n"], Float[Array, "B n D"]], v: tuple[Int[Array, "B m"], Float[Array, "B m D"]]
    ) -> "Store":
        """Writes rows, in place where the buffers are donated.

        Args:
            k: indices of rows, from P on for none, and their keys in any float dtype.
            v: the same of values; they may be other rows.

        Returns:
            The store with those rows.
        """

    def take(self, row: Int[Array, "B n"], real: Bool[Array, "B n"] | None = None) -> "Store":
        """Gathers rows, as they are held.

        Args:
            row: their indices.
            real: which of them to take; the others are zeros. All by default.

        Returns:
            A store of n rows.
        """

        def gather(leaf: Array) -> Array:
            wide = (..., *(None,) * (leaf.ndim - 2))
            rows = jnp.take_along_axis(leaf, row[wide], axis=1)
            return rows if real is None else jnp.where(real[wide], rows, jnp.zeros((), leaf.dtype))

        return jax.tree.map(gather, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Store):
    """Rows as the model makes them, in its dtype.

    Attributes:
        k: `[B, P, D]` keys.
        v: `[B, P, D]` values.
    """

    fused: ClassVar[bool] = True
    k: Float[Array, "B P D"]
    v: Float[Array, "B P D"]

    @classmethod
    def of(cls, k: Float[Array, "B P D"], v: Float[Array, "B P D"]) -> "Store":
        """Holds rows in the arrays given."""
        return cls(k=k, v=v)

    @classmethod
    def row_bytes(cls, dim: int, itemsize: int) -> int:
        """Bytes of a key and a value of D numbers each."""
        return 2 * dim * itemsize

    def view(self) -> tuple[Float[Array, "B P D"], Float[Array, "B P D"]]:
        """The arrays that rows are held in."""
        return self.k, self.v

    def put(
        self, k: tuple[Int[Array, "B n"], Float[Array, "B n D"]], v: tuple[Int[Array, "B m"], Float[Array, "B m D"]]
    ) -> "Store":
        """Scatters keys and values into their arrays."""
        write = lambda leaf, row, new: put_rows(leaf, row, new.astype(leaf.dtype))  # noqa: E731
        return dataclasses.replace(self, k=write(self.k, *k), v=write(self.v, *v))


def put_cells(leaf: Array, row: Int[Array, "B N"], new: Array) -> Array:
    """Writes what each row has, one number or several; rows from P on are left out."""
    index = jnp.arange(leaf.shape[0], dtype=jnp.int32)[:, None]
    return leaf.at[index, row].set(new, mode="drop", unique_indices=True)


def put_rows(leaf: Float[Array, "B P D"], row: Int[Array, "B N"], new: Float[Array, "B N D"]) -> Array:
    """Writes rows, in place where the buffer is donated; rows from P on are left out."""
    return _scatter_narrow(leaf, row, new) if leaf.dtype.itemsize == 2 else put_cells(leaf, row, new)


@jax.custom_jvp
def _scatter_narrow(leaf: Array, row: Int[Array, "B N"], new: Array) -> Array:
    def as_integers(leaf: Array, row: Array, new: Array) -> Array:
        # A CPU widens a 16-bit float operand of a scatter to float32 and back, all of it; integers it leaves alone.
        bits = partial(lax.bitcast_convert_type, new_dtype=jnp.uint16)
        return lax.bitcast_convert_type(put_cells(bits(leaf), row, bits(new)), leaf.dtype)

    return lax.platform_dependent(leaf, row, new, cpu=as_integers, default=put_cells)


@_scatter_narrow.defjvp
def _scatter_narrow_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    # Integers have no derivative: without this rule gradients of 16-bit rows would be zero on a CPU.
    leaf, row, new = primals
    return _scatter_narrow(leaf, row, new), put_cells(tangents[0], row, tangents[2])
