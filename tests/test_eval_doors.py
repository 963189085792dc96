"""What comes through the doors of evaluations that is no such thing: refused in our words, before work and after it."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import pytest
from evaluating import Told, Words, told

import jaxkv
from jaxkv.evals import TASKS, Evaluation, Failed, Sample, runs, task

POLICIES = {"k": jaxkv.KNorm(budget=9)}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No pictures."""
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)


def test_lines_of_a_run_are_counted_without_making_them(tmp_path):
    told(tmp_path / "out", policies=POLICIES)
    run = Evaluation.read(tmp_path / "out").run
    for samples, batch, shard in (
        (14, 3, None),
        (14, 3, (0, 2)),
        (14, 3, (1, 2)),
        (15, 3, (1, 2)),
        (2, 8, (0, 1)),
    ):
        part = dataclasses.replace(run, samples=samples, batch=batch, shard=shard)
        assert part.lines == sum(map(len, part.batches()))
    assert dataclasses.replace(run, samples=10**15).lines == 10**15


@pytest.mark.parametrize(
    "settings", [{"jax_enable_x64": True}, {"jax_numpy_rank_promotion": "raise"}]
)
def test_settings_of_jax_change_no_line(tmp_path, settings):
    lines, task = [], Words(count=3)
    for name, given in (("usual", {}), ("other", settings)):
        before = {each: getattr(jax.config, each) for each in given}
        try:
            for each, value in given.items():
                jax.config.update(each, value)
            lines.append(told(tmp_path / name, task, policies=POLICIES))
        finally:
            for each, value in before.items():
                jax.config.update(each, value)
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"rows": float("nan")}, "rows=nan: JSON has no such number"),
        ({"rows": "x"}, "rows=.*x"),
        ({"prediction": None}, "prediction=.*None"),
        ({"score": None}, "float"),
        ({"figures": {"loss": jnp.ones(2)}}, "give numbers, texts"),
    ],
    ids=str,
)
def test_outcomes_that_are_none_are_named_and_earlier_lines_stay(tmp_path, odd, message):
    class Odd(Told):
        def run(self, params, policy, samples, how):
            said = super().run(params, policy, samples, how)
            if "02" not in {sample.id for sample in samples}:
                return said
            return [dataclasses.replace(each, **odd) for each in said]

    with pytest.raises(Failed, match=f"k, sample.*{message}.*3 lines are in"):
        told(tmp_path / "out", Odd(), policies=POLICIES)
    assert (tmp_path / "out" / "samples.jsonl").read_bytes().count(b"\n") == 3


def test_a_list_of_answers_becomes_a_tuple(as_users_call):
    assert Sample(id="0", group="g", context="w1", answers=["Paris"]).answers == ("Paris",)


def test_a_line_that_was_changed_by_hand_is_named(tmp_path):
    out = tmp_path / "out"
    lines = told(out, policies={**POLICIES, "other": jaxkv.KNorm(budget=8)}).splitlines(
        keepends=True
    )
    for odd in (
        {"score": "x"},
        {"score": float("nan")},
        {"score": True},
        {"group": 3},
        {"tags": None},
        {"figures": []},
        {"rows": "x"},
        {"tokens": [1]},
        {"answers": [1]},
        {"prediction": None},
        {"policy": ["k"]},
        {"policy": "other"},
        {"id": "another"},
    ):
        changed = (json.dumps({**json.loads(lines[1]), **odd}) + "\n").encode()
        (out / "samples.jsonl").write_bytes(b"".join([lines[0], changed, *lines[2:]]))
        with pytest.raises(ValueError, match="line.*remove (it|them|the line) and those behind"):
            Evaluation.read(out)
    (out / "samples.jsonl").write_bytes(b"".join(lines))
    said = json.loads((out / "run.json").read_text())
    for odd in (
        {"shard": 5},
        {"shard": "x"},
        {"policies": None},
        {"policies": {}},
        {"batch": 0},
        {"budgets": {}},
    ):
        (out / "run.json").write_text(json.dumps({**said, **odd}))
        with pytest.raises(ValueError, match=r"run\.json='changed'"):
            Evaluation.read(out)


def test_odd_names_break_no_table(tmp_path):
    class Odd(Told):
        def samples(self, params):
            return [
                dataclasses.replace(each, id=f"ü\n😀{each.id}", group="a\n|b")
                for each in super().samples(params)
            ]

    told(tmp_path / "out", Odd(), policies={"a|b": POLICIES["k"], "<b>": POLICIES["k"]})
    lines = Evaluation.read(tmp_path / "out").table().splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert any(line.startswith(r"| a\|b |") for line in tables)
    assert all(line.startswith(("|", "#")) or not line for line in lines)


def test_pipes_and_hidden_files_of_others_are_left_alone(tmp_path):
    out = tmp_path / "out"
    told(out, policies=POLICIES)
    (out / ".mine.tmp").write_text("mine")
    left = out / f".run.json.{'0a' * 8}.tmp"
    left.write_text("of a process that was killed")
    link = tmp_path / "link"
    link.symlink_to(out)
    assert told(link, policies=POLICIES) == (out / "samples.jsonl").read_bytes()
    assert (out / ".mine.tmp").exists() and not left.exists()
    (out / "samples.jsonl").unlink()
    os.mkfifo(out / "samples.jsonl")
    with pytest.raises(ValueError, match=r"samples\.jsonl there is no file"):
        told(out, policies=POLICIES)


def test_a_name_of_a_task_is_one_class_of_one_module(monkeypatch):
    monkeypatch.delitem(TASKS, "mine", raising=False)
    made = type("Mine", (Told,), {"__module__": "one"})
    assert task("mine")(made) is made and TASKS["mine"] is made
    # A notebook's cell that is run again makes its class anew.
    task("mine")(type("Mine", (Told,), {"__module__": "one"}))
    with pytest.raises(ValueError, match="one.Mine has it"):
        task("mine")(type("Mine", (Told,), {"__module__": "other"}))
    TASKS.pop("mine")
    assert TASKS.keys().isdisjoint({"mine", "merge", "report"})
