"""Safetensors files in Hugging Face's folder layout, read with the safetensors library, complete or in parts."""

import functools
import math
from pathlib import Path

import numpy as np
import safetensors

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.json_files import AGAIN, read_json
from jaxkv.checkpoints.tensor import Index, StoredTensor, parse_dtype_name

# NumPy's names of the format's kinds of numbers, or of these without the number of bits; others are not supported.
_KINDS = {"BOOL": "bool", "U": "uint", "I": "int", "F": "float", "BF": "bfloat"}
_KINDS |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Read a safetensors file's header; return `StoredTensor` by name, in file order, whose data are read later.

    Raises:
        ValueError: if the file is missing, truncated or corrupt, or has an unsupported dtype.
    """
    require(path.is_file(), "file", path, f"missing: {AGAIN}")
    tensors = {}
    try:
        # The library checks that tensors follow each other without gaps.
        with safetensors.safe_open(path, "np") as file:
            at = 8 + int(np.fromfile(path, "<u8", 1)[0])
            for name in file.offset_keys():
                part = file.get_slice(name)
                kind = part.get_dtype()
                letters = kind if kind in _KINDS else kind.rstrip("0123456789")
                dtype = parse_dtype_name(f"{_KINDS.get(letters)}{kind.removeprefix(letters)}")
                if dtype is None:
                    remedy = "not supported: use BOOL, BF16, or U, I and F of 8 to 64 bits"
                    raise build_value_error(f"{path.name}:{name}.dtype", kind, remedy)
                shape = tuple(part.get_shape())
                read = functools.partial(_read_tensor_part, path, at, dtype, shape)
                tensors[name] = StoredTensor(shape=shape, dtype=dtype, read=read)
                at += math.prod(shape) * dtype.itemsize
    except (safetensors.SafetensorError, OSError) as error:
        size = path.stat().st_size
        remedy = f"{size} bytes are not a complete safetensors file ({error}): {AGAIN}"
        raise build_value_error("file", path, remedy) from error
    return tensors


def _read_tensor_part(
    path: Path, at: int, dtype: np.dtype, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """Read slices `index` of the tensor at byte `at` of a file; the library lacks NumPy arrays of 8-bit floats."""
    # Mapped for each read: a lasting mapping would keep all pages that were read in the memory of the process.
    return np.array(np.memmap(path, dtype, "r", at, shape)[index])


def read_folder_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return `StoredTensor` objects by name for a Hugging Face folder's safetensors files; only headers are read.

    Raises:
        ValueError: without safetensors, or if a listed file or tensor is missing or truncated.
    """
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map") or {}
        sound = isinstance(weight_map, dict) and all(
            isinstance(file, str) for file in weight_map.values()
        )
        require(sound and bool(weight_map), INDEX, folder, f"no weight_map of file names: {AGAIN}")
        found: dict[str, StoredTensor] = {}
        for file in sorted(set(weight_map.values())):
            # An index is untrusted: it may only name files in its own folder.
            require(
                Path(file).name == file,
                "weight_map",
                file,
                "not a plain file name: shards must be in the folder of the index",
            )
            listed = {name for name, where in weight_map.items() if where == file}
            held = read_safetensors_header(folder / file)
            absent = sorted(listed - held.keys())
            require(
                not absent,
                "shard",
                folder / file,
                f"{absent[:3]} are missing, but {INDEX} lists them: {AGAIN}",
            )
            found |= {name: tensor for name, tensor in held.items() if name in listed}
        return found
    if (folder / SINGLE).is_file():
        return read_safetensors_header(folder / SINGLE)
    pickles = sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
        for path in folder.glob(pattern)
    )
    remedy = (
        "pickles are never read, because they can run any code: convert the file to safetensors"
    )
    require(not pickles, "weights", folder / pickles[0] if pickles else None, remedy)
    raise build_value_error("folder", folder, f"no weights: add {SINGLE} or {INDEX}")
