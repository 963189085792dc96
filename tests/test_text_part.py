"""Checkpoints of models that also take images: their text models are loaded, planned, converted; all else rejected."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv.checkpoints import convert, open_checkpoint
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import Ministral3Rope

# Saved by transformers from its own Gemma3ForConditionalGeneration; its logits are among the golden models'.
GOLDEN = Path(__file__).parent / "golden" / "models" / "gemma3_images"


def changed(tmp_path, *, top=None, text=None, renamed=None):
    """A copy of the golden folder with keys changed (None removes one) or tensors renamed."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text())
    for where, keys in ((config, top), (config["text_config"], text)):
        where.update(keys or {})
        for key in [each for each, value in (keys or {}).items() if value is None]:
            del where[key]
    (folder / "config.json").write_text(json.dumps(config))
    if renamed is not None:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {renamed(name): each for name, each in tensors.items()}, folder / "model.safetensors"
        )
    return folder


def logits(model):
    return np.asarray(jaxkv.prefill(model, [[5, 17, 40, 8], [9, 3]]).logits)


def test_newer_names_of_tensors_are_known(tmp_path):
    """transformers 5 calls the text model's tensors `model.language_model.`, and the others as well."""

    def newer(name):
        return (
            name.replace("language_model.model.", "model.language_model.")
            if "language" in name
            else f"model.{name}"
        )

    folder = changed(tmp_path, renamed=newer)
    names = open_checkpoint(folder).tensor_names
    assert names == open_checkpoint(GOLDEN).tensor_names and all(
        each.startswith("model.") for each in names
    )
    np.testing.assert_array_equal(logits(jaxkv.load(folder)), logits(jaxkv.load(GOLDEN)))


def test_a_converted_folder_is_a_text_models(tmp_path):
    convert(GOLDEN, tmp_path / "orbax")
    config = json.loads((tmp_path / "orbax" / "config.json").read_text())
    assert config["model_type"] == "gemma3_text" and "vision_config" not in config
    np.testing.assert_array_equal(
        logits(jaxkv.load(tmp_path / "orbax")), logits(jaxkv.load(GOLDEN))
    )


def test_keys_beside_the_text_models_hold(tmp_path):
    """The end tokens of a chat stand beside it; sizes that it leaves out are those of transformers' class."""
    assert jaxkv.load(changed(tmp_path, top={"eos_token_id": [1, 7]})).config.eos == (1, 7)
    # As google/gemma-3-4b-it has them.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = ModelConfig.from_hf(
        {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    )
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab) == (8, 4, 256, 262_208)
    assert (config.eos, config.max_positions, config.tied) == ((1, 106), 131_072, True)
    assert [layer for layer, width in enumerate(config.sliding_windows) if width is None] == [
        5,
        11,
        17,
        23,
        29,
    ]


def test_a_mistral_with_images_has_one_of_three_text_models():
    """Mistral Small 3.1's text model is a Mistral, which need not be said; later ones' are of types of their own."""
    sizes = {"hidden_size": 5120, "head_dim": 128, "sliding_window": None, "vocab_size": 131_072}
    beside = {"image_token_index": 10, "spatial_merge_size": 2, "vision_feature_layer": -1}
    read = [
        ModelConfig.from_hf({"model_type": "mistral3", "text_config": sizes | kind, **beside})
        for kind in ({}, {"model_type": "ministral3"})
    ]
    assert [each.head_dim for each in read] == [128, 128]
    assert [isinstance(each.rope, Ministral3Rope) for each in read] == [False, True]
    latent = {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}
    assert ModelConfig.from_hf(latent).head_dim == 256 + 64


def test_a_prompt_of_text_fits_a_plan(tmp_path):
    path = tmp_path / "config.json"
    path.write_text((GOLDEN / "config.json").read_text())
    planned = jaxkv.plan(
        tmp_path, gpus="h100", context=64, policy=jaxkv.SnapKV(budget=16, window=8)
    )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(jaxkv.load(GOLDEN).decoder)))
    assert planned.sizes.weights == 2 * parameters


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top": {"text_config": None}}, "^text_config="),
        ({"text": {"model_type": "gemma2"}}, "^text_config.model_type="),
        ({"top": {"depth_config": {}}}, "depth_config"),
        (
            {"renamed": lambda name: name.replace("vision_tower", "depth_tower")},
            "^weights=.*depth_tower",
        ),
        (
            {"renamed": lambda name: name.replace("language_model.model.norm", "norm")},
            "^weights=",
        ),
    ],
)
def test_what_is_not_known_is_rejected(tmp_path, change, match):
    with pytest.raises(ValueError, match=match):
        jaxkv.load(changed(tmp_path, **change))
