"""`jaxkv eval`: options from tasks' fields, refusals before anything is loaded, tables, shards, pages."""

import argparse
import dataclasses
import json
import re

import evaluating
import jax
import pytest
from cli_runs import ROOT, refused
from evaluating import POLICIES, Told, words

from jaxkv import AdaKV, FullKV, KNorm, OmniKV, PyramidKV, SnapKV, cli
from jaxkv.cli import evaluating as command
from jaxkv.cli.task_options import add_task_options, task_from
from jaxkv.evals import TASKS, page, runs
from jaxkv.sharding.sizes import mesh_of

RUN = ("--policies", "full,knorm,streamingllm", "--budgets", "9", "--batch", "3")


@pytest.fixture
def told(monkeypatch):
    """The task under the name `told`, over a tiny model that takes no time to load."""
    monkeypatch.setitem(TASKS, "told", Told)
    monkeypatch.setattr(command, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(command, "load", lambda name, **_: words())
    for module in (runs, page, command):
        monkeypatch.setattr(module, "PLOTS_MISSING", True)


def test_a_run_prints_its_table(told, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["eval", "told", *RUN, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == (out / "table.md").read_text() and "| full |" in printed.out
    assert "told: 100%" in printed.err and f"all of it is in {out}" in printed.err
    assert "pip install 'jaxkv[plots]'" in printed.err
    # The same from Python.
    assert (out / "samples.jsonl").read_bytes() == evaluating.told(tmp_path / "same")
    assert cli.main(["eval", "told", *RUN, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["policy"] == "full"
    assert cli.main(["eval", "report", str(out), "--samples", "3"]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n" and (out / "report.html").is_file()


def test_shards_are_joined(told, tmp_path, capsys):
    parts = [str(tmp_path / f"{at}") for at in range(2)]
    for at, part in enumerate(parts):
        assert cli.main(["eval", "told", *RUN, "--shard", f"{at}/2", "--out", part]) == 0
    assert cli.main(["eval", "merge", *parts, "--out", str(tmp_path / "all")]) == 0
    assert "# told: 14 samples, words\n" in capsys.readouterr().out
    assert (tmp_path / "all" / "samples.jsonl").read_bytes() == evaluating.told(tmp_path / "same")
    assert "it is missing" in refused(
        capsys, "eval", "merge", parts[1], "--out", str(tmp_path / "none")
    )


def test_every_task_is_on_the_page():
    page = (
        (ROOT / "docs" / "evaluation.md").read_text("utf-8").split("## Tasks")[1].split("\n## ")[0]
    )
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M)) == set(TASKS)


def test_fields_are_options(told, tmp_path):
    given = "--count 3 --sizes 4,5 6 --share 0.25 --name x --loud --seed 9 --task-batch y".split()
    options = cli._parser().parse_args(["eval", "told", *RUN, "--out", "o", *given])
    expected = Told(count=3, sizes=(4, 5, 6), share=0.25, name="x", loud=True, seed=9, batch="y")
    assert task_from(options, Told) == expected and options.batch == 3
    assert task_from(cli._parser().parse_args(["eval", "told", *RUN, "--out", "o"]), Told) == Told()
    out = tmp_path / "out"
    assert (
        cli.main(
            ["eval", "told", *RUN, "--out", str(out), "--seed", "9", "--question-agnostic", "--raw"]
        )
        == 0
    )
    said = json.loads((out / "run.json").read_text())
    assert (said["seed"], said["settings"]["seed"], said["agnostic"], said["raw"]) == (
        9,
        9,
        True,
        True,
    )
    assert list(said["policies"]) == list(POLICIES)


def test_fields_of_pairs_are_options():
    """Of a task of one's own: those that come with jaxkv have none."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Spanned(Told):
        spans: tuple[tuple[int, int], ...] = ()

    parser = argparse.ArgumentParser()
    parser.add_argument("--seed")
    add_task_options(parser, Spanned)
    options = parser.parse_args(["--spans", "1:2", "--spans", "3:4,5:6"])
    assert task_from(options, Spanned).spans == ((1, 2), (3, 4), (5, 6))


def test_options_go_behind_a_policy(told, tmp_path, capsys):
    given = "full, adakv  --base pyramidkv --alpha 0.3,snapkv --window 4"
    out = tmp_path / "out"
    assert (
        cli.main(["eval", "told", "--policies", given, "--budgets", "64,0.5", "--out", str(out)])
        == 0
    )
    said = json.loads((out / "run.json").read_text())["policies"]
    rows = {
        f"adakv --base pyramidkv --alpha 0.3@{n}": AdaKV(base=PyramidKV(budget=n), alpha=0.3)
        for n in (64, 0.5)
    }
    rows = {
        "full": FullKV(),
        **rows,
        **{f"snapkv --window 4@{n}": SnapKV(budget=n, window=4) for n in (64, 0.5)},
    }
    assert said == {name: repr(policy) for name, policy in rows.items()}
    assert "| group | n | full | adakv --base pyramidkv --alpha 0.3@64 |" in capsys.readouterr().out


def test_options_that_are_a_budget_make_one_row(told, tmp_path):
    omnikv, chosen = (
        "omnikv --mem 0.8 --filter-layers 0 --adjacent 0",
        "omnikv --filters 0 --adjacent 0",
    )
    once = {
        omnikv: OmniKV(mem=0.8, filter_layers=(0,), adjacent=0),
        "snapkv --budget 64": SnapKV(budget=64),
    }
    rows = {f"knorm@{n}": KNorm(budget=n) for n in (9, 0.5)}
    rows |= {f"{chosen}@{n}": OmniKV(budget=n, filter_layers=(0,), adjacent=0) for n in (9, 0.5)}
    cases = (
        (once, list(once), ()),
        (once | rows, [*once, "knorm", chosen], ("--budgets", "9,0.5")),
    )
    for number, (expected, names, budgets) in enumerate(cases):
        out = tmp_path / str(number)
        assert (
            cli.main(["eval", "told", "--policies", ",".join(names), *budgets, "--out", str(out)])
            == 0
        )
        said = json.loads((out / "run.json").read_text())["policies"]
        assert said == {name: repr(policy) for name, policy in expected.items()}


def test_help_and_list_say_what_there_is(told, capsys):
    assert cli.main(["eval", "told", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "--count N of each group (default: 7)" in text
        and "--task-batch WORD has the name of another" in text
    )
    assert "--question-agnostic" in text and "--seed N of samples that are drawn" in text
    assert cli.main(["eval", "--list"]) == 0
    listed = capsys.readouterr().out
    assert (
        "told: Answers that no model gives" in listed and "  count         of each group" in listed
    )
    assert all(f"{name}: " in listed for name in TASKS)
    assert f"give one of {', '.join(TASKS)}, merge or report" in refused(capsys, "eval")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("tolt", *RUN), "did you mean told?"),
        (("told", "--policies", "adavk", "--budgets", "9"), "did you mean adakv"),
        (("told", "--policies", "adakv"), "adakv keeps a part of each prompt"),
        (("told", "--policies", ","), "give some of full"),
        (
            ("told", "--policies", "adakv --alpha x", "--budgets", "64"),
            "'adakv --alpha x': --alpha=x: give a number",
        ),
        (
            ("told", "--policies", "full --window 4"),
            "'full --window 4': --window=4: full has no such option",
        ),
        (
            ("told", "--policies", "snapkv --windw 4", "--budgets", "64"),
            "unrecognized arguments: --windw 4",
        ),
        (("told", "--policies", "snapkv --policy full", "--budgets", "64"), "a comma parts them"),
        (("told", "--policies", "snapkv --window 4"), "snapkv keeps a part of each prompt"),
        (("told", "--policies", "snapkv", "--budgets", "9"), "snapkv@9: budget=9"),
        (("told", "--policies", "snapkv", "--budgets", "9x"), "--budgets='9x': give a number"),
        (("told", "--policies", "snapkv", "--budgets", "1.5"), "snapkv@1.5: budget=1.5"),
        (("told", *RUN, "--batch", "0"), "give at least 1"),
        (("told", *RUN, "--shard", "2/2"), "--shard='2/2'"),
        (("told", *RUN, "--mesh", "0x2"), "--mesh='0x2'"),
        (("told", *RUN, "--count", "many"), "give a whole number"),
        (("told", *RUN, "--model", ""), "--model=''"),
        (("told", *RUN, "--out", __file__), "it is a file"),
    ],
)
def test_refused_before_anything_is_loaded(told, monkeypatch, tmp_path, capsys, given, message):
    monkeypatch.setattr(command, "load", None)
    assert message in refused(
        capsys, "eval", *given[:1], "--out", str(tmp_path / "out"), *given[1:]
    )
    assert not (tmp_path / "out").exists()


def test_another_run_is_refused_before_anything_is_loaded(told, monkeypatch, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert cli.main(["eval", "told", *RUN, "--out", out]) == 0
    capsys.readouterr()
    monkeypatch.setattr(command, "load", None)
    changed = refused(capsys, "eval", "told", *RUN, "--out", out, "--count", "6", "--raw")
    assert "settings.count: 7 there, 6 asked for; " in changed
    message = refused(capsys, "eval", "told", *RUN, "--out", out, "--policies", "knorm")
    assert "budgets.full: null there, nothing asked for" in message
    for word in ("merge", "report"):
        there = ("--out", str(tmp_path / "x")) if word == "merge" else ()
        assert "no evaluation lies there" in refused(capsys, "eval", word, str(tmp_path), *there)


def test_what_fails_is_told_in_a_line(told, monkeypatch, tmp_path, capsys):
    def fails(self, *_):
        raise self.error

    monkeypatch.setattr(Told, "run", fails)
    monkeypatch.setattr(Told, "error", ValueError("prompt=0: too long"), raising=False)
    assert cli.main(["eval", "told", *RUN, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "jaxkv: error: full, samples 00 to 01: prompt=0: too long; 0 lines are in"
    )
    monkeypatch.setattr(Told, "error", RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), raising=False)
    assert cli.main(["eval", "told", *RUN, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(
        "it needs a smaller --batch, or shorter prompts, in another folder\n"
    )
    monkeypatch.setattr(Told, "error", KeyError("a mistake of ours"), raising=False)
    with pytest.raises(runs.Failed):
        cli.main(["eval", "told", *RUN, "--out", str(tmp_path / "out")])


def test_a_mesh_has_the_devices_that_are_here():
    assert (
        dict(mesh_of("2x4").shape) == dict(mesh_of("2x4", "cpu").shape) == {"data": 2, "model": 4}
    )
    assert len(jax.devices()) == 8
