"""Families beside Llama's through policies, kernels and meshes: what holds for Llama's blocks holds for theirs."""

import dataclasses

import numpy as np
import pytest
import running
import slot_runs
import tiny
from meshes import answers, mesh_of, new_programs, prompts, roomy

import jaxkv
from jaxkv.analysis import similarity
from jaxkv.models.values import ExpertsConfig, LayerSpec, Ministral3Rope, Rope
from jaxkv.testing import check_policy

SMALL = tiny.shape(layers=2, kv_heads=2, group=2, dim=8)
SHAPES = {
    # Multi-query attention, one norm a block, a bias wherever there can be one, and 64 channels a head.
    "falcon-7b": dataclasses.replace(
        SMALL,
        kv_heads=1,
        head_dim=64,
        layer_norm=True,
        parallel=True,
        shared_norm=True,
        gated=False,
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
    ),
    "falcon-40b": dataclasses.replace(
        SMALL, layer_norm=True, parallel=True, gated=False, activation="gelu"
    ),
    "command-r-plus": dataclasses.replace(
        SMALL,
        layer_norm=True,
        norm_bias=False,
        parallel=True,
        shared_norm=True,
        logit_scale=0.3,
        interleaved=True,
        qk_layer_norm=True,
    ),
    "glm4": dataclasses.replace(
        SMALL, norms="both", rope=Rope(share=0.5), qkv_bias=True, interleaved=True
    ),
    "olmo2": dataclasses.replace(SMALL, norms="after", qk_norm_wide=True),
    "mixtral": dataclasses.replace(SMALL, experts=ExpertsConfig(count=4, chosen=2)),
    "apertus": dataclasses.replace(SMALL, gated=False, activation="xielu", qk_norm=True),
    # Factors on queries that differ within a prompt, and within an answer.
    "ministral3": dataclasses.replace(
        SMALL,
        rope=Ministral3Rope(factor=4.0, original_max_position=8, llama_4_scaling_beta=0.5),
    ),
    "stablelm-12b": dataclasses.replace(
        SMALL,
        layer_norm=True,
        parallel=True,
        shared_norm=True,
        qk_layer_norm=True,
        rope=Rope(share=0.25),
    ),
    # A dense layer of its own width, then experts in groups beside shared ones.
    "glm4-moe": dataclasses.replace(
        SMALL,
        hidden=16,
        qk_norm=True,
        qkv_bias=True,
        kinds=(LayerSpec(rope=Rope(share=0.5), dense_hidden=32), LayerSpec(rope=Rope(share=0.5))),
        experts=ExpertsConfig(
            count=8,
            chosen=3,
            sigmoid=True,
            corrected=True,
            groups=4,
            chosen_groups=2,
            scale=1.5,
            shared=24,
        ),
    ),
    "hunyuan": dataclasses.replace(SMALL, qk_norm=True, qk_norm_rotated=True, head_bias=True),
    "qwen3-moe": dataclasses.replace(
        SMALL, hidden=16, qk_norm=True, experts=ExpertsConfig(count=8, chosen=4, normalised=False)
    ),
}
NEW, LENGTHS = 4, (37, 21, 30)


def model_of(name, dtype="float32"):
    return tiny.tiny(SHAPES[name], dtype=dtype)


POLICIES = {
    "snapkv": jaxkv.SnapKV(budget=16, window=8),
    "criticalkv": jaxkv.CriticalKV(base=jaxkv.AdaKV(base=jaxkv.SnapKV(budget=16, window=8))),
    "pyramidkv": jaxkv.PyramidKV(budget=16, window=8),
    "expected": jaxkv.ExpectedAttention(budget=16),
    "rolling": jaxkv.StreamingLLM(budget=16, rolling_positions=True),
}


@pytest.mark.parametrize(
    "name, policy",
    [
        ("falcon-40b", "criticalkv"),
        ("glm4", "expected"),
        ("ministral3", "expected"),
        ("hunyuan", "criticalkv"),
    ],
)
def test_policies_keep_their_promises(name, policy):
    """With norms of values at the output projection, budgets of their own for heads, mean rotations."""
    check_policy(POLICIES[policy], model=model_of(name))


@pytest.mark.parametrize(
    "name, policy",
    [
        ("falcon-7b", "snapkv"),
        ("mixtral", "pyramidkv"),
        ("ministral3", "snapkv"),
        ("glm4-moe", "snapkv"),
    ],
)
def test_kernels_generate_what_xla_does(name, policy):
    options = {"policy": POLICIES[policy], "max_new_tokens": 3, "stop_at_eos": False}
    plain, kernels = (
        jaxkv.generate(model_of(name), prompts(3, LENGTHS), implementation=each, **options)
        for each in ("xla", "pallas")
    )
    assert [each.tokens.tolist() for each in kernels] == [each.tokens.tolist() for each in plain]
    assert tiny.kept(kernels.cache) == tiny.kept(plain.cache)


@pytest.mark.parametrize(
    "name, sums",
    [
        ("qwen3-moe", 2),
        ("command-r-plus", 1),
        ("olmo2", 2),
        ("apertus", 2),
        ("ministral3", 2),
        ("stablelm-12b", 1),
        ("glm4-moe", 2),
        ("hunyuan", 2),
    ],
)
def test_meshes(name, sums):
    of, policy, ids = model_of(name), POLICIES["snapkv"], prompts(5, LENGTHS[:2])
    new_programs((2, 4))  # of other tests
    assert answers(of.on(mesh_of(2, 4)), policy, ids) == answers(of, policy, ids)
    # What a layer sends in a step: attention's and the MLP's sums, or both as one.
    loops = [each for each in new_programs((2, 4)) if each.name == "_loop"]
    sent = [
        shape
        for each in loops
        for kind, shape in each.sent
        if kind == "all-reduce" and shape == (1, 1, 24)
    ]
    assert loops and len(sent) == len(loops) * (1 + sums * of.config.layers)


# A second pass and a shared pool; evicted and merged at each token; compressed again; chosen to be read.
@pytest.mark.parametrize("name", ["kvzip", "d2o", "rkv", "quest"])
def test_each_kind_of_policy_over_layers_of_two_kinds(name, tmp_path):
    """Over a mixture with a dense layer first: alone, in a batch, in slots, on a mesh, and from a saved cache."""
    model, policy = model_of("glm4-moe"), roomy(name)
    given = slot_runs.requests(1, 5, shortest=33)
    ids = [each.prompt for each in given[:2]]
    options = {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}

    def answer(of, ids, **more):
        return [each.tokens.tolist() for each in jaxkv.generate(of, ids, **options, **more)]

    alone = [jaxkv.generate(model, each, policy=policy, **options).tokens.tolist() for each in ids]
    assert answer(model, ids, policy=policy) == alone
    assert answer(model.on(mesh_of(2, 4)), ids, policy=policy) == alone
    cache = jaxkv.prefill(model, ids, policy=policy, progress=False)
    cache.save(tmp_path / "cache")
    loaded = jaxkv.load_cache(tmp_path / "cache", model)
    questions = prompts(2, (7, 5))
    assert answer(model, questions, cache=loaded) == answer(model, questions, cache=cache)
    slots = slot_runs.made(model, policy, start=False)
    slots.compile_programs(lengths=False)
    slot_runs.check(model, policy, given, slots=slots)


@pytest.mark.parametrize("name", ["expected", "rolling"])
def test_keys_that_are_scaled_behind_their_rotation_are_not_turned(name):
    with pytest.raises(ValueError, match="^policy=.*behind RoPE"):
        jaxkv.prefill(model_of("hunyuan"), prompts(3, LENGTHS), policy=POLICIES[name])


def test_filter_layers_are_looked_for():
    mass = similarity(model_of("falcon-7b"), prompts(4, (40, 34)), share=0.2, queries=4)
    # Of what a layer's queries attend to, the keys that they like best hold more than those that another layer likes.
    assert mass[1, 1] > 2 * mass[0, 1] > 0


def test_16_bits():
    model, whole = running.golden_model("mixtral", "bfloat16"), running.golden_model("mixtral")
    cache, logits = running.prefill(model, prompts(2, LENGTHS), headroom=4)
    _, expected = running.prefill(whole, prompts(2, LENGTHS), headroom=4)
    assert cache.dtype == model.dtype == "bfloat16" and 2 * model.nbytes == whole.nbytes
    off = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert off < 12 * 2.0**-8
    assert running.greedy(model, cache, 4).shape == (3, 4)
