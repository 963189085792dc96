"""`jaxkv analyze`: tables, JSON, arrays and pictures of a tiny model; what cannot be is refused before its work."""

import json
import sys

import numpy as np
import pytest
from cli_runs import refused
from evaluating import words

from jaxkv import AdaKV, PyramidKV, SnapKV
from jaxkv.analysis import recall
from jaxkv.cli import analysing, main

TEXT = " ".join(f"w{at % 61}" for at in range(3, 48))
SHORT = (
    "--budgets",
    "8,0.5",
    "--following",
    "3",
    "--policies",
    "snapkv --window 2,adakv --base pyramidkv --window 2 --alpha 0",
)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A file with a text; the model is a tiny one."""
    # A setting of the whole process: switched on here, it would serve the tests that count compilations.
    monkeypatch.setattr(analysing, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(analysing, "load", lambda name, **_: words())
    monkeypatch.setattr(analysing, "require_model", lambda name: None)
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def unloadable(text, monkeypatch):
    """The same, where nothing may be loaded."""
    monkeypatch.setattr(analysing, "load", lambda *_, **__: pytest.fail("loaded a model"))
    return text


def test_all_figures_are_written_and_said(text, tmp_path, capsys):
    out = tmp_path / "made" / "found"
    assert (
        main(
            [
                "analyze",
                "--text",
                str(text),
                str(text),
                *SHORT,
                "--out",
                str(out),
                "--json",
                "--pictures",
                "svg",
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert "text 2 of 2, 45 tokens" in captured.err
    names = list(analysing.FIGURES)
    assert list(record["figures"]) == names and [each["tokens"] for each in record["texts"]] == [
        45,
        45,
    ]
    files = {"analysis.json", *(f"{name}.{kind}" for name in names for kind in ("npz", "svg"))}
    assert {path.name for path in out.iterdir()} == files
    assert json.loads((out / "analysis.json").read_text()) == record
    with np.load(out / "recall.npz", allow_pickle=False) as arrays:
        given = {
            "texts": [words().text.encode(TEXT, bos=True)] * 2,
            "budgets": (8, 0.5),
            "following": 3,
        }
        policies = [SnapKV(window=2), AdaKV(base=PyramidKV(window=2), alpha=0.0)]
        again = recall(words(), given.pop("texts"), policies=policies, **given)
        np.testing.assert_allclose(arrays["recall"], again.recall, atol=1e-6)
        assert arrays["policies"].tolist() == [
            "snapkv --window 2",
            "adakv --base pyramidkv --window 2 --alpha 0",
        ]
    assert [each["st. err."] for each in record["figures"]["recall"]] == [0] * 4
    assert [each["rows"] for each in record["figures"]["budgets"]] == [32, 84, 32, 84]


def test_a_table_says_what_was_asked_for(text, capsys):
    assert (
        main(
            ["analyze", "--text", str(text), "--what", "retained,recall", "--tokens", "30", *SHORT]
        )
        == 0
    )
    captured = capsys.readouterr()
    told, recalled = captured.out.split("\n\n")
    assert "text 1 of 1, the first 30 of 45 tokens" in captured.err
    assert (
        "recall and loss of attention are no answers" in captured.err
        and "jaxkv eval qa --data" in captured.err
    )
    assert told.startswith("retained: ") and told.splitlines()[1].split()[:2] == ["keys", "%"]
    rows = [line.split() for line in recalled.splitlines()]
    assert rows[0][0] == "recall:" and [row[:4] for row in rows[2:4]] == [
        ["snapkv", "--window", "2", "8"],
        ["snapkv", "--window", "2", "0.5"],
    ]
    # The spread over one text is not known.
    assert {row[-2] for row in rows[2:]} == {"-"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "everything"], "--what='everything': give some of density"),
        (["--what", ","], "--what="),
        (["--pictures", "gif"], "--pictures='gif'"),
        (["--budgets", "x"], "--budgets='x'"),
        (["--budgets", ","], "--budgets=','"),
        (["--budgets", "4"], "snapkv --window 8: budget=4: below sinks + window"),
        (["--policies", "omnikv"], "policies='omnikv': it drops no rows"),
        (["--policies", "snapk"], "did you mean snapkv"),
        (
            ["--policies", "snapkv --windo 8"],
            "--policies='snapkv --windo 8': unrecognized arguments: --windo 8",
        ),
        (["--policies", "snapkv --alpha 0"], "snapkv has no such option"),
        (["--policies", "snapkv --budget 8"], "give --budgets"),
        (["--policies", ","], "--policies=','"),
        (["--what", "loss", "--budgets", "16"], "uniform: budget=16: below sinks + window"),
        (["--what", "loss", "--policies", "snapkv,d2o"], "policies='d2o': it merges rows"),
        (["--out", "{text}"], "it is no folder"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_before_the_model(
    unloadable, capsys, arguments, message
):
    given = [each.format(text=unloadable) for each in arguments]
    assert message in refused(capsys, "analyze", "--text", str(unloadable), *given)


def test_texts_are_read_before_the_model(unloadable, capsys, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    assert "it is empty" in refused(capsys, "analyze", "--text", str(tmp_path / "empty.txt"))
    assert "--text=" in refused(capsys, "analyze", "--text", str(tmp_path / "none.txt"))


def test_what_is_refused_leaves_no_folder(text, capsys, tmp_path):
    """Whether before the model is looked for or behind; and nothing of the folders above it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for out in (mine / "out", mine / "some" / "where" / "deep", mine):
        asked = (
            "analyze",
            "--text",
            str(text),
            "--what",
            "budgets",
            "--pictures",
            "none",
            "--out",
            str(out),
        )
        assert "of which 60 follow" in refused(capsys, *asked, "--following", "60")
        assert "the model was made for 512" in refused(capsys, *asked, "--tokens", "513")
        assert list(tmp_path.rglob("out")) == list(mine.iterdir()) == []
    long = mine / "a" / ("b" * 300)
    told = refused(capsys, "analyze", "--text", str(text), "--pictures", "none", "--out", str(long))
    assert f"--out={long}: File name too long; give another folder" in told and not list(
        mine.iterdir()
    )


def test_texts_that_are_too_short_are_named(text, capsys):
    message = refused(
        capsys, "analyze", "--text", str(text), "--following", "60", "--tokens", "512"
    )
    assert "it has 45 tokens, of which 60 follow the prompt" in message
    assert "the model was made for 512" in refused(
        capsys, "analyze", "--text", str(text), "--tokens", "513"
    )


def test_what_follows_a_prompt_counts_only_where_policies_are_asked(text, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("w3 w4 w5 w6")
    asked = ("analyze", "--text", str(tmp_path / "short.txt"), "--what")
    assert main([*asked, "retained", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["following"] == 0
    assert "of which 32 follow" in refused(capsys, *asked, "recall")


def test_a_seed_has_64_bits(text):
    asked = [
        "analyze",
        "--text",
        str(text),
        "--what",
        "budgets",
        "--following",
        "3",
        "--policies",
        "random",
    ]
    assert main([*asked, "--budgets", "8", "--seed", str(2**64 - 1)]) == 0


def test_pictures_need_matplotlib_and_arrays_do_not(text, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    asked = ("analyze", "--text", str(text), "--what", "retained", "--out", str(tmp_path / "out"))
    assert "jaxkv[plots]" in refused(capsys, *asked)
    assert main([*asked, "--pictures", "none"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"retained.npz", "analysis.json"}
