"""Evaluations: lines that a model gave, the same bytes however often a run was ended, shards that are the whole."""

import dataclasses
import errno
import functools
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import evaluating
import jax
import numpy as np
import pytest
from evaluating import POLICIES, Told, Words, told, words

import jaxkv
from jaxkv.checkpoints.whole_files import write_whole
from jaxkv.evals import (
    TASKS,
    Failed,
    How,
    Outcome,
    TwoStage,
    answers,
    at_budgets,
    evaluate,
    folder,
    merge,
    runs,
)
from jaxkv.evals.folder import locked

ROOT = Path(__file__).parent.parent


@pytest.fixture
def plain(monkeypatch):
    """Nothing is drawn: a picture takes longer than everything else here."""
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)


@functools.cache
def whole() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as there, pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "PLOTS_MISSING", True)
        return told(Path(there) / "whole")


# --- a model's answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agnostic", [False, True])
def test_lines_are_what_the_model_says(tmp_path, plain, agnostic):
    task, how = Words(), How(agnostic=agnostic)
    policies = {"few": jaxkv.KNorm(budget=9), **({} if agnostic else {"full": jaxkv.FullKV()})}
    found = evaluate(words(), task, policies, tmp_path / "out", how=how, batch=3)
    samples = task.samples(words())
    for name, policy in policies.items():
        said = [
            text
            for part in (samples[:3], samples[3:])
            for text in answers(words(), policy, part, how)
        ]
        records = found.of(name)
        assert [record.prediction for record in records] == said
        assert [record.score for record in records] == [
            task.score(samples[0], text) for text in said
        ]
        assert [record.tokens for record in records] == [22 + at for at in range(6)]
        # What an agnostic run's question brings comes on top of what was compressed.
        kept = [9] * 6 if name == "few" else [22 + at for at in range(6)]
        assert [record.rows for record in records] == kept
        config, row = words().config, 2 * 8 * 4
        assert [record.nbytes for record in records] == [
            n * config.layers * config.kv_heads * row for n in kept
        ]
    assert found.scores("few").shape == (6,) and found.run.agnostic is agnostic


def test_a_task_of_the_library_runs(tmp_path, plain):
    task = TwoStage(count=3, sizes=(3, 4), new_tokens=2)
    found = evaluate(
        words(),
        task,
        {"few": jaxkv.StreamingLLM(budget=16)},
        tmp_path / "out",
        how=How(agnostic=True),
    )
    assert found.run.task == "2stageretr" and [record.id for record in found.records] == [
        "0000",
        "0001",
        "0002",
    ]
    assert found.run.settings["sizes"] == [3, 4] and found.cell("few").n == 3
    assert all(record.score == (record.answers[0] in record.prediction) for record in found.records)


def test_a_mesh_says_the_same(tmp_path, plain):
    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices()[:2])
    task, policies = Words(count=3), {"few": jaxkv.KNorm(budget=9)}
    places = (("one", None), ("several", mesh))
    one, other = (
        evaluate(words(), task, policies, tmp_path / name, batch=3, mesh=at) for name, at in places
    )
    assert one.records == other.records and one.run.fingerprint == other.run.fingerprint
    assert (one.folder / "kept.json").read_bytes() == (other.folder / "kept.json").read_bytes()
    assert (one.run.made_with["devices"], other.run.made_with["devices"]) == ("1", "2x1x1")


# --- ended, and gone on with ----------------------------------------------------------------------------------------


def test_a_run_that_is_cut_anywhere_ends_with_the_same_bytes(tmp_path, plain, monkeypatch):
    given, ran = whole(), []
    lines = given.split(b"\n")[:-1]
    assert [json.loads(line)["policy"] for line in lines] == [
        name for name in POLICIES for _ in range(14)
    ]
    assert [json.loads(line)["id"] for line in lines[:3]] == ["00", "10", "01"]
    run = Told.run
    monkeypatch.setattr(Told, "run", lambda self, *each: ran.append(each[2]) or run(self, *each))
    out = tmp_path / "out"
    told(out)
    ends = np.cumsum([0, *(len(line) + 1 for line in lines)])
    rng = np.random.default_rng(0)
    cuts = {
        0,
        1,
        len(given) - 1,
        *ends[[3, 4, 14, 15]],
        ends[5] - 1,
        *rng.integers(0, len(given), 25),
    }
    for cut in sorted(int(each) for each in cuts):
        (out / "samples.jsonl").write_bytes(given[:cut])
        ran.clear()
        assert told(out) == given, cut
        there = int((ends <= cut).sum()) - 1
        # Of each policy's 14 lines batches of 3, 3, 3, 3 and 2 are whole.
        done = there // 14 * 14 + (there % 14) // 3 * 3
        assert sum(len({sample.id for sample in batch}) for batch in ran) == len(lines) - done, cut
        # One size for all, so that programs are compiled once.
        assert {len(batch) for batch in ran} <= {3}
    ran.clear()
    assert told(out) == given and not ran


_SLOW = """
import sys, time
sys.path.insert(0, sys.argv[1])
import evaluating
from pathlib import Path
from jaxkv.evals import runs
assert "scipy.special" not in sys.modules  # it takes longer than all of jaxkv's own files
runs.PLOTS_MISSING = True
run = evaluating.Told.run
evaluating.Told.run = lambda self, *each: (time.sleep(0.05), run(self, *each))[1]
print("begun", flush=True)
evaluating.told(Path(sys.argv[2]))
"""


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path, plain):
    out = tmp_path / "out"
    command = [sys.executable, "-c", _SLOW, str(Path(__file__).parent), str(out)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as slow:
        while (
            not (out / "samples.jsonl").exists()
            or (out / "samples.jsonl").read_bytes().count(b"\n") < 6
        ):
            assert slow.poll() is None
            time.sleep(0.01)
        with pytest.raises(ValueError, match="another process is at it"):
            told(out)
        slow.send_signal(signal.SIGKILL)
    cut = (out / "samples.jsonl").read_bytes()
    assert 0 < len(cut) < len(whole()) and whole().startswith(cut)
    assert told(out) == whole()


def test_a_full_disk_leaves_whole_lines(tmp_path, plain, monkeypatch):
    write, written = os.write, []

    def full(number, data):
        written.append(len(data))
        if len(written) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(number, data[: 1 + len(data) // 2])  # the rest comes with the next call

    monkeypatch.setattr(folder.os, "write", full)
    out = tmp_path / "out"
    with pytest.raises(
        OSError, match=r"samples\.jsonl: No space left on device; \d+ lines are whole: make room"
    ):
        told(out)
    monkeypatch.undo()
    monkeypatch.setattr(runs, "PLOTS_MISSING", True)
    cut = (out / "samples.jsonl").read_bytes()
    assert whole().startswith(cut) and (not cut or cut.endswith(b"\n"))
    assert told(out) == whole()


def test_a_file_system_without_locks_is_told_in_our_words(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(
        OSError, match=r"out='.*out': No locks available: it cannot be locked.*another file system"
    ):
        told(tmp_path / "out")


def test_names_are_written_through_to_the_disk(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    told_apart = lambda number: "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"  # noqa: E731
    monkeypatch.setattr(
        os, "fsync", lambda number: done.append(told_apart(number)) or fsync(number)
    )
    monkeypatch.setattr(os, "replace", lambda *each: done.append("renamed") or replace(*each))
    write_whole(tmp_path / "run.json", b"{}")
    assert done == ["file", "renamed", "folder"]
    done.clear()
    folder.Lines(tmp_path).keep(0)
    assert done == ["folder"]

    def fails(number):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error: .*run.json"):
        write_whole(tmp_path / "run.json", b"{}")


def test_programs_are_freed_before_there_are_too_many(tmp_path, plain, monkeypatch):
    freed = []
    monkeypatch.setattr(jax, "clear_caches", lambda: freed.append(1))
    told(tmp_path / "few")
    assert not freed
    monkeypatch.setattr(runs, "_MOST_MAPPINGS", 0)
    told(tmp_path / "many")
    assert len(freed) == len(POLICIES) - 1


def broken(at, what):
    class Broken(Told):
        def outcome(self, policy, sample, how):
            if sample.id == at and isinstance(policy, jaxkv.KNorm):
                return what()
            return super().outcome(policy, sample, how)

    return Broken()


def test_what_cannot_be_judged_is_named_and_earlier_lines_stay(tmp_path, plain, monkeypatch):
    def fails():
        raise MemoryError("too long")

    cases = {
        "sample 02: score=nan": lambda: Outcome(score=float("nan")),
        "sample 02: score=1.5": lambda: Outcome(score=1.5),
        "sample 02: figures=inf: JSON has no such number": lambda: Outcome(
            score=1.0, figures={"loss": float("inf")}
        ),
        "samples 11 to 12: MemoryError: too long": fails,
    }
    for number, (message, what) in enumerate(cases.items()):
        out = tmp_path / str(number)
        with pytest.raises(Failed, match=message) as failed:
            told(out, broken("02", what))
        # The first policy is done, and the first batch of the second.
        assert "17 lines are in" in str(failed.value)
        assert (out / "samples.jsonl").read_bytes().count(b"\n") == 17
    short = dataclasses.make_dataclass(
        "Short", [], bases=(Told,), namespace={"run": lambda *_: []}, frozen=True
    )()
    with pytest.raises(Failed, match="gave 0 outcomes for 3"):
        told(tmp_path / "short", short)


# --- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": Told(count=8)}, "settings.count: 7 there, 8 asked for"),
        ({"batch": 4}, "batch: 3 there, 4 asked for"),
        ({"how": How(agnostic=True)}, "agnostic: false there, true asked for"),
        ({"how": How(seed=1)}, "seed: 0 there, 1 asked for"),
        ({"shard": (0, 2)}, r"shard: null there, \[0, 2\] asked for"),
        (
            {"policies": {"full": jaxkv.FullKV()}},
            "policies: full, knorm@9, streamingllm@9 there, full asked for",
        ),
        (
            {"policies": {**POLICIES, "knorm@9": jaxkv.KNorm(budget=8)}},
            r"policies.knorm@9: .*budgets.knorm@9: 9 there, 8 asked for",
        ),
        ({"task": broken("none", None)}, "task: "),
    ],
)
def test_another_evaluation_in_the_folder_is_refused(tmp_path, plain, options, message):
    out = tmp_path / "out"
    told(out)
    with pytest.raises(ValueError, match=message):
        told(out, **options)
    assert (out / "samples.jsonl").read_bytes() == whole()


def test_other_samples_and_versions_are_refused(tmp_path, plain, monkeypatch):
    out = tmp_path / "out"
    told(out)
    for name, other in (("digest", "0"), ("fingerprint", "0"), ("made_with", {"jax": "0.1"})):
        said = json.loads((out / "run.json").read_text())
        before = dict(said)
        said[name] = {**said[name], **other} if isinstance(other, dict) else other
        (out / "run.json").write_text(json.dumps(said))
        with pytest.raises(ValueError, match=rf"another evaluation has begun there \({name}"):
            told(out)
        (out / "run.json").write_text(json.dumps(before))
    # Where the model lies does not matter.
    (out / "run.json").write_text(json.dumps({**before, "model": "elsewhere"}))
    assert told(out) == whole()


def test_changed_files_are_refused(tmp_path, plain):
    out = tmp_path / "out"
    given = told(out)
    lines = given.split(b"\n")
    for changed in (
        [*lines[:2], b"{}", *lines[3:]],
        [*lines[:2], b"\x00", *lines[3:]],
        [lines[1], *lines[1:]],
    ):
        (out / "samples.jsonl").write_bytes(b"\n".join(changed))
        with pytest.raises(ValueError, match="remove (it|the line) and those behind it"):
            told(out)
    (out / "samples.jsonl").write_bytes(given + lines[0] + b"\n")
    with pytest.raises(ValueError, match="43 lines"):
        told(out)
    for text in ("", "[]", '{"format": 0}'):
        (out / "run.json").write_text(text)
        with pytest.raises(ValueError, match="give another folder"):
            told(out)


def test_folders_that_are_none_are_refused(tmp_path, plain):
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for out, message in (
        (file, "file"),
        (file / "in", "file"),
        (tmp_path / "full", "holds something else"),
        (Path("/proc/none/such"), "give another folder"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            told(out)
    with locked(tmp_path / "busy"), pytest.raises(ValueError, match="another process is at it"):
        told(tmp_path / "busy")


def test_rows_of_names_and_budgets():
    rows = at_budgets(["full", "SnapKV", "omnikv"], [64, 0.2])
    assert list(rows) == ["full", "snapkv@64", "snapkv@0.2", "omnikv@64", "omnikv@0.2"]
    assert rows["snapkv@0.2"] == jaxkv.SnapKV(budget=0.2) and rows["full"] == jaxkv.FullKV()


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_shards_are_the_whole(tmp_path, plain, count):
    parts = [tmp_path / f"{at}" for at in range(count)]
    lines = [told(part, shard=(at, count)) for at, part in enumerate(parts)]
    assert (
        sum(each.count(b"\n") for each in lines) == whole().count(b"\n")
        and len(set(lines)) == count
    )
    joined = merge(parts[::-1], tmp_path / "joined")
    assert (tmp_path / "joined" / "samples.jsonl").read_bytes() == whole()
    # It is one: nothing is run again, and what a run would have said is said.
    assert told(tmp_path / "joined") == whole() and joined.run.shard is None
    assert merge(parts, tmp_path / "joined").records == joined.records
    # Shards whose policies came one by one, in another order, are shards of the same.
    names = [*POLICIES][::-1]
    for end in (1, len(names)):
        told(
            tmp_path / "last",
            shard=(count - 1, count),
            policies={name: POLICIES[name] for name in names[:end]},
        )
    merge([*parts[:-1], tmp_path / "last"], tmp_path / "again")
    assert (tmp_path / "again" / "samples.jsonl").read_bytes() == whole()
    with pytest.raises(ValueError, match=r"shard \[0\] of .*it is missing"):
        merge(parts[1:], tmp_path / "none")
    with pytest.raises(ValueError, match="more than once"):
        merge([*parts, parts[0]], tmp_path / "none")
    with pytest.raises(ValueError, match="no shard, but a whole"):
        merge([*parts, tmp_path / "joined"], tmp_path / "none")
    with pytest.raises(ValueError, match="another evaluation has begun"):
        merge(parts, parts[0])
    other = tmp_path / "other"
    told(other, Told(count=6), shard=(0, count))
    with pytest.raises(ValueError, match="no shards of one evaluation .*settings.count"):
        merge([*parts[1:], other], tmp_path / "none")
    (parts[0] / "samples.jsonl").write_bytes(lines[0][:-5])
    with pytest.raises(ValueError, match="run the same command again"):
        merge(parts, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_registered_task_is_there():
    assert TASKS["2stageretr"] is TwoStage and evaluating.Told not in TASKS.values()
