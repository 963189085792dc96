"""Runs of the command line that need no model: its answer is given."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxkv import cli
from jaxkv.cli import evaluating, generating, models
from jaxkv.cli.options import build_dataclass_from_options
from jaxkv.engine.generation_results import Completion, Generation, Stats
from jaxkv.evals import TASKS
from jaxkv.loading import LanguageModel

ANSWER = "Schön, 你好 \U0001f600"
ROOT = Path(__file__).parent.parent
_STATS = Stats(
    prompt_tokens=9,
    new_tokens=3,
    prefill_seconds=1.0,
    decode_seconds=1.0,
    compile_seconds=0.0,
    compiled_programs=0,
    full_bytes=9,
    kept_bytes=9,
    cache_bytes=9,
    allocated_bytes=9,
    kept=9.0,
    attention="xla",
    layout="equal",
    decode_steps=3,
)


def generation(text: str = ANSWER) -> Generation:
    """An answer without a cache."""
    made = object.__new__(Generation)
    only = Completion(text=text, tokens=np.arange(3), finish_reason="length", stop_reason=None)
    for name, value in {"completions": (only,), "cache": None, "stats": _STATS}.items():
        object.__setattr__(made, name, value)
    return made


class Pieces:
    """a stream of the answer's letters."""

    def __init__(self, given: list[str]):
        self.result, self._given = generation(), given

    def __iter__(self) -> Iterator[str]:
        for letter in ANSWER:
            self._given.append(letter)
            yield letter


def answering(monkeypatch, given: list[str] | None = None) -> list[dict]:
    """Lets `jaxkv generate` answer at once; gives the calls of `generate` it will have made."""
    calls: list[dict] = []

    def generate(model, prompt, **keywords):
        calls.append({"prompt": prompt, **keywords})
        return Pieces([] if given is None else given) if keywords["stream"] else generation()

    loading(monkeypatch)
    monkeypatch.setattr(generating, "generate", generate)
    return calls


def loading(monkeypatch, model=None) -> None:
    """Lets every command load this model, and keeps no programs on disk: the setting would outlive the test."""
    monkeypatch.setattr(models, "enable_compilation_cache", lambda: None)
    made = object.__new__(LanguageModel) if model is None else model
    monkeypatch.setattr(models, "load", lambda name, **_: made)


def unloadable(monkeypatch) -> None:
    """Fails if a command loads a model."""
    loading(monkeypatch)
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("loaded a model"))


def refused(capsys, *arguments: str) -> str:
    """The message of a run that must fail."""
    assert cli.main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxkv: error: ")
    assert "Traceback" not in captured.err
    return captured.err


def read(words):
    """Reads all words behind `jaxkv`, without running the command."""
    options = cli._build_parser(words).parse_args(words)
    file, cls = cli._COMMANDS[words[0]][1].split()
    if words[0] != "eval":
        return build_dataclass_from_options(
            getattr(importlib.import_module(f"jaxkv.cli.{file}"), cls), options
        )
    if words[1] in TASKS:
        evaluating.build_task(TASKS[words[1]], options)
        return build_dataclass_from_options(evaluating.EvaluationOptions, options)
