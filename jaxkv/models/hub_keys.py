"""Reads a Hugging Face `config.json`, family by family, into the fields of `ModelConfig`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv._checks import flag, real, whole
from jaxkv._errors import require
from jaxkv.models.hub_defaults import DEFAULTS
from jaxkv.models.values import READERS, Experts, LayerSpec, LinearRope, Llama3Rope, NoRope, Rope, YarnRope, positive

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

# Switches of each family that no key of its config changes.
_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"interleaved": True, "layer_norm": True, "norm_bias": False, "parallel": True, "shared_norm": True},
    "falcon": {"layer_norm": True, "gated": False},
    "gemma": {"norm_offset": True, "tanh_gelu": True},
    "glm4": {"interleaved": True, "norms": "both", "out_bias": False},
    "granite": {},
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "olmo2": {"norms": "after", "qk_norm_wide": True},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "smollm3": {},
}
# Names of a family's only activation, for those whose MLP is no SwiGLU. A GELU is Gemma's by a hyperbolic tangent.
_ACTIVATIONS = {"falcon": ("gelu",), "gemma": ("gelu_pytorch_tanh",)}
# A family's own names of keys, by Llama's names.
_CALLED = {
    "cohere": {"rms_norm_eps": "layer_norm_eps"},
    "falcon": {
        "attention_bias": "bias",
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
        "mlp_bias": "bias",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    # `intermediate_size` is the width of dense blocks, of which there are none.
    "qwen3_moe": {"intermediate_size": "moe_intermediate_size"},
}
# Keys that change nothing in one family but something in others.
_IGNORED_BY = {
    # The original context is that of longrope, which is refused.
    # The length that the tokenizer allows.
    "cohere": {"model_max_length"},
    # Written by transformers 5 for every model with rotary embeddings by parts.
    "glm4": {"ignore_keys_at_rope_validation"},
    "phi3": {"embd_pdrop", "ignore_keys_at_rope_validation", "original_max_position_embeddings", "resid_pdrop"},
    "qwen3_moe": {"intermediate_size"},
}

_ROPES = {"default": Rope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}


class _Keys:
    """Reader of a config's values by Llama's key names that records the keys read (`taken`)."""

    def __init__(self, raw: Mapping[str, Any], family: str):
        self.raw, self.family, self.taken = raw, family, {"model_type"}

    def called(self, key: str) -> str:
        """The family's own name, as text, for a config key given by Llama's name."""
        return _CALLED.get(self.family, {}).get(key, key)

    def has(self, key: str) -> bool:
        """True if transformers' config class of the family has a default for the key."""
        return self.called(key) in DEFAULTS[self.family]

    def given(self, key: str) -> bool:
        """True if the config contains the key (Llama's name, translated to the family's), even with the value null."""
        return self.called(key) in self.raw

    def take(self, key: str) -> Any:
        """Value of a key, marked as read; if the config leaves it out, the default of transformers' config class."""
        name = self.called(key)
        self.taken.add(name)
        return self.raw.get(name, DEFAULTS[self.family].get(name))

    def whole(self, key: str, *, null: int | None = None, least: int = 1) -> int:
        """Integer value of a key, marked as read; a null becomes the argument `null`; ValueError if not an integer."""
        value = self.take(key)
        value = null if value is None else value
        require(value is not None, self.called(key), value, "the model's config must give it")
        return whole(self.called(key), value, least=least)

    def flag(self, key: str) -> bool:
        """Bool value of a key, marked as read; null counts as false, as in transformers; ValueError if not a bool."""
        value = self.take(key)
        return flag(self.called(key), False if value is None else value)


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields by name from a parsed `config.json`; ValueError for unsupported keys and values.

    Keys that are left out have the value in `DEFAULTS`.

    Raises:
        ValueError: for what jaxkv does not build, by name.
    """
    family = raw.get("model_type")
    known = isinstance(family, str) and family in _FAMILIES
    require(known, "model_type", family, f"jaxkv builds {', '.join(sorted(_FAMILIES))}")
    keys = _Keys(raw, str(family))
    embed, heads, layers = (keys.whole(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    max_positions = keys.whole("max_position_embeddings")
    _refuse_unbuilt(keys)
    _refuse_windows(keys, layers, max_positions)
    kv_heads = keys.whole("num_key_value_heads", null=heads)
    remedy = f"config.json leaves it out, which means {kv_heads}, and num_attention_heads={heads} is no multiple of it"
    fits = heads % kv_heads == 0 or keys.given("num_key_value_heads")
    require(fits, keys.called("num_key_value_heads"), kv_heads, f"{remedy}: write the number into config.json")
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
        "rope": _read_rope(keys, max_positions),
        "max_positions": max_positions,
        "tied": keys.flag("tie_word_embeddings"),
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "mlp_bias": _bias(keys, "mlp_bias"),
        "bos": next(iter(_ids("bos_token_id", keys.take("bos_token_id"))), None),
        "eos": _ids("eos_token_id", keys.take("eos_token_id")),
    }
    fields |= _FAMILIES[keys.family] | _OWN.get(keys.family, lambda keys, fields: {})(keys, fields)
    unknown = sorted(set(raw) - keys.taken - _IGNORED - _IGNORED_BY.get(keys.family, set()))
    require(not unknown, "config", unknown, "these keys are not supported; remove them only if they change nothing")
    return fields


def _refuse_unbuilt(keys: _Keys) -> None:
    """Raises ValueError for quantised weights, and for an activation that jaxkv does not build for the family."""
    activation, known = keys.take("hidden_act"), _ACTIVATIONS.get(keys.family, ("silu", "swish"))
    remedy = f"jaxkv builds {keys.family} with {known[0]} only"
    require(activation in known, keys.called("hidden_act"), activation, remedy)
    quantization = keys.take("quantization_config")
    require(quantization is None, "quantization_config", quantization, "load the unquantised weights, or a GGUF")


def _refuse_windows(keys: _Keys, layers: int, max_positions: int) -> None:
    """Raises ValueError for sliding windows that mask positions, and for `layer_types` other than full attention."""
    kinds = keys.take("layer_types")
    full = isinstance(kinds, (list, tuple)) and all(each == "full_attention" for each in kinds)
    require(full or kinds is None, "layer_types", kinds, "only full_attention layers are built")
    count = layers if kinds is None else len(kinds)
    require(count == layers, "layer_types", f"{count} entries", f"give as many as num_hidden_layers={layers}, or none")
    window, used = keys.take("sliding_window"), keys.flag("use_sliding_window")
    if keys.has("sliding_window"):
        # Mistral's and Mixtral's classes have no such switch and ignore it.
        used = used or not keys.has("use_sliding_window")
    else:
        # Llama's and Falcon's classes have no windows, but transformers' caches still drop rows beyond one.
        used = used or keys.take("use_sliding_window") is None
    windowed = used and window is not None
    if windowed and keys.has("layer_types"):
        # Layers whose type is given have that type. In Qwen2 and Qwen3 layers below max_window_layers have no window.
        some = not keys.has("max_window_layers") or keys.whole("max_window_layers", least=0) < layers
        windowed = kinds is None and some
    left_out = "" if keys.given("sliding_window") else ', or write "sliding_window": null where it attends to all'
    # A window as wide as the model's positions leaves nothing out.
    wide = not windowed or whole("sliding_window", window) >= max_positions
    require(wide, "sliding_window", window, f"sliding windows are not built; use a full-attention model{left_out}")


def _bias(keys: _Keys, key: str) -> bool:
    """Bool of a bias switch, False for Qwen2's attention; ValueError if the family has no such bias."""
    value = keys.flag(key)
    # Qwen2's queries, keys and values always carry biases.
    fixed = keys.family == "qwen2" and key == "attention_bias"
    remedy = f"no {keys.family} has such biases in transformers: give false, or leave it out"
    require(not value or fixed or keys.has(key), key, value, remedy)
    return value and not fixed


def _falcon(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields of Falcon (kv heads, parallel, shared norm); ValueError for unsupported values."""
    alibi, post = keys.flag("alibi"), keys.flag("apply_residual_connection_post_layernorm")
    require(not alibi, "alibi", alibi, "attention biased by distance is not built; use a Falcon with rotary embeddings")
    require(not post, "apply_residual_connection_post_layernorm", post, "only sums of what was not normed are built")
    heads, kv_heads, head_dim = fields["heads"], fields["kv_heads"], fields["embed"] // fields["heads"]
    remedy = f"Falcon's are hidden_size / num_attention_heads wide: give {head_dim}, or leave it out"
    require(fields["head_dim"] == head_dim, "head_dim", fields["head_dim"], remedy)
    groups, one = keys.flag("new_decoder_architecture"), keys.flag("multi_query")
    parallel = keys.flag("parallel_attn")
    require(parallel or not groups, "parallel_attn", parallel, "blocks of new_decoder_architecture=true are: give true")
    norms = keys.take("num_ln_in_parallel_attn")
    norms = (2 if groups else 1) if norms is None else norms
    remedy = "give 1, or 2 with new_decoder_architecture=true, or leave it out"
    require(norms == 1 or (norms == 2 and groups), "num_ln_in_parallel_attn", norms, remedy)
    remedy = f"heads that share keys in groups have new_decoder_architecture=true, all others their own: give {heads}"
    require(groups or one or kv_heads == heads, "num_kv_heads", kv_heads, remedy)
    shared = parallel and norms == 1
    return {"kv_heads": 1 if one and not groups else kv_heads, "parallel": parallel, "shared_norm": shared}


def _cohere(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `logit_scale` of a Cohere config; ValueError for norms of queries."""
    normed = keys.flag("use_qk_norm")
    require(not normed, "use_qk_norm", normed, "layer norms of queries and keys (Command R+) are not built")
    return {"logit_scale": positive("logit_scale", keys.take("logit_scale"))}


def _gemma(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `embedding_scale` of a Gemma; ValueError for attention without a mask."""
    both = keys.take("use_bidirectional_attention")
    require(not both, "use_bidirectional_attention", both, "only causal attention is built")
    # The key of transformers 4 beside hidden_act.
    newer, known = keys.take("hidden_activation"), _ACTIVATIONS["gemma"]
    require(newer is None or newer in known, "hidden_activation", newer, f"jaxkv builds gemma with {known[0]} only")
    return {"embedding_scale": math.sqrt(fields["embed"])}


def _glm4(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `eos` of a GLM-4 config, where null means the default."""
    return {"eos": fields["eos"] or DEFAULTS["glm4"]["eos_token_id"]}


def _granite(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields of a Granite config's four multipliers; attention's is a scale of all layers."""
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    attention, embedding, residual, logits = (positive(name, keys.take(name)) for name in names)
    scales = {"embedding_scale": embedding, "residual_scale": residual, "logit_scale": 1 / logits}
    return {"rope": Rope(), "kinds": (LayerSpec(rope=fields["rope"], scale=attention),), **scales}


def _mixtral(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `experts` of a Mixtral config."""
    return {"experts": Experts(count=keys.whole("num_local_experts"), chosen=keys.whole("num_experts_per_tok"))}


def _qwen3_moe(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `experts` of a Qwen3-MoE config; ValueError if some blocks are dense."""
    step, dense = keys.take("decoder_sparse_step"), keys.take("mlp_only_layers")
    remedy = "blocks that differ from layer to layer are not built; use a model whose blocks all are mixtures"
    require(step == 1, "decoder_sparse_step", step, remedy)
    require(dense is None or dense == [], "mlp_only_layers", dense, remedy)
    # transformers 5 writes the key by Mixtral's name.
    counts = {key: keys.whole(key) for key in ("num_experts", "num_local_experts") if keys.raw.get(key) is not None}
    counts = counts or {"num_experts": keys.whole("num_experts")}
    keys.taken |= {"num_experts", "num_local_experts"}
    count = next(iter(counts.values()))
    require(
        set(counts.values()) == {count}, "num_experts", counts, "they are two names of one number: give one of them"
    )
    chosen, normalised = keys.whole("num_experts_per_tok"), keys.flag("norm_topk_prob")
    return {"experts": Experts(count=count, chosen=chosen, normalised=normalised)}


def _smollm3(keys: _Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields `rope` and `kinds` of SmolLM3, some of whose layers have no rotary embedding."""
    layers, given = fields["layers"], keys.take("no_rope_layers")
    interval = keys.whole("no_rope_layer_interval")
    if given is None:
        given = [int((layer + 1) % interval != 0) for layer in range(layers)]
    remedy = f"give a 1 for each of num_hidden_layers={layers} layers with rotary embeddings, a 0 for each without"
    sound = isinstance(given, (list, tuple)) and len(given) >= layers and all(each in (0, 1) for each in given)
    require(sound, "no_rope_layers", given, remedy)
    kinds = tuple(LayerSpec(rope=fields["rope"] if each else NoRope()) for each in given[:layers])
    period = next(n for n in range(1, layers + 1) if kinds == tuple(kinds[at % n] for at in range(layers)))
    return {"rope": Rope(), "kinds": kinds[:period]}


# Readers of keys that only one family has.
_OWN: dict[str, Callable[[_Keys, Mapping[str, Any]], dict[str, Any]]] = {
    "cohere": _cohere,
    "falcon": _falcon,
    "gemma": _gemma,
    "glm4": _glm4,
    "granite": _granite,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}


def _ids(key: str, value: Any) -> tuple[int, ...]:
    """Token ids of a key that holds one id, several, or null, as a tuple without -1; ValueError for others."""
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(whole(key, each, least=0) for each in values if each != -1)


def _read_rope(keys: _Keys, max_positions: int) -> Rope:
    """`Rope` config from `rope_parameters`, `rope_scaling` and `rope_theta`; ValueError if the former two disagree."""
    # Both keys are read first, so that neither is reported as unknown.
    theta, partial = keys.take("rope_theta"), keys.take("partial_rotary_factor")
    outer = {"rope_theta": theta} | ({} if partial is None else {"partial_rotary_factor": partial})
    given: list[Mapping[str, Any]] = []
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.take(key)
        require(
            value is None or isinstance(value, Mapping), key, value, "give an object with rope_type and its numbers"
        )
        given += [value] if value else []
    parts = keys.family == "glm4"
    ropes = [_one_rope({**outer, **each}, max_positions, parts=parts) for each in given or [{}]]
    remedy = (
        "rope_parameters means another rotation, and transformers would follow rope_scaling alone: remove one of them"
    )
    require(len(set(ropes)) == 1, "rope_scaling", dict(*given[:1]), remedy)
    # transformers takes a Phi-3's "yarn" for longrope, too.
    plain = keys.family != "phi3" or type(ropes[0]) is Rope
    require(plain, "rope_scaling", dict(*given[:1]), "a Phi-3 has default RoPE or longrope, which is not built")
    return ropes[0]


def _one_rope(keys: dict[str, Any], max_positions: int, *, parts: bool) -> Rope:
    """`Rope` config from one dictionary with `rope_theta`, whose keys it removes; ValueError for unknown ones."""
    theta, partial = positive("rope_theta", keys.pop("rope_theta")), keys.pop("partial_rotary_factor", 1.0)
    require(partial == 1.0 or parts, "partial_rotary_factor", partial, "only GLM-4's heads are rotated in part")
    share = real("partial_rotary_factor", partial, "give a share of the channels above 0", high=1.0, open_low=True)
    kind = keys.pop("rope_type", keys.pop("type", "default"))
    keys.pop("type", None)
    known = isinstance(kind, str) and kind in _ROPES
    require(known, "rope_type", kind, "jaxkv builds default, linear, llama3 and yarn")
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            require(not keys.get(key), f"rope_scaling.{key}", keys.get(key), "DeepSeek's YaRN variant is not built")
            keys.pop(key, None)
    values: dict[str, Any] = {"theta": theta, "share": share}
    for field in dataclasses.fields(_ROPES[kind]):
        if field.name in values:
            continue
        original = field.name == "original_max_position"
        key = "original_max_position_embeddings" if original else field.name
        default = max_positions if original else field.default
        given = keys.pop(key, default)
        needed = given is dataclasses.MISSING
        require(not needed, f"rope_scaling.{key}", None, f"rope type {kind!r} needs it")
        # Null means the default for YaRN's optional numbers, and is refused for all others.
        null = given is None and field.type.startswith("float") and default is not dataclasses.MISSING
        values[field.name] = field.default if null else READERS[field.type](f"rope_scaling.{key}", given)
    require(not keys, "rope_scaling", sorted(keys), f"these keys are not supported for rope type {kind!r}")
    return _ROPES[kind](**values)
