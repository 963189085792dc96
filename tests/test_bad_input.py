"""Bad input: an error that names the field, the value and what to do; nothing lost, nothing half-written."""

import contextlib
import json
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
EXTRA, HALF = "model.layers.3.mlp.down_proj.weight", "model.layers.2.self_attn.v_proj.weight"
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
def rejected(message, *, kind=ValueError, model=None, cache=None):
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
    assert len(out[0].tokens) == NEW


# --- models and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-model", "", "~nobody-has-this-home/model"])
def test_a_model_that_is_not_there(name):
    with rejected("^name_or_path="):
        jaxkv.load(name)
    with rejected("^model="):
        jaxkv.plan(name, gpus="h100", context=64)


MODELOPT = {"quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"}}
LLM_COMPRESSOR = {"quant_method": "compressed-tensors", "format": "marlin-24"}


@pytest.mark.parametrize("inside", [False, True])
def test_quantised_checkpoints_are_named_as_such(tmp_path, inside):
    copy = folder(tmp_path, config={"quantization_config": LLM_COMPRESSOR} if inside else None)
    if not inside:
        (copy / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    named = "compressed-tensors" if inside else "modelopt"
    for use in (jaxkv.load, lambda path: jaxkv.plan(path, gpus="h100x1", context=64)):
        with rejected(f"^quantization_config.*{named}"):
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
    "tensors, named",
    [
        (lambda: {DOWN: None}, DOWN),
        (lambda: {EXTRA: np.ones((48, 64), np.float32)}, EXTRA),
        (lambda: {DOWN: np.ones((64, 48), np.float32)}, DOWN),
        (lambda: holed(DOWN, np.nan), f"{DOWN}.*NaN"),
        (lambda: holed(HALF, np.nan), f"{HALF[:25]}.*NaN"),
    ],
    ids=["missing", "extra", "transposed", "nan", "nan in a half"],
)
def test_weights_that_do_not_fit(tmp_path, tensors, named):
    with rejected(named):
        jaxkv.load(folder(tmp_path, tensors=tensors()))


def test_weights_too_large_for_the_dtype(tmp_path):
    with rejected("weights=.*infinity: .*a wider dtype"), np.errstate(over="ignore"):
        jaxkv.load(folder(tmp_path, tensors=holed(DOWN, 1e6)), dtype="float16")


# --- policies -------------------------------------------------------------------------------------------------------


def test_a_ratio_below_the_window_names_the_prompt(model):
    rows = [ids(60), ids(34, 1), ids(8, 2)]
    policy = jaxkv.SnapKV(budget=0.25, window=8, min_budget="raise")
    with rejected(r"budget=0\.25: prompt 2 \(8 tokens\) keeps 2 entries"):
        jaxkv.prefill(model, rows, policy=policy)
    policy = jaxkv.SnapKV(budget=0.25, window=8)
    out = jaxkv.generate(model, rows, policy=policy, max_new_tokens=1)
    # With the row of the token sampled.
    wanted = np.asarray([16, 9, 9])[:, None]
    np.testing.assert_array_equal(out.cache.kept, np.broadcast_to(wanted, out.cache.kept.shape))
    # The prompt of 34 tokens keeps 8 by its share.
    assert out.stats.raised_budgets == 1


def test_protected_spans_beyond_the_budget(model):
    given = {"window": 4, "protect": ((0, 8), (5, 18)), "min_budget": "raise"}
    for budget in (16, 0.4):
        with rejected(f"budget={budget}: prompt 0 .* keeps 16 entries, .*protected spans take 22"):
            jaxkv.prefill(model, ids(40), policy=jaxkv.SnapKV(budget=budget, **given))


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, kind",
    [
        ([], ValueError),
        ([[5, 6], []], ValueError),
        (np.zeros((1, 1, 4), np.int32), TypeError),
        ([[5], [-1, 7]], ValueError),
        ([5, 96], ValueError),
        (jnp.asarray([1.0]), TypeError),
        ([[1.0, 2.0]], TypeError),
        (None, TypeError),
        ("Hello", ValueError),
        ([{"role": "user", "content": "Hi"}], ValueError),
        (ids(129), ValueError),
    ],
)
def test_prompts(model, cache, prompt, kind):
    with rejected("^prompt=", kind=kind):
        jaxkv.prefill(model, prompt, policy=POLICY)
    with rejected("^prompt=", kind=kind, model=model, cache=cache):
        jaxkv.generate(model, prompt, cache=cache, max_new_tokens=NEW)


def test_over_long_with_new_tokens_and_what_was_seen(model, cache):
    with rejected("prompt='129 tokens.*lower max_new_tokens"):
        jaxkv.generate(model, ids(125), max_new_tokens=NEW)
    with rejected("prompt='129 tokens.*lower max_new_tokens", model=model, cache=cache):
        jaxkv.generate(model, ids(80), cache=cache, max_new_tokens=9)
    assert len(jaxkv.generate(model, ids(124), max_new_tokens=NEW, stop_at_eos=False).tokens) == NEW


@pytest.mark.real
@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [{"role": "assistant", "content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
    ],
)
def test_texts_and_messages(prompt):
    for call in (jaxkv.prefill, jaxkv.generate):
        with rejected("^prompt="):
            call(running.smollm2(), prompt)


# --- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"stop": "x"},
        {"sampling": jaxkv.Sampling()},
        {"policy": jaxkv.SnapKV(budget=18, window=4)},
        {"policy": jaxkv.FullKV()},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls(model, cache, options, stream):
    named = "key" if "sampling" in options else next(iter(options))
    with rejected(f"^{named}=", model=model, cache=cache):
        jaxkv.generate(model, ids(5), cache=cache, stream=stream, **options)


def test_a_cache_of_another_model(tmp_path, model, cache):
    other = jaxkv.load(
        folder(tmp_path, tensors=holed(EMBEDDING, 0.5) | holed("model.norm.weight", 0.5))
    )
    assert other.config == model.config
    with rejected("^cache=.*another model"):
        jaxkv.generate(other, ids(5), cache=cache)
    qwen = jaxkv.load(FOLDER.parent / "qwen3")
    with rejected("cache=.*another model than .*qwen3", model=model, cache=cache):
        jaxkv.generate(qwen, ids(5), cache=cache)


def test_as_many_prompts_as_the_cache_holds(model):
    two = jaxkv.prefill(model, [ids(40), ids(34, 1)], policy=POLICY)
    for count in (1, 3):
        with rejected(f"prompt='{count} prompts'"):
            jaxkv.generate(model, [ids(5)] * count, cache=two, max_new_tokens=NEW)
    # The cache is as it was: both rows answer.
    out = jaxkv.generate(model, [ids(5)] * 2, cache=two, max_new_tokens=NEW, stop_at_eos=False)
    assert [len(each.tokens) for each in out] == [NEW, NEW]
