"""`jaxkv compress` and `jaxkv ask`: a document saved by one, asked by the other, as in Python; what they reject."""

import contextlib
import io
import json

import lettered
import numpy as np
import pytest
from cli_runs import refused
from serve_runs import model_folder

import jaxkv
from jaxkv import cli
from jaxkv.cli import models

QUESTIONS = ("what jumps?", "who is lazy, and why?")


@pytest.fixture(autouse=True)
def no_cache_of_programs(monkeypatch):
    monkeypatch.setattr(models, "enable_compilation_cache", lambda: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def saved(model):
    """A folder with a saved document."""
    (model.parent / "text.txt").write_text(f"\ufeff{lettered.DOC}\r\n")
    out = model.parent / "saved"
    asked = ["compress", str(model.parent / "text.txt"), "--out", str(out), "--model", str(model)]
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert cli.main([*asked, "--policy", "keydiff", "--budget", "20"]) == 0
    assert all(each in told.getvalue() for each in ("20 of 45 entries", "KeyDiff(budget=20)"))
    return out


def test_answers_are_those_of_python(model, saved, capsys):
    """Of several questions, and of a random sample; the cache is the one that `prefill` makes."""
    params = jaxkv.load(model)
    cache = jaxkv.prefill(params, lettered.DOC, policy=jaxkv.KeyDiff(budget=20))
    expected = jaxkv.generate(params, list(QUESTIONS), cache=cache, max_new_tokens=9)
    asked = ["ask", str(saved), *QUESTIONS, "--model", str(model), "--max-new-tokens", "9"]
    assert cli.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["question"] for each in found] == list(QUESTIONS)
    assert [each["tokens"] for each in found] == [each.tokens.tolist() for each in expected]
    assert [(each["text"], each["finish_reason"]) for each in found] == [
        (each.text, each.finish_reason) for each in expected
    ]
    assert cli.main([*asked, "--json", "--temperature", "0", "--logprobs", "2"]) == 0
    for each, scored in zip(found, json.loads(capsys.readouterr().out), strict=True):
        assert scored["tokens"] == each["tokens"]
        assert np.shape(scored["logprobs"]["top_ids"]) == (len(each["tokens"]), 2)
    assert cli.main(asked) == 0
    told = capsys.readouterr()
    lines, words = told.out.splitlines(), told.err.split()
    assert words[:3] == ["jaxkv:", str(len(QUESTIONS)), "questions,"] and words[-1] == "included"
    assert lines == [
        line for each in found for line in (each["question"], f"  {' '.join(each['text'].split())}")
    ]
    drawn = jaxkv.generate(
        params,
        QUESTIONS[0],
        cache=cache,
        max_new_tokens=9,
        sampling=jaxkv.Sampling(temperature=2.0),
        key=5,
    )
    heat = ["--max-new-tokens", "9", "--temperature", "2", "--seed", "5"]
    assert cli.main(["ask", str(saved), QUESTIONS[0], "--model", str(model), *heat]) == 0
    assert capsys.readouterr().out == f"{drawn.text}\n"


def test_what_is_refused(model, saved, capsys, tmp_path):
    (tmp_path / "text").write_text(lettered.DOC)
    (tmp_path / "empty").write_text(" \n")
    base, text = ["--model", str(model), "--policy", "keydiff"], str(tmp_path / "text")
    said = lambda *given: refused(capsys, *given)  # noqa: E731
    assert "--out" in said("compress", text, *base, "--out", str(saved)) and saved.is_dir()
    assert "--out=" in said("compress", text, *base, "--out", str(tmp_path / "no" / "folder"))
    assert "the text is empty" in said(
        "compress", str(tmp_path / "empty"), *base, "--out", str(tmp_path / "a")
    )
    assert not (tmp_path / "a").exists()
    assert "cannot encode" in said("ask", str(saved), "\udcff", "--model", str(model))
    assert "path=" in said("ask", str(tmp_path), "why?", "--model", str(model))
    other = str(lettered.FOLDER.parent / "qwen2")
    assert "belongs to another model" in said("ask", str(saved), "why?", "--model", other)
