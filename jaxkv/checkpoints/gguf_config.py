"""GGUF metadata as keys of a Hugging Face `config.json`, by llama.cpp's name of the architecture."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv.checkpoints.gguf_metadata import Metadata, decimal
from jaxkv.checkpoints.gguf_names import TABLES
from jaxkv.checkpoints.hub_config import Config
from jaxkv.checkpoints.tensor import StoredTensor

# Architectures with another name in transformers.
_CALLED = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss"}
# Number of layers of the 27B models, whose attention is not scaled by the width of a head. llama.cpp identifies them in
# the same way, because the file does not say.
_WIDER = {"gemma2": 46, "gemma3": 62}


def read_config(
    meta: Metadata, tensors: Mapping[str, StoredTensor], factors: np.ndarray | None
) -> dict[str, Any]:
    """Convert metadata to the keys of a Hugging Face `config.json`; ValueError if unsupported.

    Args:
        meta: the metadata.
        tensors: tensors by their Hugging Face names, which contain what the metadata do not.
        factors: divisors of the frequencies of the rotary embedding, or None without any in the file.

    Returns:
        The values by key.

    Raises:
        ValueError: for missing numbers, numbers of another kind, or unsupported models, by key.
    """
    arch, heads, embed = (
        meta.arch,
        meta.hyper("attention.head_count"),
        meta.hyper("embedding_length"),
    )
    require(
        heads > 0, f"{arch}.attention.head_count", heads, "not positive: convert the model again"
    )
    head_dim = meta.hyper("attention.key_length", embed // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = meta.hyper(key, head_dim)
        remedy = f"not supported: use a model with head_dim={head_dim} there"
        require(value == head_dim, f"{arch}.{key}", value, remedy)
    for key, neutral in TABLES["neutral"].items():
        value = meta.values.get(f"{arch}.{key}", neutral[0])
        require(
            value in neutral,
            f"{arch}.{key}",
            value,
            f"not supported: use a model where it is {neutral[0]}, or absent",
        )
    given = "model.embed_tokens.weight" in tensors
    require(given, "tensor", "token_embd.weight", "missing in the file: download it again")
    config = {
        "model_type": _CALLED.get(arch, arch),
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": embed,
        "num_hidden_layers": meta.hyper("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.hyper("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # float32 in the file: rounded to the decimal that it was written from.
        "rms_norm_eps": decimal(meta.hyper("attention.layer_norm_rms_epsilon", kind=float)),
        "rope_theta": decimal(meta.hyper("rope.freq_base", 10_000.0, kind=float)),
        "rope_scaling": _rope_scaling(meta, factors),
        "max_position_embeddings": meta.hyper("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
    }
    config |= _OWN.get(arch, _llama)(meta, config)
    ids = meta.ids()
    # Null without an id in the file: absent keys would get the defaults of transformers' config class.
    config |= {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")}
    if None not in (ids["eos"], ids["eot"]) and ids["eos"] != ids["eot"]:
        config["eos_token_id"] = [ids["eos"], ids["eot"]]
    return config


def _llama(meta: Metadata, config: Config) -> dict[str, Any]:
    """Return the config keys of a Llama, Mistral, Qwen2 or Qwen3 in addition to those of all architectures."""
    arch = meta.arch
    _refuse_experts(meta)
    window = meta.get(f"{arch}.attention.sliding_window", kind=int) or None
    own = {
        "intermediate_size": meta.hyper("feed_forward_length"),
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    if window and arch != "llama":  # in all layers, not only above transformers' default of 28
        own["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    return own


def _refuse_experts(meta: Metadata) -> None:
    """Raise ValueError for a mixture of experts of an architecture that supports none here."""
    experts = meta.hyper("expert_count", 0)
    remedy = "mixtures of experts of this architecture are not supported in a GGUF: use safetensors"
    require(experts == 0, f"{meta.arch}.expert_count", experts, remedy)


def _gemma(meta: Metadata, config: Config) -> dict[str, Any]:
    """Return the config keys of a Gemma 2 or 3: caps, scale of attention, and sliding-window layers."""
    arch, layers, second = meta.arch, config["num_hidden_layers"], meta.arch == "gemma2"
    _refuse_experts(meta)

    def cap(key: str, usual: float) -> float | None:
        """Return the cap of a key's logits; None for 0."""
        return decimal(meta.hyper(key, usual, kind=float)) or None

    window = meta.hyper("attention.sliding_window", 4096 if second else 0) or None
    wide = layers == _WIDER[arch]
    own = {
        "intermediate_size": meta.hyper("feed_forward_length"),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if wide
        else config["head_dim"],
        "attn_logit_softcapping": cap("attn_logit_softcapping", 50.0 if second else 0.0),
        "final_logit_softcapping": cap("final_logit_softcapping", 30.0 if second else 0.0),
        "sliding_window": window,
        "layer_types": _layer_types(meta, layers, 2 if second else 6, windows=window is not None),
    }
    if second:
        _refuse_two_bases(meta, config)
    else:
        own["rope_local_base_freq"] = decimal(
            meta.hyper("rope.freq_base_swa", 10_000.0, kind=float)
        )
    return own


def _gpt_oss(meta: Metadata, config: Config) -> dict[str, Any]:
    """Return the config keys of a gpt-oss: experts, sliding-window layers, and YaRN as in the published config."""
    _refuse_two_bases(meta, config)
    window, scaling = meta.hyper("attention.sliding_window"), config["rope_scaling"]
    # Null would mean the family's default. llama.cpp rounds the ends of YaRN's ramp, which published models do not.
    scaling = {"rope_type": "default"} if scaling is None else scaling
    scaling = scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {})
    return {
        "intermediate_size": meta.hyper("expert_feed_forward_length"),
        "num_local_experts": meta.hyper("expert_count"),
        "num_experts_per_tok": meta.hyper("expert_used_count"),
        "rope_scaling": scaling,
        "sliding_window": window,
        "layer_types": _layer_types(meta, config["num_hidden_layers"], 2, windows=window > 0),
    }


def _refuse_two_bases(meta: Metadata, config: Config) -> None:
    """Raise ValueError if sliding-window layers have another base of their rotary embedding than other layers."""
    base = decimal(meta.hyper("rope.freq_base_swa", config["rope_theta"], kind=float))
    remedy = f"a separate rotary embedding of sliding windows is not supported: use {config['rope_theta']}"
    require(base == config["rope_theta"], f"{meta.arch}.rope.freq_base_swa", base, remedy)


def _layer_types(meta: Metadata, layers: int, usual: int, *, windows: bool) -> list[str]:
    """Return each layer's type: every `usual`-th layer has no sliding window, unless the file lists the layers."""
    key = f"{meta.arch}.attention.sliding_window_pattern"
    given = meta.values.get(key)
    if isinstance(given, list):
        remedy = f"not a true or false for each of the {layers} layers: convert the model again"
        require(
            len(given) == layers and all(each in (0, 1) for each in given), key, given[:8], remedy
        )
        mask = [each == 1 for each in given]
    else:
        every = meta.get(key, usual, kind=int)
        require(every >= 0, key, every, "not a number of layers: convert the model again")
        mask = [every == 0 or layer % every < every - 1 for layer in range(layers)]
    return [("full_attention", "sliding_attention")[each and windows] for each in mask]


def _rope_scaling(meta: Metadata, factors: np.ndarray | None) -> dict[str, Any] | None:
    """Return Hugging Face's `rope_scaling` from the metadata; None for plain RoPE; ValueError if unsupported."""
    arch = meta.arch
    kind = meta.get(f"{arch}.rope.scaling.type", kind=str)
    # The factor has a new and an old key; without a type it is linear, as in llama.cpp.
    factor = meta.get(f"{arch}.rope.scaling.factor", kind=float)
    factor = meta.get(f"{arch}.rope.scale_linear", kind=float) if factor is None else factor
    kind = "linear" if kind is None and factor not in (None, 0.0, 1.0) else kind
    if factors is not None and not np.allclose(factors, 1):
        plain = kind in (None, "none")
        require(
            plain,
            f"{arch}.rope.scaling.type",
            kind,
            "scaling in addition to rope_freqs is not supported: use another file",
        )
        theta = decimal(meta.hyper("rope.freq_base", 10_000.0, kind=float))
        return _llama3_scaling(np.asarray(factors, np.float64), theta)
    if kind in (None, "none"):
        return None
    require(
        kind in ("linear", "yarn"),
        f"{arch}.rope.scaling.type",
        kind,
        "not supported: use linear, yarn or llama3",
    )
    remedy = "not a number: convert the model again"
    require(factor is not None, f"{arch}.rope.scaling.factor", factor, remedy)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": decimal(factor)}
    if kind == "yarn":
        original = meta.hyper("rope.scaling.original_context_length", meta.hyper("context_length"))
        scaling["original_max_position_embeddings"] = original
        extra = meta.get(f"{arch}.rope.scaling.attn_factor", 1.0, kind=float)
        remedy = "only YaRN's own attention factor is supported: use another file"
        require(extra == 1.0, f"{arch}.rope.scaling.attn_factor", extra, remedy)
        for key in ("beta_fast", "beta_slow"):
            value = meta.get(f"{arch}.rope.scaling.yarn_{key}", kind=float)
            if value is not None:
                scaling[key] = decimal(value)
    return scaling


def _llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the `rope_scaling` of Llama 3 with the divisors in `rope_freqs`; ValueError if none has them."""
    # The file has only the divisor of each frequency. Llama 3.1 to 3.3 share every constant but the factor, which is
    # the largest divisor; divisors that these constants do not reproduce are rejected.
    low, high, original, factor = 1.0, 4.0, 8192, round(float(factors.max()), 4)
    wavelengths = 2 * math.pi * theta ** (np.arange(factors.size) / factors.size)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    close = np.allclose(factors, expected, rtol=1e-3)
    require(
        close,
        "rope_freqs.weight",
        f"factor {factor}",
        "not Llama 3's scaling (low 1, high 4, original 8192): use another file",
    )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# Readers of keys that differ by architecture.
_OWN: dict[str, Callable[[Metadata, Config], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gpt-oss": _gpt_oss,
}
