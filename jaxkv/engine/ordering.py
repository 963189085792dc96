"""Write-after-read order inside a compiled program, so that XLA updates a pool in place instead of copying it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def behind(value: Shaped[Array, "*n"], read: Float[Array, "*#n"]) -> Shaped[Array, "*n"]:
    """Returns `value`, data-dependent on `read` so that XLA reads first; where `read` is NaN: NaN, or False for bools.

    A program that reads a pool and then writes it in place must say that the reads come first. Where XLA sees no order
    between them it copies the whole pool on a CPU, at every step. A barrier does not say it: `lax.optimization_barrier`
    is gone before buffers are assigned. What remains is a dependence of data that cannot be folded away: whether one
    number that was read is NaN.
    """
    if value.dtype == jnp.bool_:
        return value & ~jnp.isnan(read)
    return jnp.where(jnp.isnan(read), jnp.nan, value)
