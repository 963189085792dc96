"""Estimates of speed, against what an H200 has measured."""

import dataclasses
import json
from pathlib import Path

import pytest

import jaxkv
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import Experts
from jaxkv.planning import speed
from jaxkv.planning.gpus import gpus
from jaxkv.planning.setting import Setting
from jaxkv.planning.speed import (
    OF_CODES,
    all_reduce,
    estimate,
)
from jaxkv.planning.tpus import tpus

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 128001,
}
CONFIG = ModelConfig.from_hf(LLAMA)
BLOCK = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096
WEIGHTS = 2 * (32 * BLOCK + 2 * 128256 * 4096 + 4096)
FILTERS = {"filter_layers": (2, 8, 18)}


def setting_of(policy: str, batch: int, context: int, **more) -> Setting:
    options = (
        {} if policy == "FullKV" else {"budget": 1024} | (FILTERS if policy == "OmniKV" else {})
    )
    given = {"gpu": gpus()["h200"], "new": 0, "config": CONFIG} | more
    method = getattr(jaxkv, policy)(**options)
    return Setting(model="8b", policy=method, batch=batch, context=context, **given)


def test_what_is_split_over_gpus():
    one = estimate(setting_of("SnapKV", 8, 32768), WEIGHTS)
    four = estimate(setting_of("SnapKV", 8, 32768, gpus=4), WEIGHTS // 4)
    assert one.sent == 0 and four.sent == pytest.approx(
        65 * (6.6e-6 + 6 * 0.6e-6 + 2 * 1.5 * 4 * 8 * 4096 / 450e9)
    )
    assert one.tokens < four.tokens < 4 * one.tokens and four.rows == pytest.approx(one.rows / 4)
    # Groups that share nothing draw side by side.
    apart = estimate(setting_of("SnapKV", 8, 32768, gpus=4, data=4), WEIGHTS)
    assert apart.step == pytest.approx(estimate(setting_of("SnapKV", 2, 32768), WEIGHTS).step)
    assert all_reduce(setting_of("SnapKV", 1, 64, gpus=8), 1) < all_reduce(
        setting_of("SnapKV", 1, 64, gpus=8, gpu=gpus()["l4"]), 1
    )
    # TPUs send both ways around a ring, over all links of a chip.
    joined = all_reduce(setting_of("SnapKV", 1, 64, gpus=8, gpu=tpus()["v6e"]), 1 << 20)
    assert joined == pytest.approx(8e-6 + 2 * 7 / 8 * (1 << 20) / 400e9)


def test_experts_are_read_as_far_as_they_are_chosen():
    mixed = dataclasses.replace(CONFIG, experts=Experts(count=8, chosen=2))
    one_expert = 2 * 3 * 4096 * 14336 * 32
    whole = WEIGHTS + 7 * one_expert
    step = lambda batch: estimate(setting_of("SnapKV", batch, 4096, config=mixed), whole)  # noqa: E731
    copy = speed.WEIGHTS[None] * 4.8e12
    read = lambda experts: (WEIGHTS - 2 * 128256 * 4096 + (experts - 1) * one_expert) / copy  # noqa: E731
    assert step(1).weights == pytest.approx(read(2)) and step(2).weights == pytest.approx(read(4))
    assert step(64).weights == pytest.approx(read(8))


def test_answers_that_grow_and_rows_that_are_fetched():
    step = lambda policy, new: estimate(setting_of(policy, 8, 4096, new=new), WEIGHTS).step  # noqa: E731
    assert step("SnapKV", 2048) > step("SnapKV", 0) and step("H2O", 2048) == step("H2O", 0)
    away = jaxkv.OmniKV(budget=1024, offload=True, **FILTERS)
    setting = Setting(model="8b", config=CONFIG, policy=away, gpu=gpus()["h200"], context=4096)
    assert estimate(setting, WEIGHTS) is None


def measured():
    """Whole models of Llama 3 8B's shape, as an H200 ran them, prefilled by cuDNN."""
    lines = (
        (Path(__file__).parents[1] / "benchmarks/results/nvidia-h200.jsonl")
        .read_text()
        .splitlines()
    )
    rows = [
        row for row in map(json.loads, lines) if row["part"] in ("end", "bits") and "figures" in row
    ]
    return {row["case"]["name"]: row for row in rows}


def test_rows_in_8_bits():
    """Bytes per second of 8-bit rows over those of 16-bit rows, where rows fill the device."""
    lines = (
        (Path(__file__).parents[1] / "benchmarks/results/nvidia-h200.jsonl")
        .read_text()
        .splitlines()
    )
    rows = {
        (row["part"], row["case"].get("name")): row["figures"] for row in map(json.loads, lines)
    }
    cases = (("token", "8B 1 x 131072"), ("codes", "8B 1 x 131072, 8 bits"))
    wide, codes = (rows[case]["bytes_per_second"] for case in cases)
    assert codes / wide == pytest.approx(OF_CODES, abs=0.03)


@pytest.mark.parametrize("name", measured())
def test_what_a_gpu_has_measured(name):
    """Steps and prefills are estimated within 6% of what was measured, those of codes within 17%."""
    row = measured()[name]
    case, figures = row["case"], row["figures"]
    options = {} if case["policy"] == "FullKV" else {"budget": case["budget"]}
    options |= (
        {"filter_layers": tuple(case["filter_layers"]), "offload": False}
        if case["policy"] == "OmniKV"
        else {}
    )
    method, weights = getattr(jaxkv, case["policy"])(**options), case.get("weights")
    asked = {
        "context": case["tokens"],
        "batch": case["batch"],
        "new": 224,
        "gpus": "h200x1",
        "weights": weights,
    }
    found = jaxkv.plan(CONFIG, policy=method, **asked).speed
    assert found.step == pytest.approx(figures["step_seconds"], rel=0.06)
    assert found.prefill == pytest.approx(
        figures["prefill_seconds"], rel=0.06 if weights is None else 0.17
    )
