"""Hugging Face's names of GGUF tensors, by llama.cpp's name of the architecture."""

import re
import tomllib
from pathlib import Path

from jaxkv._errors import build_value_error

TABLES = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text("utf-8"))
_SINKS = re.compile(r"blk\.(\d+)\.attn_sinks\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tables of the rotary embedding are configuration, not weights.
_ROPE = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


def is_rope_table(name: str) -> bool:
    """True if a GGUF tensor name is that of a RoPE table (frequencies), which is configuration, not a weight."""
    return _ROPE.fullmatch(name) is not None


def convert_tensor_name(name: str, arch: str) -> str:
    """Convert a llama.cpp tensor name to Hugging Face's; ValueError for tensors of unsupported model parts."""
    if name in TABLES["ends"]:
        return TABLES["ends"][name]
    if arch == "gpt-oss" and (sinks := _SINKS.fullmatch(name)):
        return f"model.layers.{sinks[1]}.self_attn.sinks"
    match = _LAYER.fullmatch(name)
    known = TABLES["attention"] | TABLES["layers"][arch]
    if match is None or match[2] not in known:
        remedy = "this part of a model is not supported: use another model"
        raise build_value_error("tensor", name, remedy)
    return f"model.layers.{match[1]}.{known[match[2]]}.{match[3]}"
