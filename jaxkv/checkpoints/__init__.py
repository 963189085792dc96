"""Checkpoints without a model: downloads, conversion, and tensors read as NumPy arrays, complete or in parts."""

from jaxkv.checkpoints.converting import convert
from jaxkv.checkpoints.fetching import cache_dir, fetch_checkpoint
from jaxkv.checkpoints.gguf_tokenizer import GgufTokenizer
from jaxkv.checkpoints.named_models import (
    FolderSource,
    ModelManifest,
    WheelSource,
    find_manifests_folder,
    get_manifest,
    list_model_names,
    save_filter_layers,
)
from jaxkv.checkpoints.source import Checkpoint, open_checkpoint
from jaxkv.checkpoints.tensor import StoredTensor
from jaxkv.checkpoints.text_part import list_model_types

__all__ = [
    "Checkpoint",
    "FolderSource",
    "GgufTokenizer",
    "ModelManifest",
    "StoredTensor",
    "WheelSource",
    "cache_dir",
    "convert",
    "fetch_checkpoint",
    "get_manifest",
    "find_manifests_folder",
    "list_model_names",
    "list_model_types",
    "open_checkpoint",
    "save_filter_layers",
]
