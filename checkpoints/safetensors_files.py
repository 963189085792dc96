"""Safetensors files in Hugging Face's folder layout, one tensor at a time through a memory map."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from ._errors import refusal, require
from .json_files import AGAIN, read_json

# numpy has no bfloat16 or float8 of its own, so the library's numpy reader cannot give them all.
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
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_header(path: Path) -> dict[str, tuple[Any, tuple[int, ...], int]]:
    """Reads the header of a safetensors file, checked by the format's own library: each byte is one tensor's.

    Args:
        path: the file.

    Returns:
        For each tensor its dtype, its shape and the offset of its first byte in the file.

    Raises:
        ValueError: where the file is missing, truncated or corrupt, or names a tensor twice.
    """
    require(path.is_file(), "file", path, f"no such file; {AGAIN}")
    size = path.stat().st_size
    try:
        with safetensors.safe_open(path, "np"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        remedy = f"{size} bytes, a whole safetensors file expected ({error}); {AGAIN}"
        raise refusal("file", path, remedy) from error

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = [name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1]
            raise refusal("file", path, f"its header names {twice[:3]} more than once; {AGAIN}")
        return found

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length), object_pairs_hook=unique)
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        kind = entry["dtype"]
        require(kind in _DTYPES, f"{path.name}:{name}.dtype", kind, f"readable dtypes: {', '.join(sorted(_DTYPES))}")
        entries[name] = (_DTYPES[kind], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
    return entries


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
        sound = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
        require(sound and bool(weight_map), INDEX, folder, f"no weight_map of file names in it; {AGAIN}")
        for file in sorted(set(weight_map.values())):
            # An index is data from elsewhere: it may only name files that lie next to it.
            require(Path(file).name == file, "weight_map", file, "shards must lie in the folder of the index")
            require((folder / file).is_file(), "shard", folder / file, f"{INDEX} lists it but it is missing; {AGAIN}")
            listed = {name for name, where in weight_map.items() if where == file}
            absent = sorted(listed - read_header(folder / file).keys())
            require(not absent, "shard", folder / file, f"lacks {absent[:3]} that {INDEX} puts there; {AGAIN}")
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
