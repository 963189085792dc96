"""Writes arrays as safetensors files, with at most one file's arrays in host memory at a time."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from jaxkv.sharding.mesh import copy_to_host

_MOST_BYTES = 1 << 30


def write_tensors(folder: Path, name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Write arrays to safetensors files in a folder; return a dict from file name to size in bytes and SHA-256."""
    parts = list(_group_arrays_by_file(arrays))
    files = {}
    for at, names in enumerate(parts):
        file = (
            f"{name}.safetensors"
            if len(parts) == 1
            else f"{name}-{at + 1:05}-of-{len(parts):05}.safetensors"
        )
        files[file] = _write_tensor_file(folder / file, {each: arrays[each] for each in names})
    return files


def _group_arrays_by_file(arrays: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the list of array names of each file, which holds at most 1 GiB or a single array."""
    names = list[str]()
    size = 0
    for name, array in arrays.items():
        if names and size + array.nbytes > _MOST_BYTES:
            yield names
            names = []
            size = 0
        names.append(name)
        size += array.nbytes
    yield names


def _write_tensor_file(file: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Write arrays into one safetensors file; return a dict with its size in bytes and its SHA-256."""
    held = {name: np.asarray(copy_to_host(array), order="C") for name, array in arrays.items()}
    try:
        safetensors.numpy.save_file(held, file)
    except safetensors.SafetensorError as error:  # such as a full disk
        raise OSError(f"{file}: {error}") from error
    with file.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
