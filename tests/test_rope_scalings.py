"""longrope: which list of factors rotates, against transformers, and what does not fit; which layers OLMo 3 scales."""

import dataclasses
import json
import math

import numpy as np
import pytest
import running
from test_families import OLMO2_7B, PHI_4, PHI_4_MINI

import jaxkv
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.rope import compute_rope_frequencies
from jaxkv.models.values import LayerSpec, LongRope, Rope, YarnRope

FOLDER = running.GOLDEN / "models" / "phi3_long"
GOLDEN = running.archive("models.npz")
SHORT, LONG = [1.0] * 48, list(PHI_4_MINI["rope_scaling"]["long_factor"])


def test_short_texts_have_short_factors_where_the_model_is_loaded_for_them():
    """transformers takes the list by the text's length; the attention factor stays that of the longest text."""
    expected, ids = GOLDEN["phi3_long/within"], GOLDEN["phi3_long/input_ids"][1, :32].tolist()
    model = jaxkv.load(FOLDER, max_positions=32, progress=False)
    assert running.gap(running.by_prefixes(model, [ids])[0], expected) < 1e-4
    assert running.gap(running.by_tokens(model, [ids])[0], expected) < 1e-4
    whole = running.golden_model("phi3_long")
    assert running.gap(running.by_prefixes(whole, [ids])[0], expected) > 0.1
    # Their caches hold keys of different rotations.
    assert model.fingerprint != whole.fingerprint


def test_which_list_rotates():
    config = ModelConfig.from_hf(PHI_4_MINI)
    assert config.rope.long and config.max_positions == 131072
    assert (
        config.limit_positions(4097).rope == config.rope
        and config.limit_positions(4097).max_positions == 4097
    )
    short = config.limit_positions(4096)
    assert short.rope == dataclasses.replace(config.rope, long=False)
    plain = np.pad(10_000.0 ** (-np.arange(48) / 48), (0, 16))
    factor = math.sqrt(1 + math.log(32) / math.log(4096))
    for each, factors in ((config, LONG), (short, SHORT)):
        frequencies, scales = compute_rope_frequencies(each.rope, 128)
        np.testing.assert_allclose(frequencies[:48], plain[:48] / np.array(factors), rtol=1e-14)
        # Channels that are not rotated are not multiplied either.
        assert not frequencies[48:].any() and np.allclose(
            scales, [factor] * 48 + [1.0] * 16, rtol=1e-14
        )
    # A config of texts up to the original length has an attention factor of 1.
    made = ModelConfig.from_hf(
        PHI_4_MINI | {"max_position_embeddings": 4096, "sliding_window": None}
    )
    assert not made.rope.long and compute_rope_frequencies(made.rope, 128)[1].tolist() == [1.0] * 64


def test_layers_that_differ_each_take_their_list():
    long = LongRope(short_factor=(1.0,), long_factor=(2.0,), original_max_position=8, factor=4.0)
    kinds = (LayerSpec(rope=long), LayerSpec(rope=Rope()))
    sizes = {
        "vocab": 8,
        "layers": 2,
        "embed": 4,
        "hidden": 4,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 2,
    }
    made = ModelConfig(**sizes, kinds=kinds, max_positions=32).limit_positions(8)
    assert made.kinds == (
        LayerSpec(rope=dataclasses.replace(long, long=False)),
        LayerSpec(rope=Rope()),
    )


def test_what_older_files_call_it():
    scaling = PHI_4_MINI["rope_scaling"]
    older = ModelConfig.from_hf(PHI_4_MINI | {"rope_scaling": scaling | {"type": "su"}})
    assert older == ModelConfig.from_hf(PHI_4_MINI)
    given = scaling | {"attention_factor": 1.25, "factor": 16.0}
    rope = ModelConfig.from_hf(PHI_4_MINI | {"rope_scaling": given}).rope
    assert (rope.attention_factor, rope.factor) == (1.25, 16.0)


LISTS = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
NO_LIST = {key: value for key, value in LISTS.items() if key != "long_factor"}


@pytest.mark.parametrize(
    "keys, name",
    [
        ({"rope_scaling": LISTS | {"long_factor": [*LONG[:-1], 0.0]}}, "long_factor"),
        ({"rope_scaling": LISTS | {"long_factor": LONG[:-1]}}, "long_factor"),
        ({"rope_scaling": LISTS | {"attention_factor": -1.0}}, "attention_factor"),
        ({"rope_scaling": NO_LIST}, "long_factor"),
        ({"rope_scaling": LISTS | {"type": "yarn", "rope_type": "yarn"}}, "rope_type"),
        ({"partial_rotary_factor": 1.75}, "partial_rotary_factor"),
    ],
)
def test_lists_that_do_not_fit(keys, name):
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_hf(PHI_4_MINI | keys)


@pytest.mark.parametrize("given", [0, 16385])
def test_positions_that_the_model_does_not_have(given):
    with pytest.raises(ValueError, match=f"max_positions={given}: give "):
        ModelConfig.from_hf(PHI_4).limit_positions(given)


YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
# As published: the scaling is written as if it were that of all layers.
OLMO3_7B = OLMO2_7B | {
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": YARN,
    "sliding_window": 4096,
    "vocab_size": 100278,
}


def test_olmo3_scales_its_layers_without_windows():
    config = ModelConfig.from_hf(OLMO3_7B)
    assert Decoder(config, dtype="bfloat16").nbytes == 2 * 7_298_011_136
    plain = Rope(theta=500_000.0)
    yarn = YarnRope(
        theta=500_000.0, factor=8.0, original_max_position=8192, attention_factor=1.2079441541679836
    )
    assert [config.get_layer_spec(layer).rope for layer in range(32)] == [
        plain,
        plain,
        plain,
        yarn,
    ] * 8
    assert config.sliding_windows == (4096, 4096, 4096, None) * 8


OURS = json.loads((running.GOLDEN / "models" / "olmo3_yarn" / "config.json").read_text("utf-8"))


@pytest.mark.parametrize("raw", [OLMO3_7B, OURS], ids=["published", "golden"])
def test_every_spelling_of_olmo3s_scaling_is_one(raw):
    """transformers 4 writes rope_scaling beside rope_theta, 5.2 rope_parameters, later ones one by type of layer."""
    bare = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_theta")}
    theta = {"rope_theta": raw["rope_theta"]}
    flat = bare | {"rope_parameters": raw["rope_scaling"] | theta}
    each = {
        "sliding_attention": {"rope_type": "default"} | theta,
        "full_attention": raw["rope_scaling"] | theta,
    }
    for other in (flat, bare | {"rope_parameters": each}):
        assert ModelConfig.from_hf(other) == ModelConfig.from_hf(raw)
