"""`convert`: writes any checkpoint as an Orbax folder, one tensor at a time."""

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints.fetching import bar, fetch
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.hub_config import completed
from jaxkv.checkpoints.json_files import write_json
from jaxkv.checkpoints.named_models import manifest, names
from jaxkv.checkpoints.orbax_files import (
    MANIFEST,
    TENSORS,
    VOCABULARY,
    WEIGHTS,
    ManifestEntry,
    is_plain,
    whole_folder,
    write_arrays,
    write_manifest,
    writing,
)
from jaxkv.checkpoints.source import Checkpoint, open_checkpoint
from jaxkv.checkpoints.tensor import dtype_of

DTYPES = ("float32", "bfloat16", "float16")
# Files next to the weights: tokenizer, chat template, generation settings.
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    progress: bool = True,
) -> Path:
    """Write a checkpoint of any format as an Orbax folder for `jaxkv.load`; return its path.

    One tensor is in memory at a time. The folder gets its name when it is complete; files of an interrupted conversion
    are removed.

    Args:
        source: a folder in Hugging Face's layout, a `.gguf` file, one of `names()`, a hub id, or an Orbax folder.
        target: new folder to write; the path must not exist.
        dtype: float32, bfloat16 or float16; by default each tensor keeps its own, which is float32 for a GGUF.
        progress: True for a progress bar on stderr, if that is a terminal.

    Returns:
        The folder.

    Raises:
        TypeError: if the source is neither a string nor a path.
        ValueError: if the source cannot be read or is not a supported model, if `target` exists or cannot be written.
    """
    known = dtype is None or dtype in DTYPES
    require(
        known, "dtype", dtype, f"not supported: use one of {', '.join(DTYPES)}, or leave it out"
    )
    folder = Path(target).expanduser()
    with whole_folder(folder, "target") as part:
        checkpoint = open_checkpoint(fetch(source, progress=progress))
        for name in checkpoint.stored:
            remedy = "not valid as the name of a folder: use letters, digits, dots and hyphens"
            require(is_plain(name), "tensor", name, remedy)
        # Complete, so that a converted folder loads without transformers.
        config = completed(checkpoint.config)
        with writing(folder, "target"):
            _write_beside(part, checkpoint)
            write_json(part / "config.json", config)
        entries: dict[str, Any] = {}
        sizes = {
            name: math.prod(each.shape) * each.dtype.itemsize
            for name, each in checkpoint.stored.items()
        }
        with bar(sum(sizes.values()), f"convert to {folder.name}", progress=progress) as shown:
            for name, tensor in checkpoint.stored.items():
                array = tensor.read(())
                if dtype is not None and (
                    array.dtype.kind == "f" or array.dtype.name == "bfloat16"
                ):
                    array = array.astype(dtype_of(dtype), copy=False)
                with writing(folder, "target"):
                    write_arrays(part / TENSORS / name, {name: array})
                    (part / TENSORS / name).mkdir(exist_ok=True)  # for an array without elements
                entries[name] = ManifestEntry.of(name, array, WEIGHTS).json()
                del array  # before the next one is read
                shown.update(sizes[name])
        named = str(source) in names()
        filters = manifest(str(source)).filter_layers if named else checkpoint.filter_layers
        said = {TENSORS: entries, "filter_layers": None if filters is None else list(filters)}
        with writing(folder, "target"):
            write_manifest(part, WEIGHTS, said)
    return folder


def _write_beside(part: Path, checkpoint: Checkpoint) -> None:
    """Write config, tokenizer files and vocabulary next to the weights."""
    (part / TENSORS).mkdir()
    if checkpoint.path.is_dir():
        for file in (each for pattern in _BESIDE for each in checkpoint.path.glob(pattern)):
            if file.is_file() and not file.name.endswith((".safetensors.index.json", MANIFEST)):
                shutil.copyfile(file, part / file.name)
    if isinstance(checkpoint.tokenizer_spec, GgufTokenizer):
        write_json(part / VOCABULARY, dataclasses.asdict(checkpoint.tokenizer_spec))
