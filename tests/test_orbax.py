"""Folders of Orbax': converting to them, and being stopped on the way."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from orbax_cases import MODELS, ROOT, SOURCE, assert_same
from test_checkpoints import write_gguf

import jaxkv
from jaxkv.checkpoints import convert, converting, open_checkpoint, orbax_files


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
    "name", ["llama_gqa", "llama_gqa_sharded", "llama_bias", "llama_bf16", "qwen2", "qwen3"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_model_is_the_model(tmp_path, name, dtype):
    folder = convert(MODELS / name, tmp_path / "model")
    assert_same(jaxkv.load(folder, dtype), jaxkv.load(MODELS / name, dtype))


def test_a_converted_gguf_is_the_model(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", edit=with_words)
    folder = convert(source, tmp_path / "model")
    assert_same(jaxkv.load(folder), jaxkv.load(source))
    mine, theirs = open_checkpoint(folder), open_checkpoint(source)
    assert mine.config == theirs.config and mine.tokenizer_spec == theirs.tokenizer_spec is not None
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
    orbax_files.write_folder(tmp_path / "folder", orbax_files.CACHE, {"said": 1}, arrays)
    manifest = orbax_files.read_manifest(tmp_path / "folder", orbax_files.CACHE)
    for name, entry in orbax_files.described(
        tmp_path / "folder", manifest["arrays"], orbax_files.CACHE
    ).items():
        read = orbax_files.read_array(tmp_path / "folder" / orbax_files.ARRAYS, entry)
        assert read.dtype == arrays[name].dtype and read.shape == arrays[name].shape
        np.testing.assert_array_equal(read, arrays[name])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and manifest["said"] == 1


def assert_nothing_loads(target):
    with pytest.raises(ValueError, match="its conversion has not come to its end: run it again"):
        jaxkv.load(target)
    with pytest.raises(ValueError, match=r"partial: .*it has not been written to its end"):
        jaxkv.load(f"{target}.partial")


def test_a_killed_conversion_leaves_nothing_that_loads_and_goes_on(tmp_path):
    target, rng = tmp_path / "model", random.Random(14)
    part = Path(f"{target}.partial")
    command = [sys.executable, "-m", "checkpoints", "convert", str(SOURCE), str(target)]
    total, written = len(open_checkpoint(SOURCE).names), {}
    for most in sorted(rng.sample(range(1, total - 3), 3)):
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        done = part / "done.jsonl"
        while process.poll() is None and not (
            done.is_file() and done.read_bytes().count(b"}}") >= most
        ):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))  # somewhere between two tensors, or within one
        assert process.poll() is None, process.communicate()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stderr.close()
        assert not target.exists()
        assert_nothing_loads(target)
        noted = [line for line in done.read_text().splitlines() if line.endswith("}}")]
        for line in noted[:most]:
            (name,) = json.loads(line)
            inode = (part / "tensors" / name).stat().st_ino
            assert written.setdefault(name, inode) == inode, "written twice"
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.strip() == str(target), out.stderr
    for name, inode in written.items():
        assert (target / "tensors" / name).stat().st_ino == inode, "written twice"
    assert not part.exists() and not {"done.jsonl", "conversion.json"} & {
        path.name for path in target.iterdir()
    }
    assert_same(jaxkv.load(target), jaxkv.load(SOURCE))


def stop_after(monkeypatch, count, target, *, of="_write", **options):
    """Interrupts a conversion at its n-th call of one of its steps, before the step."""
    calls, step = [], getattr(converting, of)

    def interrupted(*args, **given):
        calls.append(args)
        if len(calls) > count:
            raise KeyboardInterrupt
        return step(*args, **given)

    with monkeypatch.context() as patched:
        patched.setattr(converting, of, interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(SOURCE, target, **options)


def test_what_is_found_is_checked(tmp_path, monkeypatch):
    target = tmp_path / "model"
    stop_after(monkeypatch, 5, target)
    part, written = Path(f"{target}.partial"), []
    names = list(open_checkpoint(SOURCE).names)
    done = [json.loads(line) for line in (part / "done.jsonl").read_text().splitlines() if line]
    swapped, torn, gone, *whole = [next(iter(each)) for each in done]
    # Another model's tensor of this name, half a file, no file; a line cut off, and what a killed writer leaves.
    entry = orbax_files.described(part, dict(done[0]), orbax_files.WEIGHTS)[swapped]
    shutil.rmtree(part / "tensors" / swapped)
    orbax_files.write_arrays(
        part / "tensors" / swapped, {swapped: np.ones(entry.shape, entry.dtype)}
    )
    data = max((part / "tensors" / torn).rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    shutil.rmtree(part / "tensors" / gone)
    with (part / "done.jsonl").open("a") as file:
        file.write('{"model.layers')
    (part / "tensors" / f"{names[-1]}.orbax-checkpoint-tmp").mkdir()
    write = converting._write
    monkeypatch.setattr(
        converting,
        "_write",
        lambda part, name, array: written.append(name) or write(part, name, array),
    )
    convert(SOURCE, target)
    assert {swapped, torn, gone} <= set(written) and not set(whole) & set(written)
    assert len(written) == len(names) - len(whole)
    assert {path.name for path in (target / "tensors").iterdir()} == set(names)
    assert_same(jaxkv.load(target), jaxkv.load(SOURCE))


@pytest.mark.parametrize("step", ["_begin", "_write_beside", "write_json", "os.rename"])
def test_stopped_between_steps(tmp_path, monkeypatch, step):
    target = tmp_path / "model"
    if step == "os.rename":  # everything is written, and only its name is wrong
        with monkeypatch.context() as patched:
            patched.setattr(
                converting.os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                convert(SOURCE, target)
    else:
        stop_after(monkeypatch, 0, target, of=step)
    if step != "_begin":
        assert_nothing_loads(target)
        # What `write_whole` leaves where it is killed.
        for name in ("jaxkv.json", "config.json", "conversion.json"):
            (Path(f"{target}.partial") / f".{name}.0123456789abcdef.tmp").write_text("{")
    convert(SOURCE, target)
    assert {path.name for path in target.iterdir()} == {"config.json", "jaxkv.json", "tensors"}
    assert_same(jaxkv.load(target), jaxkv.load(SOURCE))


def test_a_full_disk_is_named_and_what_was_written_is_kept(tmp_path):
    """TensorStore raises ValueError there. From the second layer on, no file may have more than 4,000 bytes."""
    target = tmp_path / "model"
    part = Path(f"{target}.partial")
    code = (
        "import resource, signal, sys\n"
        "from jaxkv.checkpoints import __main__, converting\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "write = converting._write\n"
        "def limited(part, name, array):\n"
        "    if name.startswith('model.layers.1.'):\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "    return write(part, name, array)\n"
        "converting._write = limited\n"
        "sys.exit(__main__.main(['convert', *sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-c", code, str(SOURCE), str(target)]
    out = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    remedy = rf"error: target={part}: it cannot be written \(.*File too large.*\): make room there and run it again"
    assert out.returncode == 2 and re.search(remedy, out.stderr), out.stderr
    done = [
        next(iter(json.loads(line)))
        for line in (part / "done.jsonl").read_text().splitlines()
        if line
    ]
    assert done and {path.name for path in (part / "tensors").iterdir()} == set(done)
    convert(SOURCE, target)
    assert_same(jaxkv.load(target), jaxkv.load(SOURCE))


def test_an_unfinished_conversion_of_something_else(tmp_path, monkeypatch):
    target = tmp_path / "model"
    stop_after(monkeypatch, 2, target)
    remedy = r"target=.*model\.partial: an unfinished conversion of something else: remove it"
    for source, options in [(SOURCE, {"dtype": "bfloat16"}), (MODELS / "llama_mha", {})]:
        with pytest.raises(ValueError, match=remedy):
            convert(source, target, **options)
    (target.with_name("model.partial") / "conversion.json").write_text("{")
    with pytest.raises(ValueError, match=remedy):
        convert(SOURCE, target)
    other = tmp_path / "other.partial"
    (other / "tensors" / "mine").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"target=.*other\.partial: an unfinished conversion"):
        convert(SOURCE, tmp_path / "other")
