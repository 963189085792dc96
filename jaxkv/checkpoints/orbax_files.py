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
# Suffix of a folder's name until it is completely written.
UNFINISHED = ".partial"
TENSORS, ARRAYS, VOCABULARY = "tensors", "arrays", "gguf_tokenizer.json"

# Large enough for quick reads, small enough to read one device's part of a matrix without the others.
_CHUNK_BYTES = 32 << 20
# Names that every file system takes.
_PLAIN = re.compile(r"\w[\w.-]{0,199}")
# Files that identify a folder written by Orbax.
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of Orbax folder, weights or saved cache: its format's name and version, and words for error messages.

    Attributes:
        format: name in the manifest.
        version: version of the format, the only one that is read.
        listed: the manifest's key of the arrays.
        one: word for one array.
        writer: what writes such folders.
        again: remedy for a folder that is damaged or half-written.
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
    """Tensors, a GGUF's vocabulary and filter layers of a folder that `convert` wrote; None for other folders.

    Only metadata are read. There is no vocabulary where tokenizer files, or none, are in the folder.

    Raises:
        ValueError: where it is half-written, lacks a tensor, or is another Orbax folder.
    """
    if not (folder / MANIFEST).is_file():
        foreign = [name for name in _ORBAX if (folder / name).exists()]
        remedy = (
            f"a folder of Orbax' without {MANIFEST}: give one that {WEIGHTS.writer} has written"
        )
        require(not foreign, "path", folder, remedy)
        return None
    manifest = read_manifest(folder, WEIGHTS)
    entries = described(folder, manifest.get(WEIGHTS.listed), WEIGHTS)
    for name in entries:
        require(
            (folder / TENSORS / name).is_dir(),
            "tensor",
            name,
            f"missing from {folder}; {WEIGHTS.again}",
        )
    filters = manifest.get("filter_layers")
    sound = (
        filters is None or isinstance(filters, list) and all(type(each) is int for each in filters)
    )
    require(
        sound,
        "filter_layers",
        filters,
        f"whole numbers are expected in {folder / MANIFEST}; {WEIGHTS.again}",
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
    require(
        not taken, field, folder, "something is there already: choose another folder, or remove it"
    )
    remedy = f"{UNFINISHED} is for unfinished ones: leave it out"
    require(not folder.name.endswith(UNFINISHED), field, folder, remedy)


def read_manifest(folder: Path, kind: Kind) -> dict[str, Any]:
    """Dictionary read from a folder's manifest.

    Raises:
        ValueError: for a folder that is not there, whole, of another kind, or of another version of the format.
    """
    whole = (folder / MANIFEST).is_file() and not folder.resolve().name.endswith(UNFINISHED)
    remedy = f"no whole folder with {MANIFEST}: give one that {kind.writer} has written"
    require(whole, "path", folder, remedy)
    manifest = read_json(folder / MANIFEST)
    found, version = manifest.get("format"), manifest.get("version")
    remedy = f"{folder} is no folder of {kind.format}: give one that {kind.writer} has written"
    require(found == kind.format, "format", found, remedy)
    remedy = f"this jaxkv reads version {kind.version} of {kind.format}, and {folder} is of another: {kind.again}"
    require(version == kind.version, "version", version, remedy)
    return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """Manifest entry of an array: name, shape, dtype, CRC-32, and the kind (`Kind`) of Orbax folder that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    crc32: int
    kind: Kind

    @classmethod
    def of(cls, name: str, array: np.ndarray, kind: Kind) -> "ManifestEntry":
        """`ManifestEntry` of an array, with its checksum computed."""
        return cls(
            name=name, shape=array.shape, dtype=array.dtype, crc32=_checksum(array), kind=kind
        )

    def json(self) -> dict[str, Any]:
        """Shape, dtype and CRC-32 of the entry as a dictionary for the manifest."""
        return {"shape": list(self.shape), "dtype": self.dtype.name, "crc32": self.crc32}


def described(folder: Path, said: Any, kind: Kind) -> dict[str, ManifestEntry]:
    """Dict from array name to validated `ManifestEntry`, from a manifest's description of arrays; ValueError if unsound.

    Raises:
        ValueError: where `said`, the manifest's value, is not that.
    """
    manifest = folder / MANIFEST
    require(
        isinstance(said, dict) and bool(said),
        kind.listed,
        said,
        f"none in {manifest}; {kind.again}",
    )
    entries = {}
    for name, each in said.items():
        require(
            is_plain(name),
            kind.one,
            name,
            f"no {kind.one} in {manifest} is called so; {kind.again}",
        )
        given = each if isinstance(each, dict) else {}
        shape: Any = given.get("shape")
        dtype, crc32 = dtype_of(given.get("dtype")), given.get("crc32")
        sound = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not sound or dtype is None or type(crc32) is not int:
            remedy = f"shape, dtype and crc32 are expected in {manifest}; {kind.again}"
            raise invalid(f"{kind.listed}.{name}", each, remedy)
        entries[name] = ManifestEntry(
            name=name, shape=tuple(shape), dtype=dtype, crc32=crc32, kind=kind
        )
    return entries


def is_plain(name: str) -> bool:
    """True if `name` is safe as a folder's name: at most 200 logical axes, digits, `_`, dots and hyphens, no dot first."""
    return _PLAIN.fullmatch(name) is not None


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name as one Orbax checkpoint, atomically; `folder` must not exist.

    Arrays without elements are left out: there is nothing to write.
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
        ValueError: where something is at `folder`, before or after the body, or no folder can be made there.
    """
    require_free(folder, field)
    # Beside `folder`, so that the last step is a rename; a short name, as the folder's may have the maximal length.
    part = folder.with_name(f".{secrets.token_hex(8)}{UNFINISHED}")
    missing = [each for each in (part, *part.parents) if not os.path.lexists(each)]
    try:
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir()
            with contextlib.suppress(FileNotFoundError):
                folder.lstat()  # rejects a name that is too long, say
        except (OSError, ValueError) as error:  # a null character in a name, say
            raise invalid(
                field, folder, f"no folder can be made there ({reason(error)}): choose another"
            ) from error
        yield part
        require_free(folder, field)
        with writing(folder, field):
            os.rename(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for parent in missing[1:]:
            with contextlib.suppress(OSError):  # somebody else's files lie there by now
                parent.rmdir()
        raise


def write_folder(
    folder: Path, kind: Kind, said: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write arrays and a manifest that includes `said` as an Orbax folder, atomically; ValueError if it cannot.

    Raises:
        ValueError: where something lies there, or nothing can be written.
    """
    with whole_folder(folder, "path") as part, writing(folder, "path"):
        write_arrays(part / ARRAYS, arrays)
        entries = {
            name: ManifestEntry.of(name, array, kind).json() for name, array in arrays.items()
        }
        write_manifest(part, kind, {**said, kind.listed: entries})


def write_manifest(folder: Path, kind: Kind, said: Mapping[str, Any]) -> None:
    """Write a folder's manifest: the format, its version and what is `said`."""
    write_json(folder / MANIFEST, {"format": kind.format, "version": kind.version, **said})


@contextlib.contextmanager
def writing(folder: Path, field: str) -> Iterator[None]:
    """Context manager that turns an error of writing, which TensorStore has two classes for, into a ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = (
            f"it cannot be written ({reason(error)}): make room there, or choose another folder"
        )
        raise invalid(field, folder, remedy) from error


def reason(error: Exception) -> str:
    """Text of an error in one line: its `strerror`, the first line of its message, or its class name."""
    return getattr(error, "strerror", None) or next(
        iter(str(error).splitlines()), type(error).__name__
    )


def read_array(folder: Path, entry: ManifestEntry, index: Index = ()) -> np.ndarray:
    """Read an array, or only its part `index`, from an Orbax folder; ValueError if it is missing or damaged.

    Raises:
        ValueError: where it is missing, damaged, or not what its entry says. Damage in a part is only found if
            TensorStore cannot read it: checksums are of whole arrays.
    """
    import tensorstore

    one, again = entry.kind.one, entry.kind.again
    if not math.prod(entry.shape):
        return np.zeros(entry.shape, entry.dtype)[index]
    # Through TensorStore, the format underneath: Orbax restores parts only along the axes of stored shardings.
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
        remedy = f"it cannot be read from {folder} ({reason(error)}); {again}"
        raise invalid(one, entry.name, remedy) from error
    said = f"{entry.dtype.name}{list(entry.shape)}"
    remedy = f"{found[1].name}{list(found[0])} in {folder}, whose manifest says {said}; {again}"
    require(found == (entry.shape, entry.dtype), one, entry.name, remedy)
    # Checksums are of whole arrays: parts are not checked.
    sound = bool(index) or _checksum(array) == entry.crc32
    remedy = f"damaged, or another's, in {folder}: its bytes are not those written; {again}"
    require(sound, one, entry.name, remedy)
    return array


def _checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes, as an int."""
    return (
        zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0
    )


def _read_vocabulary(path: Path) -> GgufTokenizer:
    """`GgufTokenizer` read from its JSON file; ValueError for fields that it does not have."""
    said: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in read_json(path).items()
    }
    try:
        return GgufTokenizer(**said)
    except TypeError as error:
        raise invalid("file", path, f"not a vocabulary ({error}); {WEIGHTS.again}") from error
