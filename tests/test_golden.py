"""Logits and greedy tokens against transformers, for every family and for the real model.

The golden files and the scripts that made them are in `golden/`; nothing of this project took part in them.
"""

import dataclasses
import json

import numpy as np
import pytest
import running

import jaxkv
from jaxkv import loading

MODELS = running.archive("models.npz")
NAMES = sorted({key.split("/")[0] for key in MODELS if "/" in key})
LENGTHS = MODELS["lengths"].tolist()


def rows(name):
    return [
        MODELS[f"{name}/input_ids"][row, :length].tolist() for row, length in enumerate(LENGTHS)
    ]


def golden(name):
    return [MODELS[f"{name}/logits{row}"] for row in range(len(LENGTHS))]


def assert_close(ours, theirs):
    """Asserts that logits differ by rounding: by 8e-6 of the largest, and by less than 1e-4.

    Logits of these random models reach 29, and transformers' own in float32 are up to 2.8e-5 away from what it computes
    in float64 (phi3_long): no smaller bound in absolute numbers holds for all of them.
    """
    assert running.gap(ours, theirs) < min(1e-4, 8e-6 * np.abs(theirs).max())


def test_every_folder_has_golden_logits():
    folders = {path.name for path in (running.GOLDEN / "models").iterdir()}
    assert folders == {*NAMES, "llama_gqa_sharded"}


# Numbers of heads, and experts: decoding token by token shows as much of these.
DECODED = ("falcon_7b", "llama_gqa8", "llama_mha", "llama_mqa", "qwen3_moe_fused")
# Of these prefill does: a model beside each has its layers, and weights or frequencies that were read otherwise.
PREFILLED = (
    *("cohere", "exaone4_full", "gemma", "gemma3_images", "glm4_yarn", "internlm3"),
    *("gpt_oss_mxfp4", "llama_bf16", "llama_linear", "llama_llama3", "llama_yarn"),
    *("dots1", "exaone_moe", "flex_olmo", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"),
    *("hy_v3", "mellum", "mistral3_images", "olmoe", "seed_oss", "solar_open"),
    *("mistral", "olmo2", "olmo3_yarn", "phi3", "phi3_short", "qwen2", "qwen2_window", "qwen3"),
)


def test_every_model_is_prefilled_or_decoded():
    assert {*DECODED, *PREFILLED} < {*NAMES} and not {*DECODED} & {*PREFILLED}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DECODED])
def test_prefill_gives_the_logits_of_every_position(name):
    batch = running.by_prefixes(running.golden_model(name), rows(name))
    for logits, expected in zip(batch, golden(name), strict=True):
        assert_close(logits, expected)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PREFILLED])
def test_decoding_token_by_token_gives_the_logits_of_every_position(name):
    batch = running.by_tokens(running.golden_model(name), rows(name))
    for logits, expected in zip(batch, golden(name), strict=True):
        assert_close(logits, expected)


def test_shards_give_the_logits_of_one_file():
    name, ids = "llama_gqa_sharded", rows("llama_gqa")
    assert len(list((running.GOLDEN / "models" / name).glob("*.safetensors"))) > 1
    _, logits = running.prefill(running.golden_model(name), ids)
    assert_close(logits, np.stack([expected[-1] for expected in golden("llama_gqa")]))
    assert running.golden_model(name).fingerprint == running.golden_model("llama_gqa").fingerprint


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [("llama_bf16", "bfloat16", 8), ("llama_gqa", "float16", 11), ("qwen3", "bfloat16", 8)],
)
def test_dtype_is_honoured(name, dtype, bits):
    model = running.golden_model(name, dtype)
    cache, logits = running.prefill(model, rows(name), headroom=4)
    assert model.dtype == cache.dtype == dtype
    assert logits.dtype == np.float32
    assert 2 * model.nbytes == running.golden_model(name).nbytes
    expected = np.stack([each[-1] for each in golden(name)])
    # Every product and norm on the way rounds once: some 3% and 0.5% were seen, by root mean square.
    off = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert off < 12 * 2.0**-bits
    assert running.greedy(model, cache, 4).shape == (2, 4)


def test_dtype_defaults_to_float32_here_and_others_are_rejected():
    folder = running.GOLDEN / "models" / "llama_bf16"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert jaxkv.load(folder, progress=False).dtype == np.float32
    with pytest.raises(ValueError, match="dtype='int8'"):
        jaxkv.load(folder, dtype="int8", progress=False)


@pytest.mark.real
def test_smollm2_gives_the_logits_of_transformers():
    expected = running.archive("smollm2.npz")
    ids = expected["input_ids"].tolist()
    _, logits = running.prefill(
        running.smollm2(), [ids[: position + 1] for position in expected["positions"]]
    )
    assert running.gap(logits, expected["logits"]) < 2e-3


@pytest.mark.real
def test_smollm2_draws_the_tokens_of_transformers():
    expected = running.archive("smollm2.npz")
    out = jaxkv.generate(
        running.smollm2(),
        expected["input_ids"],
        max_new_tokens=32,
        stop_at_eos=False,
        progress=False,
    )
    assert out.tokens.tolist() == expected["tokens"].tolist()


def test_fingerprints_leave_out_what_is_at_its_default():
    """Fields that a later version adds do not reject the caches of this one."""
    config = running.golden_model("llama_gqa").config
    text = loading._format_non_default_config(config)
    assert f"layers={config.layers}" in text and "softcap" not in text and "LayerSpec" not in text
    later = dataclasses.make_dataclass(
        "ModelConfig", [("more", int, 0)], bases=(type(config),), frozen=True, kw_only=True
    )
    fields = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    assert (
        loading._format_non_default_config(later(**fields))
        == text
        != loading._format_non_default_config(later(**fields, more=1))
    )
