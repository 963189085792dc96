"""Folders of Orbax' that are not whole, or others', and targets that are taken: rejected by name."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from orbax_cases import MODELS, NORM, ROOT, SOURCE, assert_same

import jaxkv
from jaxkv.checkpoints import convert, orbax_files
from jaxkv.checkpoints.__main__ import main
from jaxkv.checkpoints.json_files import write_json


@pytest.fixture
def converted(tmp_path):
    return convert(SOURCE, tmp_path / "whole")


def test_targets_that_are_taken(tmp_path, converted):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = (converted / "jaxkv.json").read_bytes()
    for target in (converted, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(ValueError, match="target=.*it exists already"):
            convert(SOURCE, target)
    assert (converted / "jaxkv.json").read_bytes() == before and (
        tmp_path / "file"
    ).read_text() == "mine"
    with pytest.raises(ValueError, match="the folder cannot be created"):
        convert(SOURCE, tmp_path / "file" / "model")
    with pytest.raises(ValueError, match=r"target=.*\.partial is reserved for incomplete folders"):
        convert(SOURCE, tmp_path / "model.partial")
    with pytest.raises(
        ValueError, match="dtype='int8': not supported: use one of float32, bfloat16, float16"
    ):
        convert(SOURCE, tmp_path / "model", dtype="int8")
    for target in (".", tmp_path / "new" / ".."):
        with pytest.raises(ValueError, match="target=.*it exists already"):
            convert(SOURCE, target)
    assert not (tmp_path / "new").exists()


def test_new_files_are_as_readable_as_any_of_the_users(tmp_path):
    before = os.umask(0o027)
    try:
        folder = convert(SOURCE, tmp_path / "model")
    finally:
        os.umask(before)
    for name in ("config.json", "jaxkv.json"):
        assert (folder / name).stat().st_mode & 0o777 == 0o640
    (folder / "config.json").chmod(0o604)
    write_json(folder / "config.json", {})
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o604
    assert not list(folder.glob(".*"))


def edit_manifest(folder, **said):
    path = folder / "jaxkv.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def test_folders_that_are_not_whole(tmp_path, converted):
    tensors = json.loads((converted / "jaxkv.json").read_text())["tensors"]
    place = converted / "tensors" / NORM
    shutil.move(place, tmp_path / "aside")
    with pytest.raises(ValueError, match=f"tensor='{NORM}': missing"):
        jaxkv.load(converted)
    place.mkdir()
    with pytest.raises(ValueError, match=f"tensor='{NORM}': it cannot be read"):
        jaxkv.load(converted)
    place.rmdir()
    orbax_files.write_arrays(place, {NORM: np.ones(tensors[NORM]["shape"], np.float32)})
    with pytest.raises(ValueError, match=f"tensor='{NORM}': damaged"):
        jaxkv.load(converted)
    shutil.rmtree(place)
    orbax_files.write_arrays(place, {NORM: np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=rf"tensor='{NORM}': float32\[3\] .*float32\[48\]"):
        jaxkv.load(converted)
    shutil.rmtree(place)
    shutil.move(tmp_path / "aside", place)
    assert_same(jaxkv.load(converted), jaxkv.load(SOURCE))
    edit_manifest(converted, tensors={name: each for name, each in tensors.items() if name != NORM})
    with pytest.raises(ValueError, match=rf"weights=\['{NORM}'\]"):
        jaxkv.load(converted)


@pytest.mark.parametrize(
    "said, name",
    [
        ({"version": 2}, "version=2"),
        ({"format": "other"}, "format='other'"),
        ({"tensors": {"../a": {"shape": [], "dtype": "float32", "crc32": 0}}}, "tensor='../a'"),
        ({"tensors": {"a": {"shape": [1], "dtype": "nothing", "crc32": 0}}}, "tensors.a="),
        ({"filter_layers": [0.5]}, "filter_layers="),
    ],
)
def test_manifests_of_another_kind(converted, said, name):
    edit_manifest(converted, **said)
    with pytest.raises(ValueError, match=name):
        jaxkv.load(converted)


def test_folders_of_others(tmp_path, converted):
    orbax_files.write_arrays(tmp_path / "theirs", {"a": np.ones(3)})
    with pytest.raises(ValueError, match=r"theirs: an Orbax folder without jaxkv\.json"):
        jaxkv.load(tmp_path / "theirs")
    # The config of another model beside the weights of this one.
    shutil.copyfile(MODELS / "qwen3" / "config.json", converted / "config.json")
    with pytest.raises(ValueError, match="it may be another model's|belong to another model"):
        jaxkv.load(converted)


@pytest.mark.parametrize("said", [{"tokens": ["a"], "secret": 1}, {}])
def test_vocabularies_of_another_kind(converted, said):
    (converted / "gguf_tokenizer.json").write_text(json.dumps({"model": "gpt2", **said}))
    with pytest.raises(ValueError, match=r"gguf_tokenizer\.json"):
        jaxkv.load(converted)


def test_the_command_line(tmp_path, capsys):
    assert main(["convert", str(SOURCE), str(tmp_path / "model"), "--dtype", "float16"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert (
        jaxkv.load(tmp_path / "model", "float16").fingerprint
        == jaxkv.load(SOURCE, "float16").fingerprint
    )
    assert main(["convert", str(SOURCE), str(tmp_path / "model")]) == 2
    assert "jaxkv.checkpoints: error: target=" in capsys.readouterr().err
    out = subprocess.run(
        [sys.executable, "-m", "jaxkv.checkpoints", "convert", "no/such/model.gguf", "x"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 2 and "unknown file, folder or model" in out.stderr and not out.stdout
