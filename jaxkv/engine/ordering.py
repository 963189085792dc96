"""Writes that wait for reads: how a program says that a buffer it writes in place has been read before."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def behind(value: Shaped[Array, "*n"], read: Float[Array, "*#n"]) -> Shaped[Array, "*n"]:
    """A value that cannot be had before something has been read: what is written where it says waits for that.

    A program that reads a pool and then writes it in place must say that the reads come first. Where XLA sees no order
    between them it copies the whole pool on a CPU, at every step. A barrier does not say it: `lax.optimization_barrier`
    is gone before buffers are assigned. What remains is a dependence of data that cannot be folded away. No number
    read need be known for it but one: whether it is a number at all.

    Args:
        value: which rows are written, as a mask, or numbers that these are made of.
        read: what was read, or made of it.

    Returns:
        The value; where what was read is not a number False, so that nothing is written there, or NaN.
    """
    if value.dtype == jnp.bool_:
        return value & ~jnp.isnan(read)
    return jnp.where(jnp.isnan(read), jnp.nan, value)
