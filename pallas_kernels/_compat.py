"""Pallas' Triton backend, independent of the JAX version; no other module imports it.

All kernels select the Triton backend explicitly, because the default backend depends on the version. JAX has deprecated
it since 0.11 and ships it in 0.12. `jaxkv.attention.Implementation` therefore selects the functions of this package by
name, so that kernels for another backend can be added.
"""

import dataclasses
import struct
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as _triton

BlockSpec = pl.BlockSpec
# An array, or the shape of an output, and the block of it that a program sees.
Operand = tuple[Any, BlockSpec]
program_id = pl.program_id
when = pl.when
load = _triton.load
store = _triton.store

# Large and finite, so that a masked logit minus a masked maximum is 0 instead of NaN.
MASKED = -1e30
# GPUs have an instruction for powers of two: kernels scale logits by this factor, and convert log-sum-exps back.
LOG2E = 1.4426950408889634


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchParameters:
    """Launch parameters of a Triton kernel: warps per program, and pipeline stages.

    Attributes:
        warps: warps of 32 threads per program.
        stages: blocks in flight in a pipelined loop.
    """

    warps: int = 4
    stages: int = 3


def call_triton_kernel(
    kernel: Callable[[Any], None],
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    launch: LaunchParameters,
    interpret: bool,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Array]:
    """Run a Triton kernel once per point of `grid` by `pallas_call`; return a dictionary of outputs by name.

    Args:
        kernel: function of one object with a ref per name.
        name: name in profiles and compiled programs.
        grid: number of programs along x, y, z.
        inputs: by name, an array and the block of it that a program sees.
        outputs: by name, a shape and its block; names differ from the inputs'. An output that no program writes is
            undefined.
        launch: warps and stages.
        interpret: True runs the kernel as plain JAX operations on any device, for tests.
        aliases: by an input's name, the name of the output written in its place, if the input is donated.

    Returns:
        The outputs by name.
    """
    names = [*inputs, *outputs]
    results = pl.pallas_call(
        lambda *refs: kernel(SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        grid=grid,
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        out_shape=[shape for shape, _ in outputs.values()],
        compiler_params=_triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=interpret,
        input_output_aliases={
            list(inputs).index(a): list(outputs).index(b) for a, b in (aliases or {}).items()
        },
        name=name,
    )(*(array for array, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))


def make_sequence_operand(of: Any) -> Operand:
    """Return (array, block spec) with which program (..., b) sees `[...]` of sequence b of an array `[B, ...]`."""
    rest = of.shape[1:]
    return of, BlockSpec((None, *rest), lambda *ids: (ids[-1],) + (0,) * len(rest))


def make_head_operand(of: Any, group: int = 1) -> Operand:
    """Return (array, block spec) with which program (i, h, b) sees `[b, h // group]` of an array `[B, K, ...]`."""
    rest = of.shape[2:]
    return of, BlockSpec((None, None, *rest), lambda i, h, b: (b, h // group) + (0,) * len(rest))


def make_query_head_operand(of: Any, group: int) -> Operand:
    """Return (array, block spec) with which program (i, h, b) sees query head h of an array `[B, K, G, ...]`."""
    rest = of.shape[3:]
    return of, BlockSpec(
        (None, None, None, *rest), lambda i, h, b: (b, h // group, h % group) + (0,) * len(rest)
    )


def multiply_matrices(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    """Multiply matrices inside a kernel, accumulated in float32, without tf32 for float32; b can be transposed."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return _triton.dot(a, b, trans_b=transpose_b, precision=precision)


def compute_scaled_exp2(x: Array, scale: float, shift: Array, *, interpret: bool) -> Array:
    """Compute 2 ** (x * scale + shift) inside a kernel in two instructions; results below 2 ** -126 are 0.

    `jnp.exp2` needs six, because its product and its sum are not fused and denormal results are handled separately.

    Args:
        x: float32 array.
        scale: a number that is constant when the kernel is compiled.
        shift: an array of x's shape, or one that broadcasts to it.
        interpret: True uses JAX operations.
    """
    if interpret:
        return jnp.exp2(x * scale + shift)
    (bits,) = struct.unpack(">I", struct.pack(">f", scale))
    text = f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, t; }}"
    return _run_inline_ptx(text, "=f,f,f", 1, jnp.float32, x, jnp.broadcast_to(shift, x.shape))


def compute_log2(x: Array, *, interpret: bool) -> Array:
    """Compute log2(x) of positive, normal float32 x inside a kernel in one instruction, approximately."""
    return (
        jnp.log2(x)
        if interpret
        else _run_inline_ptx("lg2.approx.ftz.f32 $0, $1;", "=f,f", 1, jnp.float32, x)
    )


def compute_reciprocal(x: Array, *, interpret: bool) -> Array:
    """Compute 1 / x of normal float32 x inside a kernel in one instruction, approximately."""
    return (
        1 / x
        if interpret
        else _run_inline_ptx("rcp.approx.ftz.f32 $0, $1;", "=f,f", 1, jnp.float32, x)
    )


def apply_softcap(logits: Array, cap: float | None, *, interpret: bool) -> Array:
    """Return cap * tanh(logits / cap) inside a kernel; unchanged logits if the cap is None.

    Computed as cap - 2 cap / (1 + e ** (2 logits / cap)), in five instructions; the error is about 1e-7 of the cap.

    Args:
        logits: float32, to any base.
        cap: softcap of the logits, to the same base.
        interpret: True uses JAX operations.
    """
    if cap is None:
        return logits
    # If the power overflows, its inverse is 0, and the result is the cap.
    power = compute_scaled_exp2(
        logits, 2.0 * LOG2E / cap, jnp.zeros_like(logits), interpret=interpret
    )
    return cap - 2.0 * cap * compute_reciprocal(1.0 + power, interpret=interpret)


def _run_inline_ptx(text: str, constraints: str, pack: int, dtype: Any, *args: Array) -> Array:
    """Run inline PTX elementwise, on `pack` elements at a time; the result has the first argument's shape."""
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    (out,) = _triton.elementwise_inline_asm(
        text, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return out


# Offset of 8-bit codes as float16: 1024 makes the bits of a code the end of a mantissa, 128 makes it positive.
HALF_OFFSET = 1024 + 128


def convert_codes_to_float16(words: Array, byte: int, *, interpret: bool) -> Array:
    """Return int8 code `byte` (0 or 1) of each 16-bit word, plus `HALF_OFFSET`, as exact float16, inside a kernel.

    One or two instructions for two codes.

    Args:
        words: uint16 array.
        byte: 0 for the lower byte, 1 for the higher.
        interpret: True uses JAX operations.
    """
    if interpret:
        return (((words >> 8 * byte) & 255) ^ 128).astype(jnp.float16) + 1024
    text = f"{{ .reg .b32 u; shr.u32 u, $1, {8 * byte}; lop3.b32 $0, u, 0x00FF00FF, 0x64806480, 0x6A; }}"
    return _run_inline_ptx(text, "=r,r", 2, jnp.float16, words)


def dequantise_nibbles(
    words: Array, scale: Array, least: Array, *, index: int, interpret: bool
) -> Array:
    """Return 4-bit code `index` of each word, times scale plus minimum, as float16, inside a kernel.

    Rounded once on a GPU; two codes need at most four instructions. Results above 65,504 are infinite.

    Args:
        words: uint8 or uint16 array, code 0 in the lowest bits.
        scale: float16 array of the same shape.
        least: float16 minima of the same shape.
        index: index of the code, 0 to 1 or 3.
        interpret: True uses JAX operations.
    """
    if interpret:
        code, scale, least = (
            each.astype(jnp.float32) for each in ((words >> 4 * index) & 15, scale, least)
        )
        return (code * scale + least).astype(jnp.float16)
    # A code is the end of a mantissa on top of 1024, or four bits higher on top of 64.
    shift = index // 2 * 8
    (mask, top) = ((0x000F000F, 0x64006400), (0x00F000F0, 0x54005400))[index % 2]
    ends = "sub.rn.f16x2 {0}, {0}, m; fma.rn.f16x2 {0}, {0}, ${1}, ${2};"
    text = f"{{ .reg .b32 u, a, b, m; mov.b32 m, {top:#010x};"
    if words.dtype == jnp.uint16:
        text += f"shr.u32 u, $1, {shift}; lop3.b32 a, u, {mask:#010x}, m, 0xEA;"
        return _run_inline_ptx(
            text + ends.format("a", 2, 3) + "mov.b32 $0, a; }",
            "=r,r,r,r",
            2,
            jnp.float16,
            words,
            scale,
            least,
        )
    text += f"and.b32 u, $2, {0xF0F0F0F0 if index else 0x0F0F0F0F:#010x};"
    text += "prmt.b32 a, u, m, 0x7170; prmt.b32 b, u, m, 0x7372;"
    text += ends.format("a", 3, 5) + ends.format("b", 4, 6) + "mov.b32 $0, a; mov.b32 $1, b; }"
    return _run_inline_ptx(text, "=r,=r,r,r,r,r,r", 4, jnp.float16, words, scale, least)


# A register holds four bytes of codes: a PRMT makes each the end, or the beginning, of a float's mantissa. Results move
# to their registers last, because these may be the registers of inputs.
_MOVE = "".join(f"mov.f32 ${i}, o{i};" for i in range(4)) + "}"
_ADD_8 = (
    "{ .reg .b32 u, t; .reg .f32 c, o<4>; xor.b32 u, $8, 0x80808080;"
    + "".join(
        f"prmt.b32 t, u, 0x4B000000, 0x744{i}; add.rn.f32 c, t, 0fCB000080; fma.rn.f32 o{i}, c, ${9 + i}, ${4 + i};"
        for i in range(4)
    )
    + _MOVE
)
_ADD_4 = (
    "{ .reg .b32 l, h, t; .reg .f32 p, o<4>; shr.u32 h, $8, 4;"
    "lop3.b32 l, $8, 0x0F0F0F0F, 0x80808080, 0xEA; lop3.b32 h, h, 0x0F0F0F0F, 0x80808080, 0xEA;"
    + "".join(
        f"prmt.b32 t, l, 0x3F000000, 0x7{i}44; mul.rn.f32 p, t, ${9 + i};"
        f"prmt.b32 t, h, 0x3F000000, 0x7{i}44; fma.rn.f32 p, t, ${13 + i}, p; fma.rn.f32 o{i}, p, ${17 + i}, ${4 + i};"
        for i in range(4)
    )
    + _MOVE
)


def multiply_add_int8(total: Array, codes: Array, x: Array, *, interpret: bool) -> Array:
    """Compute total + codes * x elementwise inside a kernel, for int8 codes and float32, in three instructions each.

    Args:
        total: float32 array.
        codes: int8 array of the same shape.
        x: float32 array of the same shape.
        interpret: True uses JAX operations.
    """
    if interpret:
        return total + codes.astype(jnp.float32) * x
    return _run_ptx_by_fours(_ADD_8, total, codes, x)


def multiply_add_int4(
    total: Array,
    codes: Array,
    low: Array,
    high: Array,
    factor: Array,
    *,
    interpret: bool,
) -> Array:
    """Return total + ((1 + a/128) * low + (1 + b/128) * high) * factor for bytes a + 16 b of 4-bit codes.

    Two codes need six instructions. The contribution of the ones does not depend on the codes and is subtracted
    elsewhere.

    Args:
        total: float32 array.
        codes: uint8 array of the same shape, as are the others.
        low: float32 factors of the codes in the low halves of bytes.
        high: float32 factors of the codes in the high halves.
        factor: float32 array.
        interpret: True uses JAX operations.
    """
    if interpret:
        a, b = (1 + each.astype(jnp.float32) / 128 for each in (codes & 15, codes >> 4))
        return total + (a * low + b * high) * factor
    return _run_ptx_by_fours(_ADD_4, total, codes, low, high, factor)


def _run_ptx_by_fours(asm, total, codes, *others):
    """Run inline PTX on four elements at a time, with their four 8-bit codes in one register; return float32."""
    registers = ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] + ["f"] * 4 * len(others))
    return _run_inline_ptx(asm, registers, 4, jnp.float32, total, codes, *others)


def round_up_head_dim(dim: int) -> int:
    """Round a head dim up to a power of two of at least 16, as arrays inside a kernel need."""
    return max(16, 1 << (dim - 1).bit_length())


def load_masked_rows(ref: Any, rows: Array, inside: Array | None, dim: int, *lead: Any) -> Array:
    """Load rows of a `[rows, dim]` ref as `[n, round_up_head_dim(dim)]`; masked rows and padding columns are 0.

    Args:
        ref: the block.
        rows: `i32[n]` row indices.
        inside: `bool[n]` mask, or None if all rows are valid.
        dim: columns of the ref.
        lead: scalar indices, for a ref with more axes before these two.
    """
    columns = jnp.arange(round_up_head_dim(dim), dtype=jnp.int32)
    at = ref.at[(*lead, rows[:, None], columns[None, :])]
    mask = _make_element_mask(rows, columns, inside, dim)
    zero = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
    return load(at) if mask is None else load(at, mask=mask, other=zero)


def store_masked_rows(ref: Any, rows: Array, inside: Array | None, dim: int, values: Array) -> None:
    """Store values `[n, round_up_head_dim(dim)]` to rows of a `[rows, dim]` ref, except masked rows and padding."""
    columns = jnp.arange(round_up_head_dim(dim), dtype=jnp.int32)
    mask = _make_element_mask(rows, columns, inside, dim)
    store(ref.at[rows[:, None], columns[None, :]], values.astype(ref.dtype), mask=mask)


def _make_element_mask(rows, columns, inside, dim):
    """Return the mask `[n, padded dim]` of valid rows' columns below `dim`; None if all elements are valid."""
    shape = (rows.shape[0], columns.shape[0])
    mask = None if inside is None else jnp.broadcast_to(inside[:, None], shape)
    if columns.shape[0] != dim:
        real = jnp.broadcast_to((columns < dim)[None, :], shape)
        mask = real if mask is None else mask & real
    return mask
