"""Files of the command line: what it reads is bounded, what it writes is checked first and never lost."""

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

from jaxkv import cli
from jaxkv.analysis import FilterLayers
from jaxkv.cli import files, filters, generating

ASK = ("generate", "--prompt", "x", "--output")


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    cli_runs.answering(monkeypatch)


@pytest.fixture
def unloadable(monkeypatch):
    for module in (generating, filters):
        monkeypatch.setattr(module, "enable_compilation_cache", lambda: None)
        monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded a model"))


def text_in(path: Path) -> str:
    return json.loads(path.read_text("utf-8"))["text"]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- Written -----------------------------------------------------------------------------------------------------


def test_links_are_followed_and_modes_kept(tmp_path):
    real, link, dangling = (
        tmp_path / "real.json",
        tmp_path / "link.json",
        tmp_path / "dangling.json",
    )
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    dangling.symlink_to("new.json")
    for path in (link, dangling):
        assert cli.main([*ASK, str(path)]) == 0
        assert path.is_symlink() and text_in(path) == ANSWER
    assert mode(real) == 0o600
    assert mode(tmp_path / "new.json") == 0o666 & ~umask()
    assert len(list(tmp_path.iterdir())) == 4


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_owners_are_kept_where_that_is_allowed(monkeypatch, tmp_path):
    output = tmp_path / "answer.json"
    output.write_text("old")
    state = output.stat()
    changed: list[tuple[int, int]] = []

    def chown(path, owner, group):
        changed.append((owner, group))
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(files.os, "chown", chown)
    assert cli.main([*ASK, str(output)]) == 0
    assert changed == [(-1, state.st_gid), (state.st_uid, -1)]
    assert text_in(output) == ANSWER


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


def test_a_fifo_is_not_opened_before_the_answer(unloadable, capsys, tmp_path):
    """It has no reader: opening it would wait for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "give --prompt TEXT" in refused(
        capsys, "generate", "--prompt", "", "--output", str(fifo)
    )


def test_devices_are_never_replaced(monkeypatch, tmp_path):
    """With a stand-in for /dev/null: a terminal of our own, through a link as /dev/stdout is one."""
    ours, theirs = os.openpty()
    link = tmp_path / "device"
    link.symlink_to(os.ttyname(theirs))
    monkeypatch.setattr(files.os, "replace", lambda *_: pytest.fail("replaced a device"))
    try:
        target = files.Target(flag="--output", name=str(link))
        target.check({"--prompt-file": str(link)})  # a terminal is no file that is lost
        target.write(b"written")
        assert os.read(ours, 99) == b"written"
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_file_that_stdout_writes_to_gets_both(tmp_path):
    both = tmp_path / "both.txt"
    done = cli_runs.shell(f">{both}", "generate", "--prompt", "x", "--output", str(both))
    assert done.returncode == 0
    text, _, record = both.read_text("utf-8").partition("\n")
    assert (text, json.loads(record)["text"]) == (ANSWER, ANSWER)


@pytest.mark.parametrize("json_too", [False, True])
def test_a_failing_write_leaves_the_answer_on_stdout(capsys, monkeypatch, tmp_path, json_too):
    output = tmp_path / "answer.json"
    output.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    assert cli.main([*ASK, str(output), *(["--json"] if json_too else [])]) == 2
    out, err = capsys.readouterr()
    assert (json.loads(out)["text"] if json_too else out.rstrip("\n")) == ANSWER
    assert (
        f"jaxkv: error: --output={output}: No space left on device; the answer is on stdout" in err
    )
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_a_file_that_cannot_be_replaced_is_written_in_place(monkeypatch, tmp_path):
    """A file that is a mount of its own, as containers make them."""
    output = tmp_path / "answer.json"
    output.write_text("old" * 999)

    def busy(*_):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(files.os, "replace", busy)
    assert cli.main([*ASK, str(output)]) == 0
    assert text_in(output) == ANSWER
    assert list(tmp_path.iterdir()) == [output]


def test_long_names_and_odd_model_names_are_written(tmp_path):
    output = tmp_path / ("n" * 255)
    assert cli.main([*ASK, str(output), "--model", "m\udcff"]) == 0
    assert json.loads(output.read_text("utf-8"))["model"] == "m\udcff"


def test_outputs_that_cannot_be_are_refused_before_the_model(
    unloadable, capsys, tmp_path, monkeypatch
):
    file, closed = tmp_path / "file", tmp_path / "closed"
    file.write_text("old")
    closed.mkdir()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name, message in {
        "": "give a file",
        f"{tmp_path}": "it is a folder; name a file in it",
        f"{tmp_path}/new/": "it is a folder; name a file in it",
        f"{tmp_path}/no/x.json": f"there is no folder {tmp_path}/no; make it first",
        f"{file}/x.json": "Not a directory",
        f"{tmp_path}/{'n' * 256}": "File name too long",
        f"{loop}": "Too many levels of symbolic links",
    }.items():
        assert message in refused(capsys, *ASK, name)
    # As root everything may be written.
    monkeypatch.setattr(files.os, "access", lambda path, how: False)
    assert f"the folder {closed} cannot be written to" in refused(capsys, *ASK, str(closed / "x"))
    assert "the file cannot be written to" in refused(capsys, *ASK, str(file))


def test_what_is_read_is_not_overwritten(unloadable, capsys, tmp_path):
    prompt, link, hard = tmp_path / "prompt.txt", tmp_path / "link", tmp_path / "hard"
    prompt.write_text("What?")
    link.symlink_to(prompt)
    os.link(prompt, hard)
    for name in (prompt, link, hard):
        message = refused(capsys, "generate", "--prompt-file", str(prompt), "--output", str(name))
        assert f"it is the file of --prompt-file={prompt}; give another" in message
    message = refused(
        capsys, "generate", "--prompt", "x", "--model", str(prompt), "--output", str(link)
    )
    assert f"it is the file of --model={prompt}" in message
    assert prompt.read_text() == "What?"


# --- Read --------------------------------------------------------------------------------------------------------


def test_marks_at_the_start_are_dropped(monkeypatch, tmp_path):
    calls = cli_runs.answering(monkeypatch)
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf Text\r\nand more\n")
    assert cli.main(["generate", "--prompt-file", str(file)]) == 0
    assert calls[0]["prompt"] == "Text\nand more"


def test_texts_are_bounded_and_a_fifo_is_one(unloadable, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    message = refused(capsys, "generate", "--prompt-file", "/dev/zero")
    assert "--prompt-file=/dev/zero: more than 1 MiB; give a shorter text" in message
    assert "Is a directory" in refused(capsys, "generate", "--prompt-file", str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    threading.Thread(target=lambda: fifo.write_text("What?"), daemon=True).start()
    assert files.read_text(str(fifo), "--prompt-file") == "What?"


# --- `jaxkv filters` ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b" \n", "it is empty"),
        (b"\xff", "not UTF-8 text"),
        (b"\xef\xbb\xbf", "it is empty"),
    ],
)
def test_filters_reads_its_texts_before_the_model(unloadable, capsys, tmp_path, content, message):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("Some text.")
    if content is not None:
        bad.write_bytes(content)
    shown = refused(capsys, "filters", "--text-file", str(good), str(bad))
    assert message in shown and str(bad) in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "argument --tokens: '0': give at least 1"),
        (["-m", "0"], "argument -m: '0': give at least 1"),
        (
            ["-m", "5", "--most-whole", "4"],
            "m=5: filter layers read everything, and at most 4 layers may",
        ),
        (["--model", "elsewhere", "--save"], "only named models have a manifest"),
        (["--picture", "nowhere/map.png"], "--picture='nowhere/map.png': there is no folder"),
    ],
)
def test_filters_checks_its_options_before_the_model(
    unloadable, capsys, tmp_path, arguments, message
):
    text = tmp_path / "text.txt"
    text.write_text("Some text.")
    assert message in refused(capsys, "filters", "--text-file", str(text), *arguments)


def test_filters_checks_where_it_saves_and_draws(unloadable, capsys, monkeypatch, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some text.")
    asked = ("filters", "--text-file", str(text))
    assert f"it is the file of --text-file[0]={text}" in refused(
        capsys, *asked, "--picture", str(text)
    )
    monkeypatch.setattr(filters.os, "access", lambda *_: False)
    assert "cannot be written to: leave it out" in refused(capsys, *asked, "--save")


class Coder:
    """A tokenizer of bytes."""

    def encode(self, text: str, *, bos: bool) -> list[int]:
        return list(text.encode())


def test_filters_prints_before_it_draws(capsys, monkeypatch, tmp_path):
    model = tiny.tiny(tiny.shape(layers=6, kv_heads=2, group=3, dim=8))
    monkeypatch.setattr(filters, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(model, "text", Coder(), raising=False)
    monkeypatch.setattr(filters, "load", lambda name: model)
    found = FilterLayers((1,), 0.5, np.eye(6, dtype=np.float32))
    monkeypatch.setattr(filters, "filter_layers", lambda *_, **__: found)
    monkeypatch.setattr(
        filters, "_picture", lambda options: files.Target(flag="--picture", name=options.picture)
    )
    text, picture = tmp_path / "text.txt", tmp_path / "map.png"
    text.write_text("Some text.")
    asked = [
        "filters",
        "--model",
        "x",
        "--text-file",
        str(text),
        "-m",
        "1",
        "--most-whole",
        "3",
        "--picture",
    ]
    assert cli.main([*asked, str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert cli.main([*asked, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("filter layers of x: ") and "it is a folder" in err
    message = refused(capsys, *asked[:5], "-m", "4")
    assert (
        "m=4: filter layers read everything, and 2 of 6 layers may: give fewer, or a larger --most-whole"
        in message
    )
