"""Hugging Face's names of a GGUF's tensors, by llama.cpp's name of the model's architecture."""

from __future__ import annotations

import re

from jaxkv._errors import require

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _DENSE | {"ffn_norm": "post_attention_layernorm"}
_GEMMA = (
    _ATTENTION
    | _DENSE
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_GPT_OSS = _ATTENTION | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# What each architecture calls the tensors of a layer. Mistral models are written as "llama".
IN_LAYER = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gpt-oss": _GPT_OSS,
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
_SINKS = re.compile(r"blk\.(\d+)\.attn_sinks\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tables of the rotary embedding: configuration, not weights.
_TABLES = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


def is_table(name: str) -> bool:
    """True if a tensor of this name holds rotary embedding tables, which are not weights."""
    return _TABLES.fullmatch(name) is not None


def hf_name(name: str, arch: str) -> str:
    """Hugging Face name for a llama.cpp tensor name; ValueError for tensors of unsupported model parts."""
    if name in _TOP:
        return _TOP[name]
    sinks = _SINKS.fullmatch(name) if arch == "gpt-oss" else None
    if sinks is not None:
        return f"model.layers.{sinks[1]}.self_attn.sinks"
    match = _LAYER.fullmatch(name)
    known = match is not None and match[2] in IN_LAYER[arch]
    require(
        known,
        "tensor",
        name,
        "jaxkv builds no part that uses it; the model is of an unsupported kind",
    )
    assert match is not None
    return f"model.layers.{match[1]}.{IN_LAYER[arch][match[2]]}.{match[3]}"
