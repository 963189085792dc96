"""GGUF metadata as keys of a Hugging Face `config.json`, by llama.cpp's name of the architecture."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxkv._errors import require
from jaxkv.checkpoints.gguf_metadata import GgufMetadata, round_to_shortest_decimal
from jaxkv.checkpoints.gguf_names import TABLES
from jaxkv.checkpoints.hub_config import Config
from jaxkv.checkpoints.tensor import StoredTensor

# Architectures with another name in transformers.
_CALLED = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss"}
# Number of layers of the 27B models, whose attention is not scaled by the width of a head. llama.cpp identifies them in
# the same way, because the file does not say.
_WIDER = {"gemma2": 46, "gemma3": 62}


def convert_metadata_to_config(
    meta: GgufMetadata, tensors: Mapping[str, StoredTensor], factors: np.ndarray | None
) -> dict[str, Any]:
    """Return GGUF metadata, tensors and RoPE divisors as a `config.json` dict; ValueError if unsupported.

    Args:
        meta: the metadata.
        tensors: tensors by their Hugging Face names, which contain what the metadata do not.
        factors: divisors of the frequencies of the rotary embedding, or None without any in the file.

    Returns:
        The values by key.

    Raises:
        ValueError: for missing numbers, numbers of another kind, or unsupported models, by key.
    """
    arch = meta.arch
    heads = meta.get_hyperparameter("attention.head_count")
    embed = meta.get_hyperparameter("embedding_length")
    require(
        heads > 0, f"{arch}.attention.head_count", heads, "not positive: convert the model again"
    )
    head_dim = meta.get_hyperparameter("attention.key_length", embed // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = meta.get_hyperparameter(key, head_dim)
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
        "num_hidden_layers": meta.get_hyperparameter("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get_hyperparameter("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # float32 in the file: rounded to the decimal that it was written from.
        "rms_norm_eps": round_to_shortest_decimal(
            meta.get_hyperparameter("attention.layer_norm_rms_epsilon", kind=float)
        ),
        "rope_theta": round_to_shortest_decimal(
            meta.get_hyperparameter("rope.freq_base", 10_000.0, kind=float)
        ),
        "rope_scaling": _read_rope_scaling(meta, factors),
        "max_position_embeddings": meta.get_hyperparameter("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
    }
    config |= _OWN.get(arch, _read_llama_keys)(meta, config)
    ids = meta.get_special_ids()
    # Null without an id in the file: absent keys would get the defaults of transformers' config class.
    config |= {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad")}
    if None not in (ids["eos"], ids["eot"]) and ids["eos"] != ids["eot"]:
        config["eos_token_id"] = [ids["eos"], ids["eot"]]
    return config


def _read_llama_keys(meta: GgufMetadata, config: Config) -> dict[str, Any]:
    """Return config keys for MLP width and sliding window of Llama, Mistral, Qwen2, Qwen3; ValueError for experts."""
    arch = meta.arch
    _require_no_experts(meta)
    window = meta.get_value(f"{arch}.attention.sliding_window", kind=int) or None
    own = {
        "intermediate_size": meta.get_hyperparameter("feed_forward_length"),
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    if window and arch != "llama":  # in all layers, not only above transformers' default of 28
        own["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    return own


def _require_no_experts(meta: GgufMetadata) -> None:
    """Raise ValueError if the metadata of a dense architecture describe a mixture of experts."""
    experts = meta.get_hyperparameter("expert_count", 0)
    remedy = "mixtures of experts of this architecture are not supported in a GGUF: use safetensors"
    require(experts == 0, f"{meta.arch}.expert_count", experts, remedy)


def _read_gemma_keys(meta: GgufMetadata, config: Config) -> dict[str, Any]:
    """Return config keys of Gemma 2 or 3: MLP width, softcaps, attention scale, windows; Gemma 3's local RoPE base."""
    arch = meta.arch
    layers = config["num_hidden_layers"]
    second = meta.arch == "gemma2"
    _require_no_experts(meta)

    def read_softcap(key: str, usual: float) -> float | None:
        """Return a softcap from the metadata, `usual` if the key is absent; None for 0."""
        return round_to_shortest_decimal(meta.get_hyperparameter(key, usual, kind=float)) or None

    window = meta.get_hyperparameter("attention.sliding_window", 4096 if second else 0) or None
    wide = layers == _WIDER[arch]
    own = {
        "intermediate_size": meta.get_hyperparameter("feed_forward_length"),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if wide
        else config["head_dim"],
        "attn_logit_softcapping": read_softcap("attn_logit_softcapping", 50.0 if second else 0.0),
        "final_logit_softcapping": read_softcap("final_logit_softcapping", 30.0 if second else 0.0),
        "sliding_window": window,
        "layer_types": _read_layer_types(
            meta, layers, 2 if second else 6, windows=window is not None
        ),
    }
    if second:
        _require_one_rope_base(meta, config)
    else:
        own["rope_local_base_freq"] = round_to_shortest_decimal(
            meta.get_hyperparameter("rope.freq_base_swa", 10_000.0, kind=float)
        )
    return own


def _read_gpt_oss_keys(meta: GgufMetadata, config: Config) -> dict[str, Any]:
    """Return the config keys of gpt-oss only: experts, sliding-window layers, and YaRN without rounding of its ramp."""
    _require_one_rope_base(meta, config)
    window = meta.get_hyperparameter("attention.sliding_window")
    scaling = config["rope_scaling"]
    # Null would mean the family's default. llama.cpp rounds the ends of YaRN's ramp, which published models do not.
    scaling = {"rope_type": "default"} if scaling is None else scaling
    scaling = scaling | ({"truncate": False} if scaling["rope_type"] == "yarn" else {})
    return {
        "intermediate_size": meta.get_hyperparameter("expert_feed_forward_length"),
        "num_local_experts": meta.get_hyperparameter("expert_count"),
        "num_experts_per_tok": meta.get_hyperparameter("expert_used_count"),
        "rope_scaling": scaling,
        "sliding_window": window,
        "layer_types": _read_layer_types(meta, config["num_hidden_layers"], 2, windows=window > 0),
    }


def _require_one_rope_base(meta: GgufMetadata, config: Config) -> None:
    """Raise ValueError if sliding-window layers have another RoPE base than the other layers."""
    base = round_to_shortest_decimal(
        meta.get_hyperparameter("rope.freq_base_swa", config["rope_theta"], kind=float)
    )
    remedy = f"a separate rotary embedding of sliding windows is not supported: use {config['rope_theta']}"
    require(base == config["rope_theta"], f"{meta.arch}.rope.freq_base_swa", base, remedy)


def _read_layer_types(meta: GgufMetadata, layers: int, usual: int, *, windows: bool) -> list[str]:
    """Return each layer's type, full or sliding attention, by the file's list or period; all full unless `windows`."""
    key = f"{meta.arch}.attention.sliding_window_pattern"
    given = meta.values.get(key)
    if isinstance(given, list):
        remedy = f"not a true or false for each of the {layers} layers: convert the model again"
        require(
            len(given) == layers and all(each in (0, 1) for each in given), key, given[:8], remedy
        )
        mask = [each == 1 for each in given]
    else:
        every = meta.get_value(key, usual, kind=int)
        require(every >= 0, key, every, "not a number of layers: convert the model again")
        mask = [every == 0 or layer % every < every - 1 for layer in range(layers)]
    return [("full_attention", "sliding_attention")[each and windows] for each in mask]


def _read_rope_scaling(meta: GgufMetadata, factors: np.ndarray | None) -> dict[str, Any] | None:
    """Return Hugging Face's `rope_scaling` of the metadata; None for unscaled RoPE; ValueError if unsupported."""
    arch = meta.arch
    kind = meta.get_value(f"{arch}.rope.scaling.type", kind=str)
    # The factor has a new and an old key; without a type it is linear, as in llama.cpp.
    factor = meta.get_value(f"{arch}.rope.scaling.factor", kind=float)
    factor = meta.get_value(f"{arch}.rope.scale_linear", kind=float) if factor is None else factor
    kind = "linear" if kind is None and factor not in (None, 0.0, 1.0) else kind
    if factors is not None and not np.allclose(factors, 1):
        plain = kind in (None, "none")
        require(
            plain,
            f"{arch}.rope.scaling.type",
            kind,
            "scaling in addition to rope_freqs is not supported: use another file",
        )
        theta = round_to_shortest_decimal(
            meta.get_hyperparameter("rope.freq_base", 10_000.0, kind=float)
        )
        return _infer_llama3_scaling(np.asarray(factors, np.float64), theta)
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
    scaling: dict[str, Any] = {"rope_type": kind, "factor": round_to_shortest_decimal(factor)}
    if kind == "yarn":
        original = meta.get_hyperparameter(
            "rope.scaling.original_context_length", meta.get_hyperparameter("context_length")
        )
        scaling["original_max_position_embeddings"] = original
        extra = meta.get_value(f"{arch}.rope.scaling.attn_factor", 1.0, kind=float)
        remedy = "only YaRN's own attention factor is supported: use another file"
        require(extra == 1.0, f"{arch}.rope.scaling.attn_factor", extra, remedy)
        for key in ("beta_fast", "beta_slow"):
            value = meta.get_value(f"{arch}.rope.scaling.yarn_{key}", kind=float)
            if value is not None:
                scaling[key] = round_to_shortest_decimal(value)
    return scaling


def _infer_llama3_scaling(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return the Llama 3 `rope_scaling` that yields the divisors in `rope_freqs`; ValueError if none does."""
    # The file has only the divisor of each frequency. Llama 3.1 to 3.3 share every constant but the factor, which is
    # the largest divisor; divisors that these constants do not reproduce are rejected.
    low = 1.0
    high = 4.0
    original = 8192
    factor = round(float(factors.max()), 4)
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
_OWN: dict[str, Callable[[GgufMetadata, Config], dict[str, Any]]] = {
    "gemma2": _read_gemma_keys,
    "gemma3": _read_gemma_keys,
    "gpt-oss": _read_gpt_oss_keys,
}
