"""The leaderboard: all policies are in it, long answers are read as sampled ones are, the page holds its figures."""

import importlib
import json
import re
from pathlib import Path

import pytest

import jaxkv
from jaxkv.evals import How, Ruler
from jaxkv.policies.policy import Policy
from jaxkv.policies.registry import POLICIES

ROOT = Path(__file__).parent.parent
# They need a file made for the model, keep what they find, or only choose among others.
ELSEWHERE = {
    "headkv",
    "lukv",
    "duoattention",
    "kvzap",
    "fastkvzip",
    "full",
    "brutaloffload",
    "auto",
}


@pytest.fixture
def leaderboard(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.leaderboard")


def test_every_policy_is_listed(leaderboard):
    for share in leaderboard.BUDGETS:
        made = leaderboard.policies(round(share * leaderboard.LENGTH))
        names = {type(each).__name__.lower() for each in made.values()}
        names = {{"randomkv": "random", "omnikv": "omnikv"}.get(each, each) for each in names}
        rejected = {name.lower() for name, each in made.items() if isinstance(each, str)}
        assert POLICIES.keys() - names - rejected == ELSEWHERE
        assert rejected <= {"quest", "simlayerkv", "rocketkv"}, made


def test_prompts_read_one_by_one_are_answered_as_whole_ones(leaderboard):
    """A policy that evicts at every token and has room for all keeps all; recompression keeps to the budget."""
    params = jaxkv.load("tiny-retrieval")
    asked = {"tasks": ("niah_single_2",), "lengths": (128,), "wording": "small", "count": 2}
    task, whole = leaderboard.LongAnswers(**asked), Ruler(**asked)
    samples = task.samples(params)
    expected = whole.run(params, jaxkv.FullKV(), samples, How())
    found = task.run(params, jaxkv.H2O(budget=300), samples, How())
    assert [each.prediction for each in found] == [each.prediction for each in expected]
    assert [each.score for each in found] == [each.score for each in expected]
    few = task.run(params, jaxkv.SnapKV(budget=32, window=8, every=16), samples, How())
    assert all(32 <= each.rows < 48 for each in few)


def test_a_page_holds_means_intervals_and_bytes(leaderboard, tmp_path):
    cells = {
        leaderboard.FULL: {"scores": "1 1 1 0", "megabytes": 4.0},
        "SnapKV, int4 @ 0.1": {"scores": "1 0 1 0", "megabytes": 0.2},
        "Quest @ 0.1": {leaderboard.REJECTED: "budget=20: </script> too few"},
    }
    losses = {
        leaderboard.FULL: {"scores": "3.5 4", "megabytes": 9.0, "seconds": 1800},
        "H2O @ 0.1": {"scores": "3.75 4.5", "megabytes": 0.9, "seconds": 3600},
    }
    settings = {"count": 1, "length": 1024}
    leaderboard.write_page(
        {"settings": settings, "cells": {"unseen": cells, "loss": losses}}, tmp_path / "page.json"
    )
    text = (tmp_path / "page.html").read_text("utf-8")
    lines = json.loads(re.search(r"const lines = (.*);\n", text)[1])
    full, snapkv, quest, _, h2o = lines
    # Losses by how much they exceed the full cache's, beyond 1, too.
    assert h2o["mean"] == 0.375 and h2o["high"] > 1 and "in 1.5 hours" in text
    assert full["mean"] == 75 and full["bytes"] == full["share"] == 100
    assert snapkv["mean"] == 50 and snapkv["low"] < 50 < snapkv["high"] and snapkv["bytes"] == 10
    assert "too few" in quest["rejected"] and text.count("</script>") == 1


def test_long_answers_are_compressed_while_they_come(leaderboard):
    made = leaderboard.while_decoding(leaderboard.policies(102), 102)
    kept = {name: each for name, each in made.items() if isinstance(each, Policy)}
    assert {"AdaKV", "SnapKV, int4", "H2O", "RKV", "TriAttention"} <= kept.keys()
    assert made.keys() - kept.keys() >= {"KVzip", "Compactor", "OmniKV", "Quest"}
    for each in kept.values():
        parts = each.composed
        assert parts.evicts_while_decoding or parts.recompression_interval == leaderboard.EVERY
    assert kept["H2O"].budget == 102 and kept["RKV"].budget == 102 - leaderboard.EVERY
