"""Defaults of transformers' config classes: the value that each family gives a key which `config.json` leaves out."""

from typing import Any

_COMMON: dict[str, Any] = {
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_MISTRAL = _COMMON | _LLAMA_IDS | {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
_QWEN = _COMMON | {
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}

_COHERE: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "num_key_value_heads": None,
    "tie_word_embeddings": True,
}
_OLMO = _COMMON | {
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 50_279,
    "max_position_embeddings": 2048,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
}
# Gemma 2 and 3.
_GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": None,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

# By the family's own names of keys. None: no value, or a value computed from other keys. Sizes that are missing here
# (vocabulary, widths, layers, query heads) must be given in `config.json`.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere": _COHERE | {"rope_theta": 500_000.0, "use_qk_norm": False},
    "cohere2": _COHERE
    | {"head_dim": None, "layer_types": None, "rope_theta": 10_000.0, "sliding_window": 4096},
    "falcon": {
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "bos_token_id": 11,
        "eos_token_id": 11,
        "ffn_hidden_size": None,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_kv_heads": None,
        "num_ln_in_parallel_attn": None,
        "parallel_attn": True,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    },
    "gemma": _COMMON
    | {
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
    },
    "gemma2": _GEMMA
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "rope_theta": 10_000.0,
        "use_bidirectional_attention": None,
    },
    "gemma3_text": _GEMMA
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "max_position_embeddings": 131_072,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1e6,
        "use_bidirectional_attention": False,
    },
    "glm4": _COMMON
    | {
        "attention_bias": True,
        "bos_token_id": None,
        "eos_token_id": (151_329, 151_336, 151_338),
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    "gpt_oss": _COMMON
    | {
        "attention_bias": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 64,
        "layer_types": None,
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "granite": _COMMON
    | _LLAMA_IDS
    | {
        "attention_bias": False,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_key_value_heads": None,
        "residual_multiplier": 1.0,
    },
    "llama": _COMMON
    | _LLAMA_IDS
    | {
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "num_key_value_heads": None,
    },
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "mixtral": _MISTRAL
    | {
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
    "olmo2": _OLMO,
    "olmo3": _OLMO | {"layer_types": None, "rope_theta": 500_000.0, "sliding_window": 4096},
    "phi3": _COMMON
    | {
        "bos_token_id": 1,
        "eos_token_id": 32_000,
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "qwen2": _QWEN | {"layer_types": None, "max_window_layers": 28},
    "qwen3": _QWEN
    | {"attention_bias": False, "head_dim": 128, "layer_types": None, "max_window_layers": 28},
    "qwen3_moe": _QWEN
    | {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    "smollm3": _COMMON
    | {
        "attention_bias": False,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "layer_types": None,
        "max_position_embeddings": 32_768,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}
