"""Configs of Hugging Face, family by family: their keys as fields of `ModelConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.models.values import READERS, Experts, LinearRope, Llama3Rope, Rope, YarnRope, flag, real, whole

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

# What each family is whatever its config says.
_FAMILIES: dict[str, dict[str, bool]] = {
    "falcon": {"layer_norm": True, "gated": False},
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
}
# Keys that a family has by other names than Llama, and what it means where it leaves one out.
_CALLED = {
    "falcon": {
        "attention_bias": "bias",
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
        "mlp_bias": "bias",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    }
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "falcon": {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
}


_ROPES = {"default": Rope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}


class _Keys:
    """A config's keys by the names that Llama has for them, and which of them have been asked for."""

    def __init__(self, raw: Mapping[str, Any], family: str):
        self.raw, self.family, self.taken = raw, family, {"model_type"}

    def called(self, key: str) -> str:
        """What the family calls it."""
        return _CALLED.get(self.family, {}).get(key, key)

    def take(self, key: str, default: Any = None) -> Any:
        """A key's value, or what the family, and else this caller, takes it for where it is left out."""
        self.taken.add(self.called(key))
        for value in (self.raw.get(self.called(key)), _LEFT_OUT.get(self.family, {}).get(key)):
            if value is not None:
                return value
        return default

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.take(key, default)
        require(value is not None, self.called(key), value, "the model's config must give it")
        return whole(self.called(key), value)

    def flag(self, key: str, default: bool = False) -> bool:
        return flag(self.called(key), self.take(key, default))


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a `config.json`; every key is used, known to be harmless, or refused.

    Args:
        raw: the parsed JSON.

    Returns:
        The fields of `ModelConfig`.

    Raises:
        ValueError: for what jaxkv does not build, by name.
    """
    family = raw.get("model_type")
    known = isinstance(family, str) and family in _FAMILIES
    require(known, "model_type", family, f"jaxkv builds {', '.join(sorted(_FAMILIES))}")
    keys = _Keys(raw, str(family))
    _refuse_unbuilt(keys)
    embed, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    max_positions = keys.whole("max_position_embeddings", 2048)
    attention_bias = keys.flag("attention_bias") and family != "qwen2"
    fields = {
        "vocab": keys.whole("vocab_size"),
        "layers": keys.whole("num_hidden_layers"),
        "embed": embed,
        "hidden": keys.whole("intermediate_size", 4 * embed if family == "falcon" else None),
        "heads": heads,
        "kv_heads": keys.whole("num_key_value_heads", heads),
        "head_dim": keys.whole("head_dim", embed // heads),
        "norm_eps": real(keys.called("rms_norm_eps"), keys.take("rms_norm_eps", 1e-6)),
        "rope": _read_rope(keys.take, max_positions),
        "max_positions": max_positions,
        "tied": keys.flag("tie_word_embeddings"),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": keys.flag("mlp_bias"),
        "bos": next(iter(_ids("bos_token_id", keys.take("bos_token_id"))), None),
        "eos": _ids("eos_token_id", keys.take("eos_token_id")),
    }
    fields |= _FAMILIES[keys.family] | _OWN.get(keys.family, lambda keys, fields: {})(keys, fields)
    unknown = sorted(set(raw) - keys.taken - _IGNORED)
    require(not unknown, "config", unknown, "these keys are not supported; remove them only if they change nothing")
    return fields


def _refuse_unbuilt(keys: _Keys) -> None:
    """Refuses what no family's decoder does here."""
    activation, falcon = keys.take("hidden_act", "silu"), keys.family == "falcon"
    known = activation in (("gelu",) if falcon else ("silu", "swish"))
    remedy = "jaxkv builds Falcon with gelu only" if falcon else "jaxkv builds silu (SwiGLU) only"
    require(known, keys.called("hidden_act"), activation, remedy)
    window = keys.take("sliding_window")
    # Qwen's configs carry a window that `use_sliding_window` switches off.
    used = keys.take("use_sliding_window", keys.family in ("mistral", "mixtral")) and window is not None
    require(not used, "sliding_window", window, "sliding windows are not built; use a full-attention model")
    kinds = keys.take("layer_types", [])
    full = isinstance(kinds, (list, tuple)) and all(each == "full_attention" for each in kinds)
    require(full, "layer_types", kinds, "only full_attention layers are built")
    quantization = keys.take("quantization_config")
    require(quantization is None, "quantization_config", quantization, "load the unquantised weights, or a GGUF")


def _falcon(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """7B has one kv head and one norm a block, 40B groups of heads and two norms."""
    alibi, post = keys.flag("alibi"), keys.flag("apply_residual_connection_post_layernorm")
    require(not alibi, "alibi", alibi, "attention biased by distance is not built; use a Falcon with rotary embeddings")
    require(not post, "apply_residual_connection_post_layernorm", post, "only sums of what was not normed are built")
    heads, kv_heads = fields["heads"], fields["kv_heads"]
    groups, one = keys.flag("new_decoder_architecture"), keys.flag("multi_query", True)
    parallel = keys.flag("parallel_attn", True)
    require(parallel or not groups, "parallel_attn", parallel, "blocks of new_decoder_architecture=true are: give true")
    norms = keys.take("num_ln_in_parallel_attn", 2 if groups else 1)
    remedy = "give 1, or 2 with new_decoder_architecture=true, or leave it out"
    require(norms == 1 or (norms == 2 and groups), "num_ln_in_parallel_attn", norms, remedy)
    remedy = f"heads that share keys in groups have new_decoder_architecture=true, all others their own: give {heads}"
    require(groups or one or kv_heads == heads, "num_kv_heads", kv_heads, remedy)
    shared = parallel and norms == 1
    return {"kv_heads": 1 if one and not groups else kv_heads, "parallel": parallel, "shared_norm": shared}


def _mixtral(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"experts": Experts(count=keys.whole("num_local_experts", 8), chosen=keys.whole("num_experts_per_tok", 2))}


def _qwen3_moe(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = keys.take("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
    remedy = "blocks that differ from layer to layer are not built; use a model whose blocks all are mixtures"
    require(step == 1, "decoder_sparse_step", step, remedy)
    require(dense == [], "mlp_only_layers", dense, remedy)
    # transformers 5 writes the name that Mixtral has for it. `intermediate_size` would be a dense block's.
    name = "num_local_experts" if keys.raw.get("num_experts") is None else "num_experts"
    count, chosen = keys.whole(name), keys.whole("num_experts_per_tok")
    experts = Experts(count=count, chosen=chosen, normalised=keys.flag("norm_topk_prob"))
    return {"hidden": keys.whole("moe_intermediate_size"), "experts": experts}


# What a family's config says beyond the keys that all have.
_OWN: dict[str, Callable[[_Keys, Mapping[str, Any]], dict[str, Any]]] = {
    "falcon": _falcon,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}


def _ids(key: str, value: Any) -> tuple[int, ...]:
    """One id or several; -1 stands for none."""
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(whole(key, each, least=0) for each in values if each != -1)


def _read_rope(take: Any, max_positions: int) -> Rope:
    # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling; both may be there.
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = take(key, {})
        require(isinstance(given, Mapping), key, given, "give an object with rope_type and its numbers")
        merged |= given
    # Both are asked for, so that neither counts as unknown.
    outer = take("rope_theta", 10_000.0), take("partial_rotary_factor", 1.0)
    inner = merged.pop("rope_theta", None), merged.pop("partial_rotary_factor", None)
    theta, partial = (ours if theirs is None else theirs for ours, theirs in zip(outer, inner, strict=True))
    theta = real("rope_theta", theta)
    require(partial == 1.0, "partial_rotary_factor", partial, "only fully rotated heads are built")
    kind = merged.pop("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    known = isinstance(kind, str) and kind in _ROPES
    require(known, "rope_type", kind, "jaxkv builds default, linear, llama3 and yarn")
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            require(not merged.get(key), f"rope_scaling.{key}", merged.get(key), "DeepSeek's YaRN variant is not built")
            merged.pop(key, None)
    values: dict[str, Any] = {"theta": theta}
    for field in dataclasses.fields(_ROPES[kind]):
        if field.name == "theta":
            continue
        original = field.name == "original_max_position"
        key = "original_max_position_embeddings" if original else field.name
        default = max_positions if original and kind == "yarn" else field.default
        given = merged.pop(key, None)
        needed = given is None and default is dataclasses.MISSING
        require(not needed, f"rope_scaling.{key}", given, f"rope type {kind!r} needs it")
        values[field.name] = default if given is None else READERS[field.type](f"rope_scaling.{key}", given)
    require(not merged, "rope_scaling", sorted(merged), f"these keys are not supported for rope type {kind!r}")
    return _ROPES[kind](**values)
