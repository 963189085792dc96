"""Weights that files hold in 8 or 4 bits (FP8, compressed-tensors, ModelOpt, AWQ, GPTQ), dequantised when read."""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.checkpoints.gpt_oss import FP4_NUMBERS
from jaxkv.checkpoints.json_files import AGAIN
from jaxkv.checkpoints.tensor import Index, StoredTensor, complete_index

_FORMATS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# Tensors with a weight's codes, of which there is one; and those with scales, zero points, groups and shapes.
_CODES = ("weight", "weight_packed", "qweight")
_BESIDE = """g_idx qzeros scales weight_g_idx weight_global_scale weight_scale weight_scale_2
weight_scale_inv weight_shape weight_zero_point""".split()
# Scales of activations and caches, which are not quantised.
_IGNORED = """activation_scale input_global_scale input_scale input_zero_point k_scale output_scale q_scale
v_scale""".split()
# Outputs and inputs that share a scale, if the config does not say.
_BLOCK = [128, 128]
# Where a word of AWQ has each of its eight outputs.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# GPTQ's first format stores zero points less 1, subtracted from words of eight.
_ONES = np.uint32(0x11111111)
# Zero point of 4-bit codes without one.
_MIDDLE = np.uint8(8)
# Elements dequantised in one step, to limit those in memory twice.
_AT_ONCE = 1 << 20


@frozen_dataclass
class WeightFormat:
    """Format of a checkpoint's quantised weights, as far as its tensors do not show it.

    Attributes:
        method: `quant_method` of the config.
        blocks: outputs and inputs of a block that shares a scale.
        zeros_less_one: True if zero points are stored less 1, as in GPTQ's first format.
    """

    method: str
    blocks: tuple[int, int]
    zeros_less_one: bool


def parse_weight_format(config: Mapping[str, Any]) -> WeightFormat | None:
    """Return the format of a config's quantised weights; None for unquantised ones and for gpt-oss' MXFP4.

    Args:
        config: the keys of a `config.json`.

    Returns:
        The format.

    Raises:
        ValueError: for a method, a format or a number of bits that is not supported, by name.
    """
    given = config.get("quantization_config")
    method = str(given.get("quant_method")) if isinstance(given, Mapping) else ""
    if given is None or (method == "mxfp4" and config.get("model_type") == "gpt_oss"):
        return None
    remedy = f"not supported: use {', '.join(_FORMATS)}, unquantised weights or a GGUF"
    require(method in _FORMATS, "quantization_config", method or given, remedy)
    groups = _list_weight_groups(given)
    for part in (given, *groups, given.get("sparsity_config") or {}):
        for key, values in _FORMATS[method].items():
            remedy = f"not supported for {method}: use {' or '.join(map(repr, values))}"
            value = part.get(key)
            require(value in (None, *values), f"quantization_config.{key}", value, remedy)
    bits = [each.get("num_bits") for each in groups if each["format"] == "pack-quantized"]
    remedy = "packs of other than 4 bits are not supported: use int-quantized for 8"
    require(all(each == 4 for each in bits), "quantization_config.num_bits", bits, remedy)
    sizes = [given.get("weight_block_size"), *(each.get("block_structure") for each in groups)]
    blocks = next(filter(None, sizes), _BLOCK)
    sound = isinstance(blocks, list) and [type(each) for each in blocks] == [int, int]
    remedy = "not a list of two positive numbers: use the published config"
    require(sound and min(blocks) > 0, "quantization_config.weight_block_size", blocks, remedy)
    second = "gptq_v2" in (given.get("checkpoint_format"), given.get("format"))
    return WeightFormat(
        method=method, blocks=tuple(blocks), zeros_less_one=method == "gptq" and not second
    )


def _list_weight_groups(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of weights in each group of a `quantization_config`, with the group's format."""
    groups = given.get("config_groups") or {}
    remedy = "not an object of objects: use the published config"
    for name, value in {
        "config_groups": groups,
        "sparsity_config": given.get("sparsity_config"),
    }.items():
        require(isinstance(value or {}, Mapping), f"quantization_config.{name}", value, remedy)
    for name, group in groups.items():
        sound = isinstance(group, Mapping) and isinstance(group.get("weights") or {}, Mapping)
        require(sound, f"quantization_config.config_groups.{name}", group, remedy)
    return [
        {**(group.get("weights") or {}), "format": group.get("format") or given.get("format")}
        for group in groups.values()
    ]


def dequantise_tensors(
    stored: Mapping[str, StoredTensor], form: WeightFormat
) -> dict[str, StoredTensor]:
    """Return all tensors by name, with a float32 `weight` `[O, I]` for the tensors of each quantised weight.

    A tensor of all experts' 8-bit codes `[X, O, I]` that has scales becomes one of float32 by the same name. Scales of
    activations and caches are left out.

    Args:
        stored: all tensors by their names in the files.
        form: format of the quantised weights.

    Returns:
        All tensors by their new names.

    Raises:
        ValueError: for missing tensors, and for tensors whose dtypes or shapes do not fit together.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        part = name.rpartition(".")[2]
        if part not in _IGNORED and not part.endswith("_activation_scale"):
            modules.setdefault(name.removesuffix(part), {})[part] = tensor
    found: dict[str, StoredTensor] = {}
    for prefix, parts in modules.items():
        codes = [each for each in _CODES if each in parts]
        if codes and (codes != ["weight"] or parts["weight"].dtype.itemsize == 1):
            remedy = f"several forms of one weight: keep one of them, or {AGAIN}"
            require(len(codes) == 1, "tensor", [prefix + each for each in codes], remedy)
            found[f"{prefix}weight"] = _WeightParts(prefix, parts).dequantise(form)
            parts = {part: parts[part] for part in parts if part not in (*_CODES, *_BESIDE)}
        found |= {prefix + part: tensor for part, tensor in parts.items()}
        for part in parts:
            if (scale := f"{part}_scale_inv") in parts:
                held = parts[part], found.pop(prefix + scale)
                found[prefix + part] = _dequantise_experts(prefix + part, *held, form)
    return found


def _dequantise_experts(
    name: str, codes: StoredTensor, scales: StoredTensor, form: WeightFormat
) -> StoredTensor:
    """Return the float32 weights `[X, O, I]` of all experts in a tensor, dequantised one by one when read."""
    alike = len(codes.shape) == 3 and scales.shape[:1] == codes.shape[:1]
    remedy = f"does not fit codes of {codes.shape}, of all experts: {AGAIN}"
    require(alike, f"{name}_scale_inv", scales.shape, remedy)

    def pick(tensor: StoredTensor, expert: int) -> StoredTensor:
        return StoredTensor(
            shape=tensor.shape[1:],
            dtype=tensor.dtype,
            read=lambda index: tensor.read((slice(expert, expert + 1), *index))[0],
        )

    weights = [
        _WeightParts(
            f"{name}.{at}.", {"weight": pick(codes, at), "weight_scale_inv": pick(scales, at)}
        ).dequantise(form)
        for at in range(codes.shape[0])
    ]

    def read_experts(index: Index) -> np.ndarray:
        """Read a part of each of some experts' weights."""
        experts, *inside = complete_index(index, codes.shape)
        made = np.empty([each.stop - each.start for each in (experts, *inside)], np.float32)
        for at, weight in enumerate(weights[experts]):
            made[at] = weight.read(tuple(inside))
        return made

    return StoredTensor(
        shape=codes.shape, dtype=np.dtype(np.float32), read=read_experts, computed=True
    )


class _WeightParts:
    """Tensors that stand for one weight `[O, I]`: codes, scales, and in some formats zero points and groups."""

    def __init__(self, prefix: str, parts: Mapping[str, StoredTensor]):
        """Wrap tensors by the last parts of their names, which begin with `prefix`."""
        self._prefix = prefix
        self._parts = parts

    def dequantise(self, form: WeightFormat) -> StoredTensor:
        """Return the float32 weight, dequantised when read; ValueError for parts that do not fit together."""
        words = "qweight" in self._parts
        scale = "weight_scale_inv" if form.method == "fp8" else "weight_scale"
        scale = "scales" if words else scale
        codes, scales, zeros = self._read_words(form) if words else self._read_numbers(scale)
        outputs, inputs = codes.shape
        high, wide = scales.shape
        height, width = form.blocks
        if scales.shape != (-(-outputs // height), -(-inputs // width)):
            fits = high in (1, outputs) and outputs > 0 and wide > 0 and inputs % wide == 0
            self._require_fit(fits, scale, scales, codes)
            height, width = outputs // high, inputs // wide
        if zeros is not None:
            zero = "qzeros" if words else "weight_zero_point"
            self._require_fit(zeros.shape == scales.shape, zero, zeros, codes)
        groups = self._parts.get("g_idx", self._parts.get("weight_g_idx"))
        if groups is not None:
            fits = groups.shape == (inputs,) and groups.dtype.kind in "iu"
            self._require_fit(fits, "g_idx", groups, codes)

        def find_groups(columns: slice) -> np.ndarray:
            """Return the column of `scales` of each input; ValueError for one that is not there."""
            if groups is None:
                return np.arange(columns.start, columns.stop) // width
            found = groups.read((columns,))
            stray = found[(found < 0) | (found >= wide)].tolist()
            require(not stray, f"{self._prefix}g_idx", stray[:3], f"not below {wide}: {AGAIN}")
            return found

        @np.errstate(all="ignore")  # NaN and infinity are rejected later
        def read_dequantised_part(index: Index) -> np.ndarray:
            """Read the codes and scales of a part; multiply them in steps that limit what is in memory twice."""
            rows, columns = complete_index(index, codes.shape)
            part, of = codes.read((rows, columns)), find_groups(columns)
            first = rows.start // height
            span = (slice(first, -(-rows.stop // height)), slice(0, wide))
            factors, middles = scales.read(span), None if zeros is None else zeros.read(span)
            array = np.empty(part.shape, np.float32)
            step = max(1, _AT_ONCE // max(1, part.shape[1]))
            for start in range(0, len(part), step):
                to = slice(start, start + step)
                at = np.arange(rows.start, rows.stop)[to] // height - first
                array[to] = part[to]
                if middles is not None:
                    array[to] -= np.take(middles[at], of, axis=1)
                array[to] *= np.take(factors[at], of, axis=1)
            return array

        return StoredTensor(
            shape=codes.shape,
            dtype=np.dtype(np.float32),
            read=read_dequantised_part,
            stepped=words or codes.dtype == np.uint8,
            # AWQ's words have outputs last: each part would read all of them again.
            computed=not (words and form.method == "awq"),
        )

    def _read_words(self, form: WeightFormat) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
        """Return codes and scales, zero points: of words `[I, O/8]` (AWQ) or `[I/8, O]` (GPTQ), scales `[I/g, O]`."""
        words, zeros = self._get("qweight", "int32"), self._get("qzeros", "int32")
        awq = form.method == "awq"
        order = _AWQ_ORDER if awq else None
        codes = _transpose(_unpack(words, order)) if awq else _unpack(_transpose(words))
        if form.zeros_less_one:
            zeros = _map_values(zeros, np.uint32, lambda array: array.view(np.uint32) + _ONES)
        return codes, _to_float(_transpose(self._get("scales"))), _transpose(_unpack(zeros, order))

    def _read_numbers(self, scale: str) -> tuple[StoredTensor, StoredTensor, StoredTensor | None]:
        """Return codes `[O, I]`, scales and zero points of blocks of these, of the other formats."""
        packed = "weight_packed" in self._parts
        codes = (
            self._get("weight_packed", "int32", "uint8")
            if packed
            else self._get("weight", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
        )
        stored = self._get(scale)
        scales = _to_float(stored)
        zeros = self._get("weight_zero_point") if "weight_zero_point" in self._parts else None
        if codes.dtype == np.int32:
            middle = np.broadcast_to(_MIDDLE, scales.shape)
            zeros = (
                StoredTensor(shape=middle.shape, dtype=middle.dtype, read=middle.__getitem__)
                if zeros is None
                else _transpose(_unpack(_transpose(zeros)))
            )
            return _unpack(codes), scales, zeros
        if codes.dtype == np.uint8:
            codes = _map_values(_unpack(codes), np.float32, lambda array: FP4_NUMBERS[array])
            if stored.dtype.name == "float8_e4m3fn":
                scales = self._scale_by_whole(scales, packed=packed)
        return codes, scales, zeros

    def _scale_by_whole(self, scales: StoredTensor, *, packed: bool) -> StoredTensor:
        """Return the scales of NVFP4 with the second one, of all weights."""
        name, combine = (
            ("weight_global_scale", np.divide) if packed else ("weight_scale_2", np.multiply)
        )
        factor = _to_float(self._get(name))
        self._require_fit(factor.shape == (1, 1), name, factor, scales)
        return _map_values(scales, np.float32, lambda array: combine(array, factor.read(())))

    def _get(self, part: str, *dtypes: str) -> StoredTensor:
        """Return a tensor as a matrix; ValueError if it is missing, of another dtype or has more axes."""
        remedy = f"missing, and needed for {self._prefix}weight: {AGAIN}"
        require(part in self._parts, "tensor", self._prefix + part, remedy)
        tensor = self._parts[part]
        remedy = f"a matrix of {' or '.join(dtypes) or 'numbers'} is expected: {AGAIN}"
        fits = tensor.dtype.name in (dtypes or (tensor.dtype.name,)) and len(tensor.shape) <= 2
        require(fits, self._prefix + part, f"{tensor.dtype.name}{list(tensor.shape)}", remedy)
        # A scale of all weights may have no axis, scales of outputs may have one.
        shape = (*tensor.shape, 1, 1)[:2]
        if shape == tensor.shape:
            return tensor
        return StoredTensor(
            shape=shape,
            dtype=tensor.dtype,
            read=lambda index: tensor.read(()).reshape(shape)[index],
        )

    def _require_fit(
        self, condition: bool, part: str, tensor: StoredTensor, codes: StoredTensor
    ) -> None:
        """Raise ValueError unless a part fits the weight's codes."""
        remedy = f"does not fit codes of {codes.shape}: {AGAIN}"
        require(condition, self._prefix + part, tensor.shape, remedy)


def _unpack(words: StoredTensor, order: tuple[int, ...] | None = None) -> StoredTensor:
    """Return 4-bit codes as bytes, from words along the last axis, lowest bits first, or as `order` places them."""
    each = 2 * words.dtype.itemsize
    shape = (*words.shape[:-1], words.shape[-1] * each)

    def read_codes(index: Index) -> np.ndarray:
        """Read the words of a part, unpack them, cut the part out."""
        rows, columns = complete_index(index, shape)
        first = columns.start // each
        part = words.read((rows, slice(first, -(-columns.stop // each))))
        halves = np.ascontiguousarray(part).view(np.uint8)
        codes = np.stack([halves & 15, halves >> 4], axis=-1).reshape(*part.shape, each)
        codes = codes if order is None else codes[..., order]
        begin = first * each
        flat = codes.reshape(len(part), part.shape[1] * each)
        return flat[:, columns.start - begin : columns.stop - begin]

    return StoredTensor(shape=shape, dtype=np.dtype(np.uint8), read=read_codes)


def _transpose(matrix: StoredTensor) -> StoredTensor:
    """Return the transpose of a matrix."""
    shape = matrix.shape[::-1]
    return StoredTensor(
        shape=shape,
        dtype=matrix.dtype,
        read=lambda index: matrix.read(tuple(complete_index(index, shape)[::-1])).T,
    )


def _map_values(
    tensor: StoredTensor, dtype: Any, change: Callable[[np.ndarray], np.ndarray]
) -> StoredTensor:
    """Return a tensor of the same shape whose parts are changed when they are read."""
    return StoredTensor(
        shape=tensor.shape,
        dtype=np.dtype(dtype),
        read=lambda index: change(tensor.read(index)),
    )


def _to_float(scales: StoredTensor) -> StoredTensor:
    """Return scales as float32; bytes are powers of two."""
    kind = ml_dtypes.float8_e8m0fnu if scales.dtype == np.uint8 else scales.dtype
    return _map_values(scales, np.float32, lambda array: array.view(kind).astype(np.float32))
