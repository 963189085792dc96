"""Folders of Orbax': converting to them, and being stopped on the way."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from orbax_cases import MODELS, ROOT, SOURCE, assert_same
from test_checkpoints import write_gguf

import jaxkv
from jaxkv.checkpoints import convert, open_checkpoint, orbax_files


def with_words(writer):
    """A vocabulary in the metadata of a GGUF."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "Ġ", *(f"<{index}>" for index in range(6))])
    writer.add_token_types([1, 1, 1, 1, 3, 3, 3, 3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    writer.add_chat_template("{{ messages }}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama_gqa_sharded", "float32"), ("llama_bf16", "float32"), ("qwen2", "bfloat16")],
)
def test_a_converted_model_is_the_model(tmp_path, name, dtype):
    folder = convert(MODELS / name, tmp_path / "model")
    assert_same(jaxkv.load(folder, dtype), jaxkv.load(MODELS / name, dtype))


def test_a_converted_gguf_is_the_model(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", edit=with_words)
    folder = convert(source, tmp_path / "model")
    assert_same(jaxkv.load(folder), jaxkv.load(source))
    mine, theirs = open_checkpoint(folder), open_checkpoint(source)
    assert mine.tokenizer_spec == theirs.tokenizer_spec is not None
    assert jaxkv.load(folder).text.encode("ab a", bos=False) == jaxkv.load(source).text.encode(
        "ab a", bos=False
    )
    # And once more, from Orbax to Orbax.
    again = convert(folder, tmp_path / "again", dtype="bfloat16")
    assert open_checkpoint(again).tokenizer_spec == theirs.tokenizer_spec
    assert_same(jaxkv.load(again, "bfloat16"), jaxkv.load(source, "bfloat16"))


def test_a_dtype_is_written(tmp_path):
    folder = convert(SOURCE, tmp_path / "model", dtype="bfloat16")
    assert {tensor.dtype.name for tensor in open_checkpoint(folder).stored.values()} == {"bfloat16"}
    assert_same(jaxkv.load(folder, "bfloat16"), jaxkv.load(SOURCE, "bfloat16"))


def test_what_lies_beside_the_weights_comes_along(tmp_path):
    source = shutil.copytree(SOURCE, tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    folder = convert(source, tmp_path / "model")
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "jaxkv.json",
        "tensors",
        "tokenizer.json",
    }
    opened = open_checkpoint(folder)
    assert opened.config["eos_token_id"] == [2, 7] and opened.tokenizer_spec == folder


def test_arrays_without_elements_are_noted_only(tmp_path):
    arrays = {
        "none": np.zeros((0, 4), np.int32),
        "one": np.asarray(3, np.float32),
        "some": np.arange(5) > 2,
    }
    orbax_files.write_array_folder(tmp_path / "folder", orbax_files.CACHE, {"said": 1}, arrays)
    manifest = orbax_files.read_manifest(tmp_path / "folder", orbax_files.CACHE)
    for name, entry in orbax_files.parse_array_entries(
        tmp_path / "folder", manifest["arrays"], orbax_files.CACHE
    ).items():
        read = orbax_files.read_array(tmp_path / "folder" / orbax_files.ARRAYS, entry)
        assert read.dtype == arrays[name].dtype and read.shape == arrays[name].shape
        np.testing.assert_array_equal(read, arrays[name])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and manifest["said"] == 1


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    """TensorStore raises ValueError there; no file may have more than 4,000 bytes."""
    code = (
        "import resource, signal, sys\n"
        "from jaxkv.checkpoints import __main__\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "sys.exit(__main__.main(['convert', *sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-c", code, str(SOURCE), str(tmp_path / "model")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 2 and "File too large" in out.stderr, out.stderr
    assert not list(tmp_path.iterdir())
