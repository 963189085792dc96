"""`convert`: writes any checkpoint as an Orbax folder, a tensor at a time, and resumes where an earlier run stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._errors import refusal, require
from .fetching import bar, fetch
from .gguf_tokenizer import GgufTokenizer
from .hub_config import completed
from .json_files import read_json, write_json
from .named_models import manifest, names
from .orbax_files import (
    MANIFEST,
    TENSORS,
    UNFINISHED,
    VOCABULARY,
    WEIGHTS,
    Entry,
    described,
    is_plain,
    read_array,
    reason,
    require_free,
    write_arrays,
)
from .source import Checkpoint, open_checkpoint
from .tensor import dtype_of
from .whole_files import remove_unfinished

DTYPES = ("float32", "bfloat16", "float16")
# Files of an unfinished conversion: source and settings; and one JSON line per tensor written.
_JOURNAL, _DONE = "conversion.json", "done.jsonl"
# Files beside the weights: tokenizer, chat template, generation settings.
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", MANIFEST)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    progress: bool = True,
) -> Path:
    """Writes a checkpoint of any format as an Orbax folder for `jaxkv.load`, resuming a stopped run; returns its path.

    One tensor is in memory at a time. Until the last one is written, all files are in `target` + ".partial", which
    cannot be loaded; a conversion that was stopped resumes there, after verifying the files it finds.

    Args:
        source: a folder in Hugging Face's layout, a `.gguf` file, one of `names()`, a hub id, or an Orbax folder.
        target: the folder to write; nothing may be there.
        dtype: float32, bfloat16 or float16; by default each tensor keeps its own, which is float32 for a GGUF's.
        progress: show a bar on stderr, where that is a terminal.

    Returns:
        The folder.

    Raises:
        TypeError: where the source is neither a string nor a path.
        ValueError: where the source cannot be read, something lies at `target`, it is called as the source is, nothing
            can be written there, or the unfinished conversion there is another one.
    """
    known = dtype is None or dtype in DTYPES
    require(known, "dtype", dtype, f"give one of {', '.join(DTYPES)}, or leave it out")
    folder = Path(target).expanduser()
    require_free(folder, "target")
    # Otherwise the next run would read the result of this one as its source.
    require(
        not _is_at(source, folder),
        "target",
        folder,
        "the source is called so: choose another folder",
    )
    part = folder.with_name(folder.name + UNFINISHED)
    checkpoint = open_checkpoint(fetch(source, progress=progress))
    for name in checkpoint.stored:
        remedy = (
            "its folder is called so, of letters, digits, dots and hyphens: rename it in the source"
        )
        require(is_plain(name), "tensor", name, remedy)
    identity = {
        "format": WEIGHTS.format,
        "version": WEIGHTS.version,
        "dtype": dtype,
        "source": _identity(checkpoint),
    }
    with _writing(part):
        done = _begin(part, identity)
    entries: dict[str, Any] = {}
    total = sum(math.prod(each.shape) * each.dtype.itemsize for each in checkpoint.stored.values())
    with bar(total, f"convert to {folder.name}", progress=progress) as shown:
        for name, tensor in checkpoint.stored.items():
            entry = done.get(name)
            if entry is None or not _is_good(part, entry):
                array = tensor.read(())
                if dtype is not None and _is_float(array.dtype):
                    array = array.astype(dtype_of(dtype), copy=False)
                with _writing(part):
                    entry = _write(part, name, array)
                del array  # before the next one is read
            entries[name] = entry.json()
            shown.update(math.prod(tensor.shape) * tensor.dtype.itemsize)
    filters = (
        manifest(str(source)).filter_layers if str(source) in names() else checkpoint.filter_layers
    )
    said = {
        **identity,
        TENSORS: entries,
        "filter_layers": None if filters is None else list(filters),
    }
    with _writing(part):
        _write_beside(part, checkpoint)
        write_json(part / MANIFEST, said)
        (part / _DONE).unlink(missing_ok=True)
        (part / _JOURNAL).unlink(missing_ok=True)
    free = not os.path.lexists(folder)
    require(
        free, "target", folder, "something has come there meanwhile: move it away, and run it again"
    )
    with _writing(part):
        os.rename(part, folder)
    return folder


def _is_at(source: str | os.PathLike[str], folder: Path) -> bool:
    """True if `source` and `folder` are the same path."""
    try:
        return Path(source).expanduser().resolve() == folder.resolve()
    except (TypeError, ValueError):
        return False  # `fetch` says what is wrong with it


@contextlib.contextmanager
def _writing(part: Path) -> Iterator[None]:
    """Context manager that turns an OSError into a ValueError that says how to resume; deletes nothing."""
    try:
        yield
    except OSError as error:
        remedy = f"it cannot be written ({reason(error)}): make room there and run it again, and it goes on"
        raise refusal("target", part, remedy) from error


def _identity(checkpoint: Checkpoint) -> str:
    """SHA-256, as text, of a checkpoint's config, files' sizes and times, and tensors' names, shapes and dtypes."""
    path = checkpoint.path
    files = (
        sorted(each for pattern in _WEIGHTS for each in path.glob(pattern))
        if path.is_dir()
        else [path]
    )
    stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    tensors = [
        (name, tensor.shape, tensor.dtype.name) for name, tensor in checkpoint.stored.items()
    ]
    told = json.dumps([dict(checkpoint.config), stats, tensors], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def _begin(part: Path, identity: Mapping[str, Any]) -> dict[str, Entry]:
    """Dict of `Entry`s of tensors written earlier; starts folder and journal; ValueError if another conversion's."""
    try:
        (part / TENSORS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(
            "target", part, f"no folder can be made there ({reason(error)}): choose another"
        ) from error
    remedy = "an unfinished conversion of something else: remove it, or choose another target"
    # The manifest is written last: if it exists, only the folder has still to be renamed.
    found = next((part / name for name in (MANIFEST, _JOURNAL) if (part / name).is_file()), None)
    if found is None:
        require(not any((part / TENSORS).iterdir()), "target", part, remedy)
        remove_unfinished(part)
        write_json(part / _JOURNAL, dict(identity))
        return {}
    try:
        said = read_json(found)
    except ValueError as error:  # cut off, or somebody else's
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # unreadable now: `_writing` says how to go on
        said = {}
    require({key: said.get(key) for key in identity} == identity, "target", part, remedy)
    remove_unfinished(part)  # they would come along into the finished folder
    if found.name == MANIFEST:
        return described(part, said.get(TENSORS), WEIGHTS)
    done: dict[str, Entry] = {}
    for line in (part / _DONE).read_text("utf-8").splitlines() if (part / _DONE).is_file() else []:
        # The last line of a run that was stopped may be cut off: its tensor is written again.
        with contextlib.suppress(ValueError):
            done |= described(part, json.loads(line), WEIGHTS)
    return done


def _is_good(part: Path, entry: Entry) -> bool:
    """True if the unfinished folder holds a journal entry's tensor: it can be read whole and its checksum matches."""
    try:
        read_array(part / TENSORS / entry.name, entry)
    except ValueError:
        return False
    return True


def _write(part: Path, name: str, array: np.ndarray) -> Entry:
    """Writes one tensor to its own Orbax folder, replacing an older one, and to the journal; returns its `Entry`."""
    place = part / TENSORS / name
    _remove(place)  # written by a run that ended before it noted it, or changed since
    try:
        write_arrays(place, {name: array})
    except (OSError, ValueError) as error:  # where a disk is full, TensorStore raises either
        for stray in place.parent.glob(f"{name}.orbax-checkpoint-tmp*"):
            _remove(stray)
        raise OSError(reason(error)) from error
    entry = Entry.of(name, array, WEIGHTS)
    place.mkdir(exist_ok=True)  # of an array without elements
    with (part / _DONE).open("a", encoding="utf-8") as file:
        # The leading newline terminates a previous line that was cut off.
        file.write("\n" + json.dumps({name: entry.json()}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return entry


def _remove(path: Path) -> None:
    """Deletes a file, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_beside(part: Path, checkpoint: Checkpoint) -> None:
    """Writes config, tokenizer files and vocabulary beside the weights; deletes tensors that the checkpoint lacks."""
    for stray in (part / TENSORS).iterdir():
        if stray.name not in checkpoint.stored:  # half-written by a run that was stopped
            _remove(stray)
    if checkpoint.path.is_dir():
        beside = {
            each for pattern in _BESIDE for each in checkpoint.path.glob(pattern) if each.is_file()
        }
        for file in beside - {
            each for pattern in _WEIGHTS for each in checkpoint.path.glob(pattern)
        }:
            shutil.copyfile(file, part / file.name)
    # Whole, so that a converted folder is loaded without transformers.
    write_json(part / "config.json", completed(checkpoint.config))
    if isinstance(checkpoint.tokenizer_spec, GgufTokenizer):
        write_json(part / VOCABULARY, dataclasses.asdict(checkpoint.tokenizer_spec))


def _is_float(dtype: np.dtype) -> bool:
    """True if the dtype is floating-point, including bfloat16."""
    return dtype.kind == "f" or dtype.name == "bfloat16"
