"""The tiny model as a checkpoint in Hugging Face's layout, and the manifest that says what its files must be."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

import jaxkv
from benchmarks.tiny.lessons import LESSONS
from benchmarks.tiny.model import Shape, Weights
from benchmarks.tiny.words import BEGIN, END, UNKNOWN
from jaxkv.analysis import find_filter_layers

ROOT = Path(__file__).parent.parent.parent
NAME = "tiny-retrieval"
FOLDER = ROOT / "checkpoints" / "data" / NAME
MANIFEST = ROOT / "checkpoints" / "manifests" / f"{NAME}.json"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def export(weights: Weights, shape: Shape, tokens: Path, folder: Path = FOLDER) -> None:
    """Writes the checkpoint.

    Args:
        weights: by their names in a checkpoint.
        shape: what the network is made of.
        tokens: the tokenizer's file.
        folder: where to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokens))
    begin, end = (tokenizer.token_to_id(each) for each in (BEGIN, END))
    _write(folder / "config.json", shape.config(bos=begin, eos=end))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.positions}
    specials = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    _write(
        folder / "tokenizer_config.json",
        {**settings, **specials, "add_bos_token": True, "clean_up_tokenization_spaces": False},
    )
    shutil.copyfile(tokens, folder / "tokenizer.json")
    # Half the bytes; what is rounded away changes no answer.
    narrow = {name: np.asarray(value).astype(np.float16) for name, value in weights.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})


def write_manifest(filters: tuple[int, ...] | None) -> None:
    """Writes sizes and hashes of the checkpoint's files, as the package expects them."""
    files = {}
    for name in FILES:
        held = (FOLDER / name).read_bytes()
        files[name] = {"sha256": hashlib.sha256(held).hexdigest(), "bytes": len(held)}
    record = {
        "name": NAME,
        "source": {"kind": "folder", "folder": NAME, "files": files},
        "license": "Apache-2.0",
        "notes": (
            "A Llama of under a million parameters, trained here by benchmarks/train_tiny.py to find what it is asked "
            "for in up to 2,048 tokens; it knows some 1,000 words, and no chat template."
        ),
    }
    if filters is not None:
        record["filter_layers"] = list(filters)
    _write(MANIFEST, record)


def _write(path: Path, record: dict) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


def find_filters(count: int = 24, headroom: int = 400) -> tuple[int, ...]:
    """The layer that chooses best what those above it read (OmniKV), over lessons of every kind.

    Args:
        count: texts.
        headroom: tokens of each, about.

    Returns:
        One layer: of four there is no more to choose.
    """
    params, rng = jaxkv.load(FOLDER, progress=False), np.random.default_rng(0)
    assert params.text is not None
    made, texts = ("needles", "variables", "two_stage"), []
    for number in range(count):
        text, asked = LESSONS[made[number % len(made)]](rng, headroom)
        texts.append(params.text.encode(text + next(asked)[0], bos=True))
    return find_filter_layers(params, texts, m=1, most_whole=2).filters
