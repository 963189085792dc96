"""The command line's standard streams: full, of another encoding, with a reader that has gone."""

import io
import json
import subprocess
import sys
import warnings
from unittest.mock import Mock

import cli_runs
import pytest
from cli_runs import ANSWER, refused

from jaxkv import cli
from jaxkv.cli import generating, models

ASK = ("generate", "--prompt", "x")


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    cli_runs.answering(monkeypatch)


class Failing(io.StringIO):
    """A terminal that takes so many writes."""

    encoding = "utf-8"

    def __init__(self, takes: int, error: type[OSError]):
        super().__init__()
        self.takes, self.error = takes, error

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text and len(self.getvalue()) >= self.takes:
            raise self.error(5, "gone away")
        return super().write(text)


def typed(data: bytes, **options: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), **options)


def test_help_that_is_lost_is_an_error():
    command = [sys.executable, "-m", "jaxkv", "--help"]
    told = ["bash", "-c", '"$@" >/dev/full', "bash", *command]
    done = subprocess.run(told, capture_output=True, text=True, timeout=60, cwd=cli_runs.ROOT)
    assert done.returncode == 2 and done.stderr.startswith("jaxkv: error: stdout: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "jaxkv", "--help"],
        cwd=cli_runs.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_a_full_stderr_hears_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Failing(0, OSError))
    assert cli.main(list(ASK)) == 0
    assert capsys.readouterr().out == ANSWER + "\n"  # and stdout not its figures


def test_stdin_is_utf8_whatever_the_locale(capsys, monkeypatch):
    """A terminal is asked for it."""
    calls = cli_runs.answering(monkeypatch)
    for data in (b"\xef\xbb\xbfHell\xc3\xb6,\r\nyou.\n", b"\xff\xfeH\x00"):
        monkeypatch.setattr(sys, "stdin", typed(data, encoding="ascii"))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        cli.main(["generate", "--prompt-file", "-"])
    # No mark at the start, newlines as in files.
    assert [call["prompt"] for call in calls] == ["Hellö,\nyou."]
    told = capsys.readouterr().err
    assert "Ctrl-D" in told and "--prompt-file=-: not UTF-8 text" in told


@pytest.mark.parametrize(
    ("errors", "shown"),
    [("strict", b"Sch\\xf6n, \\u4f60\\u597d \\U0001f600\n"), ("replace", b"Sch?n, ?? ?\n")],
)
def test_ascii_stdout_keeps_the_answer(monkeypatch, errors, shown):
    """A user's own choice stays."""
    out = typed(b"", encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(list(ASK)) == 0
    assert out.buffer.getvalue() == shown


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_json_has_every_letter_in_any_encoding(monkeypatch, encoding):
    out = typed(b"", encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main([*ASK, "--json"]) == 0
    assert json.loads(out.buffer.getvalue().decode(encoding))["text"] == ANSWER


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError, 0), (OSError, 2)])
def test_a_stream_that_breaks_ends_the_work_but_for_a_file(monkeypatch, tmp_path, error, code):
    drawn: list[str] = []
    cli_runs.answering(monkeypatch, drawn)
    monkeypatch.setattr(sys, "stdout", Failing(3, error))
    assert cli.main(list(ASK)) == code
    assert "".join(drawn) == ANSWER[:4]
    output = tmp_path / "answer.json"
    monkeypatch.setattr(sys, "stdout", Failing(3, error))
    assert cli.main([*ASK, "--no-stream", "--output", str(output)]) == code
    assert json.loads(output.read_text("utf-8"))["text"] == ANSWER


def test_a_broken_pipe_elsewhere_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(models, "load", Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
    assert "Broken pipe" in refused(capsys, *ASK)


def test_a_warning_is_one_line(capsys, monkeypatch):
    def generate(*_, **__):
        warnings.warn("a thing is\n  odd: mend it", stacklevel=2)
        return cli_runs.generation()

    monkeypatch.setattr(generating, "generate", generate)
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main([*ASK, "--no-stream"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "jaxkv: warning: a thing is odd: mend it"
    assert warnings.showwarning is shown
