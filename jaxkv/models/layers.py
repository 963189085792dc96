"""The pieces of a decoder: linear maps stored as rows [out, in], norms, dense MLPs."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxkv.sharding.collectives import total
from jaxkv.sharding.mesh import Axes

# Below this many rows XLA's bfloat16 products on a CPU with AMX fall back to scalar code (15x slower).
MIN_ROWS_16BIT = 8
# Products in parts, for a GPU of a hundred multiprocessors or so: of at most so many rows, which one tile holds; until
# there are so many outputs in all parts; at most so many parts, and of each at least so many elements to sum over.
_FEW_ROWS, _OUTPUTS, _MOST_PARTS, _LEAST_PART = 64, 32768, 8, 64


def empty(*shape: int, dtype: jnp.dtype) -> nnx.Param:
    """A parameter that has a shape and a dtype but no value yet."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))


def project(
    x: Float[Array, "*rows E"],
    weight: Float[Array, "*out E"],
    bias: Float[Array, "*out"] | None = None,
    *,
    wide: bool = False,
    over: Axes | None = None,
) -> Float[Array, "..."]:
    """A linear map with its weight kept as rows of the output.

    Args:
        x: input rows, any float dtype.
        weight: one row per output channel, in x's dtype; may have several output axes.
        bias: added to the output, or None.
        wide: leave the output in float32, for a caller that goes on computing with it.
        over: a mesh whose devices have a part of E each; None if this one has it all.

    Returns:
        The output in x's dtype unless wide; products are summed in float32.
    """
    rows, outputs = x.shape[:-1], weight.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    count = flat.shape[0]
    if x.dtype.itemsize == 2 and count < MIN_ROWS_16BIT:
        flat = jnp.pad(flat, ((0, MIN_ROWS_16BIT - count), (0, 0)))
    matrix = weight.reshape(-1, weight.shape[-1])
    out = lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = total(out[:count].reshape(*rows, *outputs), over)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out if wide else out.astype(x.dtype)


def products(x: Float[Array, "*rows E"], weight: Float[Array, "*out E"]) -> Float[Array, "n ..."]:
    """`project` in n parts that are still to be added up, by a kernel that reads them anyway: for a GPU.

    A product of few rows with few outputs leaves most of a GPU idle unless what it sums over is split; XLA does so too,
    and then needs a kernel to add.

    Args:
        x: input rows, any float dtype.
        weight: one row per output channel, in x's dtype; may have several output axes.

    Returns:
        The parts, float32 `[n, *rows, *out]`.
    """
    rows, outputs, width = x.shape[:-1], weight.shape[:-1], x.shape[-1]
    flat, matrix = x.reshape(-1, width), weight.reshape(-1, width)
    parts = 1
    if flat.shape[0] <= _FEW_ROWS:
        while (
            parts < _MOST_PARTS and 2 * parts * matrix.shape[0] <= _OUTPUTS and width % (2 * parts * _LEAST_PART) == 0
        ):
            parts *= 2
    of = lambda a: a.reshape(-1, parts, width // parts)  # noqa: E731
    out = lax.dot_general(of(flat), of(matrix), (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)
    return out.reshape(parts, *rows, *outputs)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.scale = empty(width, dtype=dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """Norms the last axis of rows of any float dtype; the result has the parameter's."""
        wide, scale = x.astype(jnp.float32), self.scale[...]
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        # Narrowing to 16 bits is slow on a CPU: once, after the scale.
        return (wide * scale.astype(jnp.float32)).astype(scale.dtype)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, with a bias, in float32 (arXiv:1607.06450)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.scale = empty(width, dtype=dtype)
        self.bias = empty(width, dtype=dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """Norms the last axis of rows of any float dtype; the result has the parameters'."""
        wide, scale, bias = x.astype(jnp.float32), self.scale[...], self.bias[...]
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(scale.dtype)


class DenseMLP(nnx.Module):
    """down(hidden(x)), one for all tokens; what is hidden differs."""

    def __init__(self, width: int, hidden: int, *, bias: bool, dtype: jnp.dtype):
        self.down = empty(width, hidden, dtype=dtype)
        self.down_bias = empty(width, dtype=dtype) if bias else None

    def __call__(self, x: Float[Array, "*rows E"], over: Axes | None = None) -> Float[Array, "*rows E"]:
        """Applies the MLP row by row; the result is float32, for the residual stream to be added to."""
        return project(self.hidden(x), self.down[...], _value(self.down_bias), wide=True, over=over)

    def part(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """What this device's part of F makes of the result, without the bias, for who adds up the devices' himself."""
        return project(self.hidden(x), self.down[...], wide=True)

    def hidden(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows F"]:
        """What is projected down, in x's dtype."""
        raise NotImplementedError


class GatedMLP(DenseMLP):
    """down(silu(gate(x)) * up(x)); gate and up lie in one parameter `[2, F, E]`."""

    def __init__(self, width: int, hidden: int, *, bias: bool, dtype: jnp.dtype):
        super().__init__(width, hidden, bias=bias, dtype=dtype)
        self.gate_up = empty(2, hidden, width, dtype=dtype)
        self.gate_up_bias = empty(2, hidden, dtype=dtype) if bias else None

    def hidden(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows F"]:
        """What is projected down, in x's dtype."""
        # Converting to 16 bits is slow on a CPU: once, after the gate, not three times around it.
        both = project(x, self.gate_up[...], _value(self.gate_up_bias), wide=True)
        gate, up = both[..., 0, :], both[..., 1, :]
        return (jax.nn.silu(gate) * up).astype(x.dtype)


class GeluMLP(DenseMLP):
    """down(gelu(up(x))), the exact GELU; up is `[F, E]`."""

    def __init__(self, width: int, hidden: int, *, bias: bool, dtype: jnp.dtype):
        super().__init__(width, hidden, bias=bias, dtype=dtype)
        self.up = empty(hidden, width, dtype=dtype)
        self.up_bias = empty(hidden, dtype=dtype) if bias else None

    def hidden(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows F"]:
        """What is projected down, in x's dtype."""
        up = project(x, self.up[...], _value(self.up_bias), wide=True)
        return jax.nn.gelu(up, approximate=False).astype(x.dtype)


def _value(parameter: nnx.Param | None) -> Array | None:
    return None if parameter is None else parameter[...]
