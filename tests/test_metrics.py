"""Metrics against what the official functions say of fixed pairs; golden/metrics/make_metrics.py tells where from."""

import json
import sys

import pytest
import running

from jaxkv.evals import metrics
from jaxkv.evals.published import InfiniteBench, LongBench, load_benchmark_table
from jaxkv.evals.task import TaskSample

GOLDEN = json.loads((running.GOLDEN / "metrics" / "metrics.json").read_text("utf-8"))
KINDS = [
    name
    for name, found in GOLDEN["longbench"].items()
    if name not in ("classes", "rapidfuzz_differs")
]


def test_every_metric_of_the_tables_is_held_against_the_official_one():
    assert {of["metric"] for of in load_benchmark_table("longbench").values()} == set(KINDS)
    assert set(load_benchmark_table("infinitebench")) == set(GOLDEN["infinitebench"])
    for rows in (*(GOLDEN["longbench"][name] for name in KINDS), *GOLDEN["infinitebench"].values()):
        scores = {score for *_, score in rows}
        assert len(scores) > 1, "pairs that all score alike hold no metric to anything"


@pytest.mark.parametrize("kind", KINDS)
def test_longbench_scores_as_it_does_itself(kind):
    of = load_benchmark_table("longbench")
    name = next(
        name for name in of if of[name]["metric"] == kind and name not in ("samsum", "triviaqa")
    )
    tags = {"classes": tuple(GOLDEN["longbench"]["classes"])}
    for said, right, score in GOLDEN["longbench"][kind]:
        sample = TaskSample(id="1", group=name, context="x", answers=(right,), tags=tags)
        assert LongBench().score(sample, said) == pytest.approx(score, abs=1e-12), (said, right)


@pytest.mark.parametrize("name", GOLDEN["infinitebench"])
def test_infinitebench_scores_as_it_does_itself(name):
    if name == "longbook_sum_eng":
        pytest.importorskip("rouge_score", reason="an extra: jaxkv[eval]")
    for said, right, score in GOLDEN["infinitebench"][name]:
        row = {"answer": right, "options": []}
        sample = TaskSample(
            id="1", group=name, context="x", answers=InfiniteBench().extract_answers(name, row)
        )
        assert InfiniteBench().score(sample, said) == pytest.approx(score, abs=1e-12), (said, right)


def test_the_best_answer_counts_and_of_few_shot_sets_the_first_line():
    sample = TaskSample(
        id="1", group="triviaqa", context="x", answers=("Melville", "Herman Melville")
    )
    assert LongBench().score(sample, "\n\nHerman Melville\nPassage: of something else") == 1.0
    assert LongBench().score(sample, "I do not know\nMelville") == 0.0
    other = TaskSample(
        id="1", group="hotpotqa", context="x", answers=("Melville", "Herman Melville")
    )
    assert 0 < LongBench().score(other, "\n\nHerman Melville\nPassage: of something else") < 1.0


def test_without_rouge_score_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match=r"jaxkv\[eval\]"):
        metrics.rouge_l_of_lines("a", "b")


def test_fractions_and_digits_without_end_are_wrong():
    assert metrics.found_number("4.5", "4") == metrics.last_number("1" * 5000, "1") == 0
    assert metrics.values_in_a_row("1, " + "4" * 5000, "[1, 4]") == 0.5
