"""Every field of transformers' config classes, a verdict each: a field that a class gains has to be added here."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import (
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from jaxkv.models.config import ModelConfig
from jaxkv.models.values import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    Rope,
    YarnRope,
)

CLASSES = (
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)


@dataclasses.dataclass(frozen=True)
class Read:
    """Read by jaxkv, with the class' default: what both make of it, and another value that both follow."""

    ours: Callable[[ModelConfig], Any]
    other: Any
    theirs: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Required:
    """A size that jaxkv does not guess: refused where it is left out; else as `Read`."""

    ours: Callable[[ModelConfig], Any]
    other: Any


@dataclasses.dataclass(frozen=True)
class Refused:
    """Refused by its name where it has this value instead of the default."""

    other: Any


@dataclasses.dataclass(frozen=True)
class NoEffect:
    """Changes nothing about the logits or about where an answer ends, and why; another value than the default."""

    reason: str
    other: Any


Verdict = Read | Required | Refused | NoEffect


def theirs_rope(config: Any) -> Rope:
    """transformers' standardised RoPE parameters as jaxkv's value, with the defaults of its functions for YaRN."""
    given = dict(config.rope_parameters)
    kind, values = given.pop("rope_type"), {"theta": given.pop("rope_theta")}
    given.pop("type", None)
    values["share"] = given.pop("partial_rotary_factor", 1.0)
    if "original_max_position_embeddings" in given:
        values["original_max_position"] = given.pop("original_max_position_embeddings")
    if kind == "longrope":
        most, original = config.max_position_embeddings, values["original_max_position"]
        given = {"factor": max(1.0, most / original), **given}
        given |= {key: tuple(map(float, given[key])) for key in ("short_factor", "long_factor")}
        given["long"] = most > original
    kinds = {"default": Rope, "dynamic": DynamicRope, "linear": LinearRope, "llama3": Llama3Rope}
    kinds |= {"longrope": LongRope, "yarn": YarnRope}
    return kinds[kind](
        **values, **{key: value for key, value in given.items() if value is not None}
    )


SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4},
}


def theirs_two_ropes(config: Any) -> list[Rope]:
    """Rotary embedding of each layer, by its type."""

    class One:
        rope_parameters: dict[str, Any]

    found = []
    for kind in config.layer_types:
        one = One()
        one.rope_parameters = config.rope_parameters[kind]
        found.append(theirs_rope(one))
    return found


def two_ropes(config: ModelConfig) -> list[Rope]:
    """Rotary embedding of each layer."""
    return [config.spec_of(layer).rope for layer in range(config.layers)]


def theirs_ids(name: str) -> Callable[[Any], tuple[int, ...]]:
    """Ids as a tuple, as `ModelConfig.eos` has them."""

    def ids(config: Any) -> tuple[int, ...]:
        value = getattr(config, name)
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    return ids


def rotated(config: ModelConfig) -> list[int]:
    """A 1 for each layer with rotary embeddings, a 0 for each without."""
    return [
        int(not isinstance(config.spec_of(layer).rope, NoRope)) for layer in range(config.layers)
    ]


def windows(config: ModelConfig) -> list[str]:
    """The type of each layer as transformers calls it."""
    return ["full_attention" if each is None else "sliding_attention" for each in config.windows]


def widths(config: ModelConfig) -> int | None:
    """The width of the windows of layers that have some."""
    return max((each for each in config.windows if each is not None), default=None)


TRAINING = "a matter of training"
WAY = "a way to the same numbers"
BACK = "what else is handed back beside the logits"
HEADS = "a matter of classifiers"

# Of the class that all derive from.
BASE: dict[str, Verdict] = {
    "architectures": NoEffect("the tensors say which weights there are", ["SomethingForCausalLM"]),
    "chunk_size_feed_forward": NoEffect(WAY, 8),
    "dtype": NoEffect("`load` is told the dtype, or takes the device's", "float16"),
    "id2label": NoEffect(HEADS, {"0": "a"}),
    "is_encoder_decoder": NoEffect("the family is a decoder", True),
    "label2id": NoEffect(HEADS, {"a": 0}),
    "output_hidden_states": NoEffect(BACK, True),
    "problem_type": NoEffect(HEADS, "regression"),
    "return_dict": NoEffect(BACK, False),
    "transformers_version": NoEffect("who wrote the file", "4.40.0"),
}
# Of every family, by the names that all but Falcon have.
ALL: dict[str, Verdict] = {
    "_attn_implementation": NoEffect(WAY, "eager"),
    "attention_dropout": NoEffect(TRAINING, 0.5),
    "bos_token_id": Read(lambda c: c.bos, 7),
    "eos_token_id": Read(lambda c: c.eos, [7, 8], theirs_ids("eos_token_id")),
    "hidden_size": Required(lambda c: c.embed, 64),
    "initializer_range": NoEffect(TRAINING, 0.5),
    "max_position_embeddings": Read(lambda c: c.max_positions, 1000),
    "num_attention_heads": Required(lambda c: c.heads, 64),
    "num_hidden_layers": Required(lambda c: c.layers, 3),
    "pad_token_id": NoEffect("padding is masked", 0),
    "rope_parameters": Read(
        lambda c: c.spec_of(0).rope, {"rope_type": "linear", "factor": 2.0}, theirs_rope
    ),
    "tie_word_embeddings": Read(lambda c: c.tied, True),
    "use_cache": NoEffect(WAY, False),
    "vocab_size": Required(lambda c: c.vocab, 500),
}
GATED: dict[str, Verdict] = {
    "hidden_act": Refused("gelu"),
    "intermediate_size": Required(lambda c: c.hidden, 80),
    "num_key_value_heads": Read(lambda c: c.kv_heads, 2),
    "rms_norm_eps": Read(lambda c: c.norm_eps, 1e-3),
}
# The class computes head_dim, or leaves it to the network, which then computes it so.
HEAD_DIM = Read(
    lambda c: c.head_dim,
    24,
    lambda c: getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
)
BIAS = Read(lambda c: c.qkv_bias and c.out_bias, True)
# Windows are switched on together: `test_windows` has the rest.
QWEN: dict[str, Verdict] = {
    "head_dim": HEAD_DIM,
    "sliding_window": NoEffect("off, until use_sliding_window is true", 64),
    "use_sliding_window": Read(
        lambda c: any(c.windows),
        True,
        lambda c: c.use_sliding_window and c.sliding_window is not None,
    ),
}
LAYERED: dict[str, Verdict] = {
    "layer_types": Refused(["sliding_attention"] * 2),
    "max_window_layers": NoEffect("no layer has a window, until use_sliding_window is true", 1),
}
CHOSEN = Read(lambda c: c.experts.chosen, 3)
ROUTED: dict[str, Verdict] = {
    "num_experts_per_tok": dataclasses.replace(CHOSEN, theirs=lambda c: c.num_experts_per_tok),
    "output_router_logits": NoEffect(BACK, True),
    "router_aux_loss_coef": NoEffect(TRAINING, 0.5),
}

COHERE: dict[str, Verdict] = (
    BASE
    | ALL
    | {key: GATED[key] for key in ("hidden_act", "intermediate_size", "num_key_value_heads")}
    | {
        "attention_bias": BIAS,
        "head_dim": HEAD_DIM,
        "layer_norm_eps": Read(lambda c: c.norm_eps, 1e-3),
        "logit_scale": Read(lambda c: c.logit_scale, 0.5),
        "tie_word_embeddings": Read(lambda c: c.tied, False),
    }
)
# Gemma 2's and 3's.
CAPPED: dict[str, Verdict] = (
    BASE
    | ALL
    | {key: GATED[key] for key in ("intermediate_size", "num_key_value_heads", "rms_norm_eps")}
    | {
        "attention_bias": BIAS,
        "attn_logit_softcapping": Read(lambda c: c.spec_of(0).softcap, 25.0),
        "final_logit_softcapping": Read(lambda c: c.logit_softcap, 15.0),
        "head_dim": HEAD_DIM,
        "hidden_activation": Refused("silu"),
        "layer_types": Read(windows, ["full_attention", "sliding_attention"]),
        "query_pre_attn_scalar": Read(
            lambda c: c.spec_of(0).scale, 64, lambda c: c.query_pre_attn_scalar**-0.5
        ),
        "sliding_window": Read(widths, 64),
        "tie_word_embeddings": Read(lambda c: c.tied, False),
        "use_bidirectional_attention": Refused(True),
    }
)
FIELDS: dict[str, dict[str, Verdict]] = {
    "cohere": COHERE | {"use_qk_norm": Read(lambda c: c.qk_layer_norm, True)},
    "cohere2": COHERE
    | {
        "layer_types": Read(windows, ["full_attention", "sliding_attention"]),
        "sliding_window": Read(widths, 64),
    },
    "falcon": BASE
    | ALL
    | {
        "_is_quantized": Refused(True),
        "activation": Refused("relu"),
        "alibi": Refused(True),
        "bias": Read(lambda c: c.qkv_bias and c.out_bias and c.mlp_bias, True),
        "classifier_dropout": Refused(0.5),
        "ffn_hidden_size": Read(lambda c: c.hidden, 80),
        "head_dim": Refused(24),
        "hidden_dropout": NoEffect(TRAINING, 0.5),
        "layer_norm_epsilon": Read(lambda c: c.norm_eps, 1e-3),
        "multi_query": Read(lambda c: c.kv_heads == 1, False),
        # As `test_falcons_switches` has it with the switches on that make it matter.
        "new_decoder_architecture": Read(lambda c: c.parallel and not c.shared_norm, True),
        "num_kv_heads": NoEffect(
            "one kv head, until multi_query is false or new_decoder_architecture is true", 4
        ),
        "num_labels": Refused(3),
        "num_ln_in_parallel_attn": Refused(2),
        "output_attentions": NoEffect(BACK, True),
        "parallel_attn": Read(lambda c: c.parallel, False),
        "tie_word_embeddings": Read(lambda c: c.tied, False),
    },
    "gemma": BASE
    | ALL
    | GATED
    | {
        "attention_bias": BIAS,
        "head_dim": HEAD_DIM,
        "hidden_act": Refused("silu"),
        "tie_word_embeddings": Read(lambda c: c.tied, False),
        "use_bidirectional_attention": Refused(True),
    },
    "gemma2": CAPPED,
    "gemma3_text": {
        key: verdict for key, verdict in CAPPED.items() if key != "_attn_implementation"
    }
    | {"rope_parameters": Read(two_ropes, SCALED, theirs_two_ropes)},
    "glm4": BASE
    | ALL
    | GATED
    | {
        "attention_bias": Read(lambda c: c.qkv_bias and not c.out_bias, False),
        "head_dim": HEAD_DIM,
        "num_key_value_heads": Read(lambda c: c.kv_heads, 4),
    },
    "gpt_oss": BASE
    | ALL
    | GATED
    | ROUTED
    | {
        "attention_bias": Read(lambda c: c.qkv_bias and c.out_bias, False),
        "head_dim": HEAD_DIM,
        "layer_types": Read(windows, ["full_attention", "sliding_attention"]),
        "num_key_value_heads": Read(lambda c: c.kv_heads, 4),
        "num_local_experts": Read(lambda c: c.experts.count, 5),
        "sliding_window": Read(widths, 64),
        "swiglu_alpha": Refused(1.5),
        "swiglu_limit": Read(lambda c: c.experts.limit, 5.0),
    },
    "granite": BASE
    | ALL
    | GATED
    | {
        "attention_bias": BIAS,
        "attention_multiplier": Read(lambda c: c.spec_of(0).scale, 0.5),
        "embedding_multiplier": Read(lambda c: c.embedding_scale, 12.0),
        "head_dim": HEAD_DIM,
        "logits_scaling": Read(lambda c: c.logit_scale, 8.0, lambda c: 1 / c.logits_scaling),
        "mlp_bias": Read(lambda c: c.mlp_bias, True),
        "residual_multiplier": Read(lambda c: c.residual_scale, 0.5),
    },
    "llama": BASE
    | ALL
    | GATED
    | {
        "attention_bias": BIAS,
        "head_dim": HEAD_DIM,
        "mlp_bias": Read(lambda c: c.mlp_bias, True),
        "pretraining_tp": NoEffect(WAY, 2),
    },
    "mistral": BASE | ALL | GATED | {"head_dim": HEAD_DIM, "sliding_window": Read(widths, 64)},
    "mixtral": BASE
    | ALL
    | GATED
    | ROUTED
    | {
        "head_dim": HEAD_DIM,
        "num_local_experts": Read(lambda c: c.experts.count, 5),
        "router_jitter_noise": NoEffect(TRAINING, 0.5),
        "sliding_window": Read(widths, 64),
    },
    "olmo2": BASE | ALL | GATED | {"attention_bias": BIAS, "head_dim": HEAD_DIM},
    "olmo3": BASE
    | ALL
    | GATED
    | {
        "attention_bias": BIAS,
        "head_dim": HEAD_DIM,
        "layer_types": Read(windows, ["full_attention", "sliding_attention"]),
        "rope_parameters": Read(two_ropes, SCALED, theirs_two_ropes),
        "sliding_window": Read(widths, 64),
    },
    "phi3": BASE
    | ALL
    | GATED
    | {
        "embd_pdrop": NoEffect(TRAINING, 0.5),
        "head_dim": HEAD_DIM,
        "original_max_position_embeddings": NoEffect("of longrope alone", 1024),
        "resid_pdrop": NoEffect(TRAINING, 0.5),
        "rope_parameters": Read(
            lambda c: c.spec_of(0).rope, {"rope_type": "default", "rope_theta": 7e4}, theirs_rope
        ),
        "sliding_window": Read(widths, 64),
    },
    "qwen2": BASE | ALL | GATED | QWEN | LAYERED,
    "qwen3": BASE | ALL | GATED | QWEN | LAYERED | {"attention_bias": BIAS},
    "qwen3_moe": BASE
    | ALL
    | GATED
    | QWEN
    | ROUTED
    | {
        "attention_bias": BIAS,
        "decoder_sparse_step": Refused(2),
        "intermediate_size": NoEffect("the width of dense blocks, of which there are none", 80),
        "mlp_only_layers": Refused([0]),
        "moe_intermediate_size": Read(lambda c: c.hidden, 80),
        "norm_topk_prob": Read(lambda c: c.experts.normalised, True),
        "num_experts": Read(lambda c: c.experts.count, 16),
    },
    "smollm3": BASE
    | ALL
    | GATED
    | {
        "attention_bias": BIAS,
        "head_dim": HEAD_DIM,
        "layer_types": Refused(["full_attention", "sliding_attention"]),
        "mlp_bias": Read(lambda c: c.mlp_bias, True),
        "no_rope_layer_interval": Read(rotated, 2, lambda c: c.no_rope_layers),
        "no_rope_layers": Read(rotated, [0, 1]),
        "sliding_window": NoEffect("off, until use_sliding_window is true", 64),
        "tie_word_embeddings": Read(lambda c: c.tied, False),
        "use_sliding_window": NoEffect("no layer has a window without a sliding_window", True),
    },
}

# What has to be said of a model: all else is left out. So many heads that every family's default of kv heads divides
# them, and positions that Mistral's default window covers.
SHAPE = {"vocab_size": 400, "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 32}


def shape(family: str, **keys: Any) -> dict[str, Any]:
    """A config of a family that gives sizes alone, and these keys."""
    sizes = SHAPE | ({} if family in ("falcon", "qwen3_moe") else {"intermediate_size": 96})
    return {"model_type": family, **sizes, **keys}


def fields_of(kind: type[PreTrainedConfig]) -> set[str]:
    """The fields of a family's config class, and what its network reads of a config besides."""
    source = Path(inspect.getfile(kind)).with_name(f"modeling_{kind.model_type}.py")
    found = {field.name for field in dataclasses.fields(kind)}
    if source.is_file():
        text = source.read_text("utf-8")
        found |= set(re.findall(r"\bconfig\.([A-Za-z_]\w*)", text))
        found |= set(re.findall(r"(?:getattr|hasattr)\((?:self\.)?config, \"(\w+)\"", text))
    return found
