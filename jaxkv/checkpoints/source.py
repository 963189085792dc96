"""`open_checkpoint`: one view (config, named arrays, tokenizer) of a checkpoint in any format."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints import gguf_file, orbax_files, safetensors_files
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.gpt_oss import convert_expert_tensors
from jaxkv.checkpoints.hub_config import Config
from jaxkv.checkpoints.json_files import read_json
from jaxkv.checkpoints.quantised_weights import dequantise_tensors, parse_weight_format
from jaxkv.checkpoints.tensor import StoredTensor
from jaxkv.checkpoints.text_part import extract_text_config, extract_text_tensors

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@frozen_dataclass
class Checkpoint:
    """Checkpoint on disk in any format: config, tensors by name, tokenizer; weights are read only on access.

    Attributes:
        path: the folder or file.
        config: keys of a Hugging Face `config.json`, into which a GGUF's metadata are translated. For a model that also
            accepts images, config and tensors are those of its text model.
        stored: tensors by their Hugging Face names, in stored order, each read on access: float32 from a GGUF and
            for quantised weights, bfloat16 for MXFP4, else in the stored dtype.
        tokenizer_spec: folder of the tokenizer's files, a GGUF's vocabulary, or None without a tokenizer.
        filter_layers: layers that choose best what the layers above them read, if the files contain them.
        generation: keys of `generation_config.json`; empty without this file.
    """

    path: Path
    config: Config
    stored: Mapping[str, StoredTensor] = dataclasses.field(repr=False)
    tokenizer_spec: Path | GgufTokenizer | None
    filter_layers: tuple[int, ...] | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tensor_names(self) -> frozenset[str]:
        """Hugging Face names of all tensors of the checkpoint, as a frozenset."""
        return frozenset(self.stored)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a Hugging Face folder, a folder written by `convert`, or a GGUF file as a `Checkpoint`; read only metadata.

    Args:
        path: the folder or file; `fetch_checkpoint` finds it for a model's name.

    Returns:
        The checkpoint.

    Raises:
        ValueError: if files are missing, truncated, corrupt, pickled or of an unsupported kind.
    """
    path = Path(path).expanduser()
    require(
        path.exists(),
        "path",
        path,
        "no such file or folder: use checkpoints.fetch to find models by name",
    )
    if path.is_dir():
        return _open_checkpoint_folder(path)
    require(path.is_file(), "path", path, "neither a folder nor a regular file: use one of these")
    with path.open("rb") as file:
        is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"
    require(
        is_gguf,
        "path",
        path,
        "not a checkpoint: use a .gguf file, or the folder with config.json and *.safetensors",
    )
    opened = gguf_file.GgufFile(path)
    return Checkpoint(
        path=path, config=opened.config, stored=opened.tensors, tokenizer_spec=opened.tokenizer
    )


def _open_checkpoint_folder(folder: Path) -> Checkpoint:
    """Open a folder of config and safetensors or Orbax as a `Checkpoint`; add eos ids of `generation_config.json`."""
    converted = orbax_files.open_converted_folder(folder)
    if not (folder / "config.json").is_file():
        ggufs = sorted(each.name for each in folder.glob("*.gguf"))
        other = f"one of its files, {ggufs[:3]}" if ggufs else "a folder with one"
        raise build_value_error("folder", folder, f"no config.json: use {other}")
    config = read_folder_config(folder)
    beside = folder / "generation_config.json"
    generation = read_json(beside) if beside.is_file() else {}
    # Chat models often name their end-of-turn tokens only in this file.
    eos, extra = _as_list(config.get("eos_token_id")), _as_list(generation.get("eos_token_id"))
    if generation and (eos or extra):
        config["eos_token_id"] = eos + [each for each in extra if each not in eos]
    tokenizer = folder if any((folder / name).is_file() for name in _TOKENIZER_FILES) else None
    if converted is None:
        held = safetensors_files.read_folder_headers(folder)
        text = extract_text_config(config)
        held = held if text is config else extract_text_tensors(held)
        form = parse_weight_format(text)
        held = held if form is None else dequantise_tensors(held, form)
        held = convert_expert_tensors(held) if text.get("model_type") == "gpt_oss" else held
        return Checkpoint(
            path=folder,
            config=text,
            stored=held,
            tokenizer_spec=tokenizer,
            generation=generation,
        )
    stored, vocabulary, filters = converted
    return Checkpoint(
        path=folder,
        config=config,
        stored=stored,
        tokenizer_spec=vocabulary or tokenizer,
        filter_layers=filters,
        generation=generation,
    )


def read_folder_config(folder: Path) -> dict[str, Any]:
    """Return a folder's `config.json` as a dict; add `quantization_config` from a ModelOpt file if it has none.

    Args:
        folder: folder of a Hugging Face checkpoint.

    Returns:
        The keys.

    Raises:
        ValueError: if a file is not a JSON object.
    """
    config = read_json(folder / "config.json")
    beside = folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and beside.is_file():
        found = read_json(beside).get("quantization")
        quantised = found if isinstance(found, dict) else {}
        # ModelOpt can quantise only the cache, which concerns an engine, not the weights.
        if quantised.get("quant_algo", "unknown") is not None:
            config["quantization_config"] = {**quantised, "quant_method": "modelopt"}
    return config


def _as_list(value: Any) -> list[Any]:
    """Return a list or tuple as a list, None as an empty list, and any other value as a list of one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
