"""`jaxkv eval`: options from tasks' fields, rejections before anything is loaded, tables, shards, pages."""

import json
import re

import cli_runs
import evaluating
import pytest
from cli_runs import ROOT, refused
from evaluating import POLICIES, Told, words

from jaxkv import AdaKV, KNorm, OmniKV, PyramidKV, SnapKV, cli
from jaxkv.cli import evaluating as command
from jaxkv.cli.options import build_dataclass_from_options
from jaxkv.evals import TASKS, Evaluation, html_report, runs

RUN = ("--policies", "full,knorm,streamingllm", "--budgets", "9", "--batch", "3")


@pytest.fixture
def told(monkeypatch):
    """The task under the name `told`, over a tiny model that takes no time to load."""
    monkeypatch.setitem(TASKS, "told", Told)
    cli_runs.loading(monkeypatch, words())
    for module in (runs, html_report):
        monkeypatch.setattr(module, "PLOTS_MISSING", True)


def test_a_run_prints_its_table_and_shards_share_a_page(told, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["eval", "told", *RUN, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == (out / "table.md").read_text() and "| full |" in printed.out
    assert "told: 100%" in printed.err and str(out) in printed.err
    # The same from Python.
    assert (out / "results.jsonl").read_bytes() == evaluating.told(tmp_path / "same")
    assert cli.main(["eval", "told", *RUN, "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["policy"] == "full"
    parts = [str(tmp_path / f"{at}") for at in range(2)]
    for at, part in enumerate(parts):
        assert cli.main(["eval", "told", *RUN, "--shard", f"{at}/2", "--out", part]) == 0
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert cli.main(["eval", "report", *parts, "--samples", "3", "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n" and "the first 3 of 14" in page.read_text()
    assert "--out" in refused(capsys, "eval", "told", *RUN, "--out", __file__)
    assert "batch: 3 there" in refused(capsys, "eval", "told", *RUN[:-1], "4", "--out", str(out))


def test_every_task_is_on_the_page():
    page = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    listed = page.split("## Tasks")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", listed, flags=re.M)) == set(TASKS)


def test_fields_are_options(told, tmp_path):
    given = "--count 3 --sizes 4,5 6 --share 0.25 --name x --loud --seed 9 --task-batch y".split()
    options = cli._build_parser().parse_args(["eval", "told", *RUN, "--out", "o", *given])
    expected = Told(count=3, sizes=(4, 5, 6), share=0.25, name="x", loud=True, seed=9, batch="y")
    assert command.build_task(Told, options) == expected
    assert build_dataclass_from_options(command.EvaluationOptions, options).batch == 3
    options = cli._build_parser().parse_args(["eval", "told", *RUN, "--out", "o"])
    assert command.build_task(Told, options) == Told()
    more = ["--seed", "9", "--question-agnostic", "--raw"]
    assert cli.main(["eval", "told", *RUN, "--out", str(tmp_path / "out"), *more]) == 0
    found = Evaluation.read(tmp_path / "out")
    run = found.run
    assert (run.seed, run.settings["seed"], run.agnostic, run.raw) == (9, 9, True, True)
    assert found.policy_names == tuple(POLICIES)


def test_options_go_behind_a_policy_and_may_be_its_budget(told, tmp_path):
    adakv, snapkv, omnikv = (
        "adakv --base pyramidkv --alpha 0.3",
        "snapkv --budget 64",
        "omnikv --mem 0.8 --filter-layers 0 --adjacent 0",
    )
    rows = {
        **{f"{adakv}@{n}": AdaKV(base=PyramidKV(budget=n), alpha=0.3) for n in (64, 0.5)},
        snapkv: SnapKV(budget=64),
        omnikv: OmniKV(mem=0.8, filter_layers=(0,), adjacent=0),
        **{f"knorm@{n}": KNorm(budget=n) for n in (64, 0.5)},
    }
    given, out = ",".join((adakv, snapkv, omnikv, "knorm")), str(tmp_path / "out")
    assert cli.main(["eval", "told", "--policies", given, "--budgets", "64,0.5", "--out", out]) == 0
    said = Evaluation.read(out).policy_reprs
    assert said == {name: repr(policy) for name, policy in rows.items()}


def test_help_and_list_say_what_there_is(told, capsys):
    assert cli.main(["eval", "told", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--count N of each group (default: 7)" in text and "--question-agnostic" in text
    assert cli.main(["eval", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}: " in listed for name in TASKS)
    assert "TASK" in refused(capsys, "eval")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("tolt", *RUN), "did you mean told?"),
        (("told", "--policies", "adakv"), "--budgets="),
        (("told", "--policies", ","), "--policies="),
        (("told", "--policies", "adakv --alpha x", "--budgets", "64"), "--alpha=x"),
        (("told", "--policies", "snapkv", "--budgets", "9"), "--policies='snapkv': budget=9"),
        (("told", "--policies", "snapkv", "--budgets", "9x"), "--budgets=9x"),
        (("told", *RUN, "--shard", "2/2"), "--shard=2/2"),
        (("told", *RUN, "--mesh", "0x2"), "--mesh='0x2'"),
    ],
)
def test_refused_before_anything_is_loaded(told, monkeypatch, tmp_path, capsys, given, message):
    cli_runs.unloadable(monkeypatch)
    out = str(tmp_path / "out")
    assert message in refused(capsys, "eval", *given[:1], "--out", out, *given[1:])
    assert not (tmp_path / "out").exists()


def test_what_fails_is_told_in_a_line_with_its_samples(told, monkeypatch, tmp_path, capsys):
    def fails(self, *_):
        raise self.error

    monkeypatch.setattr(Told, "run", fails)
    monkeypatch.setattr(Told, "error", ValueError("prompt=0: too long"), raising=False)
    assert cli.main(["eval", "told", *RUN, "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "prompt=0: too long; full, samples 00 to 01" in message
    monkeypatch.setattr(Told, "error", KeyError("a mistake of ours"), raising=False)
    with pytest.raises(KeyError):
        cli.main(["eval", "told", *RUN, "--out", str(tmp_path / "out")])
