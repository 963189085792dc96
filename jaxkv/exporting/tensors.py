"""Writes arrays as safetensors files, with at most one array copied to host memory at a time."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.sharding.mesh import host

# Names of dtypes in the format.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}
_MOST_BYTES = 4 << 30


def write_tensors(folder: Path, name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Writes arrays into one or more safetensors files; returns a dict of file name to size in bytes and SHA-256."""
    parts = list(_parts(arrays))
    files = {}
    for at, names in enumerate(parts):
        file = (
            f"{name}.safetensors"
            if len(parts) == 1
            else f"{name}-{at + 1:05}-of-{len(parts):05}.safetensors"
        )
        files[file] = _write(folder / file, {each: arrays[each] for each in names})
    return files


def _parts(arrays: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the array names of each file, which holds at most `_MOST_BYTES` or a single array."""
    names, size = list[str](), 0
    for name, array in arrays.items():
        if names and size + array.nbytes > _MOST_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += array.nbytes
    yield names


def _write(file: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Writes arrays into one safetensors file; returns a dict of its size in bytes and its SHA-256."""
    entries, at = {}, 0
    for name, array in arrays.items():
        end = at + array.nbytes
        dtype = DTYPES[np.dtype(array.dtype).name]
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest, size = hashlib.sha256(), 0
    with file.open("wb") as out:
        for data in (len(header).to_bytes(8, "little"), header, *(arrays.values())):
            raw = data if isinstance(data, bytes) else np.ascontiguousarray(host(data)).tobytes()
            digest.update(raw)
            size += out.write(raw)
    return {"bytes": size, "sha256": digest.hexdigest()}
