"""Writes the tiny random checkpoints and their logits that the model tests compare with.

Everything here comes from transformers: its configurations, its models, its ``save_pretrained`` and its forward pass.
None of this project's code is imported, so the numbers are an independent reference.

Run it in an environment that has ``torch==2.13.0`` (CPU) and ``transformers==5.2.0``, or 5.23.0 for those from
``APERTUS`` on::

    python tests/golden/make_models.py [NAME ...]

It makes the named models, and leaves others as they are. Without names it rewrites ``tests/golden/models/`` and
``tests/golden/models.npz``. The archive holds, for each model NAME:

* ``NAME/input_ids`` int32 [2, 80]: a right-padded batch. The second row has 53 tokens, the rest are zeros.
* ``NAME/logits0`` float32 [80, V] and ``NAME/logits1`` float32 [53, V]: logits at every position of each row. Each row
  was computed alone and without padding, so a batched run has to reproduce what the rows give on their own.
* ``phi3_long/within`` float32 [32, V]: logits of the second row's first 32 tokens alone, which longrope
  rotates otherwise.

``lengths`` int32 [2] is (80, 53).
"""

import copy
import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    InternLM3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
LENGTHS = (80, 53)
VOCAB = 96  # Small, because logits at every position are most of the archive's size.


# A vision tower as small as can be.
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def with_images(**text):
    """The config of a Gemma 3 with images: of a text model, and of a vision tower."""
    return Gemma3Config(
        text_config=Gemma3TextConfig(**text),
        vision_config=dict(VISION),
        mm_tokens_per_image=1,
        image_token_index=VOCAB - 1,
    )


def mistral_with_images(**text):
    """The config of a Ministral 3 with images: of a text model, and of a vision tower."""
    vision = VISION | {"model_type": "pixtral", "head_dim": 8}
    tied = text["tie_word_embeddings"]
    return Mistral3Config(
        text_config=Ministral3Config(**text),
        vision_config=vision,
        image_token_index=VOCAB - 1,
        tie_word_embeddings=tied,
    )


def qwen3_5_with_images(**text):
    """The config of a Qwen3.5 with images: of a text model, and of a vision tower as small as can be."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    tied = text["tie_word_embeddings"]
    ids = {
        f"{name}_token_id": VOCAB - 1 for name in ("image", "video", "vision_start", "vision_end")
    }
    return Qwen3_5Config(
        text_config=Qwen3_5TextConfig(**text), vision_config=vision, tie_word_embeddings=tied, **ids
    )


# pad_token_id stays None: a padding index would make torch keep that embedding row apart.
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    tie_word_embeddings=False,
    dtype="float32",
)


def rope(theta, **scaling):
    """Returns the ``rope_parameters`` mapping of transformers 5."""
    return {"rope_theta": theta, "rope_type": "default", **scaling}


def heads(query, kv, **more):
    """Returns the fields for ``query`` query heads over ``kv`` key/value heads."""
    return {"num_attention_heads": query, "num_key_value_heads": kv, **more}


# The original lengths of 32 lie well inside the 80 tokens, so that the scaled frequencies really act. With a head
# dimension of 16 and theta 10000, llama3 and yarn each have an untouched, a blended and a fully scaled frequency.
LLAMA3 = rope(
    10000.0,
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
# Queries' factors at positions 0, 32 and 64 are 1, 1.3 and 1.5.
MINISTRAL_YARN = YARN | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.4,
    "llama_4_scaling_beta": 0.45,
    "max_position_embeddings": 128,
}
LLAMA, MISTRAL = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
QWEN2, QWEN3 = (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
FALCON, MIXTRAL = (FalconConfig, FalconForCausalLM), (MixtralConfig, MixtralForCausalLM)
QWEN3_MOE = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
GEMMA, GLM4 = (GemmaConfig, GemmaForCausalLM), (Glm4Config, Glm4ForCausalLM)
GRANITE, OLMO2 = (GraniteConfig, GraniteForCausalLM), (Olmo2Config, Olmo2ForCausalLM)
COHERE, COHERE2 = (CohereConfig, CohereForCausalLM), (Cohere2Config, Cohere2ForCausalLM)
GEMMA2 = (Gemma2Config, Gemma2ForCausalLM)
GEMMA3, OLMO3 = (Gemma3TextConfig, Gemma3ForCausalLM), (Olmo3Config, Olmo3ForCausalLM)
GEMMA3_IMAGES = (with_images, Gemma3ForConditionalGeneration)
GEMMA4 = (Gemma4TextConfig, Gemma4ForCausalLM)
GEMMA4_UNIFIED = (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM)
GPT_OSS = (GptOssConfig, GptOssForCausalLM)
HUNYUAN = (HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM)
APERTUS, ARCEE = (ApertusConfig, ApertusForCausalLM), (ArceeConfig, ArceeForCausalLM)
ERNIE, EXAONE = (Ernie4_5Config, Ernie4_5ForCausalLM), (Exaone4Config, Exaone4ForCausalLM)
MINISTRAL, SEED = (Ministral3Config, Ministral3ForCausalLM), (SeedOssConfig, SeedOssForCausalLM)
MISTRAL_IMAGES = (mistral_with_images, Mistral3ForConditionalGeneration)
DEEPSEEK2 = (DeepseekV2Config, DeepseekV2ForCausalLM)
DEEPSEEK3 = (DeepseekV3Config, DeepseekV3ForCausalLM)
GLM4_LITE = (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM)
MISTRAL4 = (Mistral4Config, Mistral4ForCausalLM)
QWEN3_5 = (Qwen3_5TextConfig, Qwen3_5ForCausalLM)
QWEN3_5_IMAGES = (qwen3_5_with_images, Qwen3_5ForConditionalGeneration)
STABLELM = (StableLmConfig, StableLmForCausalLM)
STARCODER2 = (Starcoder2Config, Starcoder2ForCausalLM)
# By model type.
MIXTURES = {
    each.model_type: (each, of)
    for each, of in (
        (Dots1Config, Dots1ForCausalLM),
        (Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM),
        (ExaoneMoeConfig, ExaoneMoeForCausalLM),
        (FlexOlmoConfig, FlexOlmoForCausalLM),
        (Glm4MoeConfig, Glm4MoeForCausalLM),
        (GraniteMoeConfig, GraniteMoeForCausalLM),
        (GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM),
        (HunYuanMoEV1Config, HunYuanMoEV1ForCausalLM),
        (HYV3Config, HYV3ForCausalLM),
        (MellumConfig, MellumForCausalLM),
        (MiniMaxM2Config, MiniMaxM2ForCausalLM),
        (OlmoeConfig, OlmoeForCausalLM),
        (PhimoeConfig, PhimoeForCausalLM),
        (Qwen2MoeConfig, Qwen2MoeForCausalLM),
        (SolarOpenConfig, SolarOpenForCausalLM),
    )
}
PHI3, SMOLLM3 = (Phi3Config, Phi3ForCausalLM), (SmolLM3Config, SmolLM3ForCausalLM)


def latents(query, **more):
    """Returns the fields of multi-head latent attention with ``query`` heads, and of a mixture behind a dense layer."""
    widths = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
    experts = {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }
    return heads(query, query) | widths | experts | more


def falcon(query, **more):
    """Returns Falcon's fields for ``query`` query heads; it has no ``intermediate_size``, and would write it down."""
    own = {"intermediate_size": None, "ffn_hidden_size": 64, "rope_parameters": rope(10000.0)}
    return {"num_attention_heads": query, **own, **more}


def gemma4(query, kv, **more):
    """Returns Gemma 4's fields: heads of 16 channels in two layers with windows, of 32 around them."""
    kinds = ("full_attention", "sliding_attention", "sliding_attention", "full_attention")
    own = {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "layer_types": list(kinds),
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    return heads(query, kv, **own, **more)


# Factors of 6 pairs of channels.
LONGROPE = heads(
    3,
    1,
    rope_parameters=rope(
        10000.0,
        rope_type="longrope",
        short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
        long_factor=[1.0, 1.5, 2.5, 6.0, 11.0, 30.0],
    ),
    partial_rotary_factor=0.75,
    tie_word_embeddings=True,
)

QWEN3_EXPERTS = dict(
    head_dim=16,
    rope_parameters=rope(1000000.0),
    intermediate_size=96,
    moe_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=4,
)

# SlidingWindows in the first layer and the third, which 80 tokens fill several times over.
GPT_OSS_EXPERTS = heads(
    4,
    2,
    head_dim=16,
    num_hidden_layers=4,
    sliding_window=24,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_parameters=rope(
        150000.0,
        rope_type="yarn",
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=32,
    ),
)

# Gated delta nets below the first, second and third layer with entries: two, none and one. A key head has two values.
DELTA_NETS = heads(
    4,
    2,
    head_dim=16,
    num_hidden_layers=6,
    layer_types=[f"{each}_attention" for each in "linear linear full full linear full".split()],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
)
DELTA_EXPERTS = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "full_attention"],
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
)

# Choices within two of four groups.
GROUPED = dict(
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=16,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
)
EIGHT = dict(num_experts=8, num_experts_per_tok=3, num_hidden_layers=2, intermediate_size=16)
GRANITE_EXPERTS = dict(
    num_local_experts=8,
    num_experts_per_tok=3,
    num_hidden_layers=2,
    intermediate_size=16,
    attention_multiplier=0.2,
    embedding_multiplier=6.0,
    residual_multiplier=0.3,
    logits_scaling=4.0,
    tie_word_embeddings=True,
)


def mixture(kind, **more):
    """Returns a spec of the class in ``MIXTURES``: 4 query heads of 16 channels over 2 kv heads, 3 layers."""
    told = ("olmoe", "granitemoe", "granitemoeshared", "flex_olmo", "ernie4_5_moe", "phimoe")
    shape = {"hidden_size": 64} if kind in told else {"head_dim": 16}
    shape |= {"num_hidden_layers": 3, "rope_parameters": rope(10000.0)}
    return MIXTURES[kind], heads(4, 2, **{**shape, **more})


SPECS = {
    "llama_mha": (LLAMA, heads(4, 4, rope_parameters=rope(10000.0))),
    "llama_gqa": (
        LLAMA,
        heads(6, 2, rope_parameters=rope(100000.0), tie_word_embeddings=True, num_hidden_layers=3),
    ),
    "llama_mqa": (LLAMA, heads(4, 1, rope_parameters=rope(10000.0), rms_norm_eps=1e-5)),
    "llama_gqa8": (LLAMA, heads(16, 2, head_dim=8, rope_parameters=rope(500000.0))),
    "llama_linear": (
        LLAMA,
        heads(4, 2, rope_parameters=rope(10000.0, rope_type="linear", factor=4.0)),
    ),
    "llama_llama3": (LLAMA, heads(4, 2, head_dim=16, rope_parameters=LLAMA3)),
    "llama_yarn": (LLAMA, heads(4, 2, head_dim=16, rope_parameters=YARN)),
    "llama_bias": (
        LLAMA,
        heads(4, 2, rope_parameters=rope(10000.0), attention_bias=True, mlp_bias=True),
    ),
    "mistral": (
        MISTRAL,
        heads(
            8, 2, hidden_size=64, head_dim=8, sliding_window=None, rope_parameters=rope(1000000.0)
        ),
    ),
    "qwen2": (QWEN2, heads(6, 2, rope_parameters=rope(1000000.0), use_sliding_window=False)),
    "qwen3": (
        QWEN3,
        heads(
            4,
            2,
            head_dim=16,
            rope_parameters=rope(1000000.0),
            use_sliding_window=False,
            tie_word_embeddings=True,
        ),
    ),
    "llama_bf16": (LLAMA, heads(6, 2, rope_parameters=rope(100000.0))),
    "falcon_7b": (FALCON, falcon(6, tie_word_embeddings=True)),
    "falcon_40b": (FALCON, falcon(4, num_kv_heads=2, new_decoder_architecture=True)),
    "falcon_serial": (FALCON, falcon(4, multi_query=False, parallel_attn=False, bias=True)),
    "mixtral": (
        MIXTRAL,
        heads(4, 2, rope_parameters=rope(1000000.0), num_local_experts=4, num_experts_per_tok=2),
    ),
    "qwen3_moe": (QWEN3_MOE, heads(4, 2, norm_topk_prob=True, **QWEN3_EXPERTS)),
    "qwen3_moe_fused": (QWEN3_MOE, heads(4, 2, norm_topk_prob=False, **QWEN3_EXPERTS)),
    "phi3": (PHI3, heads(6, 2, rope_parameters=rope(250000.0))),
    # Every second layer has no rotary embedding.
    "smollm3": (
        SMOLLM3,
        heads(
            4,
            2,
            rope_parameters=rope(2000000.0),
            num_hidden_layers=3,
            no_rope_layer_interval=2,
            mlp_bias=True,
        ),
    ),
    "granite": (
        GRANITE,
        heads(
            6,
            2,
            rope_parameters=rope(10000.0),
            attention_multiplier=0.2,
            embedding_multiplier=6.0,
            residual_multiplier=0.3,
            logits_scaling=4.0,
            tie_word_embeddings=True,
        ),
    ),
    "olmo2": (OLMO2, heads(6, 2, rope_parameters=rope(500000.0))),
    # Of 16 channels 8 are rotated, neighbours together.
    "glm4": (
        GLM4,
        heads(4, 2, head_dim=16, rope_parameters=rope(10000.0, partial_rotary_factor=0.5)),
    ),
    "cohere": (
        COHERE,
        heads(6, 2, rope_parameters=rope(8000000.0), logit_scale=0.3, tie_word_embeddings=True),
    ),
    "gemma": (
        GEMMA,
        heads(4, 1, head_dim=16, rope_parameters=rope(10000.0), tie_word_embeddings=True),
    ),
    # SlidingWindows that 80 tokens fill several times over, in some layers or in all.
    "gemma3": (
        GEMMA3,
        heads(
            4,
            2,
            head_dim=16,
            num_hidden_layers=4,
            sliding_window=12,
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            query_pre_attn_scalar=24,
            rope_parameters={
                "sliding_attention": rope(10000.0),
                "full_attention": rope(1000000.0, rope_type="linear", factor=8.0),
            },
            tie_word_embeddings=True,
        ),
    ),
    "cohere2": (
        COHERE2,
        heads(
            6,
            2,
            num_hidden_layers=4,
            sliding_window=12,
            rope_parameters=rope(50000.0),
            logit_scale=0.3,
            tie_word_embeddings=True,
        ),
    ),
    "olmo3": (
        OLMO3,
        heads(6, 2, num_hidden_layers=4, sliding_window=12, rope_parameters=rope(500000.0)),
    ),
    "mistral_window": (MISTRAL, heads(4, 2, sliding_window=20, rope_parameters=rope(10000.0))),
    "qwen2_window": (
        QWEN2,
        heads(
            6,
            2,
            num_hidden_layers=3,
            rope_parameters=rope(1000000.0),
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
        ),
    ),
    # YaRN's factor is that of rotated channels alone.
    "glm4_yarn": (
        GLM4,
        heads(4, 2, head_dim=16, rope_parameters=YARN | {"partial_rotary_factor": 0.75}),
    ),
    # Read without images: its text model's logits.
    "gemma3_images": (
        GEMMA3_IMAGES,
        heads(
            4,
            2,
            head_dim=16,
            num_hidden_layers=3,
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=24,
            tie_word_embeddings=True,
        ),
    ),
    "gpt_oss": (GPT_OSS, GPT_OSS_EXPERTS),
    # Widths of whole blocks of 32, but not where four devices split them.
    "gpt_oss_mxfp4": (GPT_OSS, GPT_OSS_EXPERTS | {"hidden_size": 64, "intermediate_size": 96}),
    # As Phi-4-mini: of 16 channels 12 are rotated. Both rows are longer than the original length, ...
    "phi3_long": (
        PHI3,
        LONGROPE | {"max_position_embeddings": 128, "original_max_position_embeddings": 32},
    ),
    # ... or no text may be: short factors, and an attention factor of 1.
    "phi3_short": (
        PHI3,
        LONGROPE | {"max_position_embeddings": 128, "original_max_position_embeddings": 128},
    ),
    # Texts up to 128 tokens do not change its base.
    "llama_dynamic": (
        LLAMA,
        heads(4, 2, rope_parameters=rope(10000.0, rope_type="dynamic", factor=4.0)),
    ),
    "cohere_norms": (
        COHERE,
        heads(
            6,
            2,
            rope_parameters=rope(8000000.0),
            logit_scale=0.3,
            tie_word_embeddings=True,
            use_qk_norm=True,
        ),
    ),
    # The scaling is that of the fourth layer, the one without a window.
    "olmo3_yarn": (
        OLMO3,
        heads(
            3,
            1,
            num_hidden_layers=4,
            sliding_window=12,
            rope_parameters=YARN | {"rope_theta": 500000.0},
        ),
    ),
    # Caps that most logits reach, of attention and at the end.
    "gemma2": (
        GEMMA2,
        heads(
            4,
            2,
            head_dim=16,
            num_hidden_layers=3,
            sliding_window=12,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=4.0,
            final_logit_softcapping=3.0,
            # PyTorch's own attention caps nothing.
            attn_implementation="eager",
            rope_parameters=rope(10000.0),
            tie_word_embeddings=True,
        ),
    ),
    "apertus": (APERTUS, heads(4, 2, hidden_size=64, rope_parameters=LLAMA3)),
    "arcee": (ARCEE, heads(4, 2, mlp_bias=True, rope_parameters=rope(10000.0))),
    "ernie4_5": (
        ERNIE,
        heads(
            4,
            2,
            head_dim=16,
            use_bias=True,
            rope_parameters=rope(500000.0),
            tie_word_embeddings=True,
        ),
    ),
    # Three layers with a window and positions, one with neither; or no window, and positions in all layers.
    "exaone4": (
        EXAONE,
        heads(4, 2, num_hidden_layers=4, sliding_window=12, rope_parameters=rope(1000000.0)),
    ),
    "exaone4_full": (
        EXAONE,
        heads(
            4,
            2,
            hidden_size=64,
            sliding_window=None,
            layer_types=["full_attention"] * 2,
            rope_parameters=LLAMA3,
            tie_word_embeddings=True,
        ),
    ),
    "internlm3": (
        (InternLM3Config, LlamaForCausalLM),
        heads(4, 2, head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters=rope(50000.0)),
    ),
    "ministral3": (MINISTRAL, heads(4, 2, head_dim=16, rope_parameters=MINISTRAL_YARN)),
    # Read without images: its text model's logits. The scaling is that of the published models, but for its lengths.
    "mistral3_images": (
        MISTRAL_IMAGES,
        heads(
            4,
            1,
            head_dim=16,
            rope_parameters=MINISTRAL_YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            tie_word_embeddings=True,
        ),
    ),
    "seed_oss": (SEED, heads(4, 2, head_dim=16, mlp_bias=True, rope_parameters=rope(1000000.0))),
    # Of 16 channels 4 are rotated.
    "stablelm": (
        STABLELM,
        heads(4, 2, hidden_size=64, use_qkv_bias=True, rope_parameters=rope(10000.0)),
    ),
    "stablelm_parallel": (
        STABLELM,
        heads(
            4,
            2,
            hidden_size=64,
            qk_layernorm=True,
            use_parallel_residual=True,
            rope_parameters=rope(10000.0),
        ),
    ),
    # Magnitudes that differ, so that cosines and the scale have one each.
    "deepseek_v2": (
        DEEPSEEK2,
        latents(
            4,
            q_lora_rank=None,
            topk_method="group_limited_greedy",
            routed_scaling_factor=1.5,
            rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        ),
    ),
    "deepseek_v2_greedy": (
        DEEPSEEK2,
        latents(4, q_lora_rank=20, rope_parameters=rope(10000.0)),
    ),
    "deepseek_v3": (
        DEEPSEEK3,
        latents(
            4,
            q_lora_rank=20,
            rope_parameters=YARN
            | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    ),
    # Values wider than keys; channels in halves.
    "glm4_moe_lite": (
        GLM4_LITE,
        latents(
            3,
            q_lora_rank=20,
            v_head_dim=26,
            n_group=1,
            topk_group=1,
            mlp_layer_types=["dense", "sparse"],
            rope_interleave=False,
            rope_parameters=rope(1000000.0),
        ),
    ),
    "mistral4": (
        MISTRAL4,
        latents(
            4,
            q_lora_rank=20,
            rope_parameters=MINISTRAL_YARN | {"partial_rotary_factor": 8 / 20},
        ),
    ),
    # Two heads of a window in an entry; all of them; none, and a mixture.
    "gemma4": (GEMMA4, gemma4(8, 4, num_global_key_value_heads=2, attention_k_eq_v=True)),
    "gemma4_unified": (
        GEMMA4_UNIFIED,
        gemma4(8, 4, num_global_key_value_heads=1, attention_k_eq_v=True),
    ),
    "gemma4_moe": (
        GEMMA4,
        gemma4(
            4,
            2,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=24,
        ),
    ),
    "phi": (
        (PhiConfig, PhiForCausalLM),
        heads(4, 2, rope_parameters=rope(10000.0, partial_rotary_factor=0.5)),
    ),
    "starcoder2": (
        STARCODER2,
        heads(6, 2, sliding_window=20, rope_parameters=rope(100000.0), tie_word_embeddings=True),
    ),
    # Two of four groups of experts, and a dense layer first.
    "glm4_moe": mixture(
        "glm4_moe",
        **GROUPED,
        first_k_dense_replace=1,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ),
    "dots1": mixture(
        "dots1", **GROUPED, first_k_dense_replace=2, sliding_window=24, max_window_layers=1
    ),
    "exaone_moe": mixture(
        "exaone_moe",
        **{name: each for name, each in GROUPED.items() if "ed_experts" not in name},
        num_experts=8,
        num_shared_experts=1,
        num_hidden_layers=2,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["sparse", "dense"],
    ),
    "solar_open": mixture("solar_open", **GROUPED, num_hidden_layers=2),
    "hy_v3": mixture(
        "hy_v3",
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        moe_intermediate_size=16,
        router_scaling_factor=1.7,
    ),
    # Of 16 channels 8 are rotated, and all heads are normalised together.
    "minimax_m2": mixture(
        "minimax_m2",
        num_local_experts=8,
        num_experts_per_tok=3,
        rotary_dim=8,
        num_hidden_layers=2,
        intermediate_size=16,
    ),
    # Dense layers by a list and by a step, and a shared expert with a gate.
    "qwen2_moe": mixture(
        "qwen2_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
    ),
    "ernie4_5_moe": mixture(
        "ernie4_5_moe",
        num_hidden_layers=2,
        moe_num_experts=8,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_intermediate_size=16,
        moe_layer_interval=2,
        tie_word_embeddings=True,
    ),
    "olmoe": mixture("olmoe", **EIGHT, norm_topk_prob=False),
    "flex_olmo": mixture("flex_olmo", **EIGHT, norm_topk_prob=True),
    "mellum": mixture(
        "mellum",
        **EIGHT,
        moe_intermediate_size=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": rope(10000.0),
            "full_attention": rope(500000.0, **{**YARN, "rope_theta": 500000.0}),
        },
    ),
    "granitemoe": mixture("granitemoe", **GRANITE_EXPERTS),
    "granitemoeshared": mixture("granitemoeshared", **GRANITE_EXPERTS, shared_intermediate_size=24),
    # Its margin is wide, so that more than one logit is close; its lengths are those of short factors.
    "phimoe": mixture(
        "phimoe",
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        intermediate_size=16,
        router_jitter_noise=0.3,
        attention_bias=True,
        lm_head_bias=True,
        rope_parameters=rope(
            10000.0,
            rope_type="longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.1, 2.3],
            long_factor=[1.0, 1.5, 2.5, 6.0, 11.0, 30.0, 31.0, 32.0],
            short_mscale=1.25,
            long_mscale=1.25,
            original_max_position_embeddings=128,
        ),
    ),
    "hunyuan_v1_dense": (
        HUNYUAN,
        heads(
            4,
            2,
            head_dim=16,
            attention_bias=True,
            rope_parameters=rope(10000.0, rope_type="dynamic", alpha=20.0, factor=1.0),
            tie_word_embeddings=True,
        ),
    ),
    "hunyuan_v1_moe": mixture(
        "hunyuan_v1_moe", num_hidden_layers=2, num_experts=8, moe_topk=3, intermediate_size=16
    ),
}
SPECS |= {
    "qwen3_5": (QWEN3_5, DELTA_NETS),
    # Read without images: its text model's logits.
    "qwen3_5_images": (
        QWEN3_5_IMAGES,
        DELTA_NETS
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": ((Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM), DELTA_NETS | DELTA_EXPERTS),
    "qwen3_next": (
        (Qwen3NextConfig, Qwen3NextForCausalLM),
        DELTA_NETS | DELTA_EXPERTS | {"linear_num_value_heads": 6},
    ),
}
# Experts in one tensor for all, as transformers 5 has them in memory, and not as the hub's files have them.
FUSED = ("qwen3_moe_fused",)
# Models of which a text of this length has other rotations than the two rows.
WITHIN = {"phi3_long": 32}
# Written with the keys of transformers 4 (rope_theta, rope_scaling, torch_dtype), as most published folders are.
OLD_STYLE = (
    "llama_mha",
    "llama_llama3",
    "llama_yarn",
    "qwen2",
    "gpt_oss_mxfp4",
    "llama_dynamic",
    "olmo3_yarn",
)
# Experts as blocks of 4 bits, as the published files have them.
MXFP4 = ("gpt_oss_mxfp4",)
SHARDED = {"llama_gqa_sharded": "llama_gqa"}


def randomise(model):
    """Fills every parameter so that no feature is a near-identity: biases away from 0, norm weights away from 1."""
    # Gemma's norms, and Qwen3.5's but for its delta nets', multiply by 1 plus their weights.
    gemmas = (
        GemmaForCausalLM,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3ForConditionalGeneration,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForCausalLM,
        Qwen3NextForCausalLM,
    )
    with torch.no_grad():
        buffers = ("_bias", "layer_scalar")
        corrections = [each for each in model.named_buffers() if each[0].endswith(buffers)]
        for name, parameter in [*model.named_parameters(), *corrections]:
            middle = 0.0 if isinstance(model, gemmas) and "linear_attn" not in name else 1.0
            if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                parameter.copy_(0.6 + torch.rand_like(parameter))
            elif ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                parameter.copy_(middle + 0.3 * torch.randn_like(parameter))
            elif name.endswith("A_log"):
                # States that hold some tokens for long, and some for hardly one more.
                parameter.copy_(torch.randn_like(parameter) - 3)
            elif name.endswith(("conv1d.weight", "linear_attn.out_proj.weight")):
                # Lengths that norms divide by are far from 0, and rounding grows little from layer to layer.
                scale = 1.0 if "conv1d" in name else 0.025
                parameter.copy_(scale * torch.randn_like(parameter))
            elif name.endswith("correction_bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias") or "embed" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.25 * torch.randn_like(parameter))
            if isinstance(model, GptOssForCausalLM):
                # Sinks that take a good part of the attention; experts whose limit of 7 acts, and that leave the
                # residual stream to attention, too.
                factors = {
                    "sinks": 8.0,
                    "q_proj.weight": 0.4,
                    "k_proj.weight": 0.4,
                    "gate_up_proj": 2.0,
                }
                factors |= {"experts.down_proj": 0.1}
                parameter.mul_(
                    next((each for end, each in factors.items() if name.endswith(end)), 1.0)
                )


def to_blocks(model, rng):
    """Gives a gpt-oss random experts that MXFP4 holds exactly; returns their blocks and scales by tensor's name."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    stored = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = parameter.shape
        codes = rng.integers(0, 16, (count, outputs, inputs // 32, 32), np.uint8)
        scales = rng.integers(
            *((123, 126) if "gate_up" in name else (117, 120)), codes.shape[:-1], np.uint8
        )
        values = (
            levels[codes % 8]
            * np.where(codes < 8, 1, -1)
            * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
        )
        with torch.no_grad():
            parameter.copy_(
                torch.from_numpy(values.reshape(count, outputs, inputs)).transpose(1, 2)
            )
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = (
            codes[..., ::2] | (codes[..., 1::2] << 4),
            scales,
        )
    return stored


def put_blocks(folder, stored):
    """Rewrites a folder's weights and config with experts as blocks, as the published gpt-oss have them."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if f"{name}_blocks" not in stored}
    save_file(kept | stored, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    apart = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config["quantization_config"] = {"modules_to_not_convert": apart, "quant_method": "mxfp4"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def to_old_style(folder):
    """Rewrites config.json with the keys of transformers 4."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.40.0"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(model, folder, **options):
    """Saves a model as a Hugging Face folder with the configuration and the weights alone."""
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file in folder.iterdir():
        file.chmod(0o644)  # Shards are written readable by their owner alone.


def reload(folder, reader=AutoModelForCausalLM):
    """Loads a folder as transformers does, in float32 whatever the file holds."""
    model = reader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    # What MXFP4 blocks stand for is bfloat16, whatever dtype is asked for.
    return model.float().eval()


def unscale_windows(model):
    """Gives an OLMo 3's layers with windows their unscaled rotary embedding.

    transformers had it so when the model came out, and has it so again; 5.2.0 scales all layers.
    """
    config = copy.deepcopy(model.config)
    config.rope_parameters = rope(config.rope_parameters["rope_theta"])
    rotary = Olmo3RotaryEmbedding(config)

    def unscaled(layer, given, named):
        return given, named | {"position_embeddings": rotary(given[0], named["position_ids"])}

    for layer in model.model.layers:
        if layer.self_attn.attention_type == "sliding_attention":
            layer.register_forward_pre_hook(unscaled, with_kwargs=True)


def logits_of(model, ids):
    """Returns float32 logits [S, V] of one unpadded row."""
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(ids[None]).long()).logits[0].float().numpy()


def seed_of(name, index):
    """Returns the seed of a model: its number for the oldest 34, for others one that no other model changes."""
    return 1000 + index if index < 34 else zlib.crc32(name.encode())


def main():
    """Builds the named folders, or all, and the archive; checks that what was saved gives what was stored."""
    logging.disable_progress_bar()
    chosen = sys.argv[1:]
    arrays = {"lengths": np.array(LENGTHS, np.int32)}
    if chosen:
        arrays = dict(np.load(HERE / "models.npz"))
    for name in chosen or [""]:
        shutil.rmtree(MODELS / name, ignore_errors=True)
    for index, (name, ((config_class, model_class), fields)) in enumerate(SPECS.items()):
        if chosen and name not in chosen:
            continue
        torch.manual_seed(seed_of(name, index))
        given = {**BASE, **fields}
        if given["intermediate_size"] is None:
            del given["intermediate_size"]
        model = model_class(config_class(**given)).eval()
        randomise(model)
        stored = (
            to_blocks(model, np.random.default_rng(1000 + seed_of(name, index)))
            if name in MXFP4
            else {}
        )
        folder = MODELS / name
        if name == "llama_bf16":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16())
            # A copy: .to() would also round the rotary frequencies of the model that is compared below.
            save(copy.deepcopy(model).to(torch.bfloat16), folder)
        else:
            save(model, folder, **({"save_original_format": False} if name in FUSED else {}))
        if name in OLD_STYLE:
            to_old_style(folder)
        if stored:
            put_blocks(folder, stored)

        ids = np.zeros((2, LENGTHS[0]), np.int32)
        rng = np.random.default_rng(seed_of(name, index))
        for row, length in enumerate(LENGTHS):
            ids[row, :length] = rng.integers(3, VOCAB, length)

        # From the files, so that the stored logits belong to the stored weights.
        alone = model_class in (
            Mistral3ForConditionalGeneration,
            Mistral4ForCausalLM,
            Qwen3_5ForConditionalGeneration,
        )
        loaded = reload(folder, model_class if alone else AutoModelForCausalLM)
        for each in (model, loaded) if name == "olmo3_yarn" else ():
            unscale_windows(each)
        arrays[f"{name}/input_ids"] = ids
        for row, length in enumerate(LENGTHS):
            arrays[f"{name}/logits{row}"] = logits_of(loaded, ids[row, :length])
        if name in WITHIN:
            arrays[f"{name}/within"] = logits_of(loaded, ids[1, : WITHIN[name]])
        in_memory = logits_of(model, ids[0])
        gap = float(np.abs(in_memory - arrays[f"{name}/logits0"]).max())
        spread = float(arrays[f"{name}/logits0"].std())
        assert gap < 1e-4, (
            f"{name}: the saved folder gives other logits (gap {gap}); check what save() writes"
        )
        print(f"{name:20s} std of logits {spread:6.2f}  saved vs in memory {gap:.1e}")

    for name, source in SHARDED.items() if not chosen else ():
        save(reload(MODELS / source), MODELS / name, max_shard_size="60KB")
        gap = np.abs(
            logits_of(reload(MODELS / name), arrays[f"{source}/input_ids"][0])
            - arrays[f"{source}/logits0"]
        )
        assert gap.max() < 1e-5, (
            f"{name}: other logits than {source} (gap {gap.max()}); check the shards"
        )
        print(f"{name:20s} {len(list((MODELS / name).glob('*.safetensors')))} shards")

    with safe_open(MODELS / "llama_bf16" / "model.safetensors", "np") as file:
        dtype = file.get_slice("model.norm.weight").get_dtype()
    assert dtype == "BF16", (
        f"llama_bf16: stored as {dtype}; the model has to be bfloat16 when it is saved"
    )
    np.savez_compressed(HERE / "models.npz", **arrays)


if __name__ == "__main__":
    main()
