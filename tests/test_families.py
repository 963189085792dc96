"""Families beside Llama's: what their configs say."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from published import PUBLISHED, count_elements
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import ExpertsConfig, LayerSpec, NoRope, Rope
from jaxkv.planning.memory_sizes import count_parameters

FALCON_7B, FALCON_40B, MIXTRAL, QWEN3_30B, PHI_4, PHI_4_MINI, SMOLLM3_3B = (
    PUBLISHED[name]["config"]
    for name in "falcon-7b falcon-40b mixtral-8x7b qwen3-30b-a3b phi-4 phi-4-mini smollm3-3b".split()
)
GRANITE_8B, OLMO2_7B, GLM4_9B, COMMAND_R, GEMMA_7B = (
    PUBLISHED[name]["config"]
    for name in "granite-3.3-8b olmo-2-7b glm-4-9b command-r gemma-7b".split()
)
# Keys without which a class has no valid config, or no dense layer.
NEEDED = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {"head_dim": 128},
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "mellum": {"mlp_layer_types": ["dense", *["sparse"] * 27]},
    "mistral4": {"first_k_dense_replace": 1},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
}
# Elements of transformers' classes on torch's meta device, with their default sizes but for these keys: of types, or
# shapes, without a line in `published.json`.
COUNTS = {
    "apertus": (6_979_596_352, {}),
    "arcee": (4_022_766_080, {}),
    "deepseek_v2": (38_612_307_968, NEEDED["deepseek_v2"] | {"first_k_dense_replace": 0}),
    "flex_olmo": (33_270_665_216, {}),
    "granitemoe": (37_039_116_288, {}),
    "granitemoeshared": (37_441_769_472, {"shared_intermediate_size": 1024}),
    "hunyuan_v1_moe": (
        83_056_922_624,
        {"num_experts": 64, "moe_topk": 8, "intermediate_size": 3072},
    ),
    "mellum": (12_149_923_072, {}),
    "mistral4": (118_972_826_624, {}),
    "phi": (1_418_270_720, {}),
    "phimoe": (41_873_153_344, {"attention_bias": True, "lm_head_bias": True}),
    # As StableLM 2 12B.
    "stablelm": (
        11_630_694_400,
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        },
    ),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_counts_of_parameters_are_those_of_the_class(kind):
    """By a plan, which counts layers of one kind by their number, and of the decoder."""
    count, keys = COUNTS[kind]
    config = ModelConfig.from_hf({"model_type": kind, **keys})
    assert count_parameters(config, "bfloat16") == count_elements(config) == count


def test_what_is_read():
    assert ModelConfig.from_hf(FALCON_7B).shared_norm
    assert not ModelConfig.from_hf(FALCON_40B).shared_norm
    assert ModelConfig.from_hf(FALCON_40B | {"num_ln_in_parallel_attn": 1}).shared_norm
    old = ModelConfig.from_hf(
        FALCON_7B | {"multi_query": False, "parallel_attn": False, "bias": True}
    )
    assert (old.kv_heads, old.parallel, old.shared_norm) == (71, False, False)
    assert old.qkv_bias and old.out_bias and old.mlp_bias
    qwen, small = ModelConfig.from_hf(QWEN3_30B), ModelConfig.from_hf(SMOLLM3_3B)
    assert (
        qwen.experts == ExpertsConfig(count=128, chosen=8) and qwen.hidden == 768 and qwen.qk_norm
    )
    rotated = [isinstance(small.get_layer_spec(layer).rope, NoRope) for layer in range(36)]
    assert rotated == [False, False, False, True] * 9 and len(small.kinds) == 4 and small.tied
    granite = ModelConfig.from_hf(GRANITE_8B)
    assert (
        granite.get_layer_spec(7) == LayerSpec(rope=Rope(theta=1e7), scale=1 / 128)
        and not granite.has_llama_blocks
    )
    assert (granite.embedding_scale, granite.residual_scale, granite.logit_scale) == (
        12.0,
        0.22,
        1 / 16,
    )
    glm, command, gemma = (ModelConfig.from_hf(each) for each in (GLM4_9B, COMMAND_R, GEMMA_7B))
    assert glm.norms == "both" and glm.qkv_bias and not glm.out_bias and glm.rope == Rope(share=0.5)
    # Of 64 rotated channels the even ones come first, then half of those that are not rotated.
    assert glm.channel_permutation == (
        *range(0, 64, 2),
        *range(64, 96),
        *range(1, 64, 2),
        *range(96, 128),
    )
    assert (
        command.channel_permutation == (*range(0, 128, 2), *range(1, 128, 2))
        and command.logit_scale == 1 / 16
    )
    assert command.max_positions == 131072
    assert ModelConfig.from_hf(GEMMA_7B | {"hidden_act": "gelu"}) == gemma
    later = {
        key: value
        for key, value in QWEN3_30B.items()
        if key not in ("num_experts", "norm_topk_prob")
    }
    assert ModelConfig.from_hf(later | {"num_local_experts": 64}).experts == ExpertsConfig(
        count=64, chosen=8, normalised=False
    )


@pytest.mark.parametrize(
    "kind, keys, dense",
    [
        ("glm4_moe", NEEDED["glm4_moe"] | {"first_k_dense_replace": 2}, "dd...."),
        ("qwen2_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 3}, "dd.dd."),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "...d.."),
        (
            "ernie4_5_moe",
            {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2},
            "d.d.dd",
        ),
        ("hy_v3", {"mlp_layer_types": ["dense", "sparse"] * 3}, "d.d.d."),
        ("mixtral", {}, "......"),
    ],
)
def test_layers_of_a_mixture_may_be_dense(kind, keys, dense):
    config = ModelConfig.from_hf(
        {"model_type": kind, "num_hidden_layers": 6, "intermediate_size": 77} | keys
    )
    found = [config.get_layer_spec(layer).dense_hidden for layer in range(6)]
    assert found == [77 if each == "d" else None for each in dense]


FUSED = "transformer.h.1.self_attention.query_key_value.weight"
QKV = "model.layers.1.self_attn.qkv_proj.weight"
EXPERT, ALL = (
    "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
)


@pytest.mark.parametrize(
    "name, tensor, change, message",
    [
        ("falcon_40b", FUSED, lambda a: a[:-1], rf"{FUSED}=\(95, 48\): .*\(96, 48\)"),
        ("phi3", QKV, lambda a: a[:-1], rf"{QKV}=\(79, 48\): .*\(80, 48\)"),
        ("mixtral", EXPERT, lambda a: None, rf"weights=\['{EXPERT}'\]: .*missing"),
        ("mixtral", EXPERT, lambda a: a * np.nan, rf"weights=\['{EXPERT}'\]: .*NaN"),
        ("qwen3_moe_fused", ALL, lambda a: a[:-1], rf"{ALL}=\(7, 48, 48\): .*\(8, 48, 48\)"),
    ],
    ids=[
        "an entry less",
        "a value's row less",
        "an expert less",
        "an expert of NaN",
        "fused, an expert less",
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, tensor, change, message):
    copied = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "golden" / "models" / name, copied)
    tensors = load_file(copied / "model.safetensors")
    changed = change(tensors.pop(tensor, None))
    save_file(
        tensors | ({} if changed is None else {tensor: changed}), copied / "model.safetensors"
    )
    with pytest.raises(ValueError, match=message):
        jaxkv.load(copied, progress=False)


def test_layers_that_predict_several_tokens_are_not_read(tmp_path):
    """As many behind the last as the config says, or tensors of that name; others are rejected."""
    copied = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "golden" / "models" / "glm4_moe", copied)
    path = copied / "model.safetensors"
    tensors = load_file(path)
    more = {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(tensors | more | {"mtp.norm.weight": np.ones(3, np.float32)}, path)
    assert jaxkv.load(copied, progress=False).config.layers == 3
    save_file(tensors | {"model.layers.4.eh_proj.weight": np.zeros(2, np.float32)}, path)
    with pytest.raises(ValueError, match=r"weights=\['model.layers.4.eh_proj.weight'\]"):
        jaxkv.load(copied, progress=False)
    config = json.loads((copied / "config.json").read_text("utf-8"))
    (copied / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": "1"}))
    with pytest.raises(ValueError, match="^num_nextn_predict_layers='1'"):
        jaxkv.load(copied, progress=False)
    # A config of fewer layers than the file's.
    save_file(tensors, path)
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"weights=\['model.layers.2.* not a parameter"):
        jaxkv.load(copied, progress=False)


@pytest.mark.parametrize(
    "name, tensor",
    [("ernie4_5_moe", "mlp.gate.weight"), ("hunyuan_v1_moe", "mlp.gate.wg.weight")],
)
def test_routers_that_are_not_rounded(name, tensor):
    """transformers keeps them in float32 in a model of another dtype."""
    folder = Path(__file__).parent / "golden" / "models" / name
    model = jaxkv.load(folder, "bfloat16", progress=False)
    router = model.decoder.blocks[1].mlp.router[...]
    stored = load_file(folder / "model.safetensors")[f"model.layers.1.{tensor}"]
    np.testing.assert_array_equal(router, stored)
    assert model.decoder.blocks[1].mlp.experts_down[...].dtype == "bfloat16"
