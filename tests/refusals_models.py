"""Refusals of models: configs of every family, names, dtypes and meshes that a model is loaded with."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from config_fields import shape
from meshes import mesh_of, model_of, prompts
from refusing import calls, door
from running import GOLDEN
from test_config_fields import LLAMA3, ROOM, YARN
from test_families import FALCON_7B, FALCON_40B, MIXTRAL, PHI_4, QWEN3_30B, SMOLLM3_3B
from test_layer_specs import CONFIG

import jaxkv
from jaxkv.checkpoints import GgufTokenizer, fetch, manifest
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import LayerSpec
from jaxkv.sharding import sizes
from jaxkv.sharding.parameters import model_mesh

MODELS = GOLDEN / "models"
LLAMA = MODELS / "llama_gqa"
SIZES = (
    "num_attention_heads num_key_value_heads hidden_size head_dim intermediate_size num_hidden_layers vocab_size "
    "max_position_embeddings"
).split()
ROTATIONS = (
    "rope_theta",
    "factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
)
LONGER = {"original_max_position_embeddings": 32}


def read(keys):
    """A tiny model's config with other keys, read."""
    return ModelConfig.from_hf(json.loads((LLAMA / "config.json").read_text("utf-8")) | keys)


def rotated(key: str, value):
    """Configs in which this number of a rotation has this value."""
    if key == "rope_theta":
        return [{"rope_parameters": None, key: value}, {"rope_parameters": {key: value}}]
    if key == "factor":
        return [{"rope_parameters": {"rope_type": "linear", key: value}}]
    return [
        {
            "rope_parameters": (LLAMA3 if key.endswith("freq_factor") else YARN)
            | LONGER
            | {key: value}
        }
    ]


class BytesPath:
    """A path as `os.fspath` takes it, of bytes."""

    def __fspath__(self):
        return b"model"

    def __repr__(self):
        return "BytesPath()"


CONFIGS = [
    *door(
        "a config's sizes",
        read,
        *(
            ({key: value}, f"{key}=.*give (an integer from 1 to|at most) 2147483647")
            for key in SIZES
            for value in (0, -4, "4", 4.0, True, [4], {}, 2**31, 10**400)
        ),
    ),
    *door(
        "a config's reals",
        read,
        *(
            (keys, f"{key}=.*give a (positive, finite number|scaling factor)")
            for value in (0, 0.0, -1e-5, math.nan, math.inf, "1e-5", True, [], 10**400)
            for key, keys in (
                ("rms_norm_eps", {"rms_norm_eps": value}),
                *((key, keys) for key in ROTATIONS for keys in rotated(key, value)),
            )
        ),
    ),
    *door(
        "a config's keys",
        lambda of: read({of[0]: of[1]}),
        *(
            ((key, value), f"=.*{told}")
            for key, value, told in (
                ("tie_word_embeddings", "false", "give True or False"),
                ("attention_bias", 1, "give True or False"),
                ("mlp_bias", "no", "give True or False"),
                ("model_type", ["llama"], "jaxkv builds cohere, .*falcon, gemma"),
                ("hidden_act", ["silu"], "jaxkv builds .* with silu"),
                ("layer_types", 3, "give full_attention and sliding_attention alone"),
                ("layer_types", [["full_attention"]], "give full_attention and sliding"),
                ("rope_parameters", 3, "give an object"),
                ("rope_scaling", [1], "give an object"),
                ("rope_parameters", {"rope_type": ["yarn"]}, "jaxkv builds default"),
                ("rope_parameters", {**YARN, **LONGER, "truncate": "no"}, "give True or False"),
                (
                    "rope_parameters",
                    {**YARN, "original_max_position_embeddings": 0},
                    "give an integer from 1",
                ),
                ("partial_rotary_factor", 0, "only heads of GLM-4"),
                ("eos_token_id", "2", "give an integer from 0"),
                ("eos_token_id", [2, 2**40], "give at most 2147483647"),
                ("eos_token_id", [[2]], "give an integer from 0"),
                ("bos_token_id", 1.0, "give an integer from 0"),
            )
        ),
    ),
    *door(
        "a config's rotation",
        lambda keys: ModelConfig.from_hf(shape("llama", **keys)),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 5e5}},
            "rope_scaling=.*another rotation.*remove one",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 5e5}},
            "rope_scaling=.*another rotation",
        ),
        ({"rope_theta": None}, "rope_theta=None: give a positive"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta=None: give a positive"),
        ({"rope_parameters": YARN | {"truncate": None}}, "truncate=None: give True or False"),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": None}},
            "original_max.*=None: give an integer",
        ),
        (
            {"rope_parameters": LLAMA3 | {"low_freq_factor": None}},
            "low_freq_factor=None: give a positive",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ),
    *door(
        "a family's config",
        lambda of: ModelConfig.from_hf(shape(of[0], **ROOM.get(of[0], {})) | of[1]),
        (("mistral", {"attention_bias": True}), "attention_bias=True: no mistral has such biases"),
        (("mixtral", {"attention_bias": True}), "attention_bias=True: no mixtral"),
        (("qwen3", {"mlp_bias": True}), "mlp_bias=True: no qwen3"),
        (("qwen3", {"head_dim": None}), "head_dim=None: the model's config must give it"),
        (
            ("qwen2", {"num_attention_heads": 4}),
            "num_key_value_heads=32: config.json leaves it out.*heads=4",
        ),
        (("llama", {"sliding_window": 64}), "sliding_window=64: no llama has windows"),
        (
            ("qwen2", {"layer_types": ["full_attention"]}),
            "layer_types='1 entries': give as many as num_hidden_layers=2",
        ),
        (
            ("llama", {"max_position_embeddings": None}),
            "max_position_embeddings=None: the model's config must give it",
        ),
        (
            ("qwen3_moe", {"num_experts": 8, "num_local_experts": 16}),
            "num_experts=.*two names of one number",
        ),
    ),
    *door(
        "norms of queries and keys",
        lambda of: dataclasses.replace(CONFIG, **of),
        (
            {"qk_norm": True, "qk_layer_norm": True},
            "qk_norm=.*qk_layer_norm.*: queries and keys have one norm: give one",
        ),
        (
            {"qk_norm_wide": True, "interleaved": True},
            "interleaved=True: RMS norms of queries and keys are read in",
        ),
    ),
    *door(
        "a published config",
        lambda of: ModelConfig.from_hf(of[0] | of[1]),
        ((FALCON_7B, {"alibi": True}), "alibi=True: .*rotary"),
        ((FALCON_7B, {"activation": "relu"}), "activation='relu': .*gelu only"),
        (
            (FALCON_7B, {"apply_residual_connection_post_layernorm": True}),
            "apply_residual_connection_post_layernorm=True",
        ),
        (
            (FALCON_7B, {"num_ln_in_parallel_attn": 2}),
            "num_ln_in_parallel_attn=2: .*new_decoder_architecture",
        ),
        ((FALCON_40B, {"parallel_attn": False}), "parallel_attn=False: .*new_decoder_architecture"),
        ((FALCON_7B, {"multi_query": False, "num_kv_heads": 1}), "num_kv_heads=1: .*give 71"),
        ((FALCON_7B, {"bias": "yes"}), "bias='yes': give True or False"),
        ((FALCON_7B, {"layer_norm_epsilon": 0}), "layer_norm_epsilon=0"),
        ((FALCON_7B, {"intermediate_size": 4}), "config=.*intermediate_size"),
        ((MIXTRAL, {"sliding_window": 0}), "sliding_window=0: give an integer from 1"),
        ((MIXTRAL, {"num_experts_per_tok": 9}), "chosen=9: a block has 8 experts"),
        ((MIXTRAL, {"num_local_experts": 0}), "num_local_experts=0: give an integer from 1"),
        (
            (QWEN3_30B, {"decoder_sparse_step": 2}),
            "decoder_sparse_step=2: .*differ from layer to layer",
        ),
        ((QWEN3_30B, {"mlp_only_layers": [0]}), "mlp_only_layers=.*differ from layer to layer"),
        ((QWEN3_30B, {"norm_topk_prob": 1}), "norm_topk_prob=1: give True or False"),
        ((QWEN3_30B, {"num_experts": None}), "num_experts=None: the model's config must give it"),
        (
            (QWEN3_30B, {"shared_expert_intermediate_size": 8}),
            "config=.*shared_expert_intermediate_size",
        ),
        (
            (PHI_4, {"layer_types": ["sliding_attention"] * 40}),
            "layer_types=.*no phi3 has types of layers",
        ),
        (
            (PHI_4, {"rope_scaling": {"type": "longrope"}}),
            "rope_scaling.short_factor=None: .*'longrope' needs it",
        ),
        (
            (PHI_4, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "rope_scaling=.*default RoPE or longrope",
        ),
        (
            (PHI_4, {"partial_rotary_factor": 1.75}),
            "partial_rotary_factor=1.75: give a share of the channels",
        ),
        (
            (SMOLLM3_3B, {"sliding_window": 512, "use_sliding_window": True, "layer_types": None}),
            "sliding_window=512",
        ),
        (
            (SMOLLM3_3B, {"no_rope_layers": [1, 0]}),
            "no_rope_layers=.*give a 1 for each of num_hidden_layers=36",
        ),
        ((SMOLLM3_3B, {"no_rope_layers": [2] * 36}), "no_rope_layers=.*a 0 for each without"),
        ((SMOLLM3_3B, {"no_rope_layers": "1" * 36}), "no_rope_layers=.*a 0 for each without"),
        (
            (SMOLLM3_3B, {"no_rope_layer_interval": 0}),
            "no_rope_layer_interval=0: give an integer from 1",
        ),
        (
            (QWEN3_30B, {"model_type": "gpt2"}),
            "model_type='gpt2': jaxkv builds cohere, .*falcon, gemma",
        ),
        (
            (QWEN3_30B, {"model_type": "deepseek_v3"}),
            "model_type='deepseek_v3': it has multi-head latent attention.*not built; jaxkv builds cohere",
        ),
    ),
    *calls(
        "kinds of layers",
        (lambda: dataclasses.replace(CONFIG, kinds=("full",)), r"kinds=.*give LayerSpecs"),
        (lambda: LayerSpec(scale=-1.0), r"scale=-1"),
        (lambda: LayerSpec(rope="llama3"), r"rope=.*give a Rope"),
    ),
]

NAMES = [
    *door(
        "load",
        jaxkv.load,
        *(
            (
                given,
                TypeError,
                re.escape(f"name_or_path={given!r}: give a path, a model's name or a hub id"),
            )
            for given in (None, 5, 0.5, [], b"tiny-retrieval", BytesPath())
        ),
    ),
    *door(
        "a dtype",
        lambda dtype: jaxkv.load(LLAMA, dtype=dtype),
        *(
            (dtype, f"dtype={name}: give one of float32, bfloat16, float16")
            for dtype, name in (
                ("foo", "'foo'"),
                ("bf16", "'bf16'"),
                (3, "3"),
                (True, "True"),
                (float, "'float64'"),
                ([("a", "f4")], "'void32'"),
                ("int8", "'int8'"),
                ("float64", "'float64'"),
                (jnp.int32, "'int32'"),
                ("float8_e4m3fn", "'float8_e4m3fn'"),
            )
        ),
    ),
    *door(
        "fetch",
        fetch,
        *(
            (name, "known models: smollm2-135m-instruct")
            for name in ("no-such-model", "./no/such", "some/missing.gguf", "x" * 5000, "a\0b")
        ),
        (3, TypeError, "name_or_path.*3"),
    ),
    *calls("a manifest", (lambda: manifest("gpt-9"), "name='gpt-9'.*known models: smollm2")),
    *door(
        "a vocabulary of GGUF",
        lambda parts: GgufTokenizer(**parts).build(),
        *(
            (
                {"model": "llama", "unk": 0, "scores": scores, "tokens": tokens},
                "tokens='.* characters': tokens too long, or scores not finite",
            )
            for scores, tokens in (((0.0,), ("x" * 100_000,)), ((math.nan,), ("x",)))
        ),
        (
            {"model": "gpt2", "pre": "tekken", "tokens": ("a",)},
            "tokenizer.ggml.pre='tekken'.*smollm",
        ),
        ({"model": "t5", "tokens": ("a",)}, "tokenizer.ggml.model='t5'"),
        (
            {"model": "gpt2", "pre": "gpt-2", "tokens": ("a",), "merges": ("a b",)},
            "inconsistent vocabulary",
        ),
    ),
]


@functools.cache
def cache():
    return jaxkv.prefill(
        model_of(4), prompts(5, (20, 21)), policy=jaxkv.SnapKV(budget=24, window=8), progress=False
    )


def asked(mesh):
    policy = jaxkv.SnapKV(budget=24, window=8)
    return jaxkv.generate(
        model_of(4), prompts(5, (20, 21, 22)), mesh=mesh, policy=policy, progress=False
    )


def axes_of(*names):
    return jax.make_mesh((2, 4), names)


AXES = "give a mesh with the axes 'data' and 'model'"
EMPTY = jax.sharding.Mesh(np.zeros((0, 1), object), ("data", "model"))

MESHES = [
    *door(
        "load on a mesh",
        lambda mesh: jaxkv.load(LLAMA, mesh=mesh),
        ((2, 4), TypeError, r"mesh=tuple: give jax\.make_mesh"),
        (axes_of("data", "tensor"), f"mesh=.*{AXES}"),
        (axes_of("x", "y"), f"mesh=.*{AXES}"),
        # Two kv heads of three query heads: four devices would cut a group.
        (
            mesh_of(2, 4),
            r"mesh\.model=4: it does not divide kv_heads=2, heads=6.*give one of \[1, 2\]",
        ),
    ),
    *door(
        "generate on a mesh",
        asked,
        ((2, 4), TypeError, r"mesh=tuple: give jax\.make_mesh"),
        (EMPTY, r"mesh=\{'data': 0, 'model': 1\}: give one of at least one device"),
    ),
    *calls(
        "a mesh of a model",
        # Six kv heads on four devices: each would have three of them with half of their queries.
        (
            lambda: model_mesh(mesh_of(1, 4), dataclasses.replace(read({}), heads=24, kv_heads=6)),
            r"give one of \[1, 2\]",
        ),
    ),
    *door(
        "reshard",
        lambda given: jaxkv.reshard(given, mesh_of(2, 4)),
        *(
            (given, TypeError, r"cache=.*: give what prefill or an earlier generate returned")
            for given in (None, "cache", jaxkv.FullKV())
        ),
    ),
    *door(
        "reshard to a mesh",
        lambda mesh: jaxkv.reshard(cache(), mesh),
        ((2, 4), TypeError, r"mesh=tuple: give jax\.make_mesh"),
        (mesh_of(1, 3), r"mesh\.model=3: it does not divide kv_heads=4.*give one of"),
        (axes_of("x", "model"), rf"mesh=\('x', 'model'\): {AXES}"),
    ),
    *calls(
        "reshard of what is no cache",
        (
            lambda: jaxkv.reshard(jaxkv.generate(model_of(4), [1, 2], max_new_tokens=1), None),
            TypeError,
            r"cache=Generation: give its \.cache",
        ),
    ),
    *door(
        "a mesh of the command line",
        lambda given: sizes.mesh_of(*given),
        (("4x4",), "there are 8 devices here"),
        (("4x4", "cpu"), "there are 8 CPU devices here"),
        # XLA's CPU dies of so many.
        (("5000x2",), "give 1024 devices at most"),
        (("100000x1",), "give 1024 devices at most"),
    ),
]

ROWS = [*CONFIGS, *NAMES, *MESHES]
