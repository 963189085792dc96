"""Layers of the decoder: linear maps with weights stored as rows `[out, in]`, norms, dense MLPs."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxkv._errors import require
from jaxkv.models.config import ModelConfig
from jaxkv.models.stored import GROUP, Stored
from jaxkv.sharding.collectives import total
from jaxkv.sharding.mesh import Axes

# Vectors, the inputs of linear maps, norms and MLPs.
Vectors = Float[Array, "*rows E"]
# Split-K for GPUs of about a hundred multiprocessors: maximum rows (one tile) of a product that is split; outputs over
# all parts at which splitting stops; maximum number of parts; minimum elements per partial sum.
_FEW_ROWS, _OUTPUTS, _MOST_PARTS, _LEAST_PART = 64, 32768, 8, 64


def empty(*shape: int, dtype: jnp.dtype) -> nnx.Param:
    """Make an uninitialised `nnx.Param` that holds a shape and dtype without values."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))


def add_linear(module: nnx.Module, name: str, *shape: int, dtype: jnp.dtype) -> None:
    """Add an uninitialised weight `name` to a module, stored as floats or, for int8 and int4, as codes.

    Codes have a `name_scale` (8 bits), or `name_scales` and `name_leasts` (4 bits); the others are None.
    """
    scale = scales = leasts = None
    if dtype == jnp.int8:
        scale = empty(*shape[:-1], dtype=jnp.dtype(jnp.float32))
    elif dtype == jnp.int4:
        remedy = (
            f"rows of {shape[-1]} elements are no complete groups of {GROUP}: use 'int8', or None"
        )
        require(shape[-1] % GROUP == 0, "weights", "int4", remedy)
        scales, leasts = (
            empty(*shape[:-1], shape[-1] // GROUP, dtype=jnp.dtype(jnp.float16)) for _ in range(2)
        )
        shape, dtype = (*shape[:-1], shape[-1] // 2), jnp.dtype(jnp.uint8)
    setattr(module, name, empty(*shape, dtype=dtype))
    setattr(module, f"{name}_scale", scale)
    setattr(module, f"{name}_scales", scales)
    setattr(module, f"{name}_leasts", leasts)


def held(module: Any, name: str) -> Stored:
    """Return a module's weight `name` as it is stored."""
    beside = {
        each: value_of(getattr(module, f"{name}_{each}")) for each in ("scale", "scales", "leasts")
    }
    return Stored(getattr(module, name)[...], **beside)


def linear(
    module: Any,
    name: str,
    x: Vectors,
    *,
    bias: bool = True,
    wide: bool = False,
    over: Axes | None = None,
) -> Float[Array, "..."]:
    """Multiply x by a module's weight `name`, and add its bias if it has one; see `project`."""
    added = getattr(module, f"{name}_bias", None) if bias else None
    return project(x, held(module, name), value_of(added), wide=wide, over=over)


def linear_parts(module: Any, name: str, x: Vectors) -> Float[Array, "n ..."]:
    """Linear map as `linear`, as n float32 partial sums, see `products`; n is 1 for a weight with a bias."""
    if getattr(module, f"{name}_bias", None) is None:
        return products(x, held(module, name))
    return linear(module, name, x, wide=True)[None]


def float_weight(module: Any, name: str) -> Float[Array, "*out E"]:
    """Return a module's weight `name` in float32."""
    return held(module, name).wide()


def project(
    x: Vectors,
    weight: Stored,
    bias: Float[Array, "*out"] | None = None,
    *,
    wide: bool = False,
    over: Axes | None = None,
) -> Float[Array, "..."]:
    """Linear map of x's last axis by `weight [*out, E]`, summed in float32, with an optional bias.

    `weight` may have several output axes. Output is in x's dtype, or float32 if `wide`. `over` sums it over the devices
    of a mesh that shard E.
    """
    rows, flat = x.shape[:-1], x.reshape(-1, x.shape[-1])
    out = (
        _product_as_stored(flat, weight, split=False)[0]
        if read_as_stored(flat, weight)
        else _product(flat, weight)
    )
    out = total(out.reshape(*rows, *weight.outputs), over)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out if wide else out.astype(x.dtype)


def products(x: Vectors, weight: Stored) -> Float[Array, "n ..."]:
    """Linear map as n float32 partial sums `[n, *rows, *out]` that a kernel adds (split-K).

    A product of few rows with few outputs leaves most of a GPU idle unless the summed axis is split. XLA also splits
    it, but needs a separate kernel for the sum.
    """
    rows, flat = x.shape[:-1], x.reshape(-1, x.shape[-1])
    parts = (
        _product_as_stored(flat, weight, split=True)
        if read_as_stored(flat, weight)
        else _split_product(flat, weight)
    )
    return parts.reshape(parts.shape[0], *rows, *weight.outputs)


def _product(x: Float[Array, "n E"], weight: Stored) -> Float[Array, "n O"]:
    """Float32 product by XLA."""
    x, weight = _in_place(x, weight)
    matrix = weight.factor(x.dtype).reshape(-1, x.shape[-1])
    out = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out if weight.scale is None else out * weight.scale.reshape(-1)


def _split_product(x: Float[Array, "n E"], weight: Stored) -> Float[Array, "parts n O"]:
    """Float32 partial products by XLA, enough to occupy all multiprocessors."""
    (count, width), (x, weight) = x.shape, _in_place(x, weight)
    matrix = weight.factor(x.dtype).reshape(-1, width)
    parts = 1
    if count <= _FEW_ROWS:
        while (
            parts < _MOST_PARTS
            and 2 * parts * matrix.shape[0] <= _OUTPUTS
            and width % (2 * parts * _LEAST_PART) == 0
        ):
            parts *= 2
    x, matrix = (each.reshape(-1, parts, width // parts) for each in (x, matrix))
    out = lax.dot_general(
        x, matrix, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32
    )
    return out if weight.scale is None else out * weight.scale.reshape(-1)


def read_as_stored(x: Float[Array, "n E"], weight: Stored) -> bool:
    """True if an NVIDIA GPU multiplies x by codes directly: one vector, on a GPU that Triton supports.

    On an H200 the kernel, which does not use tensor cores, took 80 us for one vector and 289 for four; bfloat16 weights
    took 113.
    """
    major = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return x.shape[0] == 1 and weight.has_kernel and not (major.isdecimal() and int(major) < 8)


def _product_as_stored(
    x: Float[Array, "n E"], weight: Stored, *, split: bool
) -> Float[Array, "parts n O"]:
    """Float32 product with codes: by a kernel on NVIDIA GPUs, in partial sums if `split`; elsewhere by XLA."""
    # Imported late because models in floats need no kernels.
    import pallas_kernels

    def by_kernel(x: Array, weight: Stored) -> Array:
        flat = jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[len(weight.outputs) :]), weight
        )
        parts = pallas_kernels.multiply_codes(x, *flat)
        return parts if split else parts.sum(axis=0, keepdims=True)

    # Both results have the kernel's shape.
    parts = jax.eval_shape(by_kernel, x, weight).shape[0]

    def by_xla(x: Array, weight: Stored) -> Array:
        return jnp.pad(_product(x, weight)[None], ((0, parts - 1), (0, 0), (0, 0)))

    return lax.platform_dependent(x, weight, cuda=by_kernel, default=by_xla)


def _in_place(x: Float[Array, "n E"], weight: Stored) -> tuple[Float[Array, "n E"], Stored]:
    """Return both unchanged; a 4-bit weight gets a dependency on x, so that XLA dequantises it next to the product.

    Without it XLA dequantises the weights of all layers before a loop over tokens, and keeps them.
    """
    return (x, weight) if weight.scales is None else lax.optimization_barrier((x, weight))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (arXiv:1910.07467), times `scale` plus `offset`."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype, offset: float = 0.0):
        self.scale = empty(width, dtype=dtype)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Vectors) -> Vectors:
        """Normalise the last axis; the result has the dtype of the scale parameter."""
        wide, scale = x.astype(jnp.float32), self.scale[...]
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (scale.astype(jnp.float32) + self.offset)).astype(scale.dtype)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, with or without a bias, in float32 (arXiv:1607.06450)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype, bias: bool):
        self.scale = empty(width, dtype=dtype)
        self.bias = empty(width, dtype=dtype) if bias else None
        self.eps = eps

    def __call__(self, x: Vectors) -> Vectors:
        """Normalise the last axis; the result has the dtype of the parameters."""
        wide, scale, bias = x.astype(jnp.float32), self.scale[...], value_of(self.bias)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide * scale.astype(jnp.float32)
        return (wide if bias is None else wide + bias.astype(jnp.float32)).astype(scale.dtype)


class DenseMLP(nnx.Module):
    """Dense MLP, down(hidden(x)), gated or not.

    If gated, hidden is silu(gate(x)) * up(x), or GELU by tanh in place of silu; gate and up are one parameter `[2, F,
    E]`. Otherwise hidden is the exact gelu(up(x)), and up is `[F, E]`. With `apart`, the operands of both products are
    computed before the products, not fused into them.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, weights: jnp.dtype):
        self.gated, self.tanh_gelu = config.gated, config.tanh_gelu
        add_linear(self, "down", config.embed, config.hidden, dtype=weights)
        self.down_bias = empty(config.embed, dtype=dtype) if config.mlp_bias else None
        name, rows = ("gate_up", (2, config.hidden)) if config.gated else ("up", (config.hidden,))
        add_linear(self, name, *rows, config.embed, dtype=weights)
        setattr(self, f"{name}_bias", empty(*rows, dtype=dtype) if config.mlp_bias else None)

    def __call__(self, x: Vectors, over: Axes | None = None, *, apart: bool = False) -> Vectors:
        """Return the MLP's float32 output `[*rows, E]`, without the residual; summed over the devices of `over`."""
        return linear(self, "down", self._operand(x, apart), wide=True, over=over)

    def part(self, x: Vectors, *, apart: bool = False) -> Vectors:
        """Return the float32 output of this device's shard of F, without bias; the caller sums over devices."""
        return linear(self, "down", self._operand(x, apart), bias=False, wide=True)

    def _operand(self, x: Vectors, apart: bool) -> Float[Array, "*rows F"]:
        """Return activations before the down projection; with `apart`, x and they are behind a barrier."""
        if not apart:
            return self.hidden(x)
        return lax.optimization_barrier(self.hidden(lax.optimization_barrier(x)))

    def hidden(self, x: Vectors) -> Float[Array, "*rows F"]:
        """Return activations `[*rows, F]` before the down projection, in x's dtype."""
        if not self.gated:
            return jax.nn.gelu(linear(self, "up", x, wide=True), approximate=False).astype(x.dtype)
        both = linear(self, "gate_up", x, wide=True)
        gate, up = both[..., 0, :], both[..., 1, :]
        gate = jax.nn.gelu(gate, approximate=True) if self.tanh_gelu else jax.nn.silu(gate)
        return (gate * up).astype(x.dtype)


def value_of(parameter: nnx.Param | None) -> Array | None:
    """Return the array of a parameter; None for None."""
    return None if parameter is None else parameter[...]
