"""Reader of GGUF's binary format: metadata, and the locations of tensors; every length is validated before use."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.json_files import AGAIN

_MAGIC = b"GGUF"
# Names of a model's several files: beginning, number and count.
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
# Limits several times above the largest vocabularies and deepest models.
_MOST_BYTES = 256 << 20
_MOST_ITEMS = 8 << 20
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_AXES = 4


class _CorruptFileError(Exception):
    """Internal exception for a truncated or corrupt GGUF; `read_gguf_header` turns it into a ValueError."""


@frozen_dataclass
class GgufTensor:
    """Location, shape and quantisation type of a GGUF tensor, with methods that read it as stored, not dequantised.

    Attributes:
        name: llama.cpp's name.
        kind: a `gguf.GGMLQuantizationType`.
        shape: its axes, the slowest first.
        path: path of the file.
        at: offset of the tensor's first byte.
        dtype: dtype of the stored array; bytes for quantised rows.
        stored: shape of the stored array.
    """

    name: str
    kind: Any
    shape: tuple[int, ...]
    path: Path
    at: int
    dtype: np.dtype
    stored: tuple[int, ...]

    @property
    def stored_array(self) -> np.ndarray:
        """Read the tensor from the file, at each access; return it as stored: numbers, or uint8 for quantised rows."""
        return self._read_elements(0, math.prod(self.stored)).reshape(self.stored)

    def read_rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1 of a GGUF tensor as stored, not dequantised; ValueError if cut short."""
        row = math.prod(self.stored[1:])
        return self._read_elements(first * row, (last - first) * row).reshape(
            last - first, *self.stored[1:]
        )

    def _read_elements(self, first: int, count: int) -> np.ndarray:
        """Read `count` stored elements of a GGUF tensor from `first` on, flat; ValueError if cut short."""
        # Read, not mapped: a mapping would keep all pages that were read in the memory of the process.
        found = np.fromfile(
            self.path, self.dtype, count, offset=self.at + first * self.dtype.itemsize
        )
        remedy = (
            f"the file ends within {self.name!r}, and did not when it was opened: download it again"
        )
        require(len(found) == count, "file", self.path, remedy)
        return found


def read_gguf_headers(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read the header of a GGUF file, or those of all files of a model in several files, of which `path` is any.

    Returns:
        The metadata by key, of the first file, and the `GgufTensor` objects of all files by name.

    Raises:
        ValueError: if a file is missing, truncated or corrupt, or belongs to another model.
    """
    metadata, tensors = read_gguf_header(path)
    count = metadata.get("split.count", 1)
    if count in (0, 1):
        return metadata, tensors
    match = _SPLIT.fullmatch(path.name)
    remedy = "the name of such a file must be as published, NAME-00001-of-0000N.gguf"
    if match is None or int(match[2]) != count:
        raise build_value_error("split.count", count, remedy)
    tensors = {}
    for number in range(count):
        part = path.with_name(f"{match[1]}-{number + 1:05}-of-{match[2]}.gguf")
        remedy = f"missing, and one of the {count} files of this model: {AGAIN}"
        require(part.is_file(), "file", part, remedy)
        values, held = read_gguf_header(part)
        metadata = metadata if number else values
        known = values.get("split.no") == number and not held.keys() & tensors.keys()
        require(known, "file", part, f"not file {number + 1} of this model: {AGAIN}")
        tensors |= held
    total = metadata.get("split.tensors.count", len(tensors))
    remedy = f"the files hold {len(tensors)}: {AGAIN}"
    require(total == len(tensors), "split.tensors.count", total, remedy)
    return metadata, tensors


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read a GGUF file's header; return metadata by key as plain Python values, and `GgufTensor` objects by name.

    Raises:
        ValueError: if the file is truncated or corrupt.
    """
    size = path.stat().st_size
    try:
        if size < 24:
            raise _CorruptFileError("too short for a header")
        cursor = _GgufHeaderCursor(np.memmap(path, np.uint8, mode="r"), path)
        metadata, tensor_count = _read_metadata(cursor)
        return metadata, _read_tensor_list(
            cursor, tensor_count, metadata.get("general.alignment", 32)
        )
    except OSError as error:
        raise build_value_error(
            "file", path, f"{size:,} bytes cannot be mapped ({error.strerror}): free some memory"
        ) from error
    except (_CorruptFileError, UnicodeDecodeError) as error:
        remedy = f"truncated or corrupt GGUF of {size} bytes ({error}): download it again"
        raise build_value_error("file", path, remedy) from error


class _GgufHeaderCursor:
    """Reader of a memory-mapped GGUF header that advances position `at`; `_CorruptFileError` past end or 256 MiB."""

    def __init__(self, data: np.ndarray, path: Path):
        self.path = path
        self.size = len(data)
        self.at = 0
        self._view = data.data
        self._end = min(len(data), _MOST_BYTES)

    def read_bytes(self, size: int) -> memoryview:
        """Return the next `size` bytes as a memoryview and advance; `_CorruptFileError` past file end or 256 MiB."""
        if self.at + size > self._end:
            raise _CorruptFileError(
                f"{size:,} bytes from byte {self.at:,} on reach beyond the metadata"
            )
        self.at += size
        return self._view[self.at - size : self.at]

    def read_numbers(self, dtype: Any, count: int) -> list[Any]:
        """Read a GGUF header's next `count` little-endian numbers of a dtype as a list of Python numbers."""
        kind = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self.read_bytes(count * kind.itemsize), kind).tolist()

    def read_unsigned(self, size: int) -> int:
        """Read a GGUF header's next little-endian unsigned integer, of `size` bytes; return the int."""
        return int.from_bytes(self.read_bytes(size), "little")

    def read_string(self) -> str:
        """Read a GGUF header's next string: a 64-bit length in bytes, then UTF-8 text."""
        return str(self.read_bytes(self.read_unsigned(8)), "utf-8")

    def read_count(self, most: int, what: str) -> int:
        """Read a GGUF header's next 64-bit count of items; `_CorruptFileError` if it exceeds `most`."""
        count = self.read_unsigned(8)
        if count > most:
            raise _CorruptFileError(f"{count:,} {what}, at most {most:,} are read")
        return count


def _read_metadata(cursor: _GgufHeaderCursor) -> tuple[dict[str, Any], int]:
    """Check a GGUF's magic and version, read its metadata; return the metadata by key, and the number of tensors."""
    if bytes(cursor.read_bytes(4)) != _MAGIC:
        raise _CorruptFileError("GGUF magic invalid")
    version = cursor.read_unsigned(4)
    if version not in _VERSIONS:
        raise _CorruptFileError(
            f"version {version}, where {' and '.join(map(str, _VERSIONS))} are read"
        )
    tensor_count = cursor.read_count(_MOST_TENSORS, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.read_count(_MOST_KEYS, "keys")):
        key = cursor.read_string()
        if key in metadata:
            raise _CorruptFileError(f"the key {key!r} twice")
        metadata[key] = _read_metadata_value(cursor, cursor.read_unsigned(4), key)
    return metadata, tensor_count


def _read_metadata_value(cursor: _GgufHeaderCursor, kind: int, key: str) -> Any:
    """Read a metadata value of GGUF type number `kind`: a number, bool, string or list; raise if it is unknown."""
    from gguf import GGUFReader

    scalars: dict[Any, Any] = GGUFReader.gguf_scalar_to_np
    if kind in scalars:
        return cursor.read_numbers(scalars[kind], 1)[0]
    if kind == _STRING:
        return cursor.read_string()
    if kind != _ARRAY:
        raise _CorruptFileError(f"a value of unknown kind {kind} for {key!r}")
    inner = cursor.read_unsigned(4)
    count = cursor.read_count(_MOST_ITEMS, f"items in {key!r}")
    if inner in scalars:
        return cursor.read_numbers(scalars[inner], count)
    if inner != _STRING:
        raise _CorruptFileError(f"items of unknown kind {inner} in {key!r}")
    return [cursor.read_string() for _ in range(count)]


def _read_tensor_list(
    cursor: _GgufHeaderCursor, count: int, alignment: Any
) -> dict[str, GgufTensor]:
    """Read the header's tensor list; return `GgufTensor` objects by name, in file order; raise if one is invalid."""
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _CorruptFileError(f"an alignment of {alignment!r}, which is not a power of two")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.read_string()
        axes = cursor.read_unsigned(4)
        if name in entries or axes > _MOST_AXES:
            raise _CorruptFileError(f"the tensor {name!r} twice, or with {axes} axes")
        # The file lists the fastest axis first.
        shape = tuple(reversed(cursor.read_numbers(np.uint64, axes)))
        entries[name] = shape, cursor.read_unsigned(4), cursor.read_unsigned(8)
    start = -(-cursor.at // alignment) * alignment
    end = 0
    tensors = {}
    for name, (shape, kind, offset) in sorted(entries.items(), key=lambda item: item[1][2]):
        tensor, size = _locate_tensor(cursor, name, shape, kind, start + offset)
        if offset < end and size:
            raise _CorruptFileError(f"the tensor {name!r} overlaps the one before it")
        end = max(end, offset + size)
        tensors[name] = tensor
    return {name: tensors[name] for name in entries}


def _locate_tensor(
    cursor: _GgufHeaderCursor, name: str, shape: tuple[int, ...], kind: int, at: int
) -> tuple[GgufTensor, int]:
    """Return the `GgufTensor` at byte `at` of the file, and its size in bytes; raise if its type or size is invalid."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8}
    plain |= {"I16": np.int16, "I32": np.int32, "I64": np.int64}
    if kind not in {each.value for each in GGMLQuantizationType}:
        raise _CorruptFileError(f"the tensor {name!r} of unknown type {kind}")
    known = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[known]
    if (shape[-1] if shape else 1) % block:
        raise _CorruptFileError(
            f"the tensor {name!r} of shape {shape}, where rows come in blocks of {block}"
        )
    size = math.prod(shape) // block * block_bytes
    if at + size > cursor.size:
        raise _CorruptFileError(f"the tensor {name!r} ends at byte {at + size:,}")
    dtype: np.dtype = np.dtype(np.uint8)
    stored = (*shape[:-1], (shape[-1] if shape else 1) // block * block_bytes)
    if known.name in plain:
        dtype = np.dtype(plain[known.name])
        stored = shape
    tensor = GgufTensor(
        name=name, kind=known, shape=shape, path=cursor.path, at=at, dtype=dtype, stored=stored
    )
    return tensor, size
