"""Plans of settings whose GPUs are not there, against arithmetic written anew, and against themselves."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv import checkpoints
from jaxkv.engine.plan import plan_prefill
from jaxkv.planning.catalog import KnownModel, apply_rope_scaling, catalog, model_named
from jaxkv.planning.gpus import gpus
from jaxkv.planning.memory_sizes import (
    compute_memory_sizes,
    compute_weight_bytes,
    list_parameters,
)
from jaxkv.planning.named import find_accelerator, list_accelerators, parse_accelerators
from jaxkv.planning.planner import find_largest_batch, find_largest_context, has_enough_memory, plan
from jaxkv.planning.setting import Workload, parse_token_count
from jaxkv.planning.speed import estimate_speed
from jaxkv.planning.tpus import tpus
from jaxkv.sharding.parameters import make_abstract_mesh

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
    given = {"context": CONTEXT, "batch": 4, "gpu": find_accelerator(gpu), "gpus": gpus} | options
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    return Workload(model=name, config=config, policy=policy, **given)


@pytest.mark.parametrize("name", checkpoints.list_model_names())
def test_models_that_are_loaded_by_name_are_planned_by_name(name):
    known = model_named(name.upper())
    assert known.filters == checkpoints.get_manifest(name).filter_layers
    if name not in {each for entry in catalog().values() for each in entry.spellings}:
        assert known == KnownModel(name=name, config=jaxkv.load(name).config, filters=known.filters)
        with pytest.raises(ValueError, match=f"did you mean {name}"):
            model_named(name[:-1])


@pytest.mark.parametrize("name", catalog())
def test_models_have_the_parameters_that_their_makers_count(name):
    entry = catalog()[name]
    held = list_parameters(entry.config, "bfloat16")
    assert sum(each.copies * math.prod(each.shape) for each in held) == entry.parameters
    assert entry.source.startswith(f"https://huggingface.co/{entry.hub_id}/")


@pytest.mark.parametrize("batch, read", [(1, 8), (3, 24), (100, 128)])
def test_a_step_reads_dense_layers_shared_experts_and_the_chosen_ones(batch, read):
    """Of GLM-4.5-Air: 45 mixtures behind a dense layer; the correction of scores is in 32 bits."""
    sizes = compute_memory_sizes(setting("glm-4.5-air", gpus=4, batch=batch, context=4096))
    embed, heads, kv_heads, dim, expert = 4096, 96, 8, 128, 3 * 4096 * 1408
    each = (2 * heads + 2 * kv_heads) * dim * embed // 4 + (heads + 2 * kv_heads) * dim // 4
    layers = 46 * (each + 2 * embed) + 3 * embed * 10944 // 4
    mixtures = 45 * (128 * embed + (read + 1) * expert // 4)
    ends = 151552 * embed // 4 + embed
    assert sizes.read == 2 * (layers + mixtures + ends) + 45 * 4 * 128


@pytest.mark.parametrize("parts", [1, 4, 64])
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
    assert compute_weight_bytes(c, "bfloat16", make_abstract_mesh(1, parts, c)) == 2 * wanted


def by_hand(policy, batch, parts, new=256, context=CONTEXT):
    """A device's part of Llama 3.1 70B's cache: rows of keys, values and positions, and tables of segments."""
    layers, heads, dim = 80, 8, 128
    mine, headroom = heads // min(parts, heads), {"h2o": 1, "d2o": 1}.get(policy, new)
    rows = context if policy in ("full", "omnikv") else 2048
    each = 2 * dim * 2 + 4 + 4 * (policy in ("h2o", "d2o"))
    share = 1.5 if policy == "adakv" and mine < heads else 1
    pools = layers * mine * (int(rows * share) + headroom) * each
    tables = 4 * (3 * layers * mine + 1)
    if policy in ("h2o", "d2o", "omnikv"):
        tables += 4 * (2 + layers + layers * mine * (policy != "h2o"))
    return batch * (pools + tables)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gpus, data", [(1, 1), (8, 1), (16, 1), (16, 2)])
def test_caches_by_hand(policy, gpus, data):
    found = compute_memory_sizes(setting(policy=policy, gpus=gpus, data=data))
    assert found.cache == found.grown == by_hand(policy, 4 // data, gpus // data)


def test_peaks_by_hand():
    """Beside weights and the layers below: hidden states, keys and values, queries and attention's output."""
    found = compute_memory_sizes(setting(policy="snapkv"))
    tokens = 4 * CONTEXT
    wanted = tokens * (8192 + 2 * 128 + 2 * 8 * 128) * 2
    assert 1 < found.prefill / wanted < 1.02
    # Logits: of the device's part of the vocabulary twice, and all of them.
    assert 1 < found.decode / (4 * 4 * 128256 * 1.25) < 1.2
    assert (
        found.peak_device_bytes
        == found.prefill_peak
        > found.decode_peak
        == found.weights + found.cache + found.decode
    )


# Bytes at the peak of prefill and of decoding that XLA found for GPUs that were not there (commit fcfce720).
COMPILED = [
    ("llama-3.1-8b", "FullKV", "h100", 1, 1, 8192, 17622746736, 17180284654),
    ("llama-3.1-8b", "SnapKV", "h100", 1, 8, 32768, 25914780584, 18506952300),
    ("llama-3.1-8b", "AdaKV", "a100x2", 1, 4, 32768, 11297990792, 8914949156),
    ("mistral-7b-v0.3", "H2O", "h100", 1, 4, 32768, 19346262416, 15592274068),
    ("qwen2.5-7b", "D2O", "a100", 1, 1, 32768, 17864053484, 15355963318),
    ("llama-3.1-8b", "PyramidKV", "l4", 1, 1, 8192, 16877423216, 16368687854),
    ("llama-3.1-70b", "FullKV", "h100x8", 1, 4, 131072, 49879525256, 39329250468),
    ("llama-3.1-70b", "AdaKV", "h100x8", 1, 4, 131072, 29272811656, 18193890468),
    ("llama-3.1-70b", "OmniKV", "h100x8", 1, 4, 131072, 49879525256, 39346724892),
    ("llama-3.1-70b", "D2O", "h200x8", 1, 4, 131072, 50274848384, 17987155292),
    ("llama-3.1-70b", "H2O", "h100x8", 1, 1, 65536, 19194930408, 17729196846),
    ("llama-3.1-8b", "SnapKV", "h100x8", 2, 8, 65536, 7835871368, 4323524644),
    ("qwen2.5-72b", "SnapKV", "h200x8", 1, 4, 32768, 21324056720, 18623820452),
    ("llama-3.1-405b", "AdaKV", "h100x16", 1, 4, 131072, 71805913480, 52137560980),
]


@pytest.mark.parametrize(
    "name, policy, gpus, data, batch, context, prefill, decode", COMPILED, ids=str
)
def test_the_compilers_figures(name, policy, gpus, data, batch, context, prefill, decode):
    """Within 1%; without the weights within 6% of prefill's rest."""
    gpu, count = parse_accelerators(gpus)
    options = {} if policy == "FullKV" else {"budget": 2048}
    options |= {"filter_layers": (5, 20, 45)} if policy == "OmniKV" else {}
    policy = getattr(jaxkv, policy)(**options)
    where = {"gpus": count, "gpu": gpu.name, "data": data, "batch": batch, "context": context}
    found = compute_memory_sizes(setting(name, policy, **where))
    assert found.prefill_peak == pytest.approx(prefill, rel=0.01)
    assert found.decode_peak == pytest.approx(decode, rel=0.01)
    beside = prefill - found.weights
    assert found.prefill_peak - found.weights == pytest.approx(beside, rel=0.06)


def test_long_answers_grow():
    """Rows that a prefill leaves no room for come later; none where a row goes for each that comes."""
    appends, evicts = (
        compute_memory_sizes(setting(policy=each, context=8192, new=8000))
        for each in ("full", "h2o")
    )
    assert appends.grown - appends.cache == 80 * 4 * (8192 - 2048) * (2 * 128 * 2 + 4)
    assert evicts.grown == evicts.cache


def test_what_waits_in_host_memory():
    policy = dataclasses.replace(POLICIES["omnikv"], offload=True)
    found, whole = (
        compute_memory_sizes(setting(policy=policy)),
        compute_memory_sizes(setting(policy="omnikv")),
    )
    away = 80 - (5 + 2 * 3)
    assert found.host == away * 2 * 4 * CONTEXT * 128 * 2 and whole.host == 0
    assert found.cache < whole.cache / 3 and found.decode > whole.decode


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["llama-3.1-8b", "mistral-7b-v0.3", "qwen3-30b-a3b"]),
    st.sampled_from(["full", "snapkv", "adakv", "h2o", "d2o"]),
    st.integers(1, 5),
    st.sampled_from([500, 1000, 1800, 7900]),
    # Below the context: more rows than tokens are as many as the padded prompt has.
    st.integers(64, 480),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 2)]),
)
def test_more_is_never_less(name, policy, batch, context, budget, mesh):
    gpus, data = mesh
    if policy != "full":
        policy = dataclasses.replace(POLICIES[policy], budget=budget)
    batch *= data
    mine = setting(name, policy, gpus, data=data, batch=batch, context=context)
    of = lambda **options: compute_memory_sizes(dataclasses.replace(mine, **options))  # noqa: E731
    found = of()
    more = [of(batch=2 * batch), of(context=2 * context), of(new=300)]
    if mine.policy.build_policy_parts().budget is not None:
        more.append(of(policy=dataclasses.replace(mine.policy, budget=budget + 8)))
    # Twice as many: a few more can take less, where the MLP's blocks of tokens become smaller.
    for each in more:
        assert each.peak_device_bytes >= found.peak_device_bytes and each.cache >= found.cache
    alone = of(gpus=1, data=1)
    assert found.weights * mine.gpus_per_group >= alone.weights
    assert found.cache * mine.gpus >= alone.cache
    assert found.kept <= context


@pytest.mark.parametrize("policy", ["adakv", "d2o"])
def test_one_prompt_stands_for_all(policy):
    """What the engine plans for as many prompts of one length, however many."""
    mine = setting(policy=policy, gpus=16, data=2, batch=5)
    found, wanted = (
        plan_prefill(mine.config, mine.policy, lengths, headroom=9, mesh=mine.mesh, times=times)
        for lengths, times in (([CONTEXT], 5), ([CONTEXT] * 5, 1))
    )
    names = {field.name for field in dataclasses.fields(found)} - {"rows", "numbers"}
    assert all(getattr(found, name) == getattr(wanted, name) for name in names)


@pytest.mark.parametrize("policy", ["full", "adakv", "d2o"])
def test_the_largest_fits_and_the_next_does_not(policy):
    mine = setting(policy=policy, gpus=4)
    most = find_largest_batch(mine)
    assert (
        most
        and has_enough_memory(dataclasses.replace(mine, batch=most))
        and not has_enough_memory(dataclasses.replace(mine, batch=most + 1))
    )
    mine = setting(policy=policy, gpus=4, batch=16)
    length = find_largest_context(mine)
    assert has_enough_memory(dataclasses.replace(mine, context=length))
    assert length == CONTEXT or not has_enough_memory(dataclasses.replace(mine, context=length + 1))
    assert find_largest_batch(setting(gpus=1)) == find_largest_context(setting(gpus=1)) == 0


def test_remedies_would_do():
    """A budget, SnapKV's where all rows are kept, narrow weights, more GPUs, in that order, by the same arithmetic."""
    whole = plan("llama-3.1-405b", gpus="h100x16", context=CONTEXT, batch=4)
    many = plan("llama-3.1-8b", gpus="l4", context=8192, batch=24, policy=jaxkv.AdaKV(budget=2048))
    assert not whole.fits and not many.fits
    budget, weights, more = (each.setting for each in whole.remedies)
    assert budget.policy == jaxkv.SnapKV(budget=2048) and weights.weights == "int8"
    assert more.gpus == 32
    smaller = many.remedies[0].setting.policy
    assert isinstance(smaller, jaxkv.AdaKV) and smaller.composed.budget.value < 2048
    for each in (*whole.remedies, *many.remedies):
        assert (
            has_enough_memory(each.setting)
            and each.peak == compute_memory_sizes(each.setting).peak_device_bytes
        )
    assert not plan("llama-3.1-405b", gpus="l4", context=CONTEXT).remedies


def test_models_come_in_many_ways(model):
    """A name, a hub id, a folder of which the config is enough, a config and a model: the same shape is the same."""
    of = {"gpus": "l4", "context": 1024}
    named = plan("smollm2-135m-instruct", **of, policy="omnikv")
    assert named.setting.policy.filter_layers == (2, 6, 19) and not named.notes
    assert plan("HuggingFaceTB/SmolLM2-135M", **of).weights == named.weights == 2 * 134515008
    assert plan(named.setting.config, **of).weights == named.weights
    assert plan(model, gpus="l4", context=64, dtype="float32").weights == model.nbytes
    assumed = plan("llama-3.1-8b", **of, policy=jaxkv.OmniKV(budget=64))
    assert assumed.setting.policy.filter_layers == (2, 8, 18) and len(assumed.notes) == 1


@pytest.fixture(scope="module")
def model():
    import tiny

    return tiny.tiny(tiny.MODELS["gqa4"])


def test_positions_are_stretched_by_yarn():
    here = {"gpus": "h200x1", "context": 65536}
    with pytest.raises(ValueError, match="^context="):
        jaxkv.plan("qwen3-32b", **here)
    planned = [jaxkv.plan("qwen3-32b", rope_scaling=each, **here) for each in ("yarn:2", "yarn:4")]
    assert planned[0].cache == planned[1].cache > 0 and planned[1].fits
    # As in a config.json that says so.
    raw = catalog()["qwen3-32b"].raw
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40960}
    config = jaxkv.ModelConfig.from_hf(
        {**raw, "rope_scaling": scaling, "max_position_embeddings": 4 * 40960}
    )
    assert apply_rope_scaling(model_named("qwen3-32b"), "yarn:4").config == config


@pytest.mark.parametrize(
    "model, given",
    [("qwen3-32b", "yarn:0.5"), ("llama-3.1-8b", "yarn:2")],
)
def test_other_scalings_are_not_supported(model, given):
    with pytest.raises(ValueError, match="^rope_scaling="):
        jaxkv.plan(model, gpus="h200x1", context=4096, rope_scaling=given)


@pytest.mark.parametrize("name", list_accelerators())
def test_accelerators_have_what_a_compiler_asks_for(name):
    known = list_accelerators()[name]
    assert known.sources and all(each.startswith("https://") for each in known.sources)
    assert known.memory < known.reported < 1.1 * known.memory
    assert (
        parse_accelerators(f"{name}x3") == parse_accelerators(f"3 X {name.upper()}") == (known, 3)
    )
    if name in gpus():
        assert f"core_count: {known.cores}" in known.xla_target_config
        assert f"device_memory_size: {known.reported}" in known.xla_target_config


def test_accelerators_as_people_write_them():
    for written in ("4xh100", "h100:4", "4 H100"):
        assert parse_accelerators(written) == (gpus()["h100"], 4)
    assert parse_accelerators("2xrtx4090") == (find_accelerator("4090"), 2)
    found = [parse_token_count(each) for each in ("131_072", "128K", "0.5K", "1M", " 32 K ", 7)]
    assert found == [131072, 131072, 512, 1 << 20, 32768, 7]


def test_tpus_are_planned_for_as_gpus_are():
    v6e, chiplet = tpus()["v6e"], tpus()["tpu7x"]
    slices = v6e.find_slice(8), v6e.find_slice(9), chiplet.find_slice(8)
    assert slices == ("v6e:2x4", "v6e:4x4", "tpu7x:2x2x1")
    with pytest.raises(ValueError, match="^gpus="):
        v6e.find_slice(257)
    given = {"context": "32K", "batch": 8, "policy": jaxkv.SnapKV(budget=1024)}
    found, small = (plan("llama-3.1-8b", gpus=each, **given) for each in ("v6e", "v5e"))
    assert found.fits and found.setting.gpu.memory == 32 * 10**9 and found.speed.step > 0
    assert not small.fits and small.remedies[-1].setting.gpus == 2


def test_copies_in_other_tiles_are_counted():
    """TPU7x: the weights again while tokens are sampled, and hidden states of three loops in prefill; of 16 bits."""
    both = {}
    for dtype in ("bfloat16", "float32"):
        found = plan(
            "llama-3.1-8b", gpus="tpu7x", context=4096, batch=4, policy=jaxkv.FullKV(), dtype=dtype
        )
        one = dataclasses.replace(
            found.setting, gpu=dataclasses.replace(tpus()["tpu7x"], retiles=False)
        )
        both[dtype] = compute_memory_sizes(found.setting), compute_memory_sizes(one)
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
    assert not has_enough_memory(dataclasses.replace(found.setting, context=512))
    assert np.isfinite(found.speed.step) and found.speed.tokens_per_second > 0


def test_an_engine_is_planned():
    """Slots fill the memory beside one prefill; a request costs its prefill and its share of all slots' steps."""
    asked = {"gpus": "h200x1", "context": 32768, "serve": True}
    policy = jaxkv.SnapKV(budget=1024)
    found = plan("llama-3.1-8b", policy=policy, **asked)
    made, one = found.served, found.speed
    every = dataclasses.replace(found.setting, batch=made.slots)
    step = estimate_speed(every).step
    # 32 layers and 8 kv heads of 1024 rows and 256 new ones, rounded up; positions are 4 bytes a row.
    slot = 32 * 8 * (1024 + 256) * (2 * 128 * 2 + 4)
    assert slot <= made.slot_bytes <= 1.02 * slot
    beside = found.weights + found.sizes.prefill + compute_memory_sizes(every).decode
    held = (made.slots + made.slots // 4) * made.slot_bytes
    assert 0.99 * found.setting.gpu.memory < beside + held <= found.setting.gpu.memory
    seconds = one.prefill + 256 * step / made.slots
    assert made.requests == pytest.approx(3600 / seconds)
    assert made.pause == pytest.approx(2 * one.prefill / 32 + step)
    # Ten questions of each prompt share its prefill; two groups have room for the prompts that wait for both.
    shared = plan("llama-3.1-8b", policy=policy, questions=10, **asked).served
    assert shared.slots == made.slots and shared.requests > 2 * made.requests
    both = plan("llama-3.1-8b", policy=policy, **asked | {"gpus": "h200x2", "mesh": "2x1"}).served
    assert 2 * made.slots * 1.25 / 1.5 == pytest.approx(both.slots, rel=0.01)
    full = plan("llama-3.1-8b", **asked).served
    assert full.slots < made.slots / 20 and full.requests < made.requests
    assert isinstance(plan("llama-3.1-8b", policy="brutaloffload", **asked).served, str)
    large = asked | {"gpus": "h100", "context": "128K"}
    assert plan("llama-3.1-70b", **large).served.slots == 0


def test_a_process_on_this_machine():
    """SmolLM2 with 256 rows of a prompt of 4096 tokens: what it took when it was measured, or up to a third more."""
    asked = {"gpus": "cpu", "context": 4096, "policy": jaxkv.AdaKV(budget=256)}
    found = plan("smollm2-135m", **asked)
    assert found.setting.dtype == "float32" and found.weights == 4 * 134_515_008
    assert 1.1e9 < found.prefill_peak < 1.5e9 and found.sizes.process > found.cache
    assert found.speed is None and found.silent and found.fits
    short = dataclasses.replace(found.setting.gpu, memory=10**9)
    assert not has_enough_memory(found.setting, gpu=short)
    # A head of 4 GB is read in float32 beside what is kept of it.
    large = plan("llama-3.1-8b", **asked | {"dtype": "bfloat16"})
    assert large.prefill_peak >= large.weights + 6 * 128_256 * 4096


def test_a_type_that_is_not_supported_is_planned_as_a_llama_of_its_size(tmp_path):
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
    }
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    given = {"gpus": "h100x1", "context": 4096, "policy": jaxkv.SnapKV(budget=256)}
    config = {"model_type": "mimo", "a_key_of_its_own": 1} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="mimo"):
        found = jaxkv.plan(tmp_path, **given)
    config = jaxkv.ModelConfig.from_hf({"model_type": "llama"} | sizes)
    assert found.sizes == jaxkv.plan(config, **given).sizes
