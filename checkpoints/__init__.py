"""Model files without a model: fetching them, and reading them as streams of named numpy arrays."""

from .fetching import cache_dir, fetch
from .gguf_tokenizer import GgufTokenizer
from .named_models import Manifest, WheelSource, manifest, manifests_folder, names, save_filter_layers
from .source import Checkpoint, open_checkpoint

__all__ = [
    "Checkpoint",
    "GgufTokenizer",
    "Manifest",
    "WheelSource",
    "cache_dir",
    "fetch",
    "manifest",
    "manifests_folder",
    "names",
    "open_checkpoint",
    "save_filter_layers",
]
