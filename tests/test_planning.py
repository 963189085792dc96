"""Plans of settings whose GPUs are not there, against arithmetic written anew, and against themselves."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv import checkpoints
from jaxkv.engine.plan import plan_prefill
from jaxkv.planning import sizes
from jaxkv.planning.catalog import Known, catalog, model_named, scaled
from jaxkv.planning.gpus import gpus
from jaxkv.planning.named import accelerator_named, accelerators, accelerators_named
from jaxkv.planning.planner import fits, largest_batch, largest_context, plan
from jaxkv.planning.setting import Setting
from jaxkv.planning.sizes import sizes_of, weights_of
from jaxkv.planning.tpus import tpus
from jaxkv.sharding.parameters import abstract_mesh

ROOT = Path(__file__).parent.parent
CONTEXT = 131072
POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=2048),
    "adakv": jaxkv.AdaKV(budget=2048),
    "h2o": jaxkv.H2O(budget=2048),
    "d2o": jaxkv.D2O(budget=2048),
    "omnikv": jaxkv.OmniKV(budget=2048, filter_layers=(5, 20, 45)),
}


def setting(name="llama-3.1-70b", policy="full", gpus=8, gpu="h100", **options):
    config = model_named(name).config
    given = {"context": CONTEXT, "batch": 4, "gpu": accelerator_named(gpu), "gpus": gpus} | options
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    return Setting(model=name, config=config, policy=policy, **given)


@pytest.mark.parametrize("name", checkpoints.names())
def test_models_that_are_loaded_by_name_are_planned_by_name(name):
    known = model_named(name.upper())
    assert known.filters == checkpoints.manifest(name).filter_layers
    if name not in {each for entry in catalog().values() for each in entry.spellings}:
        assert known == Known(name=name, config=jaxkv.load(name).config, filters=known.filters)
        with pytest.raises(ValueError, match=f"did you mean {name}"):
            model_named(name[:-1])


@pytest.mark.parametrize("name", catalog())
def test_models_have_the_parameters_that_their_makers_count(name):
    entry = catalog()[name]
    one = abstract_mesh(1, 1, entry.config)
    assert weights_of(entry.config, "bfloat16", one) == 2 * entry.parameters
    assert entry.source.startswith(f"https://huggingface.co/{entry.hub_id}/")


@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16, 32, 64])
def test_weights_of_a_device(parts):
    """Each has its part of every matrix, of keys' and values' a whole head at least, and all norms."""
    c = model_named("llama-3.1-70b").config
    heads = c.kv_heads // min(c.kv_heads, parts)
    block = (
        c.embed * c.head_dim * (2 * c.heads // parts + 2 * heads)
        + 3 * c.embed * c.hidden // parts
        + 2 * c.embed
    )
    wanted = c.layers * block + 2 * c.vocab // parts * c.embed + c.embed
    assert weights_of(c, "bfloat16", abstract_mesh(1, parts, c)) == 2 * wanted


def by_hand(policy, batch, parts, new=256, context=CONTEXT):
    """A device's part of Llama 3.1 70B's cache: rows of keys, values and positions, and tables of segments."""
    layers, heads, dim = 80, 8, 128
    mine, room = heads // min(parts, heads), {"h2o": 1, "d2o": 1}.get(policy, new)
    rows = context if policy in ("full", "omnikv") else 2048
    each = 2 * dim * 2 + 4 + 4 * (policy in ("h2o", "d2o"))
    share = 1.5 if policy == "adakv" and mine < heads else 1
    pools = layers * mine * (int(rows * share) + room) * each
    tables = 4 * (3 * layers * mine + 1)
    if policy in ("h2o", "d2o", "omnikv"):
        tables += 4 * (2 + layers + layers * mine * (policy != "h2o"))
    return batch * (pools + tables)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gpus, data", [(1, 1), (8, 1), (16, 1), (16, 2)])
def test_caches_by_hand(policy, gpus, data):
    found = sizes_of(setting(policy=policy, gpus=gpus, data=data))
    assert found.cache == found.grown == by_hand(policy, 4 // data, gpus // data)


def test_peaks_by_hand():
    """Beside weights and the layers below: hidden states, keys and values, queries and attention's output."""
    found = sizes_of(setting(policy="snapkv"))
    tokens = 4 * CONTEXT
    wanted = tokens * (8192 + 2 * 128 + 2 * 8 * 128) * 2
    assert 1 < found.prefill / wanted < 1.02
    # Logits: of the device's part of the vocabulary twice, and all of them.
    assert 1 < found.decode / (4 * 4 * 128256 * 1.25) < 1.2
    assert (
        found.peak
        == found.prefill_peak
        > found.decode_peak
        == found.weights + found.cache + found.decode
    )


@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "policy", "batch", "context", "prefill", "decode"),
    [
        ("llama-3.1-8b", "h100", 1, "snapkv", 8, 32768, 25914780584, 18506952300),
        ("mistral-7b-v0.3", "h100", 1, "h2o", 4, 32768, 19346262416, 15592274068),
        ("llama-3.1-70b", "h100", 8, "adakv", 4, 131072, 29272811656, 18193890468),
        ("llama-3.1-70b", "h200", 8, "d2o", 4, 131072, 50274848384, 17987155292),
        ("llama-3.1-70b", "h100", 8, "omnikv", 4, 131072, 49879525256, 39346724892),
    ],
)
def test_the_compilers_figures(name, gpu, gpus, policy, batch, context, prefill, decode):
    """Within 1% of the peaks that XLA found for GPUs that are not there (`jaxkv plan --compile` at 2c6299e)."""
    found = sizes_of(setting(name, policy, gpus, gpu, batch=batch, context=context))
    assert found.prefill_peak == pytest.approx(prefill, rel=0.01)
    assert found.decode_peak == pytest.approx(decode, rel=0.01)


def test_long_answers_grow():
    """Rows that a prefill leaves no room for come later; none where a row goes for each that comes."""
    appends, evicts = (
        sizes_of(setting(policy=each, context=8192, new=8000)) for each in ("full", "h2o")
    )
    assert appends.grown - appends.cache == 80 * 4 * (8192 - 2048) * (2 * 128 * 2 + 4)
    assert evicts.grown == evicts.cache


def test_what_waits_in_host_memory():
    policy = dataclasses.replace(POLICIES["omnikv"], offload=True)
    found, whole = sizes_of(setting(policy=policy)), sizes_of(setting(policy="omnikv"))
    away = 80 - (5 + 2 * 3)
    assert found.host == away * 2 * 4 * CONTEXT * 128 * 2 and whole.host == 0
    assert found.cache < whole.cache / 3 and found.decode > whole.decode


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["llama-3.1-8b", "mistral-7b-v0.3", "qwen3-30b-a3b", "falcon-7b"]),
    st.sampled_from(["full", "snapkv", "adakv", "h2o", "d2o"]),
    st.integers(1, 5),
    st.sampled_from([500, 1000, 1800, 7900]),
    st.integers(64, 512),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 2)]),
)
def test_more_is_never_less(name, policy, batch, context, budget, mesh):
    gpus, data = mesh
    if name == "falcon-7b":
        # 71 heads are split over one device or all; it has 2,048 positions.
        gpus, context = data, min(context, 1000)
    if policy != "full":
        policy = dataclasses.replace(POLICIES[policy], budget=budget)
    batch *= data
    mine = setting(name, policy, gpus, data=data, batch=batch, context=context)
    of = lambda **options: sizes_of(dataclasses.replace(mine, **options))  # noqa: E731
    found = of()
    # Twice as many: a few more can take less, where the MLP's blocks of tokens become smaller.
    for more in (of(batch=2 * batch), of(context=2 * context), of(new=300)):
        assert (
            more.peak >= found.peak and more.cache >= found.cache and more.weights == found.weights
        )
    if mine.policy.parts().budget is not None:
        more = of(policy=dataclasses.replace(mine.policy, budget=budget + 8))
        assert more.cache >= found.cache and more.peak >= found.peak
    alone = of(gpus=1, data=1)
    assert found.weights * mine.split >= alone.weights
    assert found.cache * mine.gpus >= alone.cache
    assert found.kept <= context


@pytest.mark.parametrize("policy", POLICIES)
def test_one_prompt_stands_for_all(policy, monkeypatch):
    """What the engine plans for as many prompts of one length, however many: no plan takes longer for more of them."""
    mine = setting(policy=policy, gpus=16, data=2, batch=5)
    found, wanted = (
        plan_prefill(mine.config, mine.policy, lengths, room=9, mesh=mine.mesh, times=times)
        for lengths, times in (([CONTEXT], 5), ([CONTEXT] * 5, 1))
    )
    numbers = [
        field.name
        for field in dataclasses.fields(found)
        if field.name not in ("rows", "budget", "forced")
    ]
    assert all(getattr(found, name) == getattr(wanted, name) for name in numbers)
    asked = []
    monkeypatch.setattr(
        sizes,
        "plan_prefill",
        lambda *args, **options: asked.append(args[2]) or plan_prefill(*args, **options),
    )
    sizes_of(dataclasses.replace(mine, batch=60000))
    assert asked == [[CONTEXT]]


@pytest.mark.parametrize("policy", ["full", "adakv", "d2o"])
def test_the_largest_fits_and_the_next_does_not(policy):
    mine = setting(policy=policy, gpus=4)
    most = largest_batch(mine)
    assert (
        most
        and fits(dataclasses.replace(mine, batch=most))
        and not fits(dataclasses.replace(mine, batch=most + 1))
    )
    mine = setting(policy=policy, gpus=4, batch=16)
    length = largest_context(mine)
    assert fits(dataclasses.replace(mine, context=length))
    assert length == CONTEXT or not fits(dataclasses.replace(mine, context=length + 1))
    assert largest_batch(setting(gpus=1)) == largest_context(setting(gpus=1)) == 0


def test_remedies_would_do():
    """A budget, a policy where all rows are kept, narrow weights, more GPUs, in that order, by the same arithmetic."""
    whole = plan("llama-3.1-405b", gpus="h100x16", context=CONTEXT, batch=4)
    assert not whole.fits and [each.about for each in whole.remedies] == [
        "SnapKV(budget=2048)",
        "weights in 8 bits",
        "h100x32",
    ]
    many = plan("llama-3.1-8b", gpus="l4", context=8192, batch=24, policy=jaxkv.AdaKV(budget=2048))
    assert not many.fits and many.remedies[0].about.startswith("a budget of ")
    assert not any("SnapKV" in each.about for each in many.remedies)
    assert many.remedies[0].setting.policy.composed.budget.value < 2048
    for each in (*whole.remedies, *many.remedies):
        assert fits(each.setting) and each.peak == sizes_of(each.setting).peak
    nothing = plan("llama-3.1-405b", gpus="l4", context=CONTEXT)
    assert not nothing.remedies and "nothing that was tried would fit" in str(nothing)
    # Neither prompts nor a budget of few tokens are a budget that others could have.
    for few in (None, jaxkv.StreamingLLM(budget=8)):
        found = plan("llama-3.1-70b", gpus="h100", context=4, policy=few).remedies
        assert [each.about for each in found] == ["weights in 8 bits", "h100x2"]
    assert plan("llama-3.1-70b", context=CONTEXT, batch=4, policy="snapkv").remedies == ()


def test_models_come_in_many_ways(model):
    """A name, a hub id, a folder of which the config is enough, a config and a model: the same shape is the same."""
    of = {"gpus": "l4", "context": 1024}
    named = plan("smollm2-135m-instruct", **of, policy="omnikv")
    assert named.setting.policy.filter_layers == (2, 6, 19) and not named.notes
    assert plan("HuggingFaceTB/SmolLM2-135M", **of).weights == named.weights == 2 * 134515008
    assert plan(named.setting.config, **of).weights == named.weights
    assert plan(model, gpus="l4", context=64, dtype="float32").weights == model.nbytes
    assumed = plan("llama-3.1-8b", **of, policy=jaxkv.OmniKV(budget=64))
    assert assumed.setting.policy.filter_layers == (2, 8, 18) and "are assumed" in assumed.notes[0]


@pytest.fixture(scope="module")
def model():
    import tiny

    return tiny.tiny(tiny.MODELS["gqa4"])


def test_positions_are_stretched_by_yarn():
    here = {"gpus": "h200x1", "context": 65536}
    with pytest.raises(
        ValueError, match=r"context=65536: qwen3-32b .* 40960 positions: .*--rope-scaling yarn:2"
    ):
        jaxkv.plan("qwen3-32b", **here)
    planned = [jaxkv.plan("qwen3-32b", rope_scaling=each, **here) for each in ("yarn:2", "yarn:4")]
    assert planned[0].cache == planned[1].cache > 0 and planned[1].fits
    # As in a config.json that says so.
    raw = catalog()["qwen3-32b"].raw
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    config = jaxkv.ModelConfig.from_hf(
        {**raw, "rope_scaling": scaling, "max_position_embeddings": 4 * 40960}
    )
    assert scaled(model_named("qwen3-32b"), "yarn:4").config == config


@pytest.mark.parametrize(
    "given",
    ("yarn", "yarn:", "yarn:0", "yarn:0.5", "yarn:1e9", "yarn:-2", "yarn:nan", "linear:4", "4", ""),
)
def test_other_scalings_are_not_supported(given):
    with pytest.raises(ValueError, match="^rope_scaling=.*: give "):
        jaxkv.plan("qwen3-32b", gpus="h200x1", context=4096, rope_scaling=given)


@pytest.mark.parametrize("model", ("llama-3.1-8b", "gemma-3-12b"))
def test_models_with_a_scaling_of_their_own_keep_it(model):
    with pytest.raises(ValueError, match="rope_scaling='yarn:2'"):
        jaxkv.plan(model, gpus="h200x1", context=4096, rope_scaling="yarn:2")


def test_gpus_have_what_a_compiler_asks_for():
    for gpu in gpus().values():
        assert gpu.sources and all(each.startswith("https://") for each in gpu.sources)
        assert gpu.memory < gpu.reported < 1.1 * gpu.memory and gpu.capability in (
            (8, 0),
            (8, 9),
            (9, 0),
            (10, 0),
        )
        assert (
            f"core_count: {gpu.cores}" in gpu.target
            and f"device_memory_size: {gpu.reported}" in gpu.target
        )
        assert (
            accelerators_named(f"{gpu.name}x3") == (gpu, 3)
            and accelerator_named(gpu.name.upper()) is gpu
        )
    assert list(accelerators()) == [*gpus(), *tpus()]
    assert accelerator_named("A100").memory == 80 * 10**9
    assert accelerators_named("rtx4090") == (accelerator_named("4090"), 1)
    assert accelerators_named("H100 x 8") == (gpus()["h100"], 8)
    assert gpus()["h100"].architecture == "sm_90a" and gpus()["l4"].architecture == "sm_89"


def test_tpus_are_planned_for_as_gpus_are():
    for tpu in tpus().values():
        assert tpu.sources and all(each.startswith("https://") for each in tpu.sources)
        assert tpu.memory < tpu.reported < 1.1 * tpu.memory and accelerators_named(
            f"8x{tpu.name}"
        ) == (tpu, 8)
        assert tpu.slice_of(1).endswith((":2x2", ":2x2x1")) and tpu.slice_of(8).count("x") >= 1
    v6e, chiplet = tpus()["v6e"], tpus()["tpu7x"]
    assert (v6e.slice_of(8), v6e.slice_of(9), chiplet.slice_of(8)) == (
        "v6e:2x4",
        "v6e:4x4",
        "tpu7x:2x2x1",
    )
    with pytest.raises(ValueError, match="gpus='v6ex257': the largest slice has 256"):
        v6e.slice_of(257)
    found = plan(
        "llama-3.1-8b", gpus="v6e x1", context="32K", batch=8, policy=jaxkv.SnapKV(budget=1024)
    )
    assert found.fits and found.setting.memory == 32 * 10**9 and found.speed.launches == 0
    text = str(found)
    assert "on 1 x v6e" in text and "to spare on each TPU" in text and "no TPU was measured" in text
    small = plan(
        "llama-3.1-8b", gpus="v5e", context="32K", batch=8, policy=jaxkv.SnapKV(budget=1024)
    )
    assert (
        not small.fits
        and "on each TPU" in str(small)
        and "v5ex2" in [each.about for each in small.remedies]
    )
    with pytest.raises(
        ValueError, match="no such GPU or TPU; known ones: .*v6e, tpu7x; did you mean"
    ):
        plan("llama-3.1-8b", gpus="v6", context=4096)


def test_copies_in_other_tiles_are_counted():
    """TPU7x: the weights again while tokens are drawn, and the hidden states of three loops in prefill; of 16 bits."""
    both = {}
    for dtype in ("bfloat16", "float32"):
        found = plan(
            "llama-3.1-8b", gpus="tpu7x", context=4096, batch=4, policy=jaxkv.FullKV(), dtype=dtype
        )
        one = dataclasses.replace(
            found.setting, gpu=dataclasses.replace(tpus()["tpu7x"], retiles=False)
        )
        both[dtype] = sizes_of(found.setting), sizes_of(one)
    more, less = both["bfloat16"]
    assert more.prefill - less.prefill == 3 * 4 * 4096 * 4096 * 2
    assert more.decode - less.decode == more.weights == less.weights
    assert both["float32"][0] == both["float32"][1]


def test_budgets_that_no_short_prompt_has_are_left_out():
    """A share below sinks and window: the longest context that fits is looked for among those that can have it."""
    policy = jaxkv.SnapKV(budget=0.01, min_budget="raise")
    found = plan("llama-3.1-8b", gpus="h100", context=CONTEXT, policy=policy)
    assert found.largest_context == CONTEXT and math.isclose(
        found.sizes.kept, CONTEXT // 100, rel_tol=0.01
    )
    assert not fits(dataclasses.replace(found.setting, context=512))
    assert np.isfinite(found.speed.step) and found.speed.tokens > 0


@pytest.mark.parametrize("kind", ("seed_oss", "stablelm"))
def test_types_that_are_not_supported_are_planned_as_llamas_of_their_size(kind, tmp_path):
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    sizes |= {"num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 8192}
    given = {"gpus": "h100x1", "context": 4096, "policy": jaxkv.SnapKV(budget=256)}
    plans = []
    for name, more in (("llama", {}), (kind, {"a_key_of_its_own": 1})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": name} | sizes | more))
        with contextlib.nullcontext() if name == "llama" else pytest.warns(UserWarning, match=kind):
            plans.append(jaxkv.plan(folder, **given))
    assert plans[0].sizes == plans[1].sizes
    with pytest.raises(ValueError, match=kind):
        jaxkv.load(tmp_path / kind)
