"""A model's config: numbers of the wrong kind or size are refused by their key, before anything is built from them."""

import json
import math
from pathlib import Path

import pytest

from jaxkv.models.config import ModelConfig

MODELS = Path(__file__).parent / "golden" / "models"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(name="llama_gqa", **keys):
    return json.loads((MODELS / name / "config.json").read_text("utf-8")) | keys


SIZES = (
    "num_attention_heads num_key_value_heads hidden_size head_dim intermediate_size num_hidden_layers vocab_size "
    "max_position_embeddings"
).split()


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -4, "4", 4.0, True, [4], {}, 2**31, 10**400], ids=lambda v: str(v)[:12])
def test_sizes(key, value):
    with pytest.raises(ValueError, match=f"{key}=.*give (an integer from 1 to|at most) 2147483647"):
        ModelConfig.from_hf(config(**{key: value}))


@pytest.mark.parametrize(
    "value", [0, 0.0, -1e-5, math.nan, math.inf, "1e-5", True, [], 10**400], ids=lambda v: str(v)[:9]
)
def test_reals(value):
    def refused(key, **keys):
        with pytest.raises(ValueError, match=f"{key}=.*give a (positive, finite number|scaling factor)"):
            ModelConfig.from_hf(config(**keys))

    refused("rms_norm_eps", rms_norm_eps=value)
    refused("rope_theta", rope_parameters=None, rope_theta=value)
    refused("rope_theta", rope_parameters={"rope_theta": value})
    refused("factor", rope_parameters={"rope_type": "linear", "factor": value})
    for key in ("beta_fast", "beta_slow", "attention_factor"):
        refused(key, rope_parameters=YARN | {key: value})
    for key in ("low_freq_factor", "high_freq_factor"):
        refused(key, rope_parameters={**LLAMA3, "original_max_position_embeddings": 32, key: value})


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("tie_word_embeddings", "false", "give True or False"),
        ("attention_bias", 1, "give True or False"),
        ("mlp_bias", "no", "give True or False"),
        ("model_type", ["llama"], "jaxkv builds falcon, llama"),
        ("hidden_act", ["silu"], "jaxkv builds silu"),
        ("layer_types", 3, "only full_attention"),
        ("layer_types", [["full_attention"]], "only full_attention"),
        ("rope_parameters", 3, "give an object"),
        ("rope_scaling", [1], "give an object"),
        ("rope_parameters", {"rope_type": ["yarn"]}, "jaxkv builds default"),
        ("rope_parameters", {**YARN, "truncate": "no"}, "give True or False"),
        ("rope_parameters", {**YARN, "original_max_position_embeddings": 0}, "give an integer from 1"),
        ("partial_rotary_factor", 0, "only fully rotated"),
        ("eos_token_id", "2", "give an integer from 0"),
        ("eos_token_id", [2, 2**40], "give at most 2147483647"),
        ("eos_token_id", [[2]], "give an integer from 0"),
        ("bos_token_id", 1.0, "give an integer from 0"),
    ],
)
def test_keys_of_another_kind(key, value, message):
    with pytest.raises(ValueError, match=f"=.*{message}"):
        ModelConfig.from_hf(config(**{key: value}))


def test_an_error_is_of_bounded_length():
    with pytest.raises(ValueError, match="not supported") as caught:
        ModelConfig.from_hf(config(**{f"key{index}": 1 for index in range(100_000)}))
    assert len(str(caught.value)) < 1200


def test_ids_that_stand_for_none():
    read = ModelConfig.from_hf(config(bos_token_id=-1, eos_token_id=[2, -1]))
    assert (read.bos, read.eos) == (None, (2,))
    assert ModelConfig.from_hf(config(eos_token_id=None)).eos == ()


def test_whole_numbers_serve_as_reals():
    whole, real = (ModelConfig.from_hf(config(rope_parameters={"rope_theta": theta})) for theta in (500_000, 5e5))
    assert repr(whole) == repr(real)
