"""The command line's standard streams: closed, full, of another encoding, with a reader that has gone."""

import io
import json
import subprocess
import sys
import warnings

import cli_runs
import pytest
from cli_runs import ANSWER, refused, shell

from jaxkv import cli
from jaxkv.cli import files, generating

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


def test_closed_streams_are_no_tracebacks(tmp_path):
    output = tmp_path / "answer.json"
    done = shell("<&- >&- 2>&-", *ASK, "--output", str(output))
    assert done.returncode == 0
    assert (
        json.loads(output.read_text("utf-8"))["text"] == ANSWER
    )  # nothing else was written into it
    assert shell(">&-", "models").stderr == "jaxkv: error: stdout: it is closed\n"


def test_a_closed_stdout_is_refused_before_the_model(capsys, monkeypatch):
    monkeypatch.setattr(generating, "load", lambda *_, **__: pytest.fail("loaded a model"))
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(list(ASK)) == 2
    assert (
        "stdout='closed': there is nowhere to answer; give --output FILE" in capsys.readouterr().err
    )


def test_an_answer_that_neither_file_nor_stdout_takes_is_on_stderr(capsys, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main([*ASK, "--output", str(tmp_path / "answer.json")]) == 2
    answer, message = capsys.readouterr().err.splitlines()
    assert answer == ANSWER and message.endswith("No space left on device; the answer is on stderr")


def test_a_closed_stderr_hears_nothing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(list(ASK)) == 0
    assert capsys.readouterr().out == ANSWER + "\n"  # and stdout not its figures


def test_a_closed_stdin_is_no_prompt(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "--prompt-file=-: stdin: it is closed" in refused(
        capsys, "generate", "--prompt-file", "-"
    )


def test_stdin_is_utf8_whatever_the_locale(capsys, monkeypatch):
    calls = cli_runs.answering(monkeypatch)
    for data in (b"\xef\xbb\xbfHell\xc3\xb6,\r\nyou.\n", b"\xff\xfeH\x00"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        cli.main(["generate", "--prompt-file", "-"])
    assert [call["prompt"] for call in calls] == [
        "Hellö,\nyou."
    ]  # no mark at the start, newlines as in files
    assert (
        "--prompt-file=-: not UTF-8 text (invalid start byte at byte 0)" in capsys.readouterr().err
    )


def test_a_terminal_is_asked_for_the_prompt(capsys, monkeypatch):
    calls = cli_runs.answering(monkeypatch)
    typed = io.TextIOWrapper(io.BytesIO(b"What?\n"))
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", typed)
    assert cli.main(["generate", "--prompt-file", "-"]) == 0
    assert calls[0]["prompt"] == "What?"
    assert "Ctrl-D" in capsys.readouterr().err


def test_ascii_stdout_keeps_the_answer():
    done = shell("", *ASK, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "Sch\\xf6n, \\u4f60\\u597d \\U0001f600\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_has_every_letter_in_any_encoding(monkeypatch, encoding):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main([*ASK, "--json"]) == 0
    assert json.loads(out.buffer.getvalue().decode(encoding))["text"] == ANSWER


def test_a_users_own_choice_of_errors_stays(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(list(ASK)) == 0
    assert out.buffer.getvalue() == b"Sch?n, ?? ?\n"


def test_full_devices(tmp_path):
    output = tmp_path / "answer.json"
    done = shell(">/dev/full", *ASK, "--output", str(output))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "jaxkv: error: stdout: No space left on device",
    )
    assert json.loads(output.read_text("utf-8"))["text"] == ANSWER
    assert shell("2>/dev/full", *ASK).stdout == ANSWER + "\n"
    help_lost = shell(">/dev/full", "--help")
    assert (help_lost.returncode, help_lost.stderr) == (
        2,
        "jaxkv: error: stdout: No space left on device\n",
    )


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "jaxkv", "policies"]
    with subprocess.Popen(
        command, cwd=cli_runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


@pytest.mark.parametrize(("error", "code"), [(BrokenPipeError, 0), (OSError, 2)])
def test_a_stream_that_breaks_ends_the_work_unless_a_file_waits(monkeypatch, tmp_path, error, code):
    drawn: list[str] = []
    cli_runs.answering(monkeypatch, drawn)
    monkeypatch.setattr(sys, "stdout", Failing(3, error))
    assert cli.main(list(ASK)) == code
    assert "".join(drawn) == ANSWER[:4]
    output = tmp_path / "answer.json"
    monkeypatch.setattr(sys, "stdout", Failing(3, error))
    assert cli.main([*ASK, "--output", str(output)]) == code
    assert json.loads(output.read_text("utf-8"))["text"] == ANSWER


def test_a_broken_pipe_elsewhere_is_an_error(capsys, monkeypatch):
    def fail(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(generating, "load", fail)
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
