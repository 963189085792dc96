"""Bad input: an error that names the field, the value and what to do; nothing lost, nothing half-written."""

import contextlib
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import running
from safetensors.numpy import load_file, save_file

import jaxkv

FOLDER = Path(__file__).parent / "golden" / "models" / "llama_gqa"
EMBEDDING, DOWN = "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"
POLICY = jaxkv.SnapKV(budget=16, window=4)
NEW = 4


@pytest.fixture(scope="module")
def model():
    return jaxkv.load(FOLDER)


@pytest.fixture(scope="module")
def cache(model):
    return jaxkv.prefill(model, ids(40), policy=POLICY)


def ids(n, seed=0):
    return np.random.default_rng(seed).integers(3, 96, n).tolist()


def folder(tmp_path, *, config=None, tensors=None):
    """A copy of the tiny model with other config keys or tensors; None removes one."""
    copy = tmp_path / "model"
    shutil.copytree(FOLDER, copy)
    change = lambda old, new: {k: v for k, v in {**old, **(new or {})}.items() if v is not None}  # noqa: E731
    path = copy / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()), config)))
    if tensors:
        save_file(
            change(load_file(copy / "model.safetensors"), tensors), copy / "model.safetensors"
        )
    return copy


@contextlib.contextmanager
def refused(message, *, kind=ValueError, model=None, cache=None):
    """The error comes and says so; a cache given to the failing call has not changed, nor gone, and still answers."""
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    with pytest.raises(kind, match=message):
        yield
    if cache is None:
        return
    after = jax.tree.leaves(cache)
    assert not any(leaf.is_deleted() for leaf in after)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    out = jaxkv.generate(model, ids(5), cache=cache, max_new_tokens=NEW, stop_at_eos=False)
    assert len(out.tokens if isinstance(out.tokens, np.ndarray) else out.tokens[0]) == NEW


# --- models and files -----------------------------------------------------------------------------------------------


def test_unknown_model(tmp_path):
    with refused("name_or_path='no-such-model'.*smollm2-135m-instruct"):
        jaxkv.load("no-such-model")
    with refused("absent.*"):
        jaxkv.load(tmp_path / "absent")


@pytest.mark.parametrize("name", ["", " ", "~nobody-has-this-home/model"])
def test_a_model_of_no_name_or_in_no_home(name):
    with refused(f"name_or_path='{name}': "):
        jaxkv.load(name)
    with refused(f"model='{name}': "):
        jaxkv.plan(name, gpus="h100", context=64)


def test_corrupt_and_truncated_weights(tmp_path):
    copy = folder(tmp_path)
    file = copy / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1000])
    with refused(r"model\.safetensors: \d+ bytes.*expected.*download the file again"):
        jaxkv.load(copy)
    file.write_bytes(b"\xff" * 8 + good[8:])
    with refused("a whole safetensors file expected"):
        jaxkv.load(copy)
    file.write_bytes(good)
    (copy / "config.json").write_text("{")
    with refused(r"config\.json"):
        jaxkv.load(copy)


EXCLUDED = [f"model.layers.{layer}.self_attn" for layer in range(64)]
MODELOPT = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": EXCLUDED,
}
LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": EXCLUDED,
}


@pytest.mark.parametrize(
    "file, given, named",
    [
        ("hf_quant_config.json", {"quantization": MODELOPT}, "modelopt"),
        ("hf_quant_config.json", {}, "modelopt"),
        ("config.json", LLM_COMPRESSOR, "compressed-tensors"),
        ("config.json", {"odd": EXCLUDED}, "odd"),
    ],
)
def test_quantised_checkpoints_are_named_as_such(tmp_path, file, given, named):
    inside = file == "config.json"
    copy = folder(tmp_path, config={"quantization_config": given} if inside else None)
    if not inside:
        (copy / file).write_text(json.dumps(given))
    for use in (jaxkv.load, lambda path: jaxkv.plan(path, gpus="h100x1", context=64)):
        with refused(f"^quantization_config=.*{named}"):
            use(copy)


def test_a_quantised_cache_alone_leaves_the_weights_as_they_are(tmp_path):
    copy = folder(tmp_path)
    (copy / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    assert jaxkv.load(copy).config.layers


def holed(name, value):
    array = load_file(FOLDER / "model.safetensors")[name].copy()
    array.flat[array.size // 2] = value
    return {name: array}


@pytest.mark.parametrize(
    "tensors, message",
    [
        (lambda: {DOWN: None}, rf"weights=\['{re.escape(DOWN)}'\]: the checkpoint lacks"),
        (
            lambda: {"model.layers.3.mlp.down_proj.weight": np.ones((48, 64), np.float32)},
            r"weights=\['model\.layers\.3",
        ),
        (
            lambda: {"model.layers.0.self_attn.q_proj.bias": np.ones(48, np.float32)},
            "q_proj.bias.*has no place",
        ),
        (
            lambda: {DOWN: np.ones((48, 60), np.float32)},
            rf"{re.escape(DOWN)}=\(48, 60\): the config asks for \(48, 64\)",
        ),
        (
            lambda: {DOWN: np.ones((64, 48), np.float32)},
            r"=\(64, 48\): the config asks for \(48, 64\).*another model",
        ),
        (
            lambda: holed(DOWN, np.nan),
            rf"weights=\['{re.escape(DOWN)}'\]: .*NaN or infinity: get the checkpoint again",
        ),
        (
            lambda: holed(EMBEDDING, np.inf),
            rf"weights=\['{re.escape(EMBEDDING)}'\]: .*NaN or infinity",
        ),
        (
            lambda: holed("model.layers.2.self_attn.v_proj.weight", np.nan),
            r"layers\.2\.self_attn.*NaN",
        ),
    ],
    ids=["missing", "extra", "bias", "narrow", "transposed", "nan", "infinity", "nan in a half"],
)
def test_weights_that_do_not_fit(tmp_path, tensors, message):
    with refused(message):
        jaxkv.load(folder(tmp_path, tensors=tensors()))


def test_weights_too_large_for_the_dtype(tmp_path):
    with refused("weights=.*infinity: .*a wider dtype"), np.errstate(over="ignore"):
        jaxkv.load(folder(tmp_path, tensors=holed(DOWN, 1e6)), dtype="float16")


# --- policies -------------------------------------------------------------------------------------------------------


def test_a_ratio_below_the_window_names_the_prompt(model):
    rows = [ids(60), ids(34, 1), ids(8, 2)]
    policy = jaxkv.SnapKV(budget=0.25, window=8, min_budget="raise")
    with refused(
        r"budget=0\.25: prompt 2 \(8 tokens\) keeps 2 rows, .* take 8: raise the budget, or .*'clamp'"
    ):
        jaxkv.prefill(model, rows, policy=policy)
    policy = jaxkv.SnapKV(budget=0.25, window=8)
    cache = jaxkv.prefill(model, rows, policy=policy)
    np.testing.assert_array_equal(
        cache.kept, np.broadcast_to(np.asarray([15, 8, 8])[:, None], cache.kept.shape)
    )
    # The prompt of 34 tokens keeps 8 by its share.
    assert jaxkv.generate(model, rows, policy=policy, max_new_tokens=1).stats.raised_budgets == 1
    assert (
        jaxkv.generate(model, rows[:2], policy=policy, max_new_tokens=1).stats.raised_budgets == 0
    )


def test_protected_spans_beyond_the_budget(model):
    for budget, remedy in (
        (16, "raise the budget"),
        (0.4, "raise the budget, or give min_budget='clamp'"),
    ):
        policy = jaxkv.SnapKV(
            budget=budget, window=4, protect=((0, 8), (5, 18)), min_budget="raise"
        )
        with refused(
            f"budget={budget}: prompt 0 .* keeps 16 rows, .*protected spans take 22: {remedy}"
        ):
            jaxkv.generate(model, ids(40), policy=policy, max_new_tokens=NEW)


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, kind, message",
    [
        ([], ValueError, r"prompt=\[\]: give at least one prompt"),
        ([[]], ValueError, r"prompt=\[\]: prompt 0 has no tokens: give at least one"),
        ([[5, 6], []], ValueError, r"prompt=\[\]: prompt 1 has no tokens"),
        (np.zeros(0, np.int32), ValueError, "prompt 0 has no tokens"),
        (
            np.zeros((1, 1, 4), np.int32),
            ValueError,
            r"prompt=\(1, 1, 4\): give ids as \[S\] or \[B, S\]",
        ),
        ([5, 96], ValueError, r"prompt=\(5, 96\): token ids lie in \[0, 96\)"),
        ([[5], [-1, 7]], ValueError, r"prompt=\(-1, 7\): token ids lie in \[0, 96\)"),
        (np.asarray([1.0, 2.0]), TypeError, "prompt=float64: token ids are integers"),
        (jnp.asarray([1.0]), TypeError, "prompt=float32: token ids are integers"),
        ([1.0, 2.0], TypeError, "prompt=float: give text, chat messages, token ids"),
        ([[1.0, 2.0]], TypeError, "prompt=list: give text, chat messages, token ids"),
        ([np.asarray([1.5])], TypeError, "prompt=float64: token ids are integers"),
        (None, TypeError, "prompt=NoneType: give text"),
        ({"role": "user", "content": "Hi"}, TypeError, "prompt=dict: give text, chat messages"),
        ("Hello", ValueError, "prompt='Hello': the checkpoint has no tokenizer: give token ids"),
        (
            [{"role": "user", "content": "Hi"}],
            ValueError,
            "prompt=.*Hi.*: the model has no chat template: give text",
        ),
        (
            ids(129),
            ValueError,
            "prompt='129 tokens.*the model was made for 128: shorten the prompt",
        ),
    ],
)
def test_prompts(model, cache, prompt, kind, message):
    with refused(message, kind=kind):
        jaxkv.prefill(model, prompt, policy=POLICY)
    message = message.replace("129 tokens", r"\d+ tokens")
    with refused(message, kind=kind, model=model, cache=cache):
        jaxkv.generate(model, prompt, cache=cache, max_new_tokens=NEW)


def test_over_long_with_new_tokens_and_what_was_seen(model, cache):
    with refused("prompt='129 tokens, new ones included'|prompt='129 tokens.*lower max_new_tokens"):
        jaxkv.generate(model, ids(125), max_new_tokens=NEW)
    with refused(
        "prompt='129 tokens.*made for 128: shorten.*or lower max_new_tokens",
        model=model,
        cache=cache,
    ):
        jaxkv.generate(model, ids(80), cache=cache, max_new_tokens=9)
    assert len(jaxkv.generate(model, ids(124), max_new_tokens=NEW, stop_at_eos=False).tokens) == NEW


@pytest.fixture(scope="module")
def smol():
    return running.smollm2()


@pytest.mark.real
@pytest.mark.parametrize(
    "prompt, message",
    [
        ("", "prompt='': prompt 0 has no tokens: give at least one"),
        (["Hi", ""], "prompt='': prompt 1 has no tokens"),
        (
            [{"role": "assistant", "content": "Hi"}],
            "prompt='assistant': the last message must be the user's",
        ),
        ([{"role": "user"}], r"prompt=\{'role': 'user'\}: give its text: .*content"),
        ([{"role": "user", "content": None}], "prompt=.*None.*: give its text"),
        ([{"content": "Hi"}], "prompt=None: the last message must be the user's"),
    ],
)
def test_texts_and_messages(smol, prompt, message):
    for call in (jaxkv.prefill, jaxkv.generate):
        with refused(message):
            call(smol, prompt)


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: draw at least 1 token"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens=2\.5: draw|max_new_tokens"),
        ({"stop": "x"}, "stop='x': the checkpoint has no tokenizer: stop by eos only"),
        ({"stop": ["x", ""]}, r"stop=\['x', ''\]: a stop string has at least one character"),
        (
            {"sampling": jaxkv.Sampling()},
            r"key=None: Sampling\(.*draws at random: give key=jax\.random\.key",
        ),
        (
            {"sampling": jaxkv.Sampling(top_k=3)},
            r"key=None: Sampling\(.*draws at random: give key=jax\.random\.key",
        ),
        (
            {"policy": jaxkv.SnapKV(budget=18, window=4)},
            r"policy=SnapKV\(budget=18.*compressed by SnapKV\(budget=16",
        ),
        ({"policy": jaxkv.FullKV()}, r"policy=FullKV\(.*leave policy out, or prefill anew"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls(model, cache, options, message, stream):
    kinds = (ValueError, TypeError)  # the annotation hook of the tests meets a wrong type first
    with refused(message, kind=kinds, model=model, cache=cache):
        jaxkv.generate(model, ids(5), cache=cache, stream=stream, **options)


def test_a_cache_of_another_model(tmp_path, model, cache):
    other = jaxkv.load(
        folder(tmp_path, tensors=holed(EMBEDDING, 0.5) | holed("model.norm.weight", 0.5))
    )
    assert other.config == model.config
    with refused(
        "cache='[0-9a-f]{16}': it was made by another model than .*: prefill with this one"
    ):
        jaxkv.generate(other, ids(5), cache=cache)
    qwen = jaxkv.load(FOLDER.parent / "qwen3")
    with refused("cache=.*another model than .*qwen3", model=model, cache=cache):
        jaxkv.generate(qwen, ids(5), cache=cache)


def test_as_many_prompts_as_the_cache_holds(model):
    two = jaxkv.prefill(model, [ids(40), ids(34, 1)], policy=POLICY)
    for count in (1, 3):
        with refused(
            f"prompt='{count} prompts': the cache holds 2 sequences: give as many prompts, or a cache of 1"
        ):
            jaxkv.generate(model, [ids(5)] * count, cache=two, max_new_tokens=NEW)
    # The cache is as it was: both rows answer.
    out = jaxkv.generate(model, [ids(5)] * 2, cache=two, max_new_tokens=NEW, stop_at_eos=False)
    assert [len(each) for each in out.tokens] == [NEW, NEW]
