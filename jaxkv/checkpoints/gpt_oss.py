"""The experts of a gpt-oss in one layout, read in parts from a folder's MXFP4 blocks or floats, or from a GGUF."""

import dataclasses
import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from jaxkv._errors import require
from jaxkv.checkpoints.json_files import AGAIN
from jaxkv.checkpoints.tensor import Index, StoredTensor, complete_index

# Expert tensors of a layer: floats, or blocks with their scales, and biases.
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.(gate_up|down)_proj)(|_blocks|_scales|_bias)")
# Tensors of a GGUF, which stores gates and ups separately.
_HALVES = re.compile(r"(.+\.mlp\.experts\.)(gate|up)_proj\.(weight|bias)")
# Elements per scale, and bytes of their codes.
_GROUP = 32
_GROUP_BYTES = 16
# Elements dequantised in one step, to limit those in memory as float32.
_AT_ONCE = 1 << 20
# A code has a sign, two bits of exponent and one of mantissa (e2m1). The low half of a byte is the first element.
FP4_NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([FP4_NUMBERS[np.arange(256) & 15], FP4_NUMBERS[np.arange(256) >> 4]], axis=-1)
# Both floats of a byte as one number, for a seven times faster lookup in NumPy.
_AS_ONE = _PAIRS.view(np.uint64)[:, 0]


def convert_expert_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a gpt-oss folder's `StoredTensor` by name: experts as floats, outputs before inputs, gates and ups apart.

    A layer's `mlp.experts.` then has `gate_up_proj.weight` [X, 2, F, E], gates before ups, `gate_up_proj.bias`
    [X, 2, F], `down_proj.weight` [X, E, F] and `down_proj.bias` [X, E]. Files interleave gates and ups, and store
    floats with their inputs first. Blocks become bfloat16, which is exact.

    Args:
        stored: all tensors by their names in the file.

    Returns:
        All tensors by their new names.

    Raises:
        ValueError: for blocks without scales or scales without blocks, and for tensors of another shape or dtype.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _EXPERTS.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        base, part, kind = match.groups()
        paired = part == "gate_up"
        if kind == "_scales":
            require(
                f"{base}_blocks" in stored,
                "tensor",
                name,
                f"{base}_blocks, which it scales, is missing: {AGAIN}",
            )
            continue
        to = f"{base}.{'bias' if kind == '_bias' else 'weight'}"
        require(
            to not in found,
            "tensor",
            name,
            f"both blocks and floats of one weight: keep one of them, or {AGAIN}",
        )
        if kind == "_blocks":
            _check_mxfp4_blocks(name, tensor, stored.get(f"{base}_scales"))
            found[to] = _wrap_mxfp4_blocks(tensor, stored[f"{base}_scales"], paired=paired)
        else:
            axes = 2 if kind else 3
            remedy = f"{axes} axes{', the last of gates and ups in turns,' * paired} are expected: {AGAIN}"
            require(
                len(tensor.shape) == axes and not (paired and tensor.shape[-1] % 2),
                name,
                tensor.shape,
                remedy,
            )
            found[to] = _transpose_expert_tensor(tensor, paired=paired)
    return found


def join_gates_and_ups(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join each layer's gate and up tensors of a gpt-oss GGUF into one `gate_up_proj`; return all tensors by name.

    Args:
        stored: all tensors by their Hugging Face names; a layer's `mlp.experts.` has `gate_proj.weight` and
            `up_proj.weight` [X, F, E], and biases [X, F].

    Returns:
        All tensors by their new names.

    Raises:
        ValueError: for gates without ups or ups without gates, and for different shapes.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _HALVES.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        base, part, kind = match.groups()
        beside = f"{base}{'up' if part == 'gate' else 'gate'}_proj.{kind}"
        require(
            beside in stored,
            "tensor",
            beside,
            f"missing, and needed for {name}: {AGAIN}",
        )
        other = stored[beside]
        require(
            other.shape == tensor.shape,
            beside,
            other.shape,
            f"{name} has {tensor.shape}, and needs the same shape: {AGAIN}",
        )
        found[f"{base}gate_up_proj.{kind}"] = _join_expert_pair(
            *((tensor, other) if part == "gate" else (other, tensor))
        )
    return found


def _join_expert_pair(gates: StoredTensor, ups: StoredTensor) -> StoredTensor:
    """Return a `StoredTensor` [X, 2, F, ...] that reads from a layer's gate and up tensors, [X, F, ...] each."""
    shape = (gates.shape[0], 2, *gates.shape[1:])

    def read_joined_part(index: Index) -> np.ndarray:
        """Read a part from the gate tensor, the up tensor or both, stacked along axis 1."""
        experts, halves, *rest = complete_index(index, shape)
        return np.stack([each.read((experts, *rest)) for each in [gates, ups][halves]], axis=1)

    stepped = gates.stepped and ups.stepped
    return dataclasses.replace(gates, shape=shape, read=read_joined_part, stepped=stepped)


def _check_mxfp4_blocks(name: str, blocks: StoredTensor, scales: StoredTensor | None) -> None:
    """Raise ValueError unless tensors have the dtypes and shapes of MXFP4 blocks and of their scales."""
    remedy = (
        f"MXFP4 blocks are uint8 [experts, outputs, inputs / {_GROUP}, {_GROUP_BYTES}]: {AGAIN}"
    )
    require(blocks.dtype == np.uint8, f"{name}.dtype", blocks.dtype.name, remedy)
    sound = len(blocks.shape) == 4 and blocks.shape[-1] == _GROUP_BYTES
    require(sound and not (".gate_up_" in name and blocks.shape[1] % 2), name, blocks.shape, remedy)
    beside = f"{name.removesuffix('_blocks')}_scales"
    require(
        scales is not None,
        "tensor",
        beside,
        f"missing, and needed for {name}: {AGAIN}",
    )
    assert scales is not None
    remedy = f"a byte for each block of {name}, {blocks.shape[:-1]}, is expected: {AGAIN}"
    fits = scales.shape == blocks.shape[:-1] and scales.dtype == np.uint8
    require(fits, beside, f"{scales.dtype.name}{list(scales.shape)}", remedy)


def _transpose_expert_tensor(tensor: StoredTensor, *, paired: bool) -> StoredTensor:
    """Return a `StoredTensor` of transposed expert weights, or biases: inputs last, gates and ups apart if `paired`."""
    count, *inputs, outputs = tensor.shape
    shape = (count, *_compute_output_axes(outputs, paired), *inputs)

    def read_transposed_part(index: Index) -> np.ndarray:
        """Read the part of the file's tensor with `index`, transpose it; separate gates from ups if `paired`."""
        spans = complete_index(index, shape)
        rows, rest = _locate_file_outputs(spans, paired)
        part = np.moveaxis(tensor.read((spans[0], *rest, rows)), -1, 1)
        return np.ascontiguousarray(_separate_gates_and_ups(part, spans, paired))

    return StoredTensor(shape=shape, dtype=tensor.dtype, read=read_transposed_part)


def _wrap_mxfp4_blocks(blocks: StoredTensor, scales: StoredTensor, *, paired: bool) -> StoredTensor:
    """Return a bfloat16 `StoredTensor` that dequantises MXFP4 blocks when read, gates and ups apart if `paired`."""
    count, outputs, groups, _ = blocks.shape
    shape = (count, *_compute_output_axes(outputs, paired), groups * _GROUP)

    def read_dequantised_part(index: Index) -> np.ndarray:
        """Read the groups of a part, separate gates and ups if `paired`, dequantise to bfloat16, cut the part out."""
        spans = complete_index(index, shape)
        rows, (inputs,) = _locate_file_outputs(spans, paired)
        first = inputs.start // _GROUP
        last = -(-inputs.stop // _GROUP)
        there = (spans[0], rows, slice(first, last))
        both = blocks.read((*there, slice(0, _GROUP_BYTES))), scales.read(there)
        parts = (
            np.ascontiguousarray(_separate_gates_and_ups(each, spans, paired)) for each in both
        )
        begin = first * _GROUP
        return _dequantise_mxfp4(*parts)[..., inputs.start - begin : inputs.stop - begin]

    return StoredTensor(shape=shape, dtype=np.dtype(ml_dtypes.bfloat16), read=read_dequantised_part)


def _compute_output_axes(outputs: int, paired: bool) -> tuple[int, ...]:
    """Return the sizes of the output axes: (2, outputs / 2) for gates and ups if `paired`, else (outputs,)."""
    return (2, outputs // 2) if paired else (outputs,)


def _locate_file_outputs(spans: list[slice], paired: bool) -> tuple[slice, list[slice]]:
    """Return the file's slice of outputs, interleaved if `paired`, that holds a part; and the later axes' slices."""
    if paired:
        return slice(2 * spans[2].start, 2 * spans[2].stop), spans[3:]
    return spans[1], spans[2:]


def _separate_gates_and_ups(part: np.ndarray, spans: list[slice], paired: bool) -> np.ndarray:
    """If `paired`, split interleaved outputs [X, 2F, ...] into [X, 2, F, ...], axis 1 cut by spans; else unchanged."""
    if not paired:
        return part
    return part.reshape(len(part), -1, 2, *part.shape[2:]).swapaxes(1, 2)[:, spans[1]]


def _dequantise_mxfp4(
    blocks: UInt8[np.ndarray, "*out g 16"], scales: UInt8[np.ndarray, "*out g"]
) -> Float[np.ndarray, "*out n"]:
    """Dequantise MXFP4 blocks to bfloat16 `[*out, n]`: each e2m1 code times 2 ** (its group's scale - 127)."""
    flat = blocks.reshape(-1, _GROUP_BYTES)
    powers = scales.reshape(-1)
    array = np.empty((len(flat), _GROUP), ml_dtypes.bfloat16)
    step = _AT_ONCE // _GROUP
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # a scale of 255 is NaN, which is rejected later
            factors = np.ldexp(np.float32(1), powers[part].astype(np.int32) - 127)
            array[part] = _AS_ONE[flat[part]].view(np.float32) * factors[:, None]
    return array.reshape(*scales.shape[:-1], -1)
