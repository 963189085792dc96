"""Where exports go: nothing that lies there is lost, nothing is left half-written; and the programs they name."""

import errno
import json
import os

import jax.numpy as jnp
import pytest
import tiny

import jaxkv
from jaxkv.exporting import writing

OF = {"lengths": 16, "question": 0, "new": 4}


def model():
    return tiny.tiny(tiny.shape(layers=1, kv_heads=1, group=1, dim=8))


def seen(folder):
    """All that is in a folder, links as what they are."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.fixture
def no_programs(monkeypatch):
    """What is rejected is rejected before minutes have gone into programs."""
    monkeypatch.setattr(
        writing, "_write_programs", lambda *_: pytest.fail("programs are made already")
    )


def full(out):
    out.mkdir()
    (out / "mine.txt").write_text("mine")


TAKEN = {
    "a file": lambda out: out.write_text("mine"),
    "somebody's files": full,
    "a link to nothing": lambda out: out.symlink_to("nowhere"),
    "a link to itself": lambda out: out.symlink_to(out),
}


@pytest.mark.parametrize("taken", TAKEN)
def test_what_lies_there_stays(tmp_path, no_programs, taken):
    TAKEN[taken](tmp_path / "out")
    before = seen(tmp_path)
    with pytest.raises(ValueError, match="directory=.*/out: it exists already"):
        jaxkv.export(model(), tmp_path / "out", **OF)
    assert seen(tmp_path) == before


@pytest.mark.parametrize("taken", ["a file", "somebody's files", "a link to nothing"])
def test_what_comes_to_lie_there_meanwhile_stays(tmp_path, monkeypatch, taken):
    made = []
    monkeypatch.setattr(
        writing, "_write_programs", lambda *_: made.append(TAKEN[taken](tmp_path / "out"))
    )
    monkeypatch.setattr(
        writing,
        "_write_remaining_files",
        lambda part, *_: (part / "manifest.json").write_text("{}"),
    )
    with pytest.raises(ValueError, match="directory=.*/out: it exists already"):
        jaxkv.export(model(), tmp_path / "out", **OF)
    assert made and set(seen(tmp_path)) <= {"out", "out/mine.txt"}


@pytest.mark.parametrize("place", ["file/out", "nowhere/out", "deep/" + "n" * 256])
def test_where_no_folder_can_be(tmp_path, no_programs, place):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to("never")
    before = seen(tmp_path)
    with pytest.raises(ValueError, match="directory="):
        jaxkv.export(model(), tmp_path / place, **OF)
    assert seen(tmp_path) == before


def test_a_folder_that_is_read_only(tmp_path, monkeypatch, no_programs):
    def denied(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    given = model()
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):  # root writes there all the same
        monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(ValueError, match="directory=.*Permission denied"):
        jaxkv.export(given, tmp_path / "deep" / "out", **OF)
    assert not seen(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch, error):
    """Neither the folders above it."""

    def write(part, *_):
        (part / "half").write_text("half")
        raise error

    monkeypatch.setattr(writing, "_write_remaining_files", write)
    monkeypatch.setattr(writing, "_write_programs", lambda *_: None)
    with pytest.raises(error):
        jaxkv.export(model(), tmp_path / "above" / "it" / "out", **OF)
    assert not seen(tmp_path)


def test_a_name_as_long_as_names_can_be(tmp_path):
    assert (jaxkv.export(model(), tmp_path / "a" / ("n" * 255), **OF) / "manifest.json").is_file()


class Last:
    """Somebody's own: the last token of all."""

    def __call__(self, logits, keys):
        return jnp.full(len(logits), logits.shape[-1] - 1, jnp.int32)


class Beyond(Last):
    """The one behind it."""

    def __call__(self, logits, keys):
        return super().__call__(logits, keys) + 1


def test_samplers_of_users(tmp_path):
    from jaxkv.exporting import runtime

    made = runtime.Model(jaxkv.export(model(), tmp_path / "out", sampling=(Last(), Beyond()), **OF))
    with pytest.raises(ValueError, match=r"sample.Beyond: sampled an id outside of \[0, 64\)"):
        made.generate([[1, 2]], 3, sampling="Beyond")
    assert made.generate([[1, 2]], 3, sampling="Last")[0] == [[63, 63, 63]]
    assert "sample.Last" in {
        each["kind"]
        for each in json.loads((tmp_path / "out" / "manifest.json").read_text())["programs"]
    }
