"""Auto: it is the policy that it chooses, with the shared fields given, in the library and on the command line."""

import dataclasses
import itertools

import numpy as np
import pytest
import tiny

import jaxkv
from jaxkv import Auto, cli
from jaxkv.models.values import ExpertsConfig
from jaxkv.policies.model_policy import resolve_policy_for_model

FACTS = [*itertools.product(("seen", "later"), ("short", "long"))]
GQA = tiny.shape(layers=2, kv_heads=2, group=2, dim=16)


@pytest.mark.parametrize("question, answers", FACTS)
def test_the_parts_are_those_of_the_chosen_policy(question, answers):
    for fields in (
        {},
        {"budget": 0.02},
        {"budget": 0.25},
        {"budget": "64MB", "store": "int4", "protect": ((0, 4),)},
    ):
        auto = Auto(question=question, answers=answers, **fields)
        assert auto.composed == auto.chosen.composed and auto.reason
        for name, value in fields.items():
            assert getattr(auto.chosen, name) == getattr(auto, name) and value is not None
    compresses = auto.composed.evicts_while_decoding or auto.composed.recompression_interval
    assert bool(compresses) == (answers == "long")
    fewer = dataclasses.replace(auto, budget=32)
    assert fewer.chosen.budget == 32 and type(fewer.chosen) is type(auto.chosen)


def test_recompression_is_chosen_without_layers_that_compete():
    again = Auto(budget=0.02, every=16, grows=True).chosen
    assert again.grows and type(again) is not type(Auto(budget=0.02).chosen)


@pytest.mark.parametrize("share", [0.02, 0.049, 0.05, 0.099, 0.1, 0.249, 0.25, 1.0])
@pytest.mark.parametrize("question", ["seen", "later"])
def test_shares_of_one_band_have_one_choice(share, question):
    bands = {
        "seen": (jaxkv.CAKE, jaxkv.CriticalKV, jaxkv.ChunkKV),
        "later": (jaxkv.Compactor, jaxkv.KVGrad, jaxkv.KVzip),
    }
    at = (share >= 0.05) + (share >= 0.25)
    assert type(Auto(budget=share, question=question).chosen) is bands[question][at]


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.25])
def test_windows_leave_places_in_a_thousand_tokens(share):
    length = np.asarray([1024])
    kept = Auto(budget=share).composed.keep.count_always_kept(length)
    assert kept.max() < 0.5 * share * 1024


def test_a_model_or_store_that_the_best_rejects_gets_the_usual_choice():
    experts = dataclasses.replace(GQA, experts=ExpertsConfig(count=4, chosen=2))
    auto = Auto(budget=0.1, question="later")
    for config, expected in ((GQA, jaxkv.KVGrad), (experts, jaxkv.Compactor)):
        assert resolve_policy_for_model(auto, config, dtype="float32") == expected(budget=0.1)
    few = Auto(budget=0.02, store="int4-residual")
    assert few.chosen == jaxkv.CriticalKV(budget=0.02, store="int4-residual")
    assert few.reason == Auto(budget=64).reason != Auto(budget=0.02).reason


def test_facts_are_checked():
    with pytest.raises(ValueError, match=r"^question='ahead': .*'seen' or 'later'"):
        Auto(question="ahead")
    with pytest.raises(ValueError, match=r"^answers='any': .*'short' or 'long'"):
        Auto(answers="any")


def test_a_name_is_enough():
    model, ids = tiny.tiny(GQA), tiny.prompts(2, (60, 41))
    named, chosen = (
        jaxkv.generate(model, ids, policy=policy, max_new_tokens=4, progress=False)
        for policy in ("auto", Auto().chosen)
    )
    assert [each.tokens.tolist() for each in named] == [each.tokens.tolist() for each in chosen]
    # Saved, the cache is not another choice's in a later version.
    assert named.cache.policy == Auto().chosen


def test_the_command_line_names_the_choice_and_its_reason(capsys):
    asked = "plan --model smollm2-135m-instruct --gpus l4 --context 4096 --policy auto --budget 512"
    assert cli.main([*asked.split(), "--question", "later"]) == 0
    chosen = Auto(budget=512, question="later")
    assert capsys.readouterr().err == f"jaxkv: --policy auto is {chosen.chosen}: {chosen.reason}\n"
