"""Safetensors files in Hugging Face's folder layout, read with the safetensors library, complete or in parts."""

import functools
from pathlib import Path

import numpy as np
import safetensors

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.json_files import AGAIN, read_json
from jaxkv.checkpoints.tensor import Index, StoredTensor, parse_dtype_name

# NumPy's names of the format's kinds of numbers, without the number of bits; other kinds are not supported.
_KINDS = {"BOOL": "bool", "U": "uint", "I": "int", "F": "float", "BF": "bfloat"}
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
        with safetensors.safe_open(path, "np") as file:
            for name in file.offset_keys():
                part = file.get_slice(name)
                kind = part.get_dtype()
                letters = kind.rstrip("0123456789")
                dtype = parse_dtype_name(f"{_KINDS.get(letters)}{kind.removeprefix(letters)}")
                if dtype is None:
                    remedy = "not supported: use BOOL, BF16, or U, I and F of 8 to 64 bits"
                    raise build_value_error(f"{path.name}:{name}.dtype", kind, remedy)
                read = functools.partial(_read_tensor_part, path, name)
                shape = tuple(part.get_shape())
                tensors[name] = StoredTensor(shape=shape, dtype=dtype, read=read)
    except (safetensors.SafetensorError, OSError) as error:
        size = path.stat().st_size
        remedy = f"{size} bytes are not a complete safetensors file ({error}): {AGAIN}"
        raise build_value_error("file", path, remedy) from error
    return tensors


def _read_tensor_part(path: Path, name: str, index: Index) -> np.ndarray:
    """Read slices `index` of a tensor in a safetensors file, or the whole tensor if `index` is empty."""
    # Opened for each tensor: an open mapping would keep all pages that were read in the memory of the process.
    with safetensors.safe_open(path, "np") as file:
        return file.get_slice(name)[index] if index else file.get_tensor(name)


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
