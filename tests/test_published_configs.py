"""Plans of folders with published configs: parameters as transformers counts them, bytes of caches by hand."""

import json
import re

import pytest
from published import PUBLISHED, count_elements

import jaxkv
from jaxkv import cli
from jaxkv.engine.plan import plan_prefill
from jaxkv.models.values import YarnRope
from jaxkv.planning.catalog import model_named
from jaxkv.planning.memory_sizes import count_parameters

# One model of each type.
OF_EACH_TYPE = {each["config"]["model_type"]: name for name, each in PUBLISHED.items()}.values()
# Where a file does not list its layers, one in so many has no window, or is not a linear one.
FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "olmo3": 4}
# Of the class, where Google's files leave them out.
DEFAULTS = {"gemma3_text": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}}


def list_layer_types(config):
    """The type of each layer; windows in all of them, which may be as long as any text, where none is said."""
    layers = config["num_hidden_layers"]
    every = config.get("full_attention_interval") or FULL_EVERY.get(config["model_type"])
    other = "linear_attention" if "full_attention_interval" in config else "sliding_attention"
    if "layer_types" in config or not every:
        return config.get("layer_types", ["sliding_attention"] * layers)
    return ["full_attention" if (at + 1) % every == 0 else other for at in range(layers)]


def count_cache_bytes(config, tokens):
    """Bytes of keys and values in 16 bits, or of one latent of 512 + 64 for all heads; without states."""
    config = {**DEFAULTS.get(config["model_type"], {}), **config}
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads", config.get("num_kv_heads", heads))
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    if "kv_lora_rank" in config:
        return config["num_hidden_layers"] * tokens * (512 + 64) * 2
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    # Gemma 4's layers without windows have fewer and wider heads.
    global_heads = config.get("num_global_key_value_heads", kv_heads)
    elements = {
        "full_attention": tokens * 2 * global_heads * config.get("global_head_dim", dim),
        "sliding_attention": min(tokens, window or tokens) * 2 * kv_heads * dim,
        "linear_attention": 0,
    }
    return 2 * sum(elements[each] for each in list_layer_types(config))


def write_config(folder, name):
    """The text model's keys of a published config, which is written to a folder; and how many tokens are planned."""
    config = PUBLISHED[name]["config"]
    (folder / "config.json").write_text(json.dumps(config))
    text = config.get("text_config", config)
    return text, min(8192, text.get("max_position_embeddings", 2048))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_bytes_of_caches(name, tmp_path):
    text, tokens = write_config(tmp_path, name)
    config = model_named(tmp_path).config
    counted = PUBLISHED[name]["parameters"] + PUBLISHED[name]["buffers"]
    assert count_parameters(config, "bfloat16") == counted
    planned = plan_prefill(config, jaxkv.FullKV(), [tokens], dtype="bfloat16")
    assert planned.full_bytes == count_cache_bytes(text, tokens)


@pytest.mark.parametrize("name", OF_EACH_TYPE)
def test_a_decoder_has_the_parameters_that_a_plan_counts(name, tmp_path):
    write_config(tmp_path, name)
    config = model_named(tmp_path).config
    assert count_elements(config) == count_parameters(config, "bfloat16")


def test_sources_are_files():
    """Addresses, or repositories and paths."""
    file = re.compile(r"https://\S+\.json|[\w.-]+/[\w.-]+ [\w./-]+\.\w+")
    for name, each in PUBLISHED.items():
        assert each["sources"] and all(map(file.fullmatch, each["sources"])), name


@pytest.mark.parametrize("name", ["glm-4.7-flash", "ministral-3-3b", "qwen3-32b-fp8"])
def test_the_command(name, tmp_path, capsys):
    text, tokens = write_config(tmp_path, name)
    asked = f"plan --model {tmp_path} --gpus h100x4 --context {tokens} --batch 8 --json"
    assert cli.main(asked.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == PUBLISHED[name]["parameters"] + PUBLISHED[name]["buffers"]
    shards = 1 if "kv_lora_rank" in text else 4
    assert found["uncompressed_bytes"] == 8 * count_cache_bytes(text, tokens) // shards


def test_queries_that_do_not_grow_with_their_position():
    """A factor of 0; of the magnitudes of YaRN one alone, which transformers does not read."""
    config = jaxkv.ModelConfig.from_hf(PUBLISHED["devstral-2-123b"]["config"])
    rope = YarnRope(theta=1e6, factor=64.0, original_max_position=4096, beta_fast=4.0)
    assert config.rope == rope
