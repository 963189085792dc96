"""The command line: what it prints, what it rejects and how."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import cli_runs
import jax
import pytest
import running
from cli_runs import refused

import jaxkv
from jaxkv import Sampling, cli
from jaxkv.checkpoints.hub_config import FAMILIES
from jaxkv.cli import models
from jaxkv.policies.registry import POLICIES

TINY = str(running.GOLDEN / "models" / "llama_gqa")
REAL = [
    "generate",
    "--prompt",
    "What is the capital of France?",
    "--policy",
    "adakv",
    "--budget",
    "24",
]
REAL += ["--window", "8", "--max-new-tokens", "8"]


@pytest.fixture
def asked(monkeypatch):
    """Runs `jaxkv generate`, which answers at once, and gives the arguments of its call of `generate`."""
    calls = cli_runs.answering(monkeypatch)

    def run(*arguments):
        assert cli.main(["generate", *arguments]) == 0
        return calls[-1]

    return run


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_teaches(capsys, arguments):
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert '--question "What did it cost?"' in text


def test_registry_holds_every_policy(capsys):
    # Names and their order are public; a new policy needs no line here.
    names = "full streamingllm snapkv pyramidkv adakv h2o roco tova d2o cam criticalkv pyramidinfer keydiff "
    names += "expectedattention defensivekv layerdefensivekv globalbudget omnikv brutaloffload localwindow knorm random"
    assert [name for name in POLICIES if name in names.split()] == names.split()
    assert cli.main(["policies", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(POLICIES)
    for row in rows:
        assert row["about"] and row["paper"] and row["parts"] and "budget" in row["defaults"]
        assert ("--budget" in row["options"]) == (
            row["name"] not in ("full", "brutaloffload", "duoattention")
        )
    assert (
        rows[list(POLICIES).index("pyramidkv")]["defaults"]["layers"] == "LinearLayers(beta=20.0)"
    )
    assert cli.main(["policies"]) == 0
    text = capsys.readouterr().out
    assert "arXiv:2404.14469" in text and "window=32" in text


def test_models(capsys):
    assert cli.main(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert sorted(rows) == ["smollm2-135m-instruct", "tiny-retrieval"]
    assert {row["license"] for row in rows.values()} == {"Apache-2.0"}
    assert (
        isinstance(rows["smollm2-135m-instruct"]["cached"], bool)
        and rows["tiny-retrieval"]["cached"] is True
    )
    assert rows["tiny-retrieval"]["source"] == "comes with jaxkv"
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    assert "98.4 MB" in text and "tiny-retrieval" in text.split("comes with jaxkv")[0]


def test_model_types(capsys):
    assert cli.main(["models", "--types", "--json"]) == 0
    rows = {row["name"]: row["models"] for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() > FAMILIES.keys() and "gpt-oss" in rows["gpt_oss"]
    assert cli.main(["models", "--types"]) == 0
    assert "gemma3\n  models         Gemma 3 with images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sampling"),
    [
        ([], Sampling(temperature=0)),
        (["--top-p", "0.9", "--temperature", "2"], Sampling(top_p=0.9, temperature=2.0)),
        (["--min-p", "0.1", "--top-k", "9"], Sampling(min_p=0.1, top_k=9)),
        (["--temperature", "0"], Sampling(temperature=0)),
        (
            ["--repetition-penalty", "1.2", "--stop-token-ids", "7", "5", "--logprobs", "2"],
            Sampling(repetition_penalty=1.2, stop_token_ids=(5, 7), logprobs=2),
        ),
    ],
)
def test_options_make_the_sampling(asked, arguments, sampling):
    assert asked("--prompt", "x", *arguments)["sampling"] == sampling


def test_prompt_file_and_question_are_joined(asked, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Some téxt.\n", "utf-8")
    call = asked(
        "--prompt-file", str(file), "--question", "Why?", "--raw", "--seed", "3", "--stop", "a", "b"
    )
    assert call["prompt"] == "Some téxt.\n\nWhy?"
    assert call["raw"] is True
    assert call["stop"] == ("a", "b")
    assert not asked("--prompt", "x")["stop"]
    assert call["key"] == jax.random.key(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "-2"], "top_k=-2"),
        (["--temperature", "nan"], "--temperature=nan"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0"),
        (["--max-new-tokens", str(2**63)], f"--max-new-tokens={2**63}"),
        (["--seed", "9" * 5000], "--seed=9"),
        (["--implementation", "triton"], "--implementation=triton"),
        (["--output", "no/such/folder/x.json"], "--output='no/such/folder/x.json'"),
        (["--prompt-file", "no-such-file"], "--prompt-file=no-such-file: No such file"),
        (["--buget", "5"], "unrecognized arguments: --buget 5; did you mean --budget?"),
        (["--compression-ratio=0.5"], "it is the evicted share in kvpress: use --budget"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(capsys, monkeypatch, arguments, message):
    cli_runs.unloadable(monkeypatch)
    assert message in refused(capsys, "generate", "--prompt", "x", *arguments)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_bad_prompt_files(capsys, monkeypatch, tmp_path, content):
    """A question alone is no prompt."""
    cli_runs.unloadable(monkeypatch)
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    message = refused(capsys, "generate", "--prompt-file", str(file), "--question", "Why?")
    assert ("not UTF-8" if content.startswith(b"\xff") else "the text is empty") in message


def test_no_command_and_unknown_models(capsys, monkeypatch):
    monkeypatch.setattr(models, "enable_compilation_cache", lambda: None)
    assert "COMMAND" in refused(capsys)
    message = refused(capsys, "generate", "--model", "gpt-17", "--prompt", "x")
    assert "gpt-17" in message and "smollm2-135m-instruct" in message
    given = ("--model", TINY, "--dtype", "int8", "--prompt", "x")
    assert "dtype='int8'" in refused(capsys, "generate", *given)


def test_seeds_of_64_bits_are_told_apart(asked):
    numbers = (-1, 5, 2**32 + 5, 2**63 + 5, 2**64 - 1)
    keys = [asked("--prompt", "x", f"--seed={number}")["key"] for number in numbers]
    assert keys[0] == jax.random.key(-1) and keys[1] == jax.random.key(5)
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 5


def test_versions(capsys, monkeypatch):
    assert cli.main(["--version"]) == 0
    (word, number) = capsys.readouterr().out.split()
    assert word == "jaxkv" and number[0].isdigit()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)  # a checkout that is not installed
    monkeypatch.delitem(
        vars(jaxkv), "__version__", raising=False
    )  # kept since it was first asked for
    assert jaxkv.__version__ == "unknown"
    monkeypatch.delitem(vars(jaxkv), "__version__")


@pytest.mark.parametrize(
    "error",
    [
        TypeError("what"),
        MemoryError(),
        OverflowError("too large"),
        RecursionError("maximum recursion depth exceeded"),
        jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 4947802322688 bytes."),
        ValueError("of several\n\nlines"),
    ],
)
def test_errors_have_no_traceback(capsys, monkeypatch, error):
    cli_runs.loading(monkeypatch)
    monkeypatch.setattr(models, "load", Mock(side_effect=error))
    message = refused(capsys, "generate", "--prompt", "x")
    assert ("; ".join(str(error).split("\n\n")) or "MemoryError") in message
    assert len(message.splitlines()) == 1


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    ours = [
        KeyError("name"),
        AttributeError("no such part"),
        RuntimeError("a bug"),
        ZeroDivisionError(),
    ]
    cli_runs.loading(monkeypatch)
    for error in (*ours, jax.errors.JaxRuntimeError("INTERNAL")):
        monkeypatch.setattr(models, "load", Mock(side_effect=error))
        with pytest.raises(type(error)):
            cli.main(["generate", "--prompt", "x"])


def test_a_failing_run_leaves_the_old_output(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "enable_compilation_cache", lambda: None)
    output = tmp_path / "answer.json"
    output.write_text("old")
    message = refused(capsys, "generate", "--model", TINY, "--prompt", "x", "--output", str(output))
    assert "tokenizer" in message
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.real
def test_generate_answers(capsys, monkeypatch, tmp_path):
    cli_runs.loading(monkeypatch, running.smollm2())
    output = tmp_path / "answer.json"
    output.write_text("old")
    assert cli.main([*REAL, "--json", "--output", str(output)]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record == json.loads(output.read_text("utf-8"))
    assert list(tmp_path.iterdir()) == [output]
    assert "Paris" in record["text"]
    assert record["policy"].startswith("AdaKV(") and "base=SnapKV(budget=24" in record["policy"]
    assert 1 <= len(record["tokens"]) <= 8
    assert record["stats"]["kept"] == 24
    assert record["stats"]["kept_bytes"] < record["stats"]["full_bytes"]
    assert record["stats"]["decode_tokens_per_second"] > 0

    # The same on a terminal: the text comes in pieces, the figures go to stderr.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(REAL) == 0
    captured = capsys.readouterr()
    assert captured.out == record["text"] + "\n"
    assert "24.0 entries per kv head" in captured.err


_TWICE = """
import sys, jax, jax.numpy as jnp
from jaxkv.machine.compilation import enable_compilation_cache
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.jit(lambda x: x + 1)(jnp.ones(3))  # JAX has settled by now that there is no cache
folder = enable_compilation_cache(sys.argv[1])
for _ in range(2):
    jax.jit(lambda x: x * 2 + 1)(jnp.ones(7)).block_until_ready()
    jax.clear_caches()
assert any(folder.iterdir())
assert "/jax/compilation_cache/cache_hits" in hits, hits
"""


def test_compilation_cache(tmp_path):
    """In a process of its own: the setting would outlive the test."""
    folder = tmp_path / "programs"
    command = [sys.executable, "-W", "error", "-c", _TWICE, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
