"""Folders of arrays written by Orbax (converted weights, saved caches): their manifests, and reads of array parts."""

import contextlib
import functools
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.json_files import read_json, write_json
from jaxkv.checkpoints.tensor import Index, StoredTensor, parse_dtype_name

MANIFEST = "jaxkv.json"
# Suffix of a folder's name until it is complete.
UNFINISHED = ".partial"
TENSORS = "tensors"
ARRAYS = "arrays"
VOCABULARY = "gguf_tokenizer.json"

# Large enough for fast reads, small enough to read one device's part of a matrix without the others.
_CHUNK_BYTES = 32 << 20
# Names that are valid on every file system.
_PLAIN = re.compile(r"\w[\w.-]{0,199}")
# Files that identify a folder written by Orbax.
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


@frozen_dataclass
class OrbaxFolderKind:
    """Kind of Orbax folder, weights or saved cache: format name and version, and words for error messages.

    Attributes:
        format: name in the manifest.
        version: version of the format, the only supported one.
        listed: key of the arrays in the manifest.
        one: word for one array.
        writer: function or command that writes such folders.
        again: remedy for a damaged or incomplete folder.
    """

    format: str
    version: int
    listed: str
    one: str
    writer: str
    again: str


WEIGHTS = OrbaxFolderKind(
    format="jaxkv weights",
    version=1,
    listed=TENSORS,
    one="tensor",
    writer="`python -m jaxkv.checkpoints convert`",
    again="convert the checkpoint again",
)
CACHE = OrbaxFolderKind(
    format="jaxkv cache",
    # From version 5 on, fields have the glossary's names.
    version=5,
    listed=ARRAYS,
    one="array",
    writer="KVCache.save",
    again="save the cache again",
)


def open_converted_folder(
    folder: Path,
) -> tuple[dict[str, StoredTensor], GgufTokenizer | None, tuple[int, ...] | None] | None:
    """Return (`StoredTensor` by name, vocabulary, filter layers) of a folder from `convert`; None if not from Orbax.

    Only metadata are read. The vocabulary is None if the folder has tokenizer files, or no tokenizer.

    Raises:
        ValueError: if it is incomplete, lacks a tensor, or is another Orbax folder.
    """
    if not (folder / MANIFEST).is_file():
        foreign = [name for name in _ORBAX if (folder / name).exists()]
        remedy = f"an Orbax folder without {MANIFEST}: use one written by {WEIGHTS.writer}"
        require(not foreign, "path", folder, remedy)
        return None
    manifest = read_manifest(folder, WEIGHTS)
    entries = parse_array_entries(folder, manifest.get(WEIGHTS.listed), WEIGHTS)
    for name in entries:
        require(
            (folder / TENSORS / name).is_dir(),
            "tensor",
            name,
            f"missing from {folder}: {WEIGHTS.again}",
        )
    filters = manifest.get("filter_layers")
    sound = (
        filters is None or isinstance(filters, list) and all(type(each) is int for each in filters)
    )
    require(
        sound,
        "filter_layers",
        filters,
        f"not whole numbers in {folder / MANIFEST}: {WEIGHTS.again}",
    )
    stored = {
        name: StoredTensor(
            shape=entry.shape,
            dtype=entry.dtype,
            read=functools.partial(read_array, folder / TENSORS / name, entry),
        )
        for name, entry in entries.items()
    }
    path = folder / VOCABULARY
    vocabulary = _read_vocabulary(path) if path.is_file() else None
    return stored, vocabulary, None if filters is None else tuple(filters)


def require_new_path(folder: Path, field: str) -> None:
    """Raise ValueError if a path exists or its name is reserved; `field` names the argument in the error."""
    taken = os.path.lexists(folder) or folder.name in (
        "",
        "..",
    )  # names of folders that always exist
    require(not taken, field, folder, "it exists already: choose another folder, or remove it")
    remedy = f"{UNFINISHED} is reserved for incomplete folders: leave it out"
    require(not folder.name.endswith(UNFINISHED), field, folder, remedy)


def read_manifest(folder: Path, kind: OrbaxFolderKind) -> dict[str, Any]:
    """Read the `jaxkv.json` of an Orbax folder and check its format and version; return a dictionary.

    Raises:
        ValueError: for a folder that is missing, incomplete, of another kind, or of another format version.
    """
    whole = (folder / MANIFEST).is_file() and not folder.resolve().name.endswith(UNFINISHED)
    remedy = f"not a complete folder with {MANIFEST}: use one written by {kind.writer}"
    require(whole, "path", folder, remedy)
    manifest = read_json(folder / MANIFEST)
    found = manifest.get("format")
    version = manifest.get("version")
    remedy = f"{folder} is not a folder of {kind.format}: use one written by {kind.writer}"
    require(found == kind.format, "format", found, remedy)
    remedy = f"this jaxkv reads only version {kind.version} of {kind.format}, and {folder} has another: {kind.again}"
    require(version == kind.version, "version", version, remedy)
    return manifest


@frozen_dataclass
class ManifestEntry:
    """Description of an array in an Orbax folder's manifest: name, shape, dtype, CRC-32, kind of folder."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    crc32: int
    kind: OrbaxFolderKind

    @classmethod
    def from_array(cls, name: str, array: np.ndarray, kind: OrbaxFolderKind) -> "ManifestEntry":
        """Build the `ManifestEntry` of an array, with the CRC-32 of its bytes."""
        return cls(
            name=name, shape=array.shape, dtype=array.dtype, crc32=_compute_crc32(array), kind=kind
        )

    def to_json(self) -> dict[str, Any]:
        """Return an array's shape, dtype name and CRC-32 as a dictionary for a manifest, without its name."""
        return {"shape": list(self.shape), "dtype": self.dtype.name, "crc32": self.crc32}


def parse_array_entries(folder: Path, said: Any, kind: OrbaxFolderKind) -> dict[str, ManifestEntry]:
    """Parse and validate a manifest's dictionary of arrays; return `ManifestEntry` objects by array name.

    Raises:
        ValueError: if `said`, the manifest's value, is invalid.
    """
    manifest = folder / MANIFEST
    require(
        isinstance(said, dict) and bool(said),
        kind.listed,
        said,
        f"none in {manifest}: {kind.again}",
    )
    entries = {}
    for name, each in said.items():
        require(
            is_safe_name(name),
            kind.one,
            name,
            f"not a valid {kind.one} name in {manifest}: {kind.again}",
        )
        given = each if isinstance(each, dict) else {}
        shape: Any = given.get("shape")
        dtype = parse_dtype_name(given.get("dtype"))
        crc32 = given.get("crc32")
        sound = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not sound or dtype is None or type(crc32) is not int:
            remedy = f"shape, dtype and crc32 are missing in {manifest}: {kind.again}"
            raise build_value_error(f"{kind.listed}.{name}", each, remedy)
        entries[name] = ManifestEntry(
            name=name, shape=tuple(shape), dtype=dtype, crc32=crc32, kind=kind
        )
    return entries


def is_safe_name(name: str) -> bool:
    """True if `name` is safe as a folder's name: up to 200 letters, digits, `_`, `.` and `-`, no `.` or `-` first."""
    return _PLAIN.fullmatch(name) is not None


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, except empty ones, atomically as one Orbax checkpoint in the new folder `folder`.

    Arrays without elements are left out.
    """
    import orbax.checkpoint as ocp

    tree = {name: array for name, array in arrays.items() if array.size}
    chunks = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    # Otherwise, with several JAX processes, Orbax would wait for the others, which may not be writing.
    me = ocp.multihost.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree, save_args=chunks))


@contextlib.contextmanager
def create_folder_atomically(folder: Path, field: str) -> Iterator[Path]:
    """Context manager: yield a temporary folder, rename it to the new path `folder` on success, else delete it.

    `field` is the argument that names the folder, for errors.

    Raises:
        ValueError: if `folder` exists, before or after the body, or cannot be created.
    """
    require_new_path(folder, field)
    # Next to `folder`, so that the last step is a rename; with a short name, as `folder` may have the maximum length.
    part = folder.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    missing = [each for each in (part, *part.parents) if not os.path.lexists(each)]
    try:
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir()
            with contextlib.suppress(FileNotFoundError):
                folder.lstat()  # rejects invalid names, such as those that are too long
        except (OSError, ValueError) as error:  # ValueError for a null character in a name
            raise build_value_error(
                field,
                folder,
                f"the folder cannot be created ({format_error(error)}): choose another",
            ) from error
        yield part
        require_new_path(folder, field)
        with convert_write_errors(folder, field):
            os.rename(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for parent in missing[1:]:
            with contextlib.suppress(OSError):  # another process may have written files there
                parent.rmdir()
        raise


def write_array_folder(
    folder: Path, kind: OrbaxFolderKind, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write arrays and a manifest with the values of `said` as a new Orbax folder, atomically.

    Raises:
        ValueError: if the path exists, or cannot be written.
    """
    with create_folder_atomically(folder, "path") as part, convert_write_errors(folder, "path"):
        write_arrays(part / ARRAYS, arrays)
        entries = {
            name: ManifestEntry.from_array(name, array, kind).to_json()
            for name, array in arrays.items()
        }
        write_manifest(part, kind, {**said, kind.listed: entries})


def write_manifest(folder: Path, kind: OrbaxFolderKind, said: Mapping[str, Any]) -> None:
    """Write an Orbax folder's `jaxkv.json`: format name, format version, and the values of `said`."""
    write_json(folder / MANIFEST, {"format": kind.format, "version": kind.version, **said})


@contextlib.contextmanager
def convert_write_errors(folder: Path, field: str) -> Iterator[None]:
    """Context manager that turns an OSError or ValueError of its body into a ValueError about writing `folder`."""
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = f"it cannot be written ({format_error(error)}): free some space, or choose another folder"
        raise build_value_error(field, folder, remedy) from error


def format_error(error: Exception) -> str:
    """Return an error as one line: its `strerror`, else the first line of its message, else its class name."""
    return getattr(error, "strerror", None) or next(
        iter(str(error).splitlines()), type(error).__name__
    )


def read_array(folder: Path, entry: ManifestEntry, index: Index = ()) -> np.ndarray:
    """Read an array, or the part `index`, from an Orbax folder; a whole array's CRC-32 is checked.

    Raises:
        ValueError: if it is missing, damaged, or differs from its entry. Damage in a part is only found if TensorStore
            cannot read it: checksums are of complete arrays.
    """
    import tensorstore

    one = entry.kind.one
    again = entry.kind.again
    if not math.prod(entry.shape):
        return np.zeros(entry.shape, entry.dtype)[index]
    # With TensorStore, the underlying format: Orbax restores parts only along the axes of stored shardings.
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
        remedy = f"it cannot be read from {folder} ({format_error(error)}): {again}"
        raise build_value_error(one, entry.name, remedy) from error
    said = f"{entry.dtype.name}{list(entry.shape)}"
    remedy = f"{found[1].name}{list(found[0])} in {folder}, but its manifest has {said}: {again}"
    require(found == (entry.shape, entry.dtype), one, entry.name, remedy)
    # Checksums are of complete arrays, so parts are not checked.
    sound = bool(index) or _compute_crc32(array) == entry.crc32
    remedy = f"damaged or replaced in {folder}, its checksum differs: {again}"
    require(sound, one, entry.name, remedy)
    return array


def _compute_crc32(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes; 0 for an empty array."""
    return (
        zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0
    )


def _read_vocabulary(path: Path) -> GgufTokenizer:
    """Build a `GgufTokenizer` from the JSON file of a converted GGUF; ValueError for unknown fields."""
    said: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in read_json(path).items()
    }
    try:
        return GgufTokenizer(**said)
    except TypeError as error:
        raise build_value_error(
            "file", path, f"not a vocabulary ({error}): {WEIGHTS.again}"
        ) from error
