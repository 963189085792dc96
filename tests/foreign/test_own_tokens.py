"""The transform under KerasHub's Llama gives jaxkv's own tokens for the same weights, also where it goes on evicting.

It runs in an environment of its own, `make test-foreign`.
"""

import json
import runpy

import jax.numpy as jnp
import notebook_outputs as outputs
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxkv
from jaxkv import H2O, TOVA, AdaKV, Quest, SnapKV

NOTEBOOK = outputs.FOLDER / "04_bring_your_own_model.ipynb"
LENGTHS, SLOTS, NEW = (64, 41), 64, 16
POLICIES = {
    "h2o": H2O(budget=16),
    "tova": TOVA(budget=16),
    "adakv-h2o": AdaKV(base=H2O(budget=16)),
    "quest": Quest(budget=16, page=4, dense_layers=1),
    "snapkv": SnapKV(budget=16, window=8),
    "snapkv-every": SnapKV(budget=16, window=8, every=4),
    "adakv-every": AdaKV(base=SnapKV(budget=16, window=8, every=4)),
}


@pytest.fixture(scope="module")
def book():
    """The notebook's names after all of its cells ran."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return runpy.run_path(str(outputs.FOLDER / "run.py"))["ran"](cells)[0]


@pytest.fixture(scope="module")
def ours(book, tmp_path_factory):
    """The notebook's model as jaxkv loads it, from a Hugging Face folder of its weights."""
    backbone, folder = book["backbone"], tmp_path_factory.mktemp("llama")
    config = backbone.get_config()
    shape = {
        "vocab_size": config["vocabulary_size"],
        "hidden_size": config["hidden_dim"],
        "intermediate_size": config["intermediate_dim"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_query_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "rope_theta": config["rope_max_wavelength"],
        "rms_norm_eps": config["layer_norm_epsilon"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
    }
    named = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(named | shape), "utf-8")
    save_file(tensors(backbone), folder / "model.safetensors")
    return jaxkv.load(folder, progress=False)


def tensors(backbone):
    """The model's weights under Hugging Face's names, matrices `[out, in]`."""
    table = backbone.token_embedding
    found = {
        "model.embed_tokens.weight": table.embeddings,
        "lm_head.weight": np.asarray(table.reverse_embeddings).T,
        "model.norm.weight": backbone.layer_norm.scale,
    }
    for index, block in enumerate(backbone.transformer_layers):
        attention, at = block._self_attention_layer, f"model.layers.{index}."
        for name in ("query", "key", "value"):
            kernel = np.asarray(getattr(attention, f"_{name}_dense").kernel)
            found[f"{at}self_attn.{name[0]}_proj.weight"] = kernel.reshape(len(kernel), -1).T
        out = np.asarray(attention._output_dense.kernel)
        found[f"{at}self_attn.o_proj.weight"] = out.reshape(-1, out.shape[-1]).T
        for name, dense in (("gate", "gate"), ("up", "intermediate"), ("down", "output")):
            kernel = getattr(block, f"_feedforward_{dense}_dense").kernel
            found[f"{at}mlp.{name}_proj.weight"] = np.asarray(kernel).T
        found[f"{at}input_layernorm.weight"] = block._self_attention_layernorm.scale
        found[f"{at}post_attention_layernorm.weight"] = block._feedforward_layernorm.scale
    return {name: np.ascontiguousarray(each, np.float32) for name, each in found.items()}


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_jaxkv(book, ours, name):
    policy = POLICIES[name]
    prompt = np.random.default_rng(5).integers(1, 97, (2, SLOTS))
    mine, states = book["generate"](prompt, jnp.asarray(LENGTHS), policy, NEW)
    given = [prompt[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    options = {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}
    theirs = jaxkv.generate(ours, given, policy=policy, **options)
    assert np.asarray(mine).tolist() == [each.tokens.tolist() for each in theirs]
    assert len(set(np.asarray(mine).ravel().tolist())) > 4
    cache = jaxkv.prefill(ours, given, policy=policy, progress=False)
    for layer, state in enumerate(states):
        for row, heads in enumerate(state.positions()):
            for head, positions in enumerate(heads):
                assert positions.tolist() == cache.positions(layer, head)[row].tolist()
