"""Reader of GGUF's binary format: metadata, and the locations of tensors; every length is validated before use."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._errors import invalid, require

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Limits several times above the largest vocabularies and deepest models.
_MOST_BYTES, _MOST_ITEMS, _MOST_KEYS, _MOST_TENSORS, _MOST_AXES = (
    256 << 20,
    8 << 20,
    1 << 16,
    1 << 20,
    4,
)


class _Corrupt(Exception):
    """Exception for a corrupt GGUF file; `read` turns it into a ValueError that names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Location, shape and quantisation type of a tensor in a GGUF file; `data` and `rows` read it as stored.

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
    def data(self) -> np.ndarray:
        """Stored array, numbers or quantised bytes, read from the file; ValueError if the file is shorter."""
        return self._read(0, math.prod(self.stored)).reshape(self.stored)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Read rows first to last - 1 of the stored array; ValueError if the file has become shorter."""
        row = math.prod(self.stored[1:])
        return self._read(first * row, (last - first) * row).reshape(last - first, *self.stored[1:])

    def _read(self, first: int, count: int) -> np.ndarray:
        """Read `count` elements of the stored array from element `first` on; ValueError if the file is shorter."""
        # Read, not mapped: a mapping would keep all pages that were read in the memory of the process.
        found = np.fromfile(
            self.path, self.dtype, count, offset=self.at + first * self.dtype.itemsize
        )
        remedy = (
            f"the file ends within {self.name!r}, and did not when it was opened: download it again"
        )
        require(len(found) == count, "file", self.path, remedy)
        return found


def read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read a GGUF file's header; return metadata by key as plain Python values, and `GgufTensor`s by name.

    Raises:
        ValueError: if the file is truncated or corrupt.
    """
    size = path.stat().st_size
    try:
        if size < 24:
            raise _Corrupt("too short for a header")
        cursor = _Cursor(np.memmap(path, np.uint8, mode="r"), path)
        metadata, tensor_count = _metadata(cursor)
        return metadata, _tensors(cursor, tensor_count, metadata.get("general.alignment", 32))
    except OSError as error:
        raise invalid(
            "file", path, f"{size:,} bytes cannot be mapped ({error.strerror}): free some memory"
        ) from error
    except (_Corrupt, UnicodeDecodeError) as error:
        remedy = f"truncated or corrupt GGUF of {size} bytes ({error}): download it again"
        raise invalid("file", path, remedy) from error


class _Cursor:
    """Read position `at` in a memory-mapped GGUF header; its readers raise `_Corrupt` beyond the header's end."""

    def __init__(self, data: np.ndarray, path: Path):
        self.path = path
        self.size = len(data)
        self.at = 0
        self._view = data.data
        self._end = min(len(data), _MOST_BYTES)

    def take(self, size: int) -> memoryview:
        """Read the next `size` bytes as a memoryview; raise `_Corrupt` beyond the end."""
        if self.at + size > self._end:
            raise _Corrupt(f"{size:,} bytes from byte {self.at:,} on reach beyond the metadata")
        self.at += size
        return self._view[self.at - size : self.at]

    def many(self, dtype: Any, count: int) -> list[Any]:
        """Read the next `count` little-endian numbers of a dtype as a list of Python numbers."""
        kind = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self.take(count * kind.itemsize), kind).tolist()

    def whole(self, size: int) -> int:
        """Read the next unsigned integer of `size` bytes, little-endian."""
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        """Read the next string, a 64-bit length followed by UTF-8 text."""
        return str(self.take(self.whole(8)), "utf-8")

    def count(self, most: int, what: str) -> int:
        """Read the next 64-bit unsigned integer, a number of items; raise `_Corrupt` if it is above `most`."""
        count = self.whole(8)
        if count > most:
            raise _Corrupt(f"{count:,} {what}, at most {most:,} are read")
        return count


def _metadata(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """Read magic, version and metadata; return the metadata by key, and the number of tensors."""
    if bytes(cursor.take(4)) != _MAGIC:
        raise _Corrupt("GGUF magic invalid")
    version = cursor.whole(4)
    if version not in _VERSIONS:
        raise _Corrupt(f"version {version}, where {' and '.join(map(str, _VERSIONS))} are read")
    tensor_count = cursor.count(_MOST_TENSORS, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(_MOST_KEYS, "keys")):
        key = cursor.text()
        if key in metadata:
            raise _Corrupt(f"the key {key!r} twice")
        metadata[key] = _value(cursor, cursor.whole(4), key)
    return metadata, tensor_count


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    """Read the next metadata value (number, text or list), of the GGUF type number `kind`; `_Corrupt` if unknown."""
    from gguf import GGUFReader

    scalars: dict[Any, Any] = GGUFReader.gguf_scalar_to_np
    if kind in scalars:
        return cursor.many(scalars[kind], 1)[0]
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise _Corrupt(f"a value of unknown kind {kind} for {key!r}")
    inner, count = cursor.whole(4), cursor.count(_MOST_ITEMS, f"items in {key!r}")
    if inner in scalars:
        return cursor.many(scalars[inner], count)
    if inner != _STRING:
        raise _Corrupt(f"items of unknown kind {inner} in {key!r}")
    return [cursor.text() for _ in range(count)]


def _tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    """Read the tensor list; return `GgufTensor`s by name, in file order; raise `_Corrupt` if one is invalid."""
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Corrupt(f"an alignment of {alignment!r}, which is not a power of two")
    entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text()
        axes = cursor.whole(4)
        if name in entries or axes > _MOST_AXES:
            raise _Corrupt(f"the tensor {name!r} twice, or with {axes} axes")
        # The file lists the fastest axis first.
        shape = tuple(reversed(cursor.many(np.uint64, axes)))
        entries[name] = shape, cursor.whole(4), cursor.whole(8)
    start = -(-cursor.at // alignment) * alignment
    end, tensors = 0, {}
    for name, (shape, kind, offset) in sorted(entries.items(), key=lambda item: item[1][2]):
        tensor, size = _tensor(cursor, name, shape, kind, start + offset)
        if offset < end and size:
            raise _Corrupt(f"the tensor {name!r} overlaps the one before it")
        end, tensors[name] = max(end, offset + size), tensor
    return {name: tensors[name] for name in entries}


def _tensor(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, at: int
) -> tuple[GgufTensor, int]:
    """Return the `GgufTensor` at byte `at` of the file and its size in bytes; raise `_Corrupt` if invalid."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8}
    plain |= {"I16": np.int16, "I32": np.int32, "I64": np.int64}
    if kind not in {each.value for each in GGMLQuantizationType}:
        raise _Corrupt(f"the tensor {name!r} of unknown type {kind}")
    known = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[known]
    if (shape[-1] if shape else 1) % block:
        raise _Corrupt(
            f"the tensor {name!r} of shape {shape}, where rows come in blocks of {block}"
        )
    size = math.prod(shape) // block * block_bytes
    if at + size > cursor.size:
        raise _Corrupt(f"the tensor {name!r} ends at byte {at + size:,}")
    dtype: np.dtype = np.dtype(np.uint8)
    stored = (*shape[:-1], (shape[-1] if shape else 1) // block * block_bytes)
    if known.name in plain:
        dtype, stored = np.dtype(plain[known.name]), shape
    tensor = GgufTensor(
        name=name, kind=known, shape=shape, path=cursor.path, at=at, dtype=dtype, stored=stored
    )
    return tensor, size
