"""Folders of arrays written by Orbax (converted weights, saved caches): their manifests, and reads of array parts."""

import contextlib
import dataclasses
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

from jaxkv._errors import invalid, require
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.json_files import read_json, write_json
from jaxkv.checkpoints.tensor import Index, StoredTensor, dtype_of

MANIFEST = "jaxkv.json"
# Suffix of a folder's name until it is complete.
UNFINISHED = ".partial"
TENSORS, ARRAYS, VOCABULARY = "tensors", "arrays", "gguf_tokenizer.json"

# Large enough for fast reads, small enough to read one device's part of a matrix without the others.
_CHUNK_BYTES = 32 << 20
# Names that are valid on every file system.
_PLAIN = re.compile(r"\w[\w.-]{0,199}")
# Files that identify a folder written by Orbax.
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of Orbax folder, weights or saved cache: name and version of its format, and words for error messages.

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


WEIGHTS = Kind(
    format="jaxkv weights",
    version=1,
    listed=TENSORS,
    one="tensor",
    writer="`python -m jaxkv.checkpoints convert`",
    again="convert the checkpoint again",
)
CACHE = Kind(
    format="jaxkv cache",
    # From version 5 on, fields have the glossary's names.
    version=5,
    listed=ARRAYS,
    one="array",
    writer="KVCache.save",
    again="save the cache again",
)


def open_converted(
    folder: Path,
) -> tuple[dict[str, StoredTensor], GgufTokenizer | None, tuple[int, ...] | None] | None:
    """Open a folder written by `convert`; return tensors, a GGUF's vocabulary and filter layers, else None.

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
    entries = described(folder, manifest.get(WEIGHTS.listed), WEIGHTS)
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


def require_free(folder: Path, field: str) -> None:
    """Raise ValueError if a path exists or its name is reserved; `field` is the argument's name for the error."""
    taken = os.path.lexists(folder) or folder.name in (
        "",
        "..",
    )  # names of folders that always exist
    require(not taken, field, folder, "it exists already: choose another folder, or remove it")
    remedy = f"{UNFINISHED} is reserved for incomplete folders: leave it out"
    require(not folder.name.endswith(UNFINISHED), field, folder, remedy)


def read_manifest(folder: Path, kind: Kind) -> dict[str, Any]:
    """Read a folder's manifest as a dictionary.

    Raises:
        ValueError: for a folder that is missing, incomplete, of another kind, or of another format version.
    """
    whole = (folder / MANIFEST).is_file() and not folder.resolve().name.endswith(UNFINISHED)
    remedy = f"not a complete folder with {MANIFEST}: use one written by {kind.writer}"
    require(whole, "path", folder, remedy)
    manifest = read_json(folder / MANIFEST)
    found, version = manifest.get("format"), manifest.get("version")
    remedy = f"{folder} is not a folder of {kind.format}: use one written by {kind.writer}"
    require(found == kind.format, "format", found, remedy)
    remedy = f"this jaxkv reads only version {kind.version} of {kind.format}, and {folder} has another: {kind.again}"
    require(version == kind.version, "version", version, remedy)
    return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """Manifest entry of an array: name, shape, dtype, CRC-32, and the kind (`Kind`) of its Orbax folder."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    crc32: int
    kind: Kind

    @classmethod
    def of(cls, name: str, array: np.ndarray, kind: Kind) -> "ManifestEntry":
        """Build the `ManifestEntry` of an array, with its checksum."""
        return cls(
            name=name, shape=array.shape, dtype=array.dtype, crc32=_checksum(array), kind=kind
        )

    def json(self) -> dict[str, Any]:
        """Return shape, dtype and CRC-32 as JSON values for the manifest."""
        return {"shape": list(self.shape), "dtype": self.dtype.name, "crc32": self.crc32}


def described(folder: Path, said: Any, kind: Kind) -> dict[str, ManifestEntry]:
    """Parse a manifest's description of arrays to validated `ManifestEntry`s by array name.

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
            is_plain(name),
            kind.one,
            name,
            f"not a valid {kind.one} name in {manifest}: {kind.again}",
        )
        given = each if isinstance(each, dict) else {}
        shape: Any = given.get("shape")
        dtype, crc32 = dtype_of(given.get("dtype")), given.get("crc32")
        sound = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not sound or dtype is None or type(crc32) is not int:
            remedy = f"shape, dtype and crc32 are missing in {manifest}: {kind.again}"
            raise invalid(f"{kind.listed}.{name}", each, remedy)
        entries[name] = ManifestEntry(
            name=name, shape=tuple(shape), dtype=dtype, crc32=crc32, kind=kind
        )
    return entries


def is_plain(name: str) -> bool:
    """True if `name` is safe as a folder's name: at most 200 letters, digits, `_`, dots and hyphens, no dot first."""
    return _PLAIN.fullmatch(name) is not None


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as one Orbax checkpoint, atomically; `folder` must not exist.

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
def whole_folder(folder: Path, field: str) -> Iterator[Path]:
    """Context manager that yields a temporary folder and renames it to `folder` on success, else deletes it.

    `field` is the argument that names the folder, for errors.

    Raises:
        ValueError: if `folder` exists, before or after the body, or cannot be created.
    """
    require_free(folder, field)
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
            raise invalid(
                field, folder, f"the folder cannot be created ({reason(error)}): choose another"
            ) from error
        yield part
        require_free(folder, field)
        with writing(folder, field):
            os.rename(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for parent in missing[1:]:
            with contextlib.suppress(OSError):  # another process may have written files there
                parent.rmdir()
        raise


def write_folder(
    folder: Path, kind: Kind, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write arrays and a manifest that includes `said` as an Orbax folder, atomically.

    Raises:
        ValueError: if the path exists, or cannot be written.
    """
    with whole_folder(folder, "path") as part, writing(folder, "path"):
        write_arrays(part / ARRAYS, arrays)
        entries = {
            name: ManifestEntry.of(name, array, kind).json() for name, array in arrays.items()
        }
        write_manifest(part, kind, {**said, kind.listed: entries})


def write_manifest(folder: Path, kind: Kind, said: Mapping[str, Any]) -> None:
    """Write a folder's manifest: the format, its version and the values of `said`."""
    write_json(folder / MANIFEST, {"format": kind.format, "version": kind.version, **said})


@contextlib.contextmanager
def writing(folder: Path, field: str) -> Iterator[None]:
    """Context manager that turns an error of writing, of which TensorStore has two classes, into a ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = (
            f"it cannot be written ({reason(error)}): free some space, or choose another folder"
        )
        raise invalid(field, folder, remedy) from error


def reason(error: Exception) -> str:
    """Format an error in one line: its `strerror`, the first line of its message, or its class name."""
    return getattr(error, "strerror", None) or next(
        iter(str(error).splitlines()), type(error).__name__
    )


def read_array(folder: Path, entry: ManifestEntry, index: Index = ()) -> np.ndarray:
    """Read an array, or only its part `index`, from an Orbax folder.

    Raises:
        ValueError: if it is missing, damaged, or differs from its entry. Damage in a part is only found if TensorStore
            cannot read it: checksums are of complete arrays.
    """
    import tensorstore

    one, again = entry.kind.one, entry.kind.again
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
        remedy = f"it cannot be read from {folder} ({reason(error)}): {again}"
        raise invalid(one, entry.name, remedy) from error
    said = f"{entry.dtype.name}{list(entry.shape)}"
    remedy = f"{found[1].name}{list(found[0])} in {folder}, but its manifest has {said}: {again}"
    require(found == (entry.shape, entry.dtype), one, entry.name, remedy)
    # Checksums are of complete arrays, so parts are not checked.
    sound = bool(index) or _checksum(array) == entry.crc32
    remedy = f"damaged or replaced in {folder}, its checksum differs: {again}"
    require(sound, one, entry.name, remedy)
    return array


def _checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of an array's bytes."""
    return (
        zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0
    )


def _read_vocabulary(path: Path) -> GgufTokenizer:
    """Read a `GgufTokenizer` from its JSON file; ValueError for unknown fields."""
    said: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in read_json(path).items()
    }
    try:
        return GgufTokenizer(**said)
    except TypeError as error:
        raise invalid("file", path, f"not a vocabulary ({error}): {WEIGHTS.again}") from error
