"""The experts of a gpt-oss in one layout, read in parts from a folder's MXFP4 blocks or floats, or from a GGUF."""

import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from jaxkv._errors import require
from jaxkv.checkpoints.json_files import AGAIN
from jaxkv.checkpoints.tensor import Index, StoredTensor

# Expert tensors of a layer: floats, or blocks with their scales, and biases.
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.(gate_up|down)_proj)(|_blocks|_scales|_bias)")
# Tensors of a GGUF, which stores gates and ups separately.
_HALVES = re.compile(r"(.+\.mlp\.experts\.)(gate|up)_proj\.(weight|bias)")
# Elements per scale, and bytes of their codes.
_GROUP, _GROUP_BYTES = 32, 16
# Elements dequantised in one step, to limit those in memory as float32.
_AT_ONCE = 1 << 20
# A code has a sign, two bits of exponent and one of mantissa (e2m1). The low half of a byte is the first element.
_CODES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=-1)
# Both floats of a byte as one number, for a seven times faster lookup in NumPy.
_AS_ONE = _PAIRS.view(np.uint64)[:, 0]


def with_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Convert the expert tensors of a gpt-oss folder to the layout of a linear map: outputs, then inputs.

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
            _check_blocks(name, tensor, stored.get(f"{base}_scales"))
            found[to] = _unpacked(tensor, stored[f"{base}_scales"], paired=paired)
        else:
            axes = 2 if kind else 3
            remedy = f"{axes} axes{', the last of gates and ups in turns,' * paired} are expected: {AGAIN}"
            require(
                len(tensor.shape) == axes and not (paired and tensor.shape[-1] % 2),
                name,
                tensor.shape,
                remedy,
            )
            found[to] = _turned(tensor, paired=paired)
    return found


def with_joined_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join the gates and ups of a gpt-oss GGUF in one tensor, in the layout of `with_experts`.

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
        found[f"{base}gate_up_proj.{kind}"] = _joined(
            *((tensor, other) if part == "gate" else (other, tensor))
        )
    return found


def _joined(gates: StoredTensor, ups: StoredTensor) -> StoredTensor:
    """Join gates and ups of experts, [X, F, ...] each, as a `StoredTensor` [X, 2, F, ...]."""
    shape = (gates.shape[0], 2, *gates.shape[1:])

    def read(index: Index) -> np.ndarray:
        """Read the part from the gates, the ups or both."""
        experts, halves, *rest = _spans(index, shape)
        return np.stack([each.read((experts, *rest)) for each in [gates, ups][halves]], axis=1)

    return StoredTensor(
        shape=shape, dtype=gates.dtype, read=read, stepped=gates.stepped and ups.stepped
    )


def _check_blocks(name: str, blocks: StoredTensor, scales: StoredTensor | None) -> None:
    """Raise ValueError unless a tensor has MXFP4 blocks, and another one their scales."""
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


def _turned(tensor: StoredTensor, *, paired: bool) -> StoredTensor:
    """Transpose floats [X, inputs, outputs], or biases [X, outputs], to a `StoredTensor` with inputs last."""
    count, *inputs, outputs = tensor.shape
    shape = (count, *_ahead(outputs, paired), *inputs)

    def read(index: Index) -> np.ndarray:
        """Read the part from the slices of the file's axes that contain it."""
        spans = _spans(index, shape)
        rows, rest = _rows(spans, paired)
        part = np.moveaxis(tensor.read((spans[0], *rest, rows)), -1, 1)
        return np.ascontiguousarray(_parted(part, spans, paired))

    return StoredTensor(shape=shape, dtype=tensor.dtype, read=read)


def _unpacked(blocks: StoredTensor, scales: StoredTensor, *, paired: bool) -> StoredTensor:
    """Return MXFP4 blocks [X, outputs, groups, 16] as a `StoredTensor` of their values."""
    count, outputs, groups, _ = blocks.shape
    shape = (count, *_ahead(outputs, paired), groups * _GROUP)

    def read(index: Index) -> np.ndarray:
        """Read the groups that contain the part, and dequantise them."""
        spans = _spans(index, shape)
        rows, (inputs,) = _rows(spans, paired)
        first, last = inputs.start // _GROUP, -(-inputs.stop // _GROUP)
        there = (spans[0], rows, slice(first, last))
        both = blocks.read((*there, slice(0, _GROUP_BYTES))), scales.read(there)
        parts = (np.ascontiguousarray(_parted(each, spans, paired)) for each in both)
        begin = first * _GROUP
        return _dequantised(*parts)[..., inputs.start - begin : inputs.stop - begin]

    return StoredTensor(shape=shape, dtype=np.dtype(ml_dtypes.bfloat16), read=read)


def _ahead(outputs: int, paired: bool) -> tuple[int, ...]:
    """Return the sizes of the output axes: (2, outputs / 2) for gates and ups if `paired`, else (outputs,)."""
    return (2, outputs // 2) if paired else (outputs,)


def _rows(spans: list[slice], paired: bool) -> tuple[slice, list[slice]]:
    """Return the file's outputs that contain a part, gates and ups interleaved, and the spans of the next axes."""
    if paired:
        return slice(2 * spans[2].start, 2 * spans[2].stop), spans[3:]
    return spans[1], spans[2:]


def _parted(part: np.ndarray, spans: list[slice], paired: bool) -> np.ndarray:
    """Separate the interleaved gates and ups of a part [X, outputs, ...] of the file."""
    if not paired:
        return part
    return part.reshape(len(part), -1, 2, *part.shape[2:]).swapaxes(1, 2)[:, spans[1]]


def _dequantised(
    blocks: UInt8[np.ndarray, "*out g 16"], scales: UInt8[np.ndarray, "*out g"]
) -> Float[np.ndarray, "*out n"]:
    """Dequantise MXFP4 blocks to bfloat16: codes times 2 to the power of their group's scale less 127."""
    flat, powers = blocks.reshape(-1, _GROUP_BYTES), scales.reshape(-1)
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


def _spans(index: Index, shape: tuple[int, ...]) -> list[slice]:
    """Return one slice with both ends per axis, for an index that may omit axes and ends."""
    given = (*index, *(slice(None),) * (len(shape) - len(index)))
    return [slice(*each.indices(size)[:2]) for each, size in zip(given, shape, strict=True)]
