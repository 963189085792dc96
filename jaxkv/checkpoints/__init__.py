"""Checkpoints without a model: downloads, conversion, and tensors read as NumPy arrays, complete or in parts."""

from jaxkv.checkpoints.converting import convert
from jaxkv.checkpoints.fetching import cache_dir, fetch
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.named_models import (
    FolderSource,
    Manifest,
    WheelSource,
    manifest,
    manifests_folder,
    names,
    save_filter_layers,
)
from jaxkv.checkpoints.source import Checkpoint, open_checkpoint
from jaxkv.checkpoints.tensor import StoredTensor

__all__ = [
    "Checkpoint",
    "FolderSource",
    "GgufTokenizer",
    "Manifest",
    "StoredTensor",
    "WheelSource",
    "cache_dir",
    "convert",
    "fetch",
    "manifest",
    "manifests_folder",
    "names",
    "open_checkpoint",
    "save_filter_layers",
]
