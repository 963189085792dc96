"""Folders of arrays written by Orbax: what is in them, and reading any part of any array."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ._errors import refusal, require
from .gguf_tokenizer import GgufTokenizer
from .json_files import read_json, write_json
from .tensor import Index, StoredTensor

MANIFEST = "jaxkv.json"
WEIGHTS, CACHE = "jaxkv weights", "jaxkv cache"
VERSION = 1
# What a conversion is called until it is whole.
UNFINISHED = ".partial"
TENSORS, ARRAYS, VOCABULARY = "tensors", "arrays", "gguf_tokenizer.json"
AGAIN = "convert the checkpoint again"

# Large enough to be read quickly, small enough for a device's part of a matrix to be read without the others.
_CHUNK_BYTES = 32 << 20
# Names of files everywhere.
_PLAIN = re.compile(r"\w[\w.-]{0,199}")
# What Orbax leaves in a folder of arrays.
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_MOST_AXES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """What a folder that `convert` has written holds besides its config.

    Attributes:
        stored: the tensors by name.
        tokenizer: a GGUF's vocabulary, or None where the tokenizer lies in files of its own, or there is none.
        filter_layers: those that choose best what the layers above them read, where they were known.
    """

    stored: Mapping[str, StoredTensor]
    tokenizer: GgufTokenizer | None
    filter_layers: tuple[int, ...] | None


def open_converted(folder: Path) -> Converted | None:
    """Opens a folder that `convert` has written, reading what is said of its tensors only.

    Args:
        folder: any folder.

    Returns:
        What is in it; None for a folder of another kind.

    Raises:
        ValueError: where it is half-written, lacks a tensor, or holds something else of Orbax'.
    """
    unfinished = folder.resolve().name.endswith(UNFINISHED) and (folder / TENSORS).is_dir()
    if not (folder / MANIFEST).is_file() and not unfinished:
        foreign = [name for name in _ORBAX if (folder / name).exists()]
        remedy = (
            f"a folder of Orbax' without {MANIFEST}: `python -m jaxkv.checkpoints convert` writes those that are read"
        )
        require(not foreign, "folder", folder, remedy)
        return None
    require_whole(folder)
    manifest = read_manifest(folder, WEIGHTS)
    entries = described(folder, manifest.get("tensors"))
    for name in entries:
        require((folder / TENSORS / name).is_dir(), "tensor", name, f"missing from {folder}; {AGAIN}")
    filters = manifest.get("filter_layers")
    sound = filters is None or isinstance(filters, list) and all(type(each) is int for each in filters)
    require(sound, "filter_layers", filters, f"whole numbers are expected in {folder / MANIFEST}; {AGAIN}")
    return Converted(
        stored={
            name: StoredTensor(
                shape=entry.shape, dtype=entry.dtype, read=functools.partial(read_array, folder / TENSORS / name, entry)
            )
            for name, entry in entries.items()
        },
        tokenizer=_read_vocabulary(folder / VOCABULARY) if (folder / VOCABULARY).is_file() else None,
        filter_layers=None if filters is None else tuple(filters),
    )


def require_whole(folder: Path) -> None:
    """Refuses what is no folder of arrays, or not yet one.

    Args:
        folder: what somebody wants to read.

    Raises:
        ValueError: naming it.
    """
    require(folder.exists(), "path", folder, "no such folder")
    require(folder.is_dir(), "path", folder, "a file, where a folder of arrays is expected")
    remedy = "it has not been written to its end: write it again; a conversion goes on from here"
    require(not folder.resolve().name.endswith(UNFINISHED), "folder", folder, remedy)
    require(
        (folder / MANIFEST).is_file(),
        "folder",
        folder,
        f"no {MANIFEST} in it: it was not written to its end, or by another",
    )


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Reads the manifest of a folder of arrays.

    Args:
        folder: the folder.
        kind: WEIGHTS or CACHE.

    Returns:
        The JSON object.

    Raises:
        ValueError: for a folder of the other kind, or of another version of the format.
    """
    manifest = read_json(folder / MANIFEST)
    found, version = manifest.get("format"), manifest.get("version")
    remedy = {WEIGHTS: "read weights with jaxkv.load", CACHE: "read a saved cache with jaxkv.load_cache"}
    require(found == kind, "format", found, remedy.get(str(found), f"{folder} is no folder of {kind}"))
    require(
        version == VERSION, "version", version, f"this jaxkv reads version {VERSION} of {kind}: write {folder} anew"
    )
    return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What a manifest says of an array.

    Attributes:
        name: its name.
        shape: its axes.
        dtype: its dtype.
        crc32: checksum of its bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    crc32: int

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Entry:
        """Describes an array.

        Args:
            name: its name.
            array: the array.

        Returns:
            The entry.
        """
        return cls(name=name, shape=array.shape, dtype=array.dtype, crc32=_checksum(array))

    def json(self) -> dict[str, Any]:
        """The entry as a manifest says it."""
        return {"shape": list(self.shape), "dtype": self.dtype.name, "crc32": self.crc32}


def described(folder: Path, said: Any) -> dict[str, Entry]:
    """Reads what a manifest says of its arrays.

    Args:
        folder: the manifest's.
        said: shape, dtype and checksum by name.

    Returns:
        The entries by name.

    Raises:
        ValueError: where they are not that.
    """
    require(isinstance(said, dict) and bool(said), "tensors", said, f"none in {folder / MANIFEST}; {AGAIN}")
    entries = {}
    for name, each in said.items():
        check_name(name)
        sound = isinstance(each, dict) and isinstance(each.get("shape"), list) and type(each.get("crc32")) is int
        sound = sound and len(each["shape"]) <= _MOST_AXES
        sound = sound and all(type(size) is int and size >= 0 for size in each["shape"])
        dtype = _dtype(each.get("dtype")) if sound else None
        remedy = f"shape, dtype and crc32 are expected in {folder / MANIFEST}; {AGAIN}"
        if dtype is None:
            raise refusal(f"tensors.{name}", each, remedy)
        entries[name] = Entry(name=name, shape=tuple(each["shape"]), dtype=dtype, crc32=each["crc32"])
    return entries


def check_name(name: str) -> None:
    """Refuses a name that no folder can have.

    Args:
        name: a tensor's.

    Raises:
        ValueError: naming it.
    """
    require(
        _PLAIN.fullmatch(name) is not None, "tensor", name, "letters, digits, dots and hyphens make a tensor's name"
    )


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as one checkpoint of Orbax', whole or not at all.

    Args:
        folder: where to; it must not exist.
        arrays: by name; those without elements have nothing that could be written, and are left out.
    """
    import orbax.checkpoint as ocp

    tree = {name: array for name, array in arrays.items() if array.size}
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree, save_args=chunks)


def write_folder(folder: Path, kind: str, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a manifest and arrays, whole or not at all.

    Args:
        folder: the folder to make.
        kind: what it holds.
        said: what the manifest says besides.
        arrays: by name.

    Raises:
        ValueError: where something lies there, or nothing can be written.
    """
    require(
        not os.path.lexists(folder), "path", folder, "something is there already: choose another folder, or remove it"
    )
    remedy = f"{UNFINISHED} is for unfinished ones: leave it out"
    require(not folder.name.endswith(UNFINISHED), "path", folder, remedy)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, so that the last step is a rename; who finds it half-written knows it by its name.
        part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{UNFINISHED}")
        part.mkdir()
    except OSError as error:
        raise refusal("path", folder, f"no folder can be made there ({error.strerror})") from error
    try:
        write_arrays(part / ARRAYS, arrays)
        entries = {name: Entry.of(name, array).json() for name, array in arrays.items()}
        write_json(part / MANIFEST, {"format": kind, "version": VERSION, **said, "arrays": entries})
        os.rename(part, folder)
    except OSError as error:
        raise refusal("path", folder, f"it cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_array(folder: Path, entry: Entry, index: Index = ()) -> np.ndarray:
    """Reads an array, or a part of it without the others.

    Args:
        folder: of the arrays.
        entry: what the manifest says of it.
        index: which part of each axis; whole axes by default.

    Returns:
        The array.

    Raises:
        ValueError: where it is missing or damaged, or not what the manifest says.
    """
    import tensorstore

    if not math.prod(entry.shape):
        return np.zeros(entry.shape, entry.dtype)[index]
    # Orbax keeps arrays as TensorStore does, and restores parts only along the axes that they are stored with.
    base = {"driver": "file", "path": str(folder.absolute())}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{entry.name}/"},
        "fill_missing_data_reads": False,
    }
    try:
        store = tensorstore.open(spec, read=True, open=True).result()
        found = tuple(store.shape), np.dtype(store.dtype.numpy_dtype)
        if found == (entry.shape, entry.dtype):
            array = store[index].read().result() if index else store.read().result()
    except (ValueError, OSError) as error:
        first = str(error).splitlines()[0]
        raise refusal("tensor", entry.name, f"it cannot be read from {folder} ({first}); write it again") from error
    said = f"{entry.dtype.name}{list(entry.shape)}"
    remedy = f"{found[1].name}{list(found[0])} in {folder}, whose manifest says {said}; write it again"
    require(found == (entry.shape, entry.dtype), "tensor", entry.name, remedy)
    # Parts have no checksum of their own.
    sound = bool(index) or _checksum(array) == entry.crc32
    require(sound, "tensor", entry.name, f"damaged, or another's, in {folder}: its bytes are not those written")
    return array


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0


def _dtype(name: Any) -> np.dtype | None:
    try:
        return np.dtype(getattr(ml_dtypes, name, name)) if isinstance(name, str) else None
    except TypeError:
        return None


_LISTS: dict[str, tuple[type, ...]] = {"tokens": (str,), "types": (int,), "merges": (str,), "scores": (int, float)}
_IDS = ("bos", "eos", "eot", "pad", "unk")
_TEXTS, _FLAGS = ("model", "pre", "chat_template"), ("add_bos", "add_space_prefix")


def _read_vocabulary(path: Path) -> GgufTokenizer:
    said = read_json(path)

    def sound(name: str, value: Any) -> bool:
        if name in _LISTS:
            return isinstance(value, list) and all(type(each) in _LISTS[name] for each in value)
        if name in _IDS:
            return value is None or type(value) is int and 0 <= value < len(said.get("tokens") or ())
        kinds = {**dict.fromkeys(_TEXTS, str), **dict.fromkeys(_FLAGS, bool)}
        return name in kinds and (isinstance(value, kinds[name]) or value is None and name != "model")

    wrong = [name for name in {"model": None, "tokens": None} | said if not sound(name, said.get(name))]
    require(not wrong, "file", path, f"{wrong[:3]} are not a vocabulary's; {AGAIN}")
    fields: dict[str, Any] = {name: tuple(value) if name in _LISTS else value for name, value in said.items()}
    return GgufTokenizer(**fields)
