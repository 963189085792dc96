"""Models with sliding-window layers under policies that read chosen rows: OmniKV, Quest, BrutalOffload."""

import dataclasses
from functools import partial
from unittest import mock

import numpy as np
import pytest
import tiny
from meshes import mesh_of
from slow_reads import Slow

import jaxkv
from jaxkv import AdaKV, BrutalOffload, FullKV, GlobalBudget, OmniKV, Quest, SnapKV
from jaxkv.engine import headroom
from jaxkv.engine.headroom import compute_prefill_headroom
from jaxkv.engine.offloaded_decode import LayerGroup, split_into_layer_groups
from jaxkv.engine.plan import plan_prefill
from jaxkv.exporting import runtime
from jaxkv.models.values import LayerSpec, Rope
from jaxkv.policies.reads import WHOLE, count_attended_prompt_tokens

WINDOW, LENGTHS, NEW = 8, (50, 7, 21), 14
# Layers 1 and 4 of 5, or 1, 4 and 7 of 8, attend to the whole prompt, with windows below and two between them.
KINDS = (
    LayerSpec(sliding_window=WINDOW),
    LayerSpec(rope=Rope(theta=5e4)),
    LayerSpec(sliding_window=WINDOW),
)
SHAPE, DEEPER = (
    dataclasses.replace(tiny.shape(layers=layers, kv_heads=2, group=2, dim=16), kinds=KINDS)
    for layers in (5, 8)
)
CHUNKS = {"prefill_ratio": 0.5, "prefill_chunk": 16}


def omni(budget, **options):
    return OmniKV(**{"filter_layers": (1,), "adjacent": 0, "budget": budget} | options)


def quest(budget, **options):
    return Quest(**{"budget": budget, "page": 4, "dense_layers": 1} | options)


POLICIES = {
    "last": lambda budget: omni(budget),
    "generated": lambda budget: omni(budget, include_generated=True, selector="uniform", window=5),
    "offload": lambda budget: omni(budget, offload=True, selector="exponential", window=6),
    "chunks": lambda budget: omni(budget, **CHUNKS | {"prefill_ratio": budget / 16}),
    "chunks, offload": lambda budget: omni(
        budget, offload=True, **CHUNKS | {"prefill_ratio": budget / 16}
    ),
    "over adakv": lambda budget: omni(budget, base=AdaKV(base=SnapKV(budget=2 * budget, window=6))),
    "over globalbudget": lambda budget: omni(
        budget, base=GlobalBudget(base=SnapKV(budget=2 * budget, window=6))
    ),
    "brutal": lambda budget: BrutalOffload(resident_layers=1, ahead=1),
    "quest": lambda budget: quest(budget),
    "quest, all layers": lambda budget: quest(budget, dense_layers=0),
}
SMALL = 12


def prompts(seed=0, lengths=LENGTHS):
    return [list(each) for each in tiny.prompts(seed, lengths)]


# --- which layers ----------------------------------------------------------------------------------------------------


def test_filters_are_layers_of_the_model_and_what_follows_from_them_counts_layers_without_a_window():
    windows = (8, None, 8) * 4
    of = lambda policy: policy.build_policy_parts().build_read_config(windows, 64)  # noqa: E731
    reading = of(OmniKV(filter_layers=(1,), budget=8, offload=True))
    # The layer above the filter that reads everything is 4, three layers higher.
    assert reading.filters == (1,) and reading.offloaded == (7, 10)
    assert {layer: source for layer, source in enumerate(reading.sources) if source != WHOLE} == {
        7: 1,
        10: 1,
    }
    reading = of(OmniKV(filter_layers=(1, 7), adjacent=0, budget=8))
    assert {layer: source for layer, source in enumerate(reading.sources) if source != WHOLE} == {
        4: 1,
        10: 7,
    }
    reading = of(Quest(dense_layers=2))
    assert {layer: source for layer, source in enumerate(reading.sources) if source != WHOLE} == {
        7: 7,
        10: 10,
    }
    assert of(BrutalOffload(resident_layers=1)).offloaded == (4, 7, 10)
    # Half of four layers read everything, and mem is the share of their rows.
    read = OmniKV(filter_layers=(1,), mem=0.6).build_policy_parts().read
    assert count_attended_prompt_tokens(read, np.asarray([100]), windows).tolist() == [20]


def test_one_transfer_for_all_layers_that_read_a_filters_choice():
    reading = (
        omni(8, offload=True).build_policy_parts().build_read_config(DEEPER.sliding_windows, 64)
    )
    assert reading.max_loaded_entries == 2 * 8
    assert split_into_layer_groups(reading, DEEPER.sliding_windows, whole=False) == (
        LayerGroup(layers=(0,), loaded=(), ask=1),
        LayerGroup(layers=(1, 2, 3), loaded=(), ask=None),
        LayerGroup(layers=(4, 5, 6, 7), loaded=(4, 7), ask=None),
    )
    # A question loads layer by layer.
    assert [
        each.layers for each in split_into_layer_groups(reading, DEEPER.sliding_windows, whole=True)
    ] == [
        (0, 1, 2, 3),
        (4, 5, 6),
        (7,),
    ]


REFUSED = [
    ("filter_layers=", omni(8, filter_layers=(1, 2, 3))),
    ("filter_layers=", omni(8, filter_layers=(1, 8))),
    ("filter_layers=", omni(8, filter_layers=(4,), adjacent=1)),
    ("filter_layers=None", OmniKV()),
    ("mem=", OmniKV(filter_layers=(1,), adjacent=0, mem=0.3)),
    ("dense_layers=", quest(12, dense_layers=3)),
    ("resident_layers=", BrutalOffload(resident_layers=3)),
]


@pytest.mark.parametrize(("named", "policy"), REFUSED)
def test_what_the_model_cannot_honour(named, policy):
    with pytest.raises(ValueError, match=named):
        jaxkv.Session(tiny.tiny(DEEPER), policy)


def test_a_model_of_windows_alone_has_nothing_to_choose():
    shape = dataclasses.replace(SHAPE, layers=4, kinds=KINDS[:1])
    with pytest.raises(ValueError, match="dense_layers="):
        jaxkv.Session(tiny.tiny(shape), Quest())


def test_plans_assume_filters_without_a_window():
    config = jaxkv.ModelConfig(
        vocab=1000, layers=48, embed=512, hidden=1024, heads=8, kv_heads=4, head_dim=64, max_positions=131072,
        kinds=(*(LayerSpec(sliding_window=1024),) * 3, LayerSpec()),
    )  # fmt: skip
    made = jaxkv.plan(config, policy=OmniKV(budget=2048), context=100_000, new=256, gpus="h100x1")
    assert made.setting.policy.filter_layers == (3, 15, 27) and made.notes
    away = jaxkv.plan(
        config, policy=OmniKV(budget=2048, offload=True), context=100_000, new=256, gpus="h100x1"
    )
    assert away.host_bytes > 0 and away.cache + away.host_bytes == pytest.approx(
        made.cache, rel=0.02
    )


# --- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["offload", "over globalbudget", "brutal", "quest"])
def test_bytes_are_as_planned_and_windows_hold_their_rows(name):
    policy = POLICIES[name](SMALL)
    headroom = compute_prefill_headroom(
        policy.build_policy_parts(), SHAPE.sliding_windows, np.asarray(LENGTHS), NEW
    )
    cache = jaxkv.Session(tiny.tiny(SHAPE), policy).prefill(prompts(), new=NEW)
    plan = plan_prefill(SHAPE, policy, LENGTHS, headroom=headroom)
    assert (cache.nbytes, cache.host_nbytes) == (plan.cache_bytes, plan.host_bytes)
    assert [pool.row_count for pool in cache.pools] == list(plan.pools)
    for layer, row, _, _, _, positions in tiny.segments(cache):
        if SHAPE.sliding_windows[layer] is not None:
            assert positions.tolist() == list(range(max(0, LENGTHS[row] - WINDOW), LENGTHS[row]))


def drawn(policy, **given):
    """Tokens that are sampled behind the prompts, past the window."""
    options = {"policy": policy, "max_new_tokens": NEW, "stop_at_eos": False}
    made = jaxkv.generate(tiny.tiny(SHAPE), prompts(), **options, **given)
    return [each.tokens.tolist() for each in made]


def test_a_budget_of_the_whole_prompt_gives_the_full_caches_tokens():
    assert drawn(POLICIES["quest, all layers"](80)) == drawn(FullKV())


SLOW = {
    "generated": {"sources": {4: 1}, "ages": (1.0,) * 5, "generated": True},
    "offload": {"sources": {4: 1, 7: 1}, "ages": tuple(0.5**age for age in range(6))},
    "chunks": {"sources": {4: 1}},
    "over adakv": {"sources": {4: 1}},
    "quest": {"sources": {4: 4}, "page": 4},
}


@pytest.mark.parametrize("name", SLOW)
def test_logits_are_those_of_plain_loops(name):
    """Two prompts, tokens that are sampled, questions on top, and sampled tokens again, past the window."""
    model, policy = (
        tiny.tiny(DEEPER if 7 in SLOW[name]["sources"] else SHAPE),
        POLICIES[name](SMALL),
    )
    session, texts, walks = jaxkv.Session(model, policy), prompts(4, (50, 34)), prompts(5, (4, 4))
    cache = session.prefill(texts)
    alike = partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-4)
    slow = [Slow(model=model, budget=SMALL, prompt=len(text), **SLOW[name]) for text in texts]
    for row, (each, text) in enumerate(zip(slow, texts, strict=True)):
        if name == "chunks":
            for first in range(0, len(text), 16):
                each.prompt, want = first, each.read(text[first : first + 16], "chunk")
            each.prompt = len(text)
        else:
            want = each.read(text, "whole")
        if getattr(policy, "base", None) is not None:
            each.kept = [layer[row] for layer in tiny.kept(cache)]
        alike(cache.logits[row], want)
    for part in (slice(2), slice(2, 4)):
        for tokens in zip(*(walk[part] for walk in walks), strict=True):
            cache = session.extend(cache, [[token] for token in tokens], chunk=1, new=1)
            want = [each.read([token], "one") for each, token in zip(slow, tokens, strict=True)]
            alike(cache.logits, want)
        cache = session.extend(cache, walks, new=1)
        alike(
            cache.logits, [each.read(walk, "whole") for each, walk in zip(slow, walks, strict=True)]
        )


# --- devices, kernels ------------------------------------------------------------------------------------------------


def test_devices_change_nothing():
    """Two groups of sequences on four devices each, of which two share a kv head."""
    policy = POLICIES["chunks, offload"](SMALL)
    assert drawn(policy, mesh=mesh_of(2, 4)) == drawn(policy)


def test_kernels_read_what_windows_leave_and_what_is_chosen():
    assert drawn(quest(SMALL), implementation="pallas") == drawn(quest(SMALL))


@pytest.mark.parametrize("make", [omni, quest])
def test_stores(make):
    """A budget of the whole prompt reads what a full cache of such rows holds."""
    assert drawn(make(80, store="int8")) == drawn(FullKV(store="int8"))


# --- longer lives ----------------------------------------------------------------------------------------------------


def test_exports(tmp_path):
    policy = POLICIES["last"](SMALL)
    made = jaxkv.export(
        tiny.tiny(SHAPE),
        tmp_path / "made",
        policy=policy,
        batch=(3,),
        lengths=64,
        question=0,
        new=NEW,
    )
    assert runtime.Model(made).generate(prompts(), NEW)[0] == drawn(policy)


@pytest.mark.parametrize(("name", "count"), [("offload", 0), ("quest", 1)])
def test_long_answers_and_turns_drop_what_left_the_window(name, count):
    """Whether sliding-window layers drop rows every 16 tokens, or not on the way, shows in no token."""
    policy, rng = POLICIES[name](SMALL), np.random.default_rng(6)
    session = jaxkv.Session(tiny.tiny(SHAPE), policy)
    turns = [[rng.integers(3, SHAPE.vocab, n).tolist() for n in (9, 2, 4)] for _ in range(count)]

    def answers(least):
        with mock.patch.object(headroom, "_LEAST_BEYOND", least):
            cache, tokens = session.sample(session.prefill(prompts(), new=40), 40)
            found, held = [tokens.tolist()], cache.kept[0].max()
            for turn in turns:
                cache, tokens = session.sample(session.extend(cache, turn, new=4), 4)
                found.append(tokens.tolist())
            return found, held, cache

    found, held, cache = answers(16)
    assert held <= WINDOW + 16
    for layer, row, _, _, _, positions in tiny.segments(cache):
        if SHAPE.sliding_windows[layer] is not None:
            seen = int(np.asarray(cache.seen)[row])
            assert positions.tolist() == list(range(seen - len(positions), seen))
    # A window that is full makes no other layer larger.
    assert max(pool.row_count for pool in cache.pools) <= 2 * (64 + 64 + 64 + 128)
    again, held, _ = answers(256)
    assert held >= 40 and again == found
