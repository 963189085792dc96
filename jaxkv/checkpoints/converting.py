"""`convert`: writes any checkpoint as an Orbax folder, one tensor at a time."""

import dataclasses
import math
import os
import shutil
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints.fetching import fetch_checkpoint, make_progress_bar
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.hub_config import complete_config
from jaxkv.checkpoints.json_files import write_json
from jaxkv.checkpoints.named_models import get_manifest, list_model_names
from jaxkv.checkpoints.orbax_files import (
    MANIFEST,
    TENSORS,
    VOCABULARY,
    WEIGHTS,
    ManifestEntry,
    convert_write_errors,
    create_folder_atomically,
    is_safe_name,
    write_arrays,
    write_manifest,
)
from jaxkv.checkpoints.source import Checkpoint, open_checkpoint
from jaxkv.checkpoints.tensor import parse_dtype_name

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
    """Write a checkpoint of any format as an Orbax folder that `jaxkv.load` reads, in `dtype` if set; return its path.

    One tensor is in memory at a time. The folder gets its name when it is complete; files of an interrupted conversion
    are removed.

    Args:
        source: a folder in Hugging Face's layout, a `.gguf` file, one of `list_model_names()`, a hub id, or an Orbax
            folder.
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
    with create_folder_atomically(folder, "target") as part:
        checkpoint = open_checkpoint(fetch_checkpoint(source, progress=progress))
        for name in checkpoint.stored:
            remedy = "not valid as the name of a folder: use letters, digits, dots and hyphens"
            require(is_safe_name(name), "tensor", name, remedy)
        # Complete, so that a converted folder loads without transformers.
        config = complete_config(checkpoint.config)
        with convert_write_errors(folder, "target"):
            _copy_metadata_files(part, checkpoint)
            write_json(part / "config.json", config)
        entries: dict[str, Any] = {}
        sizes = {
            name: math.prod(each.shape) * each.dtype.itemsize
            for name, each in checkpoint.stored.items()
        }
        with make_progress_bar(
            sum(sizes.values()), f"convert to {folder.name}", progress=progress
        ) as shown:
            for name, tensor in checkpoint.stored.items():
                array = tensor.read(())
                if dtype is not None and (
                    array.dtype.kind == "f" or array.dtype.name == "bfloat16"
                ):
                    array = array.astype(parse_dtype_name(dtype), copy=False)
                with convert_write_errors(folder, "target"):
                    write_arrays(part / TENSORS / name, {name: array})
                    (part / TENSORS / name).mkdir(exist_ok=True)  # for an array without elements
                entries[name] = ManifestEntry.from_array(name, array, WEIGHTS).to_json()
                del array  # before the next one is read
                shown.update(sizes[name])
        named = str(source) in list_model_names()
        filters = get_manifest(str(source)).filter_layers if named else checkpoint.filter_layers
        said = {TENSORS: entries, "filter_layers": None if filters is None else list(filters)}
        with convert_write_errors(folder, "target"):
            write_manifest(part, WEIGHTS, said)
    return folder


def _copy_metadata_files(part: Path, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint's JSON, template and tokenizer files to `part`, write a GGUF's vocabulary; make `tensors/`."""
    (part / TENSORS).mkdir()
    if checkpoint.path.is_dir():
        for file in (each for pattern in _BESIDE for each in checkpoint.path.glob(pattern)):
            if file.is_file() and not file.name.endswith((".safetensors.index.json", MANIFEST)):
                shutil.copyfile(file, part / file.name)
    if isinstance(checkpoint.tokenizer_spec, GgufTokenizer):
        write_json(part / VOCABULARY, dataclasses.asdict(checkpoint.tokenizer_spec))
