"""Families: switches of each, and readers of the keys that its Hugging Face config has beside Llama's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv._errors import require
from jaxkv.models.hub_defaults import DEFAULTS
from jaxkv.models.hub_reader import Keys
from jaxkv.models.hub_rope import read_two_ropes
from jaxkv.models.hub_windows import period_of
from jaxkv.models.values import Experts, LayerSpec, NoRope, Rope, positive

# Mask of the layers whose type is that with windows.
Sliding = tuple[bool, ...]
# Families whose layers with windows have a rotary embedding of their own.
TWO_ROPES = ("gemma3_text", "olmo3")
# Switches of each family that no key of its config changes.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {
        "interleaved": True,
        "layer_norm": True,
        "norm_bias": False,
        "parallel": True,
        "shared_norm": True,
    },
    "cohere2": {
        "interleaved": True,
        "layer_norm": True,
        "norm_bias": False,
        "parallel": True,
        "shared_norm": True,
    },
    "falcon": {"layer_norm": True, "gated": False},
    "gemma": {"norm_offset": True, "tanh_gelu": True},
    "gemma2": {"norm_offset": True, "norms": "both", "tanh_gelu": True},
    "gemma3_text": {"norm_offset": True, "norms": "both", "qk_norm": True, "tanh_gelu": True},
    "glm4": {"interleaved": True, "norms": "both", "out_bias": False},
    "gpt_oss": {"sink_logits": True},
    "granite": {},
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "olmo2": {"norms": "after", "qk_norm_wide": True},
    "olmo3": {"norms": "after", "qk_norm_wide": True},
    "phi3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "smollm3": {},
}
# Names of a family's activation, where its MLP is no SwiGLU. The first Gemmas' files say "gelu" and mean the GELU by a
# hyperbolic tangent.
ACTIVATIONS = {
    "falcon": ("gelu",),
    "gemma": ("gelu_pytorch_tanh", "gelu"),
    "gemma2": ("gelu_pytorch_tanh",),
    "gemma3_text": ("gelu_pytorch_tanh",),
}


def _falcon(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields of Falcon (kv heads, parallel, shared norm); ValueError for unsupported values."""
    alibi, post = keys.flag("alibi"), keys.flag("apply_residual_connection_post_layernorm")
    require(
        not alibi,
        "alibi",
        alibi,
        "attention biased by distance is not built; use a Falcon with rotary embeddings",
    )
    require(
        not post,
        "apply_residual_connection_post_layernorm",
        post,
        "only sums of what was not normed are built",
    )
    heads, kv_heads, head_dim = (
        fields["heads"],
        fields["kv_heads"],
        fields["embed"] // fields["heads"],
    )
    remedy = (
        f"Falcon's are hidden_size / num_attention_heads wide: give {head_dim}, or leave it out"
    )
    require(fields["head_dim"] == head_dim, "head_dim", fields["head_dim"], remedy)
    groups, one = keys.flag("new_decoder_architecture"), keys.flag("multi_query")
    parallel = keys.flag("parallel_attn")
    require(
        parallel or not groups,
        "parallel_attn",
        parallel,
        "blocks of new_decoder_architecture=true are: give true",
    )
    norms = keys.take("num_ln_in_parallel_attn")
    norms = (2 if groups else 1) if norms is None else norms
    remedy = "give 1, or 2 with new_decoder_architecture=true, or leave it out"
    require(norms == 1 or (norms == 2 and groups), "num_ln_in_parallel_attn", norms, remedy)
    remedy = f"heads that share keys in groups have new_decoder_architecture=true, all others their own: give {heads}"
    require(groups or one or kv_heads == heads, "num_kv_heads", kv_heads, remedy)
    shared = parallel and norms == 1
    return {
        "kv_heads": 1 if one and not groups else kv_heads,
        "parallel": parallel,
        "shared_norm": shared,
    }


def _cohere(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` fields `logit_scale` and `qk_layer_norm` of a Cohere config."""
    logit_scale = positive("logit_scale", keys.take("logit_scale"))
    return {"logit_scale": logit_scale, "qk_layer_norm": keys.flag("use_qk_norm")}


def _gemma(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `embedding_scale` of a Gemma; ValueError for attention without a mask."""
    both = keys.take("use_bidirectional_attention")
    require(not both, "use_bidirectional_attention", both, "only causal attention is built")
    # The key of transformers 4 beside hidden_act.
    newer, known = keys.take("hidden_activation"), ACTIVATIONS["gemma"]
    require(
        newer in (None, known[0]),
        "hidden_activation",
        newer,
        f"jaxkv builds gemma with {known[0]} only",
    )
    return {"embedding_scale": math.sqrt(fields["embed"])}


def _cohere2(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields of a Cohere 2 config: layers that attend to the whole prompt have no rotary embedding."""
    kinds = [LayerSpec(rope=fields["rope"] if each else NoRope()) for each in sliding]
    logit_scale = positive("logit_scale", keys.take("logit_scale"))
    return {"rope": Rope(), "kinds": period_of(kinds), "logit_scale": logit_scale}


def _capped(keys: Keys, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of Gemma 2 and 3: attention's scale and cap, of `LayerSpec`; scale of embeddings, cap of last logits."""
    both = keys.take("use_bidirectional_attention")
    require(not both, "use_bidirectional_attention", both, "only causal attention is built")

    def cap(name: str) -> float | None:
        """Cap of a key; None for null."""
        given = keys.take(name)
        return (
            None
            if given is None
            else positive(name, given, "give a positive number, or null for no cap")
        )

    scale = positive("query_pre_attn_scalar", keys.take("query_pre_attn_scalar")) ** -0.5
    model = {
        "embedding_scale": math.sqrt(fields["embed"]),
        "logit_softcap": cap("final_logit_softcapping"),
    }
    return {"scale": scale, "softcap": cap("attn_logit_softcapping")}, model


def _gemma2(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields of a Gemma 2 config: attention's scale and cap, embeddings' scale, and the logits' cap."""
    layer, model = _capped(keys, fields)
    return {"rope": Rope(), "kinds": (LayerSpec(rope=fields["rope"], **layer),), **model}


def _gemma3(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields of a Gemma 3 text config: two rotary embeddings, and what Gemma 2's has."""
    layer, model = _capped(keys, fields)
    local, everywhere = read_two_ropes(keys, fields["max_positions"])
    kinds = [LayerSpec(rope=local if each else everywhere, **layer) for each in sliding]
    return {"rope": Rope(), "kinds": period_of(kinds), **model}


def _olmo3(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields of an OLMo 3 config, whose layers with windows have a rotary embedding of their own."""
    local, everywhere = read_two_ropes(keys, fields["max_positions"])
    kinds = [LayerSpec(rope=local if each else everywhere) for each in sliding]
    return {"rope": Rope(), "kinds": period_of(kinds)}


def _glm4(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `eos` of a GLM-4 config, where null means the default."""
    left_out = keys.raw.get("eos_token_id") is None
    return {"eos": DEFAULTS["glm4"]["eos_token_id"]} if left_out else {}


def _gpt_oss(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `experts` of a gpt-oss config."""
    count, chosen = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    # Published files have both names.
    older = keys.take("experts_per_token")
    remedy = f"it is another name of num_experts_per_tok={chosen}: give the same, or leave it out"
    require(older in (None, chosen), "experts_per_token", older, remedy)
    alpha, limit = keys.take("swiglu_alpha"), positive("swiglu_limit", keys.take("swiglu_limit"))
    require(
        alpha == DEFAULTS["gpt_oss"]["swiglu_alpha"], "swiglu_alpha", alpha, "only 1.702 is built"
    )
    return {"experts": Experts(count=count, chosen=chosen, bias=True, limit=limit)}


def _granite(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields of a Granite config's four multipliers; attention's is a scale of all layers."""
    names = (
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    attention, embedding, residual, logits = (positive(name, keys.take(name)) for name in names)
    scales = {"embedding_scale": embedding, "residual_scale": residual, "logit_scale": 1 / logits}
    return {"rope": Rope(), "kinds": (LayerSpec(rope=fields["rope"], scale=attention),), **scales}


def _mixtral(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `experts` of a Mixtral config."""
    return {
        "experts": Experts(
            count=keys.whole("num_local_experts"), chosen=keys.whole("num_experts_per_tok")
        )
    }


def _qwen3_moe(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """Dictionary with the `ModelConfig` field `experts` of a Qwen3-MoE config; ValueError if some blocks are dense."""
    step, dense = keys.take("decoder_sparse_step"), keys.take("mlp_only_layers")
    remedy = "blocks that differ from layer to layer are not built; use a model whose blocks all are mixtures"
    require(step == 1, "decoder_sparse_step", step, remedy)
    require(dense is None or dense == [], "mlp_only_layers", dense, remedy)
    # transformers 5 writes the key by Mixtral's name.
    counts = {
        key: keys.whole(key)
        for key in ("num_experts", "num_local_experts")
        if keys.raw.get(key) is not None
    }
    counts = counts or {"num_experts": keys.whole("num_experts")}
    keys.taken |= {"num_experts", "num_local_experts"}
    count = next(iter(counts.values()))
    require(
        set(counts.values()) == {count},
        "num_experts",
        counts,
        "they are two names of one number: give one of them",
    )
    chosen, normalised = keys.whole("num_experts_per_tok"), keys.flag("norm_topk_prob")
    return {"experts": Experts(count=count, chosen=chosen, normalised=normalised)}


def _smollm3(keys: Keys, fields: Mapping[str, Any], sliding: Sliding) -> dict[str, Any]:
    """`ModelConfig` fields `rope` and `kinds` of SmolLM3, some of whose layers have no rotary embedding."""
    layers, given = fields["layers"], keys.take("no_rope_layers")
    interval = keys.whole("no_rope_layer_interval")
    if given is None:
        given = [int((layer + 1) % interval != 0) for layer in range(layers)]
    remedy = f"give a 1 for each of num_hidden_layers={layers} layers with rotary embeddings, a 0 for each without"
    sound = (
        isinstance(given, (list, tuple))
        and len(given) >= layers
        and all(each in (0, 1) for each in given)
    )
    require(sound, "no_rope_layers", given, remedy)
    kinds = tuple(LayerSpec(rope=fields["rope"] if each else NoRope()) for each in given[:layers])
    remedy = "windows of SmolLM3 are not built: give null"
    require(not any(sliding), "sliding_window", keys.raw.get("sliding_window"), remedy)
    return {"rope": Rope(), "kinds": period_of(kinds)}


# Readers of keys that only one family has.
OWN: dict[str, Callable[[Keys, Mapping[str, Any], Sliding], dict[str, Any]]] = {
    "cohere": _cohere,
    "cohere2": _cohere2,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "mixtral": _mixtral,
    "olmo3": _olmo3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
