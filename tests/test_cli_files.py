"""Files of the command line: what it reads is bounded, what it writes is checked first and never lost."""

import errno
import json
import os
import stat
import threading
from pathlib import Path

import cli_runs
import numpy as np
import pytest
import tiny
from cli_runs import ANSWER, refused
from evaluating import words

from jaxkv import cli
from jaxkv.analysis import FilterLayers
from jaxkv.checkpoints import whole_files
from jaxkv.cli import analysing, outputs

ASK = ("generate", "--prompt", "x", "--output")


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    cli_runs.answering(monkeypatch)


@pytest.fixture
def unloadable(monkeypatch):
    cli_runs.unloadable(monkeypatch)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("Some text.")
    return file


def text_in(path: Path) -> str:
    return json.loads(path.read_text("utf-8"))["text"]


def unreplaced(monkeypatch, number: int) -> None:
    """Lets every rename fail."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(whole_files.os, "replace", fail)


# --- Written -----------------------------------------------------------------------------------------------------


def test_links_are_followed_and_modes_kept(tmp_path):
    real, link, dangling = (tmp_path / f"{name}.json" for name in ("real", "link", "dangling"))
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    dangling.symlink_to("n" * 255)
    for path in (link, dangling):
        assert cli.main([*ASK, str(path)]) == 0
        assert path.is_symlink() and text_in(path) == ANSWER
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 4


def test_a_fifo_is_written_to_and_stays_one(tmp_path, capsys):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_text("utf-8")), daemon=True)
    reader.start()
    assert cli.main([*ASK, str(fifo)]) == 0
    reader.join(10)
    assert json.loads(received[0])["text"] == ANSWER
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert capsys.readouterr().out == ANSWER + "\n"
    # Before there is an answer it is not opened, which would wait for a reader.
    asked = ("generate", "--prompt", "", "--output", str(fifo))
    assert "no prompt: use --prompt TEXT" in refused(capsys, *asked)


def test_devices_are_never_replaced(monkeypatch, tmp_path):
    """With a stand-in for /dev/null: a terminal of our own, through a link as /dev/stdout is one."""
    ours, theirs = os.openpty()
    link = tmp_path / "device"
    link.symlink_to(os.ttyname(theirs))
    monkeypatch.setattr(whole_files.os, "replace", lambda *_: pytest.fail("replaced a device"))
    try:
        output = outputs.OutputTarget(flag="--output", name=str(link))
        output.require_writable([str(link)])  # a terminal is no file that is lost
        output.write_bytes(b"written")
        assert os.read(ours, 99) == b"written"
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_dash_is_stdout(capfdbinary):
    assert cli.main([*ASK, "-", "--json"]) == 0
    printed, output = capfdbinary.readouterr().out.split(b"\n", 1)
    assert json.loads(printed) == json.loads(output)


def test_a_failing_write_leaves_the_answer_on_stdout(capsys, monkeypatch, tmp_path):
    output = tmp_path / "answer.json"
    output.write_text("old")
    unreplaced(monkeypatch, errno.ENOSPC)
    assert cli.main([*ASK, str(output)]) == 2
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert f"jaxkv: error: --output={output}: No space left on device" in err
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_outputs_that_cannot_be_are_refused_before_the_model(
    unloadable, capsys, text, tmp_path, monkeypatch
):
    for name in ["", f"{tmp_path}", f"{tmp_path}/no/x.json", f"{text}/x.json"]:
        assert f"--output={name!r}"[:99] in refused(capsys, *ASK, name)
    # As root everything may be written.
    monkeypatch.setattr(outputs.os, "access", lambda path, how: False)
    for name in (f"{tmp_path}/new", str(text)):
        assert f"--output={name!r}" in refused(capsys, *ASK, name)


def test_what_is_read_is_not_overwritten(unloadable, capsys, text, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(text)
    for read in (("--prompt-file", str(text)), ("--prompt", "x", "--model", str(text))):
        for name in (text, link):
            assert "--output=" in refused(capsys, "generate", *read, "--output", str(name))
    assert text.read_text() == "Some text."


# --- Read --------------------------------------------------------------------------------------------------------


def test_texts_are_bounded_and_a_fifo_is_one(unloadable, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(outputs, "MOST_BYTES", 1 << 20)
    message = refused(capsys, "generate", "--prompt-file", "/dev/zero")
    assert "--prompt-file='/dev/zero': more than 1 MiB" in message
    assert "Is a directory" in refused(capsys, "generate", "--prompt-file", str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    threading.Thread(target=lambda: fifo.write_bytes(b"\xef\xbb\xbfWhy?\r\n"), daemon=True).start()
    assert outputs.read_text(str(fifo), "--prompt-file") == "Why?\n"


# --- `jaxkv filters` ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_filters_reads_its_texts_before_the_model(unloadable, capsys, text, tmp_path, content):
    bad = tmp_path / "bad.txt"
    if content is not None:
        bad.write_bytes(content)
    shown = refused(capsys, "filters", "--text-file", str(text), str(bad))
    assert f"--text-file={bad}" in shown.replace("'", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens=0"),
        (["-m", "0"], "-m=0"),
        (["--model", "elsewhere", "--save"], "--save="),
        (["--picture", "map.gif"], "--picture='map.gif'"),
        (["--picture", "nowhere/map.png"], "--picture='nowhere/map.png'"),
    ],
)
def test_filters_checks_its_options_before_the_model(unloadable, capsys, text, arguments, message):
    assert message in refused(capsys, "filters", "--text-file", str(text), *arguments)


def test_filters_prints_before_it_draws(capsys, monkeypatch, text, tmp_path):
    model = tiny.tiny(tiny.shape(layers=6, kv_heads=2, group=3, dim=8))
    monkeypatch.setattr(model, "text", words().text)
    cli_runs.loading(monkeypatch, model)
    found = FilterLayers((1,), 0.5, np.eye(6, dtype=np.float32))
    monkeypatch.setattr(analysing, "find_filter_layers", lambda *_, **__: found)
    picture = tmp_path / "map.png"
    given = ["filters", "--model", "x", "--text-file", str(text), "--picture", str(picture)]
    assert cli.main(given) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    unreplaced(monkeypatch, errno.ENOSPC)
    assert cli.main(given) == 2
    out, err = capsys.readouterr()
    assert out.startswith("filter layers of x: ") and "--picture=" in err
