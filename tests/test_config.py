"""A model's config: every key is honoured, changes nothing, or is rejected by name; transformers knows the others."""

import copy
import dataclasses
import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
from test_families import (
    COMMAND_R,
    FALCON_7B,
    GEMMA_7B,
    MIXTRAL,
    NEEDED,
    PHI_4,
    QWEN3_30B,
    SMOLLM3_3B,
)
from test_packaging import run

from jaxkv.checkpoints import list_model_types
from jaxkv.checkpoints.hub_config import _MISSING, FAMILIES, IGNORED
from jaxkv.checkpoints.text_part import extract_text_config
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import ExpertsConfig, Llama3Rope, Ministral3Rope, Rope
from jaxkv.planning.catalog import catalog

# Of the classes in transformers: equal magnitudes, so that cosines and sines keep theirs.
MINISTRAL = Ministral3Rope(
    theta=1e6,
    factor=16.0,
    original_max_position=16384,
    attention_factor=1.0,
    llama_4_scaling_beta=0.1,
)
APERTUS = Llama3Rope(
    theta=12e6,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32}
HUNYUAN = ExpertsConfig(count=8, chosen=2, shared=11008, wide_router=True)
MODELS = Path(__file__).parent / "golden" / "models"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA_2 = catalog()["gemma-2-2b"].raw


def config(name="llama_gqa", **keys):
    return json.loads((MODELS / name / "config.json").read_text("utf-8")) | keys


def test_an_error_is_of_bounded_length():
    with pytest.raises(ValueError, match="key0=") as caught:
        ModelConfig.from_hf(config(**{f"key{index}": "1" * 100_000 for index in range(9)}))
    assert len(str(caught.value)) < 1200


def test_ids_that_stand_for_none():
    read = ModelConfig.from_hf(config(bos_token_id=-1, eos_token_id=[2, -1]))
    assert (read.bos, read.eos) == (None, (2,))
    assert ModelConfig.from_hf(config(eos_token_id=None)).eos == ()


def test_whole_numbers_serve_as_reals():
    whole, real = (
        ModelConfig.from_hf(config(rope_parameters={"rope_theta": theta}))
        for theta in (500_000, 5e5)
    )
    assert repr(whole) == repr(real)


def test_what_transformers_need_not_be_told_need_not_be_told_here():
    """Of every family: keys are left out one by one, and all at once but those that transformers has otherwise."""
    from transformers import AutoConfig

    def theirs(raw):
        return AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()

    logging.getLogger("transformers").setLevel(logging.ERROR)
    seen = set()
    for file in sorted(MODELS.glob("*/config.json")):
        raw = dict(extract_text_config(json.loads(file.read_text("utf-8"))))
        whole, least = theirs(raw), dict(raw)
        for key in raw.keys() - {"model_type", "rope_scaling", "rope_parameters"}:
            less = {other: value for other, value in least.items() if other != key}
            try:
                least = less if theirs(less) == whole else least
            except Exception:  # noqa: BLE001 - sizes that do not fit one another
                continue
        assert ModelConfig.from_hf(least) == ModelConfig.from_hf(raw), file.parent.name
        seen.add(raw["model_type"])
    assert seen == FAMILIES.keys()


# Keys that another one beside them overrides, or that act only with another rotary embedding or window.
OVERRIDDEN = {
    "dots1": "sliding_window",
    "ernie4_5_moe": "moe_layer_end_index",
    "exaone4": "sliding_window sliding_window_pattern",
    "exaone_moe": "sliding_window sliding_window_pattern",
    "falcon": "num_kv_heads",
    "mellum": "sliding_window",
    "olmo3": "sliding_window",
    "phi3": "original_max_position_embeddings",
    "qwen2": "use_sliding_window",
    "qwen2_moe": "sliding_window use_sliding_window",
    "qwen3": "use_sliding_window",
    "qwen3_moe": "use_sliding_window",
    "smollm3": "use_sliding_window no_rope_layer_interval",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_a_class_is_honoured_harmless_or_rejected(kind):
    from transformers import AutoConfig

    raw = AutoConfig.for_model(kind, **NEEDED.get(kind, {})).to_dict()
    plain = ModelConfig.from_hf(copy.deepcopy(raw))
    harmless = {*IGNORED, *f"{FAMILIES[kind].ignored} {OVERRIDDEN.get(kind, '')}".split()}
    without_effect = set()
    for key in raw.keys() - harmless:
        value = raw[key]
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, str):
            other = f"{value}x"
        elif isinstance(value, (int, float)):
            other = 2 * value + 2
        else:
            continue
        try:
            read = ModelConfig.from_hf(copy.deepcopy(raw) | {key: other})
        except ValueError:
            continue
        without_effect |= {key} if read == plain else set()
    assert not without_effect


@pytest.mark.parametrize(
    "family, keys, name, value",
    [
        ("mistral", {}, "sliding_windows", (4096, 4096)),
        ("mistral", {"sliding_window": None}, "sliding_windows", (None, None)),
        ("llama", {"num_key_value_heads": None}, "kv_heads", 32),
        ("glm4", {}, "eos", (151_329, 151_336, 151_338)),
        ("smollm3", {"no_rope_layer_interval": 2}, "layers", 2),
        (
            "qwen3",
            {"use_sliding_window": True, "max_window_layers": 1},
            "sliding_windows",
            (None, 4096),
        ),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 64},
            "sliding_windows",
            (64, 64),
        ),
        (
            "llama",
            {"sliding_window": 64, "use_sliding_window": False},
            "sliding_windows",
            (None, None),
        ),
        ("gemma", {"hidden_act": "gelu"}, "activation", "gelu_tanh"),
        ("seed_oss", {}, "qkv_bias", True),
        ("seed_oss", {}, "out_bias", False),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, "out_bias", True),
        ("stablelm", {"use_qkv_bias": True}, "out_bias", False),
        ("stablelm", {}, "rope", Rope(share=0.25)),
        ("internlm3", {"qkv_bias": True, "bias": True}, "out_bias", True),
        ("starcoder2", {}, "sliding_windows", (None, None)),
        ("ministral3", {}, "rope", MINISTRAL),
        ("apertus", {}, "rope", APERTUS),
        ("glm4_moe", {"first_k_dense_replace": 0}, "rope", Rope(share=0.5)),
        ("minimax_m2", {"rotary_dim": 64}, "rope", Rope(theta=5e6, share=0.5)),
        ("hunyuan_v1_dense", {"rope_scaling": ALPHA}, "rope", Rope(theta=1e4 * 50 ** (32 / 30))),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [2] * 2}, "experts", HUNYUAN),
    ],
)
def test_what_is_left_out(family, keys, name, value):
    sizes = {"vocab_size": 400, "hidden_size": 1024, "num_hidden_layers": 2}
    read = ModelConfig.from_hf({"model_type": family, "num_attention_heads": 32, **sizes, **keys})
    assert getattr(read, name) == value


# Of the published files of Hunyuan A13B, beside those that its class reads.
HUNYUAN_A13B = {
    **{"attention_head_dim": 8, "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0]},
    **{"eod_token_id": 3, "im_end_id": 6, "kv_lora_rank": None, "moe_drop_tokens": False},
    **{"moe_intermediate_size": [3072] * 2, "moe_layer_num_skipped": 0, "moe_topk": [2] * 2},
    **{"n_group": False, "norm_topk_prob": True, "norm_type": "rms", "num_media_embeds": 257},
    **{"num_shared_expert": [1] * 2, "pool_type": "last", "q_lora_rank": None, "use_cla": False},
    **{"routed_scaling_factor": False, "topk_group": False, "use_mixed_mlp_moe": True},
    **{"use_mla": False, "use_qk_norm": True, "use_rotary_pos_emb": True, "v_head_dim": None},
}


def test_neighbouring_channels_in_folded_layers():
    """Their order is that of a head's channels, of which there are two numbers."""
    with pytest.raises(ValueError, match="^interleaved=True: .*own head dim"):
        dataclasses.replace(ModelConfig.from_hf(config("gemma4")), interleaved=True)


def test_published_keys_of_each_layer():
    """Numbers of every layer, as lists, where the class reads one number or none."""
    plain = config("hunyuan_v1_moe", moe_topk=2, num_hidden_layers=2)
    assert ModelConfig.from_hf(plain | HUNYUAN_A13B) == ModelConfig.from_hf(plain)


def test_keys_that_change_nothing():
    """Qwen3-Coder's published config has them beside Qwen3's."""
    dense = config("solar_open", first_k_dense_replace=1)
    assert ModelConfig.from_hf(dense) == ModelConfig.from_hf(config("solar_open"))
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert ModelConfig.from_hf(QWEN3_30B | coder) == ModelConfig.from_hf(QWEN3_30B)
    plain = ModelConfig.from_hf(config())
    for keys in ({"qkv_bias": None}, {"use_bidirectional_attention": False}, {"temperature": 3}):
        assert ModelConfig.from_hf(config(**keys)) == plain


HUNYUAN_2 = config("hunyuan_v1_moe", num_hidden_layers=2)
APERTUS_8B = {"model_type": "apertus", "hidden_act": "xielu"}
REFUSED = [
    *((None, {"hidden_size": value}) for value in (0, "4", 2**31)),
    *((None, {"rms_norm_eps": value}) for value in (math.nan, "1e-5")),
    (None, {"tie_word_embeddings": "false"}),
    (None, {"hidden_act": ["silu"]}),
    (None, {"layer_types": ["full_attention"]}),
    (None, {"sliding_window": 64}),
    (None, {"eos_token_id": [2, 2**40]}),
    (None, {"partial_rotary_factor": 0.5}),
    (None, {"rope_scaling": [1]}),
    (None, {"quantization_config": {"quant_method": "hqq"}}),
    (None, {"attention_chunk_size": 8}),
    (None, {"mlp_bias": True, "model_type": "mistral"}),
    (COMMAND_R, {"logit_scale": 0}),
    (FALCON_7B, {"alibi": True}),
    (FALCON_7B, {"head_dim": 64}),
    (FALCON_7B, {"apply_residual_connection_post_layernorm": True}),
    (FALCON_7B, {"num_kv_heads": 1, "multi_query": False}),
    (GEMMA_7B, {"hidden_activation": "gelu"}),
    (GEMMA_7B, {"use_bidirectional_attention": True}),
    (GEMMA_2, {"attn_logit_softcapping": 0.0}),
    (MIXTRAL, {"num_local_experts": 0}),
    (QWEN3_30B, {"shared_expert_intermediate_size": 8}),
    (PHI_4, {"layer_types": ["sliding_attention"] * 40}),
    (SMOLLM3_3B, {"sliding_window": 512, "use_sliding_window": True}),
    (SMOLLM3_3B, {"no_rope_layers": [2] * 36}),
    (APERTUS_8B, {"hidden_act": "silu"}),
    (APERTUS_8B, {"post_norm": True}),
    ({"model_type": "olmoe"}, {"clip_qkv": 8.0}),
    ({"model_type": "ernie4_5_moe"}, {"use_bias": True}),
    ({"model_type": "glm4_moe"}, {"scoring_func": "softmax"}),
    ({"model_type": "qwen2_moe"}, {"mlp_only_layers": [24]}),
    ({"model_type": "hy_v3"}, {"mlp_layer_types": ["sparse"]}),
    (APERTUS_8B, {"mlp_bias": True}),
    *((None, {"model_type": kind}) for kind in (["llama"], "gpt2")),
    # Values of other types, and lists of another length than the layers.
    (config("minimax_m2"), {"rotary_dim": "8"}),
    (config("gemma4_moe"), {"enable_moe_block": "false"}),
    (config("gemma4"), {"per_layer_config": {"0": None, "3": None}}),
    (config("qwen3_next"), {"layer_types": [["full_attention"]] * 4}),
    (config("glm4_moe_lite"), {"mlp_layer_types": [["dense"]] * 2}),
    *((HUNYUAN_2, {"moe_topk": topk}) for topk in ([[2], [2]], [2, 4], [2], [2] * 3, [])),
    (HUNYUAN_2, {"moe_intermediate_size": [3072]}),
    (HUNYUAN_2, {"num_shared_expert": [1, 2]}),
    (HUNYUAN_2, {"use_mixed_mlp_moe": False}),
]


@pytest.mark.parametrize("published, keys", REFUSED)
def test_what_is_not_built(published, keys):
    # Or by transformers, where a config leaves others out.
    with pytest.raises(ValueError, match=rf"(^{next(iter(keys))}=|'{next(iter(keys))}')"):
        ModelConfig.from_hf((published or config()) | keys)


@pytest.mark.parametrize(
    "keys, name",
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear"}, "rope_scaling.factor"),
        ({"rope_type": "default", "factor": 2.0}, "rope_scaling"),
        (YARN | {"truncate": "no"}, "rope_scaling.truncate"),
        (YARN | {"mscale": 1.0, "mscale_all_dim": -1.0}, "rope_scaling.mscale"),
        (YARN | {"llama_4_scaling_beta": 0.1}, "rope_scaling"),
        (YARN | {"beta_fast": -1}, "rope_scaling.beta_fast"),
        (LLAMA3 | {"low_freq_factor": None}, "rope_scaling.low_freq_factor"),
    ],
)
def test_rotations_that_are_not_built(keys, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        ModelConfig.from_hf(config(rope_parameters={"rope_theta": 1e4} | keys))


# Of models that people ask for, by what they have.
ABSENT = {
    "latent": "longcat_flash minicpm3",
    "images": "kimi_k25 qwen3_vl",
    "indexer": "deepseek_v32 glm_moe_dsa",
    "sparse": "deepseek_v4 minimax_m3",
    "chunks": "llama4 llama4_text",
    "linear attention": "bailing_hybrid qwen4_exp",
    "state": "nemotron_h granitemoehybrid olmo_hybrid falcon_h1 lfm2 kimi_linear jamba zamba2",
    "share entries": "gemma3n",
    "one tensor": "bailing_moe bailing_moe_v2",
    "gate": "afmoe",
    "averaged": "cohere2_moe",
    "clipped": "dbrx",
    "widths": "mimo_v2_flash step3p5",
    "several tokens": "mimo",
}


@pytest.mark.parametrize("has, kinds", ABSENT.items())
def test_model_types_that_are_not_built_say_why_and_what_is(has, kinds):
    for kind in kinds.split():
        with pytest.raises(ValueError, match=f"^model_type='{kind}': it has .*{has}") as caught:
            ModelConfig.from_hf({"model_type": kind})
        named = re.search("not supported: use (.*), or others of", str(caught.value))[1]
        assert {*re.findall(r"\w+", named)} & list_model_types().keys(), named


def test_no_model_type_is_both_built_and_missing():
    assert not {*list_model_types()} & {*_MISSING}


def test_packaged_models_and_converted_folders_are_loaded_without_transformers(tmp_path):
    late = "assert 'transformers' not in sys.modules\n"
    run(tmp_path, f"import sys, jaxkv\njaxkv.load('tiny-retrieval')\n{late}")
    less = {key: value for key, value in config("llama_mqa").items() if key != "mlp_bias"}
    folder = tmp_path / "less"
    shutil.copytree(MODELS / "llama_mqa", folder)
    (folder / "config.json").write_text(json.dumps(less), "utf-8")
    run(tmp_path, f"from jaxkv.checkpoints import convert\nconvert({str(folder)!r}, 'whole')\n")
    run(tmp_path, f"import sys, jaxkv\njaxkv.load('whole')\n{late}")
