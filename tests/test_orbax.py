"""Folders of Orbax': converting to them, being stopped on the way, loading from them, whole or in slices."""

import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from test_checkpoints import write_gguf

import jaxkv
from jaxkv.checkpoints import StoredTensor, convert, converting, open_checkpoint, orbax_files
from jaxkv.checkpoints.__main__ import main
from jaxkv.loading import fill
from jaxkv.models.decoder import Decoder
from jaxkv.sharding import model_mesh, spec_of

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "tests" / "golden" / "models"
SOURCE = MODELS / "llama_gqa"
NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


def leaves(model):
    """Every parameter by its place."""
    flat = nnx.to_flat_state(nnx.state(model.decoder, nnx.Param))
    return {path: np.asarray(parameter.get_value()) for path, parameter in flat}


def assert_same(model, other):
    assert model.fingerprint == other.fingerprint and model.config == other.config
    mine, theirs = leaves(model), leaves(other)
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        assert value.dtype == theirs[path].dtype
        np.testing.assert_array_equal(value, theirs[path], err_msg=str(path))


@pytest.fixture
def converted(tmp_path):
    return convert(SOURCE, tmp_path / "whole")


def with_words(writer):
    """A vocabulary in the metadata of a GGUF."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "Ġ", *(f"<{index}>" for index in range(6))])
    writer.add_token_types([1, 1, 1, 1, 3, 3, 3, 3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    writer.add_chat_template("{{ messages }}")


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "llama_gqa_sharded", "llama_bias", "llama_bf16", "qwen2", "qwen3"])
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
    assert jaxkv.load(folder).text.encode("ab a", bos=False) == jaxkv.load(source).text.encode("ab a", bos=False)
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
    arrays = {"none": np.zeros((0, 4), np.int32), "one": np.asarray(3, np.float32), "some": np.arange(5) > 2}
    orbax_files.write_folder(tmp_path / "folder", orbax_files.CACHE, {"said": 1}, arrays)
    manifest = orbax_files.read_manifest(tmp_path / "folder", orbax_files.CACHE)
    for name, entry in orbax_files.described(tmp_path / "folder", manifest["arrays"]).items():
        read = orbax_files.read_array(tmp_path / "folder" / orbax_files.ARRAYS, entry)
        assert read.dtype == arrays[name].dtype and read.shape == arrays[name].shape
        np.testing.assert_array_equal(read, arrays[name])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and manifest["said"] == 1


# --- being stopped --------------------------------------------------------------------------------------------------


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
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        done = part / "done.jsonl"
        while process.poll() is None and not (done.is_file() and done.read_bytes().count(b"}}") >= most):
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
    assert not part.exists() and not {"done.jsonl", "conversion.json"} & {path.name for path in target.iterdir()}
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
    entry = orbax_files.described(part, dict(done[0]))[swapped]
    shutil.rmtree(part / "tensors" / swapped)
    orbax_files.write_arrays(part / "tensors" / swapped, {swapped: np.ones(entry.shape, entry.dtype)})
    data = max((part / "tensors" / torn).rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    shutil.rmtree(part / "tensors" / gone)
    with (part / "done.jsonl").open("a") as file:
        file.write('{"model.layers')
    (part / "tensors" / f"{names[-1]}.orbax-checkpoint-tmp").mkdir()
    write = converting._write
    monkeypatch.setattr(
        converting, "_write", lambda part, name, array: written.append(name) or write(part, name, array)
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
            patched.setattr(converting.os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                convert(SOURCE, target)
    else:
        stop_after(monkeypatch, 0, target, of=step)
    if step != "_begin":
        assert_nothing_loads(target)
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


# --- what is refused ------------------------------------------------------------------------------------------------


def test_targets_that_are_taken(tmp_path, converted):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = (converted / "jaxkv.json").read_bytes()
    for target in (converted, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(ValueError, match="target=.*something is there already: choose another folder"):
            convert(SOURCE, target)
    assert (converted / "jaxkv.json").read_bytes() == before and (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="no folder can be made there"):
        convert(SOURCE, tmp_path / "file" / "model")
    with pytest.raises(ValueError, match=r"target=.*\.partial is for unfinished ones"):
        convert(SOURCE, tmp_path / "model.partial")
    with pytest.raises(ValueError, match="dtype='int8': give one of float32, bfloat16, float16"):
        convert(SOURCE, tmp_path / "model", dtype="int8")


def edit_manifest(folder, **said):
    path = folder / "jaxkv.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def test_folders_that_are_not_whole(tmp_path, converted):
    tensors = json.loads((converted / "jaxkv.json").read_text())["tensors"]
    place = converted / "tensors" / NORM
    shutil.move(place, tmp_path / "aside")
    with pytest.raises(ValueError, match=rf"tensor='{NORM}': missing from .*whole; convert the checkpoint again"):
        jaxkv.load(converted)
    place.write_text("a file in place of a folder")
    with pytest.raises(ValueError, match=rf"tensor='{NORM}': missing"):
        jaxkv.load(converted)
    place.unlink()
    place.mkdir()
    with pytest.raises(ValueError, match=rf"tensor='{NORM}': it cannot be read from .*\(NOT_FOUND"):
        jaxkv.load(converted)
    place.rmdir()
    orbax_files.write_arrays(place, {NORM: np.ones(tensors[NORM]["shape"], np.float32)})
    with pytest.raises(ValueError, match=rf"tensor='{NORM}': damaged, or another's"):
        jaxkv.load(converted)
    shutil.rmtree(place)
    orbax_files.write_arrays(place, {NORM: np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=rf"tensor='{NORM}': float32\[3\] in .*manifest says float32\[48\]"):
        jaxkv.load(converted)
    shutil.rmtree(place)
    shutil.move(tmp_path / "aside", place)
    assert_same(jaxkv.load(converted), jaxkv.load(SOURCE))
    edit_manifest(converted, tensors={name: each for name, each in tensors.items() if name != NORM})
    with pytest.raises(ValueError, match=rf"weights=\['{NORM}'\]: the checkpoint lacks these tensors"):
        jaxkv.load(converted)


@pytest.mark.parametrize(
    "said, message",
    [
        ({"version": 2}, "version=2: this jaxkv reads version 1 of jaxkv weights"),
        ({"format": "other"}, "format='other': .*is no folder of jaxkv weights"),
        ({"format": "jaxkv cache"}, "read a saved cache with jaxkv.load_cache"),
        ({"tensors": {}}, "tensors={}: none in"),
        ({"tensors": {"../a": {"shape": [], "dtype": "float32", "crc32": 0}}}, r"tensor='\.\./a': letters, digits"),
        ({"tensors": {"a": {"shape": [-1], "dtype": "float32", "crc32": 0}}}, "shape, dtype and crc32 are expected"),
        ({"tensors": {"a": {"shape": [1], "dtype": "nothing", "crc32": 0}}}, "shape, dtype and crc32 are expected"),
        ({"filter_layers": [0.5]}, r"filter_layers=\[0\.5\]: whole numbers are expected"),
    ],
)
def test_manifests_of_another_kind(converted, said, message):
    edit_manifest(converted, **said)
    with pytest.raises(ValueError, match=message):
        jaxkv.load(converted)


def test_folders_of_others(tmp_path, converted):
    orbax_files.write_arrays(tmp_path / "theirs", {"a": np.ones(3)})
    with pytest.raises(ValueError, match=r"theirs: a folder of Orbax' without jaxkv\.json"):
        jaxkv.load(tmp_path / "theirs")
    # The config of another model beside the weights of this one.
    shutil.copyfile(MODELS / "qwen3" / "config.json", converted / "config.json")
    with pytest.raises(ValueError, match="it may be another model's|belong to another model"):
        jaxkv.load(converted)


@pytest.mark.parametrize("said", [{"tokens": [1]}, {"tokens": ["a"], "eos": 5}, {"tokens": ["a"], "secret": 1}, {}])
def test_vocabularies_of_another_kind(converted, said):
    (converted / "gguf_tokenizer.json").write_text(json.dumps({"model": "gpt2", **said}))
    with pytest.raises(ValueError, match=r"gguf_tokenizer\.json: .* are not a vocabulary's"):
        jaxkv.load(converted)


def test_the_command_line(tmp_path, capsys):
    assert main(["convert", str(SOURCE), str(tmp_path / "model"), "--dtype", "float16"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert jaxkv.load(tmp_path / "model", "float16").fingerprint == jaxkv.load(SOURCE, "float16").fingerprint
    assert main(["convert", str(SOURCE), str(tmp_path / "model")]) == 2
    assert "jaxkv.checkpoints: error: target=" in capsys.readouterr().err
    out = subprocess.run(
        [sys.executable, "-m", "jaxkv.checkpoints", "convert", "no/such/model.gguf", "x"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 2 and "no such file, folder or model" in out.stderr and not out.stdout


# --- on a mesh ------------------------------------------------------------------------------------------------------


def mesh_of(data, model):
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])


@pytest.mark.parametrize("data, model", [(1, 1), (1, 2), (2, 4), (1, 8), (4, 2)])
@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_parameters_on_a_mesh(tmp_path, data, model, kind):
    source = MODELS / "llama_gqa8"  # two kv heads of eight query heads
    loaded = jaxkv.load(source if kind == "safetensors" else convert(source, tmp_path / "m"), mesh=mesh_of(data, model))
    plain = jaxkv.load(source)
    assert_same(loaded, plain)
    kv = min(2, model)
    block = loaded.decoder.blocks[0]
    assert block.attention.q.get_value().sharding.shard_shape((2, 8, 8, 48)) == (2 // kv, 8 * kv // model, 8, 48)
    down, norm = block.mlp.down.get_value(), block.mlp_norm.scale.get_value()
    assert down.sharding.shard_shape(down.shape) == (48, 64 // model)
    assert norm.sharding.is_fully_replicated
    assert dict(down.sharding.mesh.shape) == {"data": data, "kv": kv, "rep": model // kv}
    assert set(down.sharding.mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize("name, model", [("llama_bias", 2), ("qwen2", 2), ("qwen3", 2), ("llama_mqa", 4)])
def test_families_on_a_mesh(name, model):
    assert_same(jaxkv.load(MODELS / name, "bfloat16", mesh=mesh_of(2, model)), jaxkv.load(MODELS / name, "bfloat16"))


def test_a_gguf_on_a_mesh(tmp_path):
    """Rows of interleaved heads, and quantised blocks that run through what is split."""
    source = write_gguf(tmp_path / "m.gguf")
    assert_same(jaxkv.load(source, mesh=mesh_of(1, 2)), jaxkv.load(source))


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "orbax"])
def test_any_part_of_any_tensor(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(orbax_files, "_CHUNK_BYTES", 1000)  # so that parts run through several
    source = write_gguf(tmp_path / "m.gguf") if kind == "gguf" else SOURCE
    checkpoint = open_checkpoint(convert(source, tmp_path / "model") if kind == "orbax" else source)
    rng = np.random.default_rng(3)
    for name, tensor in checkpoint.stored.items():
        whole = tensor.read(())
        assert whole.shape == tensor.shape and whole.dtype == tensor.dtype
        for _ in range(6):
            ends = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for size in tensor.shape]
            index = tuple(slice(*pair) for pair in ends)[: rng.integers(1, len(ends) + 1)]
            np.testing.assert_array_equal(tensor.read(index), whole[index], err_msg=f"{name} {index}")


def test_a_process_reads_its_own_slices_once():
    """No split tensor is read whole, and devices with the same part share what was read."""
    checkpoint = open_checkpoint(MODELS / "llama_gqa8")
    reads, largest = collections.Counter(), collections.Counter()

    def counted(name, tensor):
        def read(index):
            array = tensor.read(index)
            reads[name] += array.size
            largest[name] = max(largest[name], array.size)
            return array

        return StoredTensor(shape=tensor.shape, dtype=tensor.dtype, read=read)

    stored = {name: counted(name, tensor) for name, tensor in checkpoint.stored.items()}
    config = jaxkv.ModelConfig.from_hf(checkpoint.config)
    decoder = Decoder(config)
    fill(decoder, dataclasses.replace(checkpoint, stored=stored), model_mesh(mesh_of(2, 4), config))
    assert reads == {name: int(np.prod(tensor.shape)) for name, tensor in stored.items()}
    whole = {name for name, tensor in stored.items() if largest[name] == np.prod(tensor.shape)}
    assert whole == {name for name in stored if "norm" in name}
    assert spec_of("blocks.0.attention.out") == jax.sharding.PartitionSpec(None, ("kv", "rep"))


_PROCESS = """
import dataclasses, json, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, port, source = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
import jaxkv
from jaxkv import checkpoints, loading

read = {}

def opened(path):
    found = checkpoints.open_checkpoint(path)
    def counted(name, tensor):
        def part(index):
            array = tensor.read(index)
            read[name] = read.get(name, 0) + array.size
            return array
        return checkpoints.StoredTensor(shape=tensor.shape, dtype=tensor.dtype, read=part)
    stored = {name: counted(name, tensor) for name, tensor in found.stored.items()}
    return dataclasses.replace(found, stored=stored)

loading.open_checkpoint = opened
model = jaxkv.load(source, mesh=jax.make_mesh((1, 2), ("data", "model")))
print(json.dumps([model.fingerprint, read]))
jax.distributed.shutdown()
"""


def test_two_processes_read_half_each(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(_PROCESS)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen([*command, str(rank), str(port), str(SOURCE)], env=environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    expected = jaxkv.load(SOURCE).fingerprint
    sizes = {name: int(np.prod(tensor.shape)) for name, tensor in open_checkpoint(SOURCE).stored.items()}
    for process in processes:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        fingerprint, read = json.loads(out.splitlines()[-1])  # behind what gloo says
        assert fingerprint == expected
        assert read == {name: size if "norm" in name else size // 2 for name, size in sizes.items()}


@pytest.mark.usefixtures("as_users_call")
def test_meshes_that_do_not_fit():
    with pytest.raises(TypeError, match=r"mesh=tuple: give jax\.make_mesh"):
        jaxkv.load(SOURCE, mesh=(2, 4))
    for axes in (("data", "tensor"), ("x", "y")):
        with pytest.raises(ValueError, match="mesh=.*give a mesh with the axes 'data' and 'model'"):
            jaxkv.load(SOURCE, mesh=jax.make_mesh((2, 4), axes))
    # Two kv heads of three query heads: four devices would cut a group.
    with pytest.raises(
        ValueError, match=r"mesh\.model=4: it does not divide kv_heads=2, heads=6.*give one of \[1, 2\]"
    ):
        jaxkv.load(SOURCE, mesh=mesh_of(2, 4))
    # Six kv heads on four devices: each would have three of them with half of their queries.
    config = dataclasses.replace(jaxkv.load(SOURCE).config, heads=24, kv_heads=6)
    with pytest.raises(ValueError, match=r"give one of \[1, 2\]"):
        model_mesh(mesh_of(1, 4), config)
