"""Draws of policies that draw: every sample has its own, wherever it runs; and what a question keeps from a policy."""

import dataclasses

import numpy as np
import pytest
from evaluating import Told, Words, told, words
from policy_table import BY_NAME

import jaxkv
from jaxkv.evals import How, Sample, asking, merge, runs
from jaxkv.evals.arguments import seed_of

DRAWING = {"random@9": jaxkv.Random(budget=9), "knorm@9": jaxkv.KNorm(budget=9)}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Nothing is drawn on paper."""
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)


def test_parts_say_whether_they_draw():
    said = {name for name, row in BY_NAME.items() if row.policy(24).parts().draws}
    drawn = ("random", "cam", "compactor")
    assert said == {name for name in BY_NAME if name.startswith(drawn) and "expected" not in name}
    assert jaxkv.AdaKV(base=jaxkv.Random(budget=9)).parts().draws
    assert (
        jaxkv.CaM(budget=40).parts().draws and not jaxkv.CaM(budget=40, expected=True).parts().draws
    )


def test_every_sample_has_draws_of_its_own_in_whatever_batch(tmp_path, monkeypatch):
    ran, run = [], Told.run
    monkeypatch.setattr(
        Told,
        "run",
        lambda self, params, policy, samples, how: (
            ran.append((policy, samples, how)) or run(self, params, policy, samples, how)
        ),
    )

    def seeds(name, **options):
        ran.clear()
        told(tmp_path / name, policies=DRAWING, how=How(seed=3), **options)
        drawn = [
            (samples, how.seed) for policy, samples, how in ran if isinstance(policy, jaxkv.Random)
        ]
        assert {(len(samples)) for samples, _ in drawn} == {1}
        others = [
            (len(samples), how.seed)
            for policy, samples, how in ran
            if isinstance(policy, jaxkv.KNorm)
        ]
        assert set(others) == {(options["batch"], 3)}
        return {samples[0].id: seed for samples, seed in drawn}

    found = seeds("threes", batch=3)
    assert len(found) == 14 == len(set(found.values())) and 3 not in found.values()
    assert seeds("twos", batch=2) == found
    shards = [seeds(f"{at}", batch=3, shard=(at, 2)) for at in range(2)]
    assert shards[0] | shards[1] == found
    joined = merge([tmp_path / "0", tmp_path / "1"], tmp_path / "joined")
    assert (joined.folder / "samples.jsonl").read_bytes() == (
        tmp_path / "threes" / "samples.jsonl"
    ).read_bytes()
    # What was cut goes on with the same ones.
    lines = (tmp_path / "threes" / "samples.jsonl").read_bytes()
    (tmp_path / "threes" / "samples.jsonl").write_bytes(
        b"".join(lines.splitlines(keepends=True)[:4])
    )
    again = seeds("threes", batch=3)
    assert (
        again.items() < found.items()
        and (tmp_path / "threes" / "samples.jsonl").read_bytes() == lines
    )
    assert (
        found["00"] == seed_of(3, "00") != seed_of(4, "00") and 0 <= seed_of(0, "\ud800 ö") < 2**32
    )


def test_a_models_answers_under_chance_do_not_depend_on_the_batch(tmp_path):
    task = Words(count=5)
    lines = [
        told(tmp_path / f"{n}", task, policies={"random@9": DRAWING["random@9"]}, batch=n)
        for n in (1, 3)
    ]
    assert lines[0] == lines[1] and lines[0].count(b"\n") == 5


def test_a_sample_without_a_question_changes_none_beside_it():
    made = Words(count=4).samples(words())
    given = [
        dataclasses.replace(each, question="" if at in (1, 2) else each.question)
        for at, each in enumerate(made)
    ]
    policy = jaxkv.StreamingLLM(budget=0.5)
    for agnostic in (True, False):
        how = How(agnostic=agnostic, raw=True)
        together = asking.asked(words(), policy, given, how)
        assert together == [asking.asked(words(), policy, [each], how)[0] for each in given]
        # Of 20 + at words, and of the question's two where the policy sees them.
        lengths = [20 + at + 2 * (at not in (1, 2) and not agnostic) for at in range(4)]
        np.testing.assert_array_equal(
            [each.rows for each in together], [length // 2 for length in lengths]
        )


def test_what_one_sample_may_answer_changes_none_beside_it():
    made = Words(count=4).samples(words())
    most = words().config.max_positions
    # The longest prompt that there is leaves room for its own answer alone.
    longest = " ".join(["w5"] * (most - 5))
    given = [
        dataclasses.replace(
            each, new_tokens=3 + 20 * (at % 2), context=longest if at == 2 else each.context
        )
        for at, each in enumerate(made)
    ]
    for policy in (jaxkv.H2O(budget=30), jaxkv.FullKV()):
        together = asking.asked(words(), policy, given, How(agnostic=False, raw=True))
        assert together == [
            asking.asked(words(), policy, [each], How(agnostic=False, raw=True))[0]
            for each in given
        ]


def test_a_prefix_is_kept_from_the_policy_with_the_question():
    sample = Sample(id="0", group="g", context="w1 w2 w3", prefix=" w4", new_tokens=1)
    context, question = asking.ids_of(words().text, sample)
    assert (len(context), len(question)) == (3, 1)
