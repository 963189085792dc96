"""Keys of a Hugging Face `config.json`: what each family reads, ignores and refuses, and what is left out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jaxkv._errors import refusal, require

LAYER_TYPES = ("sliding_attention", "full_attention")
# Families whose layers with windows have a rotary embedding of their own.
TWO_ROPES = ("gemma3_text", "olmo3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Keys of a family's config; any other key that is not null is refused by name.

    Attributes:
        read: keys that decide something; what transformers' class of the family says of those that are left out.
        optional: keys that decide something where they are given.
        neutral: keys by the values with which they change nothing; other values are refused.
        ignored: keys that change nothing, whatever they hold.
    """

    read: str
    optional: str = ""
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: str = ""


_ALL = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings "
    "tie_word_embeddings bos_token_id eos_token_id rope_theta "
)
_LLAMA = f"{_ALL} intermediate_size num_key_value_heads rms_norm_eps "
_BIASES = "attention_bias mlp_bias "
_COHERE = f"{_ALL} intermediate_size num_key_value_heads layer_norm_eps logit_scale attention_bias "
_WINDOWS = "sliding_window layer_types "
_GEMMA = (
    f"{_LLAMA} {_WINDOWS} attention_bias head_dim attn_logit_softcapping final_logit_softcapping "
    "query_pre_attn_scalar "
)
_TANH = ("gelu_pytorch_tanh",)

FAMILIES = {
    "cohere": Family(read=_COHERE + "use_qk_norm", optional="model_max_length"),
    "cohere2": Family(
        read=_COHERE + _WINDOWS,
        # Of Cohere's own code; transformers reads none of these.
        ignored="layer_switch order_of_interleaved_layers position_embedding_type rotary_pct use_embedding_sharing "
        "use_gated_activation use_parallel_block use_parallel_embedding",
    ),
    "falcon": Family(
        read=_ALL + "num_kv_heads ffn_hidden_size layer_norm_epsilon bias multi_query "
        "new_decoder_architecture parallel_attn",
        optional="num_ln_in_parallel_attn",
        neutral={
            "activation": ("gelu",),
            "alibi": (False,),
            "apply_residual_connection_post_layernorm": (False,),
            "head_dim": (),
        },
    ),
    "gemma": Family(
        read=_LLAMA + "attention_bias head_dim",
        # The first files say "gelu" and mean the GELU by a hyperbolic tangent.
        neutral={"hidden_act": (*_TANH, "gelu"), "hidden_activation": _TANH},
    ),
    "gemma2": Family(
        read=_GEMMA,
        neutral={"hidden_activation": _TANH},
        ignored="hidden_act sliding_window_size",
    ),
    "gemma3_text": Family(
        read=_GEMMA + "rope_local_base_freq", neutral={"hidden_activation": _TANH}
    ),
    "glm4": Family(read=_LLAMA + "attention_bias head_dim partial_rotary_factor"),
    "gpt_oss": Family(
        read=_LLAMA + _WINDOWS + "attention_bias head_dim num_local_experts num_experts_per_tok "
        "rope_type",
        optional="swiglu_limit",
        neutral={"swiglu_alpha": (1.702,)},
        # It stands among the numbers of the rotary embedding, too.
        ignored="initial_context_length",
    ),
    "granite": Family(
        read=_LLAMA + _BIASES + "attention_multiplier embedding_multiplier residual_multiplier "
        "logits_scaling"
    ),
    "llama": Family(read=_LLAMA + _BIASES),
    "mistral": Family(read=_LLAMA + "sliding_window"),
    "mixtral": Family(read=_LLAMA + "sliding_window num_local_experts num_experts_per_tok"),
    "olmo2": Family(read=_LLAMA + "attention_bias"),
    "olmo3": Family(read=_LLAMA + _WINDOWS + "attention_bias"),
    "phi3": Family(
        read=_LLAMA + "sliding_window original_max_position_embeddings",
        ignored="embd_pdrop full_attn_mod interpolate_factor lm_head_bias resid_pdrop",
    ),
    # Its queries, keys and values always carry biases.
    "qwen2": Family(read=_LLAMA + "use_sliding_window", neutral={"attention_bias": (True, False)}),
    "qwen3": Family(read=_LLAMA + "use_sliding_window attention_bias head_dim"),
    "qwen3_moe": Family(
        read=_ALL + "moe_intermediate_size num_key_value_heads rms_norm_eps attention_bias "
        "use_sliding_window num_experts num_experts_per_tok norm_topk_prob",
        neutral={
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            # Of Qwen3-Coder's files; transformers reads none of these.
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
            "use_qk_norm": (True,),
        },
        # The width of dense blocks, of which there are none.
        ignored="intermediate_size",
    ),
    "smollm3": Family(
        read=_LLAMA + _BIASES + "use_sliding_window no_rope_layers",
        optional="no_rope_layer_interval",
    ),
}
# A null that says "none"; what any other means, transformers' class says.
_NONE = (
    "attn_logit_softcapping bos_token_id eos_token_id final_logit_softcapping sliding_window"
).split()
# Of every family, unless its own row says otherwise.
_OPTIONAL = (
    "head_dim layer_types partial_rotary_factor quantization_config rope_parameters rope_scaling sliding_window "
    "sliding_window_pattern use_sliding_window"
).split()
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "use_bidirectional_attention": (False,),
}
# Keys that change nothing about inference with these decoders.
IGNORED = frozenset(
    """_attn_implementation _name_or_path _sliding_window_pattern add_cross_attention architectures attention_dropout
    attn_implementation auto_map bad_words_ids begin_suppress_tokens cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty ff_factor finetuning_task forced_bos_token_id
    forced_eos_token_id hidden_dropout id2label ignore_keys_at_rope_validation initializer_range is_decoder
    is_encoder_decoder is_llama_config label2id length_penalty max_length max_window_layers min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate rope_interleaved
    router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_mrope""".split()
)
# Other names of a family's keys.
_ALIASES = {
    "gpt_oss": {"experts_per_token": "num_experts_per_tok"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
# What families have that many ask for and that are refused.
_LATENTS = "multi-head latent attention, whose cache is one latent row for all heads"
_MISSING = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _LATENTS),
    **dict.fromkeys(("llama4", "llama4_text"), "attention within chunks"),
    "qwen3_next": "linear attention, whose cache has no rows",
}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's config with all keys that its family reads, those that are left out by transformers' class.

    transformers is imported only where a key is left out, which takes seconds.

    Args:
        config: the keys of a `config.json`.

    Returns:
        The keys that are given, by one name each, and those that were left out.

    Raises:
        ValueError: for a model type that is not built, and for a key with what is not built, by name.
    """
    kind = config.get("model_type")
    known = isinstance(kind, str) and kind in FAMILIES
    lacking = _MISSING.get(str(kind))
    why = "" if lacking is None else f"it has {lacking}, not built; "
    require(known, "model_type", kind, f"{why}jaxkv builds {', '.join(sorted(FAMILIES))}")
    names = _ALIASES.get(str(kind), {})
    renamed = {names[key]: config[key] for key in names if key in config}
    config = renamed | {key: value for key, value in config.items() if key not in names}
    given = {key: value for key, value in config.items() if value is not None or key in _NONE}
    _check(given)
    missing = _missing(given)
    return given | (_usual(config, missing) if missing else {})


def rotations(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of the rotary embeddings of layers with windows and of those without, however a config spells them.

    transformers 4 writes `rope_scaling` beside `rope_theta`, 5 `rope_parameters`, later ones by type of layer.

    Args:
        config: keys of a `config.json`.

    Returns:
        Two dictionaries; families with one rotary embedding have it twice.
    """
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        require(isinstance(value, Mapping), key, value, "give an object with rope_type and numbers")
    given, scaling = (dict(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    if config["model_type"] not in TWO_ROPES:
        rope = outer | given | scaling
        return rope, rope
    by_type = [given.pop(key, None) or {} for key in LAYER_TYPES]
    for key, value in zip(LAYER_TYPES, by_type, strict=True):
        told = isinstance(value, Mapping)
        require(told, f"rope_parameters.{key}", value, "give an object with rope_type and numbers")
    # Scaling that is written as if it were that of all layers is that of those without windows.
    theta = (
        {**outer, **given}
        if config["model_type"] == "olmo3"
        else {"rope_theta": config.get("rope_local_base_freq")}
    )
    local = {"rope_theta": theta.get("rope_theta")} | by_type[0]
    return local, outer | given | scaling | by_type[1]


def _check(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a key that is not known, or holds what is not built, by its name."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    allowed = {*_OPTIONAL, *IGNORED, *f"{family.read} {family.optional} {family.ignored}".split()}
    for key, value in config.items():
        values = family.neutral.get(key, None if key in allowed else _NEUTRAL.get(key, ()))
        built = f"give {' or '.join(map(repr, values))}" if values else "not known: leave it out"
        remedy = f"of a {kind} this is not built; {built} if that changes nothing"
        require(values is None or value in values, key, value, remedy)
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    remedy = "quantised weights are not supported: load unquantised ones, a GGUF or gpt-oss' mxfp4"
    # Which tensors of a gpt-oss are blocks, their names say.
    plain = quantised is None or (kind == "gpt_oss" and method == "mxfp4")
    require(plain, "quantization_config", method or quantised, remedy)


def _missing(config: Mapping[str, Any]) -> list[str]:
    """Keys that a family reads and a config leaves out."""
    local, rope = rotations(config)
    read = FAMILIES[config["model_type"]].read
    read += f" {_WINDOWS}" if config.get("use_sliding_window") else ""
    known = config.keys() | rope.keys() & {"rope_theta", "partial_rotary_factor"}
    known |= {"rope_type"} if rope.keys() & {"rope_type", "type"} else set()
    known |= {"rope_local_base_freq"} if local.get("rope_theta") is not None else set()
    return [key for key in read.split() if key not in known]


def _usual(config: Mapping[str, Any], missing: list[str]) -> dict[str, Any]:
    """Values, by key, that transformers' config class of a family gives keys that a config leaves out."""
    usual = _of_transformers(config)
    local, rope = (usual.rope_parameters.get(key, usual.rope_parameters) for key in LAYER_TYPES)
    values = {
        "rope_theta": rope["rope_theta"],
        "rope_local_base_freq": local["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
    }
    found = {
        key: values.get(key, getattr(usual, key, None)) for key in missing if key != "rope_type"
    }
    return found | ({"rope_scaling": rope} if "rope_type" in missing else {})


def _of_transformers(config: Mapping[str, Any]) -> Any:
    """Transformers' config of these keys but for scaling, which is read here; ValueError for what it refuses."""
    apart = ("quantization_config", "rope_parameters", "rope_scaling")
    before = logging.root.manager.disable
    # It says that PyTorch is missing, and more that users of jaxkv cannot mend.
    logging.disable(logging.WARNING)
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(**{key: config[key] for key in config if key not in apart})
    except Exception as error:  # it and huggingface_hub have several classes for what they refuse
        told = f"transformers does not read it: {error}"
        raise refusal("config", config["model_type"], told) from error
    finally:
        logging.disable(before)
