"""Layers of the decoder: linear maps with weights stored as rows `[out, in]`, norms, dense MLPs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxkv._errors import require
from jaxkv.models.config import ModelConfig
from jaxkv.models.stored import GROUP, StoredWeight
from jaxkv.sharding.collectives import sum_over_devices
from jaxkv.sharding.mesh import ShardingMesh

# Activations without parameters, by name.
ACTIVATION_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}
# Slope of xIELU at 0, and the largest input of its exponential.
_XIELU_BETA, _XIELU_EPSILON = 0.5, -1e-6
# Vectors, the inputs of linear maps, norms and MLPs.
Vectors = Float[Array, "*rows E"]
# Split-K for GPUs of about a hundred multiprocessors: maximum rows (one tile) of a product that is split; outputs over
# all parts at which splitting stops; maximum number of parts; minimum elements per partial sum.
_FEW_ROWS, _OUTPUTS, _MOST_PARTS, _LEAST_PART = 64, 32768, 8, 64
# Numbers of float32 vectors for which a CPU multiplies the matrix by them, not them by the matrix; in bfloat16 that is
# slower.
_FEW_VECTORS = range(2, 17)
# Maximum vectors of the kernel that multiplies codes on tensor cores.
_MOST_CODED_VECTORS = 16


def make_empty_parameter(*shape: int, dtype: jnp.dtype) -> nnx.Param:
    """Make an `nnx.Param` with a shape and dtype but no array, to be loaded later."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))


def add_linear_weight(module: nnx.Module, name: str, *shape: int, dtype: jnp.dtype) -> None:
    """Add an empty linear weight `name` to a module: floats, int8 codes and scale, or 4-bit codes, scales and minima.

    Codes have a `name_scale` (8 bits), or `name_scales` and `name_leasts` (4 bits); the others are None.
    """
    scale = scales = leasts = None
    if dtype == jnp.int8:
        scale = make_empty_parameter(*shape[:-1], dtype=jnp.dtype(jnp.float32))
    elif dtype == jnp.int4:
        remedy = (
            f"rows of {shape[-1]} elements are no complete groups of {GROUP}: use 'int8', or None"
        )
        require(shape[-1] % GROUP == 0, "weights", "int4", remedy)
        scales, leasts = (
            make_empty_parameter(*shape[:-1], shape[-1] // GROUP, dtype=jnp.dtype(jnp.float16))
            for _ in range(2)
        )
        shape, dtype = (*shape[:-1], shape[-1] // 2), jnp.dtype(jnp.uint8)
    setattr(module, name, make_empty_parameter(*shape, dtype=dtype))
    setattr(module, f"{name}_scale", scale)
    setattr(module, f"{name}_scales", scales)
    setattr(module, f"{name}_leasts", leasts)


def get_stored_weight(module: Any, name: str) -> StoredWeight:
    """Return a module's linear weight `name`, floats or codes with scales, as a `StoredWeight`."""
    beside = {
        each: get_parameter_array(getattr(module, f"{name}_{each}", None))
        for each in ("scale", "scales", "leasts")
    }
    return StoredWeight(getattr(module, name)[...], **beside)


def apply_linear(
    module: Any,
    name: str,
    x: Vectors,
    *,
    bias: bool = True,
    wide: bool = False,
    over: ShardingMesh | None = None,
) -> Float[Array, "..."]:
    """Apply a module's linear map `name`, summed over `over`'s devices, plus its bias; x's dtype, float32 if `wide`."""
    added = getattr(module, f"{name}_bias", None) if bias else None
    return multiply_by_weight(
        x, get_stored_weight(module, name), get_parameter_array(added), wide=wide, over=over
    )


def apply_linear_split_k(module: Any, name: str, x: Vectors) -> Float[Array, "n ..."]:
    """Apply a module's linear map `name`; return n float32 partial sums (split-K), one if it has a bias."""
    if getattr(module, f"{name}_bias", None) is None:
        return multiply_split_k(x, get_stored_weight(module, name))
    return apply_linear(module, name, x, wide=True)[None]


def get_float_weight(module: Any, name: str) -> Float[Array, "*out E"]:
    """Return a module's linear weight `name` `[*out, E]`, dequantised to float32."""
    return get_stored_weight(module, name).dequantise_to_float32()


def multiply_by_weight(
    x: Vectors,
    weight: StoredWeight,
    bias: Float[Array, "*out"] | None = None,
    *,
    wide: bool = False,
    over: ShardingMesh | None = None,
) -> Float[Array, "..."]:
    """Multiply x by a weight with float32 sums, over devices of `over`, too; add a bias; x's dtype, float32 if `wide`.

    `weight` may have several output axes. Output is in x's dtype, or float32 if `wide`. `over` sums it over the devices
    of a mesh that shard E.
    """
    rows, flat = x.shape[:-1], x.reshape(-1, x.shape[-1])
    out = (
        _multiply_by_codes(flat, weight, split=False)[0]
        if uses_quantised_kernel(flat, weight)
        else _multiply_by_xla(flat, weight)
    )
    out = sum_over_devices(out.reshape(*rows, *weight.output_shape), over)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out if wide else out.astype(x.dtype)


def multiply_split_k(x: Vectors, weight: StoredWeight) -> Float[Array, "n ..."]:
    """Multiply x's last axis by a weight; return n float32 partial sums `[n, *rows, *out]` over parts of E (split-K).

    A product of few rows with few outputs leaves most of a GPU idle unless the summed axis is split. XLA also splits
    it, but needs a separate kernel for the sum.
    """
    rows, flat = x.shape[:-1], x.reshape(-1, x.shape[-1])
    parts = (
        _multiply_by_codes(flat, weight, split=True)
        if uses_quantised_kernel(flat, weight)
        else _multiply_split_k_by_xla(flat, weight)
    )
    return parts.reshape(parts.shape[0], *rows, *weight.output_shape)


def _multiply_by_xla(x: Float[Array, "n E"], weight: StoredWeight) -> Float[Array, "n O"]:
    """Multiply vectors by a weight with XLA; return float32 `[n, O]`."""
    x, weight = _delay_dequantisation(x, weight)
    matrix = weight.get_weight_matrix(x.dtype).reshape(-1, x.shape[-1])
    if len(x) in _FEW_VECTORS and x.dtype == jnp.float32:
        ways = {"cpu": _multiply_swapped, "default": _multiply_by_rows}
        out = lax.platform_dependent(x, matrix, **ways)
    else:
        out = _multiply_by_rows(x, matrix)
    return out if weight.scale is None else out * weight.scale.reshape(-1)


def _multiply_by_rows(x: Float[Array, "n E"], matrix: Float[Array, "O E"]) -> Float[Array, "n O"]:
    """Multiply vectors by the rows of a matrix; return float32 `[n, O]`."""
    return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _multiply_swapped(x: Float[Array, "n E"], matrix: Float[Array, "O E"]) -> Float[Array, "n O"]:
    """Multiply as `_multiply_by_rows`, the matrix first: XLA's product for CPUs copies its second operand."""
    # Without the barrier XLA swaps them back.
    return lax.optimization_barrier(_multiply_by_rows(matrix, x)).T


def _multiply_split_k_by_xla(
    x: Float[Array, "n E"], weight: StoredWeight
) -> Float[Array, "parts n O"]:
    """Multiply vectors by a weight with XLA; return float32 sums over parts of E, one for many vectors or outputs."""
    (count, width), (x, weight) = x.shape, _delay_dequantisation(x, weight)
    matrix = weight.get_weight_matrix(x.dtype).reshape(-1, width)
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


def uses_quantised_kernel(x: Float[Array, "n E"], weight: StoredWeight) -> bool:
    """True for one vector, or up to 16 in 16 bits, and supported codes, unless on GPUs before Ampere.

    Only CUDA runs the kernels. On an H200 that for one vector took 80 us where bfloat16 weights took 113; that for
    several, on tensor cores, has not run on a GPU.
    """
    several = x.dtype.itemsize == 2 and 1 < x.shape[0] <= _MOST_CODED_VECTORS
    return (
        (x.shape[0] == 1 or several) and weight.is_quantised and supports_kernels_on_device(weight)
    )


def supports_kernels_on_device(weight: StoredWeight) -> bool:
    """True if kernels support the weight, and the device, unless it is no GPU, has Ampere's instructions."""
    major = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return weight.supports_kernels and not (major.isdecimal() and int(major) < 8)


def _multiply_by_codes(
    x: Float[Array, "n E"], weight: StoredWeight, *, split: bool
) -> Float[Array, "parts n O"]:
    """Multiply by a quantised weight, on CUDA in a kernel; return float32 `[parts, n, O]` to sum, 1 unless `split`."""
    # Imported late because models in floats need no kernels.
    import pallas_kernels

    def by_kernel(x: Array, weight: StoredWeight) -> Array:
        flat = weight.flatten_outputs()
        if x.shape[0] == 1:
            parts = pallas_kernels.multiply_codes(x, *flat)
        else:
            alone, ids = jax.tree.map(lambda leaf: leaf[None], flat), jnp.zeros(1, jnp.int32)
            parts = pallas_kernels.multiply_blocks_by_tensor_cores(x[None], ids, *alone)[:, 0]
        return parts if split else parts.sum(axis=0, keepdims=True)

    # Both results have the kernel's shape.
    parts = jax.eval_shape(by_kernel, x, weight).shape[0]

    def by_xla(x: Array, weight: StoredWeight) -> Array:
        return jnp.pad(_multiply_by_xla(x, weight)[None], ((0, parts - 1), (0, 0), (0, 0)))

    return lax.platform_dependent(x, weight, cuda=by_kernel, default=by_xla)


def _delay_dequantisation(
    x: Float[Array, "n E"], weight: StoredWeight
) -> tuple[Float[Array, "n E"], StoredWeight]:
    """Return x and weight unchanged, but keep XLA from dequantising a 4-bit weight before x is computed.

    Without it XLA dequantises the weights of all layers before a loop over tokens, and keeps them.
    """
    return (x, weight) if weight.scales is None else lax.optimization_barrier((x, weight))


def divide_by_rms(x: Vectors, eps: float) -> Vectors:
    """Return vectors divided by their root mean square over the last axis, float32: an RMS norm without weights."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """RMS norm over the last axis, computed in float32, times (`scale` + `offset`) (arXiv:1910.07467).

    With `scales_later` that factor is left to the caller, and results are float32.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        dtype: jnp.dtype,
        offset: float = 0.0,
        scales_later: bool = False,
    ):
        self.scale = make_empty_parameter(width, dtype=dtype)
        self.eps, self.offset, self.scales_later = eps, offset, scales_later

    def __call__(self, x: Vectors) -> Vectors:
        """RMS-normalise x over its last axis, times (`scale` + `offset`); the result has the dtype of `scale`."""
        wide = divide_by_rms(x, self.eps)
        return (
            wide if self.scales_later else (wide * self.get_scale()).astype(self.scale[...].dtype)
        )

    def get_scale(self) -> Float[Array, " E"]:
        """Return the factor of normalised vectors, `scale` + `offset`, in float32."""
        return self.scale[...].astype(jnp.float32) + self.offset


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, computed in float32, with or without a bias (arXiv:1607.06450)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype, bias: bool):
        self.scale = make_empty_parameter(width, dtype=dtype)
        self.bias = make_empty_parameter(width, dtype=dtype) if bias else None
        self.eps = eps

    def __call__(self, x: Vectors) -> Vectors:
        """Layer-normalise x over its last axis, times scale, plus any bias; the result has the parameters' dtype."""
        wide, scale, bias = x.astype(jnp.float32), self.scale[...], get_parameter_array(self.bias)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide * scale.astype(jnp.float32)
        return (wide if bias is None else wide + bias.astype(jnp.float32)).astype(scale.dtype)


class DenseMLP(nnx.Module):
    """Dense MLP: down(activation(gate(x)) * up(x)), or ungated down(activation(up(x))).

    If gated, gate and up are one parameter `[2, F, E]`; otherwise up is `[F, E]`. With `apart`, the operands of both
    products are computed before the products, not fused into them. xIELU's parameter `[2, 1]` has its alphas for
    positive and negative inputs, before their softplus (arXiv:2411.13010).
    """

    def __init__(self, config: ModelConfig, hidden: int, *, dtype: jnp.dtype, weights: jnp.dtype):
        self.gated, self.activation = config.gated, config.activation
        self.xielu = (
            make_empty_parameter(2, 1, dtype=dtype) if config.activation == "xielu" else None
        )
        add_linear_weight(self, "down", config.embed, hidden, dtype=weights)
        self.down_bias = (
            make_empty_parameter(config.embed, dtype=dtype) if config.mlp_bias else None
        )
        name, rows = ("gate_up", (2, hidden)) if config.gated else ("up", (hidden,))
        add_linear_weight(self, name, *rows, config.embed, dtype=weights)
        setattr(
            self,
            f"{name}_bias",
            make_empty_parameter(*rows, dtype=dtype) if config.mlp_bias else None,
        )

    def __call__(
        self, x: Vectors, over: ShardingMesh | None = None, *, apart: bool = False
    ) -> Vectors:
        """Return the MLP's float32 output `[*rows, E]`, without the residual; summed over the devices of `over`."""
        return apply_linear(
            self, "down", self._compute_unfused_activations(x, apart), wide=True, over=over
        )

    def compute_shard_output(self, x: Vectors, *, apart: bool = False) -> Vectors:
        """Return this device's summand of the MLP's float32 output: of its shard of F, without down's bias."""
        return apply_linear(
            self, "down", self._compute_unfused_activations(x, apart), bias=False, wide=True
        )

    def _compute_unfused_activations(self, x: Vectors, apart: bool) -> Float[Array, "*rows F"]:
        """Return the MLP's activations `[*rows, F]`; with `apart`, XLA cannot fuse x or these into products."""
        if not apart:
            return self.compute_activations(x)
        return lax.optimization_barrier(self.compute_activations(lax.optimization_barrier(x)))

    def compute_activations(self, x: Vectors) -> Float[Array, "*rows F"]:
        """Return the MLP's activations `[*rows, F]` before the down projection, in x's dtype."""
        if not self.gated:
            return self._activate(apply_linear(self, "up", x, wide=True)).astype(x.dtype)
        both = apply_linear(self, "gate_up", x, wide=True)
        return (self._activate(both[..., 0, :]) * both[..., 1, :]).astype(x.dtype)

    def _activate(self, x: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        """Return the activation of float32 `[*rows, F]`."""
        if self.xielu is None:
            return ACTIVATION_FUNCTIONS[self.activation](x)
        positive, negative = jax.nn.softplus(self.xielu[...].astype(jnp.float32))
        below = (jnp.expm1(jnp.minimum(x, _XIELU_EPSILON)) - x) * (_XIELU_BETA + negative)
        return jnp.where(x > 0, positive * x * x, below) + _XIELU_BETA * x


def get_parameter_array(parameter: nnx.Param | None) -> Array | None:
    """Return the array of a module's `nnx.Param`; None if the module has None in its place."""
    return None if parameter is None else parameter[...]
