"""Safetensors files in Hugging Face's folder layout, read by the format's own library one tensor at a time."""

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

# What the library's numpy reader makes arrays of; bfloat16 it finds once ml_dtypes has been imported.
_READ = frozenset("BOOL U8 I8 U16 I16 U32 I32 U64 I64 F16 BF16 F32 F64".split())
# Floats that it checks but has no arrays for.
_EIGHT_BITS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_header(path: Path) -> dict[str, tuple[str, int]]:
    """Reads the header of a safetensors file, checked by the format's own library: each byte is one tensor's.

    Args:
        path: the file.

    Returns:
        For each tensor its dtype as the format names it, and the offset of its first byte in the file.

    Raises:
        ValueError: where the file is missing, truncated or corrupt, or names a tensor twice.
    """
    require(path.is_file(), "file", path, f"no such file; {AGAIN}")
    try:
        with safetensors.safe_open(path, "np"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        remedy = f"{path.stat().st_size} bytes, a whole safetensors file expected ({error}); {AGAIN}"
        raise refusal("file", path, remedy) from error

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(name for name, _ in pairs)
        twice = [name for name, count in counts.items() if count > 1]
        require(not twice, "file", path, f"its header names {twice[:3]} more than once; {AGAIN}")
        return dict(pairs)

    # The library takes the last of two tensors of one name, without a word.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length), object_pairs_hook=unique)
    header.pop("__metadata__", None)
    readable = ", ".join(sorted(_READ | _EIGHT_BITS.keys()))
    for name, entry in header.items():
        kind = entry["dtype"]
        known = kind in _READ or kind in _EIGHT_BITS
        require(known, f"{path.name}:{name}.dtype", kind, f"readable dtypes: {readable}")
    return {name: (entry["dtype"], 8 + length + entry["data_offsets"][0]) for name, entry in header.items()}


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a file's tensors, each read when it is asked for.

    Args:
        path: the file.

    Yields:
        Names and arrays, as they lie in the file.
    """
    header = read_header(path)
    with safetensors.safe_open(path, "np") as file:
        for name in file.offset_keys():
            kind, offset = header[name]
            if kind in _READ:
                yield name, file.get_tensor(name)
            else:
                shape = file.get_slice(name).get_shape()
                yield name, np.fromfile(path, _EIGHT_BITS[kind], math.prod(shape), offset=offset).reshape(shape)


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
