"""A model's config: how long an error is, ids that mean none, numbers that are equal."""

import json
from pathlib import Path

import pytest

from jaxkv.models.config import ModelConfig

MODELS = Path(__file__).parent / "golden" / "models"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(name="llama_gqa", **keys):
    return json.loads((MODELS / name / "config.json").read_text("utf-8")) | keys


def test_an_error_is_of_bounded_length():
    with pytest.raises(ValueError, match="not supported") as caught:
        ModelConfig.from_hf(config(**{f"key{index}": 1 for index in range(100_000)}))
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
