"""Weights that a model must not take, and a model as a value: printed, pickled, copied."""

import copy
import json
import pickle
import shutil
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from test_text import CHATML, with_template

import jaxkv
from jaxkv.loading import LanguageModel

FOLDER = Path(__file__).parent / "golden" / "models" / "llama_gqa"
TIED = FOLDER.parent / "qwen3"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def folder(tmp_path, source=FOLDER, *, config=None, **tensors):
    """A copy of a tiny model with other config keys, or tensors by their short names."""
    copied = tmp_path / "model"
    shutil.copytree(source, copied, dirs_exist_ok=True)
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    names = {"head": HEAD, "embedding": EMBEDDING, "norm": NORM}
    file = copied / "model.safetensors"
    save_file(load_file(file) | {names[each]: value for each, value in tensors.items()}, file)
    return copied


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_weights_that_are_no_floats(tmp_path, dtype):
    with pytest.raises(ValueError, match=rf"{NORM}\.dtype='{np.dtype(dtype).name}': weights are floating point"):
        jaxkv.load(folder(tmp_path, norm=np.ones(48, dtype)))


def test_a_head_beside_a_tied_embedding(tmp_path):
    config = {"tie_word_embeddings": True}
    embedding = load_file(FOLDER / "model.safetensors")[EMBEDDING]
    assert jaxkv.load(folder(tmp_path, config=config, head=embedding)).decoder.head is None
    half = embedding.astype(ml_dtypes.bfloat16)
    assert jaxkv.load(folder(tmp_path, config=config, head=half.astype(np.float32), embedding=half)).config.tied
    for head in (embedding + 1, embedding[:-1]):
        with pytest.raises(ValueError, match=r"'lm_head\.weight': it differs .*\"tie_word_embeddings\": false"):
            jaxkv.load(folder(tmp_path, config=config, head=head))
    own = jaxkv.load(folder(tmp_path, config={"tie_word_embeddings": False}, head=embedding + 1))
    np.testing.assert_array_equal(own.decoder.head[...], embedding + 1)


@pytest.mark.parametrize("layers", [4, 20_000, 2**31 - 1])
def test_layers_that_the_checkpoint_does_not_hold(tmp_path, layers):
    path = folder(tmp_path, config={"num_hidden_layers": layers})
    started = time.perf_counter()
    with pytest.raises(ValueError, match=f"num_hidden_layers={layers}: the checkpoint holds 3 layers"):
        jaxkv.load(path)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "hidden_size", "head_dim"])
def test_sizes_that_would_fill_the_memory(tmp_path, key):
    with pytest.raises(ValueError, match="the config asks for"):
        jaxkv.load(folder(tmp_path, config={key: 2**30}))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.dtype("bfloat16"), "bfloat16", np.dtype(">f4"), np.float16])
def test_dtypes_by_any_name(dtype):
    model = jaxkv.load(FOLDER, dtype=dtype)
    assert model.dtype == np.dtype(dtype).newbyteorder("=")


def test_a_model_is_one_line():
    model = jaxkv.load(TIED)
    assert repr(model) == str(model) == f"LanguageModel({str(TIED)!r}, {model.config.layers} layers, float32, 0.2 MB)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_is_a_value(copied):
    model = jaxkv.load(FOLDER)
    model.text = with_template(CHATML)
    asked = dict(max_new_tokens=4, stop_at_eos=False)
    first = jaxkv.generate(model, [5, 6, 7], **asked)
    assert model.text.turns.between and model.text.eos_ids  # its template's process runs
    other = copied(model)
    assert other.fingerprint == model.fingerprint and other.config == model.config
    np.testing.assert_array_equal(jaxkv.generate(other, [5, 6, 7], **asked).tokens, first.tokens)
    assert other.text.turns.between == model.text.turns.between


def test_weights_that_differ_anywhere_are_told_apart():
    """By a cache's owner: the difference may lie in any row of any parameter."""
    config = tiny.MODELS["mha"]
    same, other = tiny.tiny(config), copy.deepcopy(tiny.tiny(config))
    assert LanguageModel(other.decoder, text=None, name="same").fingerprint == same.fingerprint
    value = np.array(other.decoder.embedding.get_value())
    value[-1, -1] += 1
    other.decoder.embedding.set_value(jnp.asarray(value))
    other = LanguageModel(other.decoder, text=None, name="other")
    assert other.fingerprint != same.fingerprint
    with pytest.raises(ValueError, match="another model"):
        jaxkv.generate(other, [3], cache=jaxkv.prefill(same, [5, 6, 7]), max_new_tokens=1)
