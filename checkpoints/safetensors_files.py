"""Safetensors files in Hugging Face's folder layout, one tensor at a time through a memory map."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ._errors import refusal, require

# numpy has no bfloat16 or float8 of its own, so the library's numpy reader cannot give them.
_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "U64": np.uint64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
_MAX_HEADER = 100_000_000  # the format's own limit
_AGAIN = "copy or download the file again"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        ValueError: where the file is not a JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise refusal("file", path, f"not valid JSON ({error}); {_AGAIN}") from error
    require(isinstance(value, dict), "file", path, f"a JSON object is expected; {_AGAIN}")
    return value


def read_header(path: Path) -> dict[str, tuple[Any, tuple[int, ...], int]]:
    """Reads and checks the header of a safetensors file.

    Args:
        path: the file.

    Returns:
        For each tensor its dtype, its shape and the offset of its first byte in the file.

    Raises:
        ValueError: where the file is missing, truncated or corrupt.
    """
    require(path.is_file(), "file", path, f"no such file; {_AGAIN}")
    size = path.stat().st_size
    require(size >= 8, "file", path, f"{size} bytes, at least 8 expected: the file is truncated; {_AGAIN}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        require(length <= _MAX_HEADER, "file", path, f"header of {length} bytes: not a safetensors file; {_AGAIN}")
        require(size >= 8 + length, "file", path, f"{size} bytes, at least {8 + length} expected: truncated; {_AGAIN}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise refusal("file", path, f"corrupt safetensors header ({error!r}); {_AGAIN}") from error
    ends = (offset + math.prod(shape) * np.dtype(dtype).itemsize for dtype, shape, offset in entries.values())
    expected = max(ends, default=8 + length)
    require(size >= expected, "file", path, f"{size} bytes, {expected} expected: the file is truncated; {_AGAIN}")
    return entries


def _entry(path: Path, name: str, entry: Mapping[str, Any], start: int) -> tuple[Any, tuple[int, ...], int]:
    kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    require(kind in _DTYPES, f"{path.name}:{name}.dtype", kind, f"readable dtypes: {', '.join(sorted(_DTYPES))}")
    sizes = (*shape, begin, end)
    sound = all(isinstance(each, int) and each >= 0 for each in sizes)
    sound = sound and end - begin == math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize
    require(sound, f"{path.name}:{name}", dict(entry), f"shape and data_offsets disagree: corrupt header; {_AGAIN}")
    return _DTYPES[kind], shape, start + begin


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a file's tensors as read-only views of a memory map, so a tensor costs memory when it is read.

    Args:
        path: the file.

    Yields:
        Names and arrays, in the order of the header.
    """
    entries = read_header(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for name, (dtype, shape, offset) in entries.items():
        yield name, np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)


def shards(folder: Path) -> dict[str, str]:
    """Maps every tensor of a folder to the file that holds it, having checked every file's header.

    Args:
        folder: a folder in Hugging Face's layout.

    Returns:
        File names by tensor name.

    Raises:
        ValueError: where there are no safetensors, or a listed file or tensor is missing or truncated.
    """
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map") or {}
        require(isinstance(weight_map, dict) and bool(weight_map), INDEX, folder, f"no weight_map in it; {_AGAIN}")
        for file in sorted(set(weight_map.values())):
            # An index is data from elsewhere: it may only name files that lie next to it.
            require(Path(file).name == file, "weight_map", file, "shards must lie in the folder of the index")
            require((folder / file).is_file(), "shard", folder / file, f"{INDEX} lists it but it is missing; {_AGAIN}")
            listed = {name for name, where in weight_map.items() if where == file}
            absent = sorted(listed - read_header(folder / file).keys())
            require(not absent, "shard", folder / file, f"lacks {absent[:3]} that {INDEX} puts there; {_AGAIN}")
        return dict(weight_map)
    if (folder / SINGLE).is_file():
        return dict.fromkeys(read_header(folder / SINGLE), SINGLE)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    remedy = "convert it to safetensors: unpickling runs whatever code the file holds, so pickles are never read"
    require(not pickles, "weights", folder / pickles[0] if pickles else None, remedy)
    raise refusal("folder", folder, f"no weights in it; it must hold {SINGLE} or {INDEX}")


def stream(folder: Path, where: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor that `where` lists, file by file.

    Args:
        folder: the folder of the files.
        where: file names by tensor name, from `shards`.

    Yields:
        Names and arrays.
    """
    for file in sorted(set(where.values())):
        for name, array in read_tensors(folder / file):
            if where.get(name) == file:
                yield name, array
