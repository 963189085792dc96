"""Reads a Hugging Face `config.json`, family by family, into the fields of `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv._checks import whole
from jaxkv._errors import require
from jaxkv.models.hub_families import ACTIVATIONS, FAMILIES, OWN, TWO_ROPES
from jaxkv.models.hub_reader import Keys
from jaxkv.models.hub_rope import read_rope
from jaxkv.models.hub_windows import read_windows, with_windows
from jaxkv.models.values import Rope, positive

# Keys of a Hugging Face config that change nothing about inference with these decoders.
_IGNORED = frozenset(
    """_attn_implementation _name_or_path add_cross_attention architectures attention_dropout attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty ff_factor finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout
    id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length
    max_window_layers min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    rope_interleaved router_aux_loss_coef router_jitter_noise sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    use_mrope""".split()
)

# Keys that change nothing in one family but something in others.
_IGNORED_BY = {
    # Of Cohere's own code; transformers reads none of these.
    "cohere2": {
        "_sliding_window_pattern",
        "cache_implementation",
        "layer_switch",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "rotary_pct",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
    },
    # Beside the keys that transformers reads, hidden_activation and sliding_window.
    "gemma2": {
        "_sliding_window_pattern",
        "cache_implementation",
        "hidden_act",
        "sliding_window_size",
    },
    "gemma3_text": {"_sliding_window_pattern", "cache_implementation"},
    # Written by transformers 5 for every model with rotary embeddings by parts.
    "glm4": {"ignore_keys_at_rope_validation"},
    # The context before scaling stands among the numbers of the rotary embedding, too.
    "gpt_oss": {"initial_context_length"},
    # Of Phi-4-mini's own code; transformers reads none of the last three.
    "phi3": {
        "embd_pdrop",
        "ignore_keys_at_rope_validation",
        "resid_pdrop",
        "full_attn_mod",
        "interpolate_factor",
        "lm_head_bias",
    },
    "qwen3_moe": {"intermediate_size"},
}


# What families have that many ask for and that are refused.
_LATENTS = "multi-head latent attention, whose cache is one latent row for all heads"
_MISSING = {
    "deepseek_v2": _LATENTS,
    "deepseek_v3": _LATENTS,
    "llama4": "attention within chunks",
    "llama4_text": "attention within chunks",
    "qwen3_next": "linear attention, whose cache has no rows",
}


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields by name from a parsed `config.json`; ValueError for unsupported keys and values.

    Keys that are left out have the value in `DEFAULTS`.

    Raises:
        ValueError: for what jaxkv does not build, by name.
    """
    family = raw.get("model_type")
    known = isinstance(family, str) and family in FAMILIES
    missing = _MISSING.get(str(family))
    why = "" if missing is None else f"it has {missing}, not built; "
    require(known, "model_type", family, f"{why}jaxkv builds {', '.join(sorted(FAMILIES))}")
    keys = Keys(raw, str(family))
    embed, heads, layers = (
        keys.whole(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    max_positions = keys.whole("max_position_embeddings")
    if family == "cohere" and keys.raw.get("model_max_length") is not None:
        # Command R's files give its context by this key.
        max_positions = max(max_positions, keys.whole("model_max_length"))
    _refuse_unbuilt(keys)
    windows, sliding = read_windows(keys, layers, max_positions)
    kv_heads = keys.whole("num_key_value_heads", null=heads)
    remedy = f"config.json leaves it out, which means {kv_heads}, and num_attention_heads={heads} is no multiple of it"
    fits = heads % kv_heads == 0 or keys.given("num_key_value_heads")
    require(
        fits,
        keys.called("num_key_value_heads"),
        kv_heads,
        f"{remedy}: write the number into config.json",
    )
    attention_bias = _bias(keys, "attention_bias")
    fields = {
        "vocab": keys.whole("vocab_size"),
        "layers": layers,
        "embed": embed,
        "hidden": keys.whole("intermediate_size", null=4 * embed if family == "falcon" else None),
        "heads": heads,
        "kv_heads": kv_heads,
        # Null is refused for Qwen3: it could mean 128 or hidden_size / num_attention_heads.
        "head_dim": keys.whole("head_dim", null=None if family == "qwen3" else embed // heads),
        "norm_eps": positive(keys.called("rms_norm_eps"), keys.take("rms_norm_eps")),
        "rope": Rope() if family in TWO_ROPES else read_rope(keys, max_positions),
        "max_positions": max_positions,
        "tied": keys.flag("tie_word_embeddings"),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": _bias(keys, "mlp_bias"),
        "bos": next(iter(_ids("bos_token_id", keys.take("bos_token_id"))), None),
        "eos": _ids("eos_token_id", keys.take("eos_token_id")),
    }
    fields |= FAMILIES[keys.family] | OWN.get(keys.family, lambda keys, fields, sliding: {})(
        keys, fields, sliding
    )
    fields |= with_windows(fields, windows) if any(windows) else {}
    unknown = sorted(set(raw) - keys.taken - _IGNORED - _IGNORED_BY.get(keys.family, set()))
    require(
        not unknown,
        "config",
        unknown,
        "these keys are not supported; remove them only if they change nothing",
    )
    return fields


def _refuse_unbuilt(keys: Keys) -> None:
    """Raises ValueError for quantised weights, and for an activation that jaxkv does not build for the family."""
    activation, known = keys.take("hidden_act"), ACTIVATIONS.get(keys.family, ("silu", "swish"))
    remedy = f"jaxkv builds {keys.family} with {known[0]} only"
    require(activation in known, keys.called("hidden_act"), activation, remedy)
    given = keys.take("quantization_config")
    method = _method(given)
    remedy = "load the unquantised weights, or a GGUF"
    if keys.family == "gpt_oss":
        remedy = "load the published weights (quant_method mxfp4), or unquantised ones"
        # Which tensors are blocks, their names say.
        method = None if isinstance(given, Mapping) and method == "mxfp4" else method
    require(
        method is None,
        "quantization_config",
        method,
        f"quantised weights are not supported: {remedy}",
    )


def _method(given: Any) -> Any:
    """Method, algorithm and format that a `quantization_config` names, as one text; itself if it names none."""
    if not isinstance(given, Mapping):
        return given
    # ModelOpt writes them one level below in its own file, llm-compressor beside each other.
    below = given.get("quantization")
    keys = {**given, **below} if isinstance(below, Mapping) else given
    named = [str(keys[key]) for key in ("quant_method", "quant_algo", "format") if keys.get(key)]
    return ", ".join(named) or given


def _bias(keys: Keys, key: str) -> bool:
    """Bool of a bias switch, False for Qwen2's attention; ValueError if the family has no such bias."""
    value = keys.flag(key)
    # Qwen2's queries, keys and values always carry biases.
    fixed = keys.family == "qwen2" and key == "attention_bias"
    remedy = f"no {keys.family} has such biases in transformers: give false, or leave it out"
    require(not value or fixed or keys.has(key), key, value, remedy)
    return value and not fixed


def _ids(key: str, value: Any) -> tuple[int, ...]:
    """Token ids of a key that holds one id, several, or null, as a tuple without -1; ValueError for others."""
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(whole(key, each, least=0) for each in values if each != -1)
