"""Reading checkpoints: what comes back, and what is rejected."""

import json
import subprocess
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf_files import layer_shapes, numbers_of, write
from safetensors.numpy import save_file

from jaxkv.checkpoints import open_checkpoint
from jaxkv.checkpoints.gguf_file import undo_rope_permutation

CONFIG = {"model_type": "llama", "hidden_size": 8, "eos_token_id": 2}


def test_readers_need_neither_jax_nor_gguf():
    code = "import sys, jaxkv.checkpoints\n"
    code += "sys.exit(any(name in sys.modules for name in ('jax', 'gguf', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- safetensors ----------------------------------------------------------------------------------------------------


def arrays(checkpoint):
    return {name: tensor.read(()) for name, tensor in checkpoint.stored.items()}


def make_folder(folder, shards, *, index=True):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if index:
        where = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def two_shards():
    rng = np.random.default_rng(0)
    first = {
        "a": rng.normal(size=(3, 4)).astype(ml_dtypes.bfloat16),
        "b": rng.normal(size=5).astype(np.float16),
    }
    second = {
        "c": rng.normal(size=(2, 2)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    return {"model-1.safetensors": first, "model-2.safetensors": second}


@pytest.mark.parametrize("sharded", [True, False])
def test_safetensors_round_trip(tmp_path, sharded):
    shards = two_shards()
    expected = {name: array for tensors in shards.values() for name, array in tensors.items()}
    checkpoint = open_checkpoint(
        make_folder(tmp_path, shards if sharded else {"model.safetensors": expected}, index=sharded)
    )
    found = arrays(checkpoint)
    assert checkpoint.tensor_names == found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert checkpoint.config["eos_token_id"] == [2, 5]
    assert checkpoint.tokenizer_spec is None


@pytest.mark.parametrize("keep", [4, -1])
def test_truncated_safetensors(tmp_path, keep):
    folder = make_folder(tmp_path, two_shards())
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model-1\.safetensors: .*download the file again"):
        open_checkpoint(folder)


def test_corrupt_safetensors(tmp_path):
    folder = make_folder(
        tmp_path, {"model.safetensors": {"a": np.ones(2, np.float32)}}, index=False
    )
    file = folder / "model.safetensors"
    good = file.read_bytes()
    for bad, message in [
        (good.replace(b'"dtype":"F32"', b'"dtype":"Q99"'), "Q99"),
        (good.replace(b'{"a"', b"{,a,"), "invalid JSON in header"),
        (b"\xff" * 8 + good[8:], "not a complete safetensors file"),
    ]:
        assert bad != good
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=message):
            open_checkpoint(folder)


def entry(start, end, kind="F32"):
    return f'{{"dtype":"{kind}","shape":[{(end - start) // 4}],"data_offsets":[{start},{end}]}}'


@pytest.mark.parametrize(
    "header, message",
    [
        (f'{{"a":{entry(0, 12)},"b":{entry(8, 20)}}}', "invalid offset for tensor"),
        (f'{{"a":{entry(0, 24, "F6_E2M3").replace("[6]", "[32]")}}}', ":a.dtype='F6_E2M3'"),
    ],
    ids=["overlapping", "6 bits"],
)
def test_headers_that_are_not_read(tmp_path, header, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(24))
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{message}"):
        open_checkpoint(tmp_path)


def test_json_that_is_not_what_it_should_be(tmp_path):
    folder = make_folder(
        tmp_path, {"model.safetensors": {"a": np.ones(2, np.float32)}}, index=False
    )
    file = folder / "config.json"
    for content, message in [
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[1]", "not a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b"{" + b" " * (33 << 20), "34,603,009 bytes are more than 33,554,432"),
    ]:
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"config\.json: .*{message}.*download the file again"
        ):
            open_checkpoint(folder)
    file.write_text(json.dumps(CONFIG), "utf-8-sig")
    assert open_checkpoint(folder).config["model_type"] == "llama"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [[2], {}]}))
    assert open_checkpoint(folder).config["eos_token_id"] == [
        2,
        [2],
        {},
    ]  # the model's config rejects them by name
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": ["model.safetensors"]}})
    )
    with pytest.raises(ValueError, match="no weight_map of file names"):
        open_checkpoint(folder)


def test_missing_shard_and_tensor(tmp_path):
    folder = make_folder(tmp_path, two_shards())
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**where, "d": "model-2.safetensors"}}))
    with pytest.raises(ValueError, match=r"\['d'\] are missing"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {**where, "d": "../outside.safetensors"}}))
    with pytest.raises(ValueError, match="must be in the folder"):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": where}))
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-2\.safetensors.*missing"):
        open_checkpoint(folder)


def test_folders_without_safetensors(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="no weights: add"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pytorch_model.bin.*pickles are never read"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"use a \.gguf file"):
        open_checkpoint(tmp_path / "config.json")


# --- GGUF -----------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, EMBED, HIDDEN, VOCAB = 4, 2, 8, 32, 64, 10


def permute(array, heads):
    """llama.cpp's conversion from Hugging Face, written as there."""
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


# Names of Hugging Face's by llama.cpp's.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.0.attn_norm": "model.layers.0.input_layernorm",
    "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    "blk.0.attn_q": "model.layers.0.self_attn.q_proj",
    "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
    "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
    "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
    "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
    "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
    "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
}


def hf_tensors():
    """Random tensors by llama.cpp's names, each with its name of Hugging Face's."""
    rng = np.random.default_rng(1)
    shapes = layer_shapes(EMBED, HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"token_embd": (VOCAB, EMBED), "output_norm": (EMBED,)}
    return {
        f"{key}.weight": (f"{name}.weight", rng.normal(size=shapes[key]).astype(np.float32))
        for key, name in NAMES.items()
    }


def write_gguf(path, *, arch="llama", extra_tensors=None, edit=lambda writer: None):
    tensors = {key: array for key, (_, array) in hf_tensors().items()}
    if arch == "llama":
        for key, heads in (("blk.0.attn_q.weight", HEADS), ("blk.0.attn_k.weight", KV_HEADS)):
            tensors[key] = permute(tensors[key], heads)
    down, kind = "blk.0.ffn_down.weight", gguf.GGMLQuantizationType.Q8_0
    tensors[down] = gguf.quants.quantize(tensors[down], kind)
    numbers = numbers_of(EMBED, HIDDEN, HEADS, KV_HEADS) | {"rope.freq_base": 500_000.0}
    tensors |= extra_tensors or {}
    return write(path, arch, tensors, numbers=numbers, kinds={down: kind}, edit=edit)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_tensors_are_those_of_hugging_face(tmp_path, arch):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", arch=arch))
    expected = dict(hf_tensors().values())
    found = arrays(checkpoint)
    assert checkpoint.tensor_names == found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], array, atol=0.02 if "down_proj" in name else 0)
    config = dict(checkpoint.config)
    assert (
        config["model_type"] == arch
        and config["tie_word_embeddings"]
        and config["rope_scaling"] is None
    )
    assert (config["vocab_size"], config["head_dim"], config["rope_theta"]) == (
        VOCAB,
        HEAD_DIM,
        500_000.0,
    )
    assert config["rms_norm_eps"] == 1e-5  # not its float32 neighbour
    assert checkpoint.tokenizer_spec is None


def test_untied_output_and_bias_permutation(tmp_path):
    output = np.ones((VOCAB, EMBED), np.float32)
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", extra_tensors={"output.weight": output})
    )
    assert (
        not checkpoint.config["tie_word_embeddings"] and "lm_head.weight" in checkpoint.tensor_names
    )
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    np.testing.assert_array_equal(undo_rope_permutation(permute(bias, HEADS), HEADS), bias)


def llama3_factors(factor, low=1.0, high=4.0, original=8192):
    """The table as llama.cpp's converter computes it."""
    table = []
    for frequency in 1 / 500_000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            table.append(1.0)
        elif wavelength > original / low:
            table.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_gguf_rope_scaling(tmp_path):
    factors = {"rope_freqs.weight": llama3_factors(32.0)}
    scaling = open_checkpoint(write_gguf(tmp_path / "a.gguf", extra_tensors=factors)).config[
        "rope_scaling"
    ]
    assert scaling["rope_type"] == "llama3" and scaling["factor"] == 32.0

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    scaling = open_checkpoint(write_gguf(tmp_path / "b.gguf", edit=yarn)).config["rope_scaling"]
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    strange = {"rope_freqs.weight": np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)}
    with pytest.raises(ValueError, match="rope_freqs.weight=.*not Llama 3's"):
        open_checkpoint(write_gguf(tmp_path / "c.gguf", extra_tensors=strange))


def test_rejected_ggufs(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", arch="gemma3n")
    with pytest.raises(ValueError, match="general.architecture='gemma3n'"):
        open_checkpoint(path)
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((2, EMBED), np.float32)}
    with pytest.raises(ValueError, match="tensor='blk.0.ffn_gate_inp.weight'"):
        open_checkpoint(write_gguf(tmp_path / "n.gguf", extra_tensors=extra))
    for key, edit in {
        "rope.scaling.type='longrope'": lambda w: w.add_rope_scaling_type(
            gguf.RopeScalingType.LONGROPE
        ),
        "rope.dimension_count=4": lambda w: w.add_rope_dimension_count(4),
        "expert_count=8": lambda w: w.add_expert_count(8),
        "split.count=2": lambda w: w.add_uint16("split.count", 2),
    }.items():
        with pytest.raises(ValueError, match=key):
            open_checkpoint(write_gguf(tmp_path / "o.gguf", edit=edit))


def write_several(folder, whole):
    """The model of a GGUF file in several, by the gguf package's own writer."""
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=4)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    for each in reader.tensors:
        writer.add_tensor(each.name, np.array(each.data), raw_dtype=each.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def test_gguf_in_several_files(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf")
    files = write_several(tmp_path, whole)
    assert [file.name for file in files] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    expected = open_checkpoint(whole)
    for file in files:
        found = open_checkpoint(file)
        assert dict(found.config) == dict(expected.config)
        assert found.tensor_names == expected.tensor_names
        for name, array in arrays(expected).items():
            np.testing.assert_array_equal(found.stored[name].read(()), array)
    swapped = [file.read_bytes() for file in files]
    files[1].write_bytes(swapped[2])
    with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf: not file 2 of this model"):
        open_checkpoint(files[0])
    files[1].unlink()
    with pytest.raises(ValueError, match=r"m-00002-of-00003\.gguf: missing"):
        open_checkpoint(files[2])
    files[1].write_bytes(swapped[1])
    renamed = files[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match="split.count=3: the name"):
        open_checkpoint(renamed)


# All that the package reads, K-quants among them; it writes only some of these.
KINDS = [kind for kind in gguf.quants._type_traits if kind.name not in ("F32", "F16")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gguf_quantisations(tmp_path, kind):
    """Random blocks: whole and in parts as the package reads them."""
    name, rows = "blk.0.ffn_down.weight", 12
    block, size = gguf.GGML_QUANT_SIZES[kind]
    codes = np.random.default_rng(0).integers(0, 120, (rows, 512 // block * size), np.uint8)
    tensors = {key: array for key, (_, array) in hf_tensors().items()} | {name: codes}
    numbers = numbers_of(EMBED, HIDDEN, HEADS, KV_HEADS)
    path = write(tmp_path / "m.gguf", "qwen2", tensors, numbers=numbers, kinds={name: kind})
    tensor = open_checkpoint(path).stored["model.layers.0.mlp.down_proj.weight"]
    expected = gguf.quants.dequantize(codes, kind)
    assert tensor.shape == expected.shape == (rows, 512)
    np.testing.assert_array_equal(tensor.read(()), expected)
    part = (slice(3, 7), slice(100, 300))
    np.testing.assert_array_equal(tensor.read(part), expected[part])


@pytest.mark.parametrize("keep", [0, 100, -40])
def test_truncated_gguf(tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf: truncated or corrupt GGUF of \d+ bytes"):
        open_checkpoint(path)


def test_garbled_gguf(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    good = path.read_bytes()
    path.write_bytes(b"GGML" + good[4:])
    with pytest.raises(ValueError, match="GGUF magic invalid"):
        open_checkpoint(path)
    path.write_bytes(good[:24] + b"\xff" * 40 + good[64:])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        open_checkpoint(path)
