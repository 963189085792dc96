"""Files of quantised weights: FP8, compressed-tensors, ModelOpt, AWQ and GPTQ load as what their codes stand for."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from meshes import mesh_of
from orbax_cases import assert_same
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv.checkpoints import StoredTensor, convert, open_checkpoint
from jaxkv.checkpoints.quantised_weights import (
    WeightFormat,
    dequantise_tensors,
    parse_weight_format,
)
from jaxkv.models.config import ModelConfig
from jaxkv.models.sources import TensorSource
from jaxkv.models.stored import StoredWeight
from jaxkv.models.weights import read_parameter

# Written by compressed-tensors, with what it reads from them (tests/golden/make_quantised.py).
WRITTEN = Path(__file__).parent / "golden" / "quantised"
# Their Llama, wider.
CONFIG = json.loads((WRITTEN / "nvfp4" / "config.json").read_text("utf-8"))
CONFIG |= {"hidden_size": 64, "intermediate_size": 96}
del CONFIG["quantization_config"]
LAYER = "model.layers.0."
DOWN = f"{LAYER}mlp.down_proj."
LINEAR = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
NORMS = (f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm", "model.norm")
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def words_of(codes, places=range(8)):
    """Eight codes of the last axis in each int32, by loops: the code of `places[n]` in bits 4 n to 4 n + 3."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for row, word in np.ndindex(words.shape):
        for n, place in enumerate(places):
            words[row, word] |= np.uint32(codes[row, 8 * word + place]) << np.uint32(4 * n)
    return words.view(np.int32)


def spread(scales, shape, groups=None):
    """Scales of rows and groups of columns as a matrix, by loops."""
    wide = np.zeros(shape, np.float32)
    for row, column in np.ndindex(shape):
        of = column * scales.shape[1] // shape[1] if groups is None else groups[column]
        wide[row, column] = scales[row, of]
    return wide


def four_bits(rng, shape):
    """Codes, and scales and zero points of groups of 32, some of them at the ends."""
    outputs, inputs = shape
    scales = rng.uniform(0.01, 0.03, (outputs, inputs // 32)).astype(np.float16)
    return rng.integers(0, 16, shape), scales, rng.integers(0, 16, scales.shape)


def awq(rng, shape):
    """As AutoAWQ's GEMM packs: inputs first, outputs 0 2 4 6 1 3 5 7 of a word."""
    codes, scales, zeros = four_bits(rng, shape)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words_of(codes.T, order), "qzeros": words_of(zeros.T, order)}
    return parts | {"scales": scales.T}, (codes - spread(zeros, shape)) * spread(scales, shape)


def gptq(rng, shape, *, second=False, ordered=False):
    """As GPTQ packs: inputs in words, outputs last, in any groups; zero points less 1 in the first format."""
    codes, scales, zeros = four_bits(rng, shape)
    inputs = np.arange(shape[1]) if ordered else rng.permutation(shape[1])
    groups = inputs.astype(np.int32) // 32
    stored = words_of(zeros.T).view(np.uint32) - np.uint32(0 if second else 0x11111111)
    parts = {"qweight": words_of(codes).T, "qzeros": stored.view(np.int32), "scales": scales.T}
    wide = (codes - spread(zeros, shape, groups)) * spread(scales, shape, groups)
    return parts | ({} if ordered else {"g_idx": groups}), wide


def fp8(rng, shape, *, block=None):
    """As DeepSeek's files: a scale for each block, of which those at the edges are smaller, or one for all weights."""
    codes = rng.normal(0, 100, shape).astype(E4M3)
    high, wide = block or shape
    grid = -(-shape[0] // high), -(-shape[1] // wide)
    scales = rng.uniform(1e-4, 4e-4, grid).astype(np.float32)
    weight = np.zeros(shape, np.float32)
    for row, column in np.ndindex(shape):
        weight[row, column] = np.float32(codes[row, column]) * scales[row // high, column // wide]
    scales = scales if block else scales.reshape(()).astype(ml_dtypes.bfloat16)
    weight = weight if block else codes.astype(np.float32) * np.float32(scales)
    return {
        "weight": codes,
        "weight_scale_inv": scales,
        "activation_scale": np.ones((), "f"),
    }, weight


def mxfp8(rng, shape):
    """Scales of 32 inputs that are powers of two, in bytes."""
    codes = rng.normal(0, 100, shape).astype(E4M3)
    powers = rng.integers(110, 120, (shape[0], shape[1] // 32)).astype(np.uint8)
    weight = codes.astype(np.float32) * spread(2.0 ** (powers.astype(np.float32) - 127), shape)
    return {"weight": codes, "weight_scale_inv": powers}, weight


def nvfp4(rng, shape):
    """As ModelOpt's files: two codes in a byte, a scale for each 16, and one of all weights."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scales = rng.uniform(16, 400, (shape[0], shape[1] // 16)).astype(E4M3)
    whole = np.float32(1e-4)
    weight = codes.view(E2M1).astype(np.float32) * (
        spread(scales.astype(np.float32) * whole, shape)
    )
    parts = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    return parts | {"weight_scale_2": whole.reshape(()), "input_scale": np.ones((), "f")}, weight


def modelopt_fp8(rng, shape):
    """As ModelOpt's FP8: one scale of all weights."""
    codes, scale = rng.normal(0, 100, shape).astype(E4M3), np.float32(rng.uniform(1e-4, 4e-4))
    parts = {"weight": codes, "weight_scale": scale.reshape(()), "input_scale": np.ones((), "f")}
    return parts, codes.astype(np.float32) * scale


def mixed(rng, shape):
    """Attention in FP8, MLPs in NVFP4."""
    return nvfp4(rng, shape) if 96 in shape else modelopt_fp8(rng, shape)


FORMATS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 32}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq_v2": (
        lambda *given: gptq(*given, second=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "gptq_ordered": (
        lambda *given: gptq(*given, ordered=True),
        {"quant_method": "gptq", "bits": 4, "desc_act": False, "group_size": 32},
    ),
    "fp8_blocks": (
        lambda *given: fp8(*given, block=(24, 40)),
        {"quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic"},
    ),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": None, "fmt": "float8_e4m3fn"}),
    "mxfp8": (mxfp8, {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt_fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt_mixed": (mixed, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
}


def write(folder, name, *, change=None, config=None):
    """Folders of quantised weights and of the floats that they stand for; `change` replaces parts, None drops them."""
    make, quantised = FORMATS[name]
    rng = np.random.default_rng(7)
    shared = {"model.embed_tokens.weight": rng.normal(size=(96, 64)).astype(np.float32)}
    shared |= {f"{norm}.weight": np.ones(64, np.float32) for norm in NORMS}
    narrow, wide = {}, {}
    for base, shape in LINEAR.items():
        parts, wide[f"{LAYER}{base}.weight"] = make(rng, shape)
        narrow |= {f"{LAYER}{base}.{part}": array for part, array in parts.items()}
    narrow |= change or {}
    narrow = {name: array for name, array in narrow.items() if array is not None}
    quantised = {"quantization_config": quantised | (config or {})}
    return (
        save(folder / "narrow", shared | narrow, CONFIG | quantised),
        save(folder / "wide", shared | wide, CONFIG),
    )


def save(folder, tensors, keys):
    """A folder with a config and tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    arrays = {key: np.ascontiguousarray(each) for key, each in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


EXPERTS = {"gate_up_proj": (3, 96, 64), "down_proj": (3, 64, 48)}
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "attention_bias": False,
    "use_sliding_window": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_experts(folder, layout, change=None):
    """As transformers' FP8Experts: codes of all experts in one tensor, scales of an expert or of blocks of it."""
    rng = np.random.default_rng(11)
    shared = {"model.embed_tokens.weight": rng.normal(size=(96, 64)).astype(np.float32)}
    shared |= {f"{norm}.weight": np.ones(64, np.float32) for norm in NORMS}
    shared |= {f"{LAYER}self_attn.{each}_norm.weight": np.ones(16, np.float32) for each in "qk"}
    shared[f"{LAYER}mlp.gate.weight"] = rng.normal(size=(3, 64)).astype(np.float32)
    for base, shape in LINEAR.items():
        if "mlp" not in base:
            shared[f"{LAYER}{base}.weight"] = rng.normal(0, 0.1, shape).astype(np.float32)
    narrow, wide = {}, {}
    for base, shape in EXPERTS.items():
        codes = rng.uniform(-400, 400, shape).astype(E4M3)
        high, across = (24, 40) if layout == "blocks" else shape[1:]
        grid = shape[0], -(-shape[1] // high), -(-shape[2] // across)
        scales = rng.uniform(1e-4, 4e-4, grid).astype(np.float32)
        weight = np.zeros(shape, np.float32)
        for expert, row, column in np.ndindex(shape):
            scale = scales[expert, row // high, column // across]
            weight[expert, row, column] = np.float32(codes[expert, row, column]) * scale
        name = f"{LAYER}mlp.experts.{base}"
        wide[name] = weight
        narrow[name] = codes
        narrow[f"{name}_scale_inv"] = scales.reshape(3) if layout == "vector" else scales
        narrow[f"{name}_activation_scale"] = np.ones(3, np.float32)
    narrow = {key: each for key, each in (narrow | (change or {})).items() if each is not None}
    blocks = [24, 40] if layout == "blocks" else None
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": blocks}}
    return (
        save(folder / "narrow", shared | narrow, MIXTURE | quantised),
        save(folder / "wide", shared | wide, MIXTURE),
    )


def check_parts(folder):
    """Parts of all tensors of a checkpoint, along any axes, are those of the whole ones."""
    rng = np.random.default_rng(3)
    for key, tensor in open_checkpoint(folder).stored.items():
        whole = tensor.read(())
        assert whole.shape == tensor.shape and whole.dtype == tensor.dtype
        for _ in range(12):
            ends = [sorted(rng.integers(0, size + 1, 2).tolist()) for size in tensor.shape]
            index = tuple(slice(*pair) for pair in ends)[: rng.integers(1, len(ends) + 1)]
            np.testing.assert_array_equal(tensor.read(index), whole[index], err_msg=key)


def logits(model):
    ids = [[5, 9, 2, 60, 31], [7, 1, 30]]
    return np.asarray(jaxkv.prefill(model, ids).logits)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_the_codes_stand_for(tmp_path, name):
    narrow, wide = map(jaxkv.load, write(tmp_path, name))
    assert_same(narrow, wide)
    np.testing.assert_array_equal(logits(narrow), logits(wide))


@pytest.mark.parametrize("name", FORMATS)
def test_a_mesh_reads_its_parts(tmp_path, name):
    """Cut within words of eight codes and blocks of scales, along outputs and inputs."""
    narrow, _ = write(tmp_path, name)
    assert_same(jaxkv.load(narrow, mesh=mesh_of(2, 2)), jaxkv.load(narrow))
    check_parts(narrow)


@pytest.mark.parametrize("layout", ["each", "vector", "blocks"])
def test_experts_in_one_tensor(tmp_path, layout):
    narrow, wide = write_experts(tmp_path, layout)
    read = jaxkv.load(narrow)
    assert_same(read, jaxkv.load(wide))
    assert_same(jaxkv.load(narrow, mesh=mesh_of(2, 2)), read)
    check_parts(narrow)


DOWNS = f"{LAYER}mlp.experts.down_proj"


@pytest.mark.parametrize(
    "change, message",
    [
        ({f"{DOWNS}_scale_inv": np.ones((2, 1, 1), "f")}, rf"^{DOWNS}_scale_inv=\(2, 1, 1\): does"),
        ({f"{DOWNS}_scale_inv": np.ones((3, 5, 5), "f")}, r"weight_scale_inv=\(5, 5\): does not"),
        ({f"{DOWNS}_scale_inv": None}, f"^{DOWNS}.dtype='float8_e4m3fn': .*scales"),
    ],
)
def test_experts_whose_scales_do_not_fit(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.load(write_experts(tmp_path, "each", change)[0])


def test_words_of_awq_are_read_once():
    """They hold outputs, of which each part would read all words."""
    rng, reads = np.random.default_rng(1), []
    arrays = {
        "m.qweight": rng.integers(0, 2**31, (1024, 128), np.int32),
        "m.qzeros": rng.integers(0, 2**31, (8, 128), np.int32),
        "m.scales": np.ones((8, 1024), np.float16),
    }

    def hold(name):
        """The stored tensor of an array, which notes when it is read."""
        array = arrays[name]
        read = lambda index: reads.append(name) or array[index]  # noqa: E731
        return StoredTensor(shape=array.shape, dtype=array.dtype, read=read)

    form = WeightFormat(method="awq", blocks=(128, 128), zeros_less_one=False)
    weight = dequantise_tensors({name: hold(name) for name in arrays}, form)["m.weight"]
    source = TensorSource(name="m.weight", axes=((1024,), (1024,)))
    like = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    read_parameter([(source, weight)], like, "blocks.0.mlp.down", None)
    assert sorted(reads) == sorted(arrays)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["awq", "fp8_blocks"])
def test_weights_in_8_and_4_bits_of_jaxkv(tmp_path, name, bits):
    narrow, wide = write(tmp_path, name)
    # Rows of three groups of 32 cannot be split in two.
    found = jaxkv.load(narrow, weights=bits, mesh=mesh_of(1, 2) if bits == "int8" else None)
    if bits == "int8":
        assert_same(found, jaxkv.load(wide, weights=bits))
        return
    # Groups of 32 codes with one scale keep their steps.
    down = found.decoder.blocks[0].mlp
    codes = [getattr(down, f"down{part}").get_value() for part in ("", "_scales", "_leasts")]
    read = np.asarray(StoredWeight(codes[0], None, *codes[1:]).dequantise_to_float32())
    weight = open_checkpoint(wide).stored[f"{DOWN}weight"].read(())
    error = np.abs(read - weight).max() / np.abs(weight).max()
    assert error < (1e-3 if name == "awq" else 0.07)


@pytest.mark.parametrize("name", ["awq", "nvfp4"])
def test_conversion_writes_what_the_codes_stand_for(tmp_path, name):
    narrow, wide = write(tmp_path, name)
    assert_same(jaxkv.load(convert(narrow, tmp_path / "converted")), jaxkv.load(wide))


@pytest.mark.parametrize("name", [each.name for each in sorted(WRITTEN.iterdir())])
def test_files_of_compressed_tensors(name):
    stored = open_checkpoint(WRITTEN / name).stored
    expected = load_file(WRITTEN / name / "dequantised.safetensors")
    assert stored.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_allclose(stored[key].read(()), array, rtol=3e-7, err_msg=key)
    one, many = (jaxkv.load(WRITTEN / name, mesh=mesh) for mesh in (None, mesh_of(2, 2)))
    assert_same(one, many)


SCALE = f"{DOWN}weight_scale_inv"
BAD_TENSORS = [
    ("fp8_blocks", {SCALE: None}, f"tensor='{SCALE}': missing"),
    ("fp8_blocks", {SCALE: np.ones((2, 3), "f")}, rf"{SCALE}=\(2, 3\)"),
    ("fp8_blocks", {SCALE: np.ones((3, 3, 1), "f")}, rf"{SCALE}='float32\[3, 3, 1\]'"),
    ("fp8_blocks", {SCALE: np.full((3, 3), np.nan, "f")}, f"{DOWN}weight.*NaN"),
    ("fp8", {f"{DOWN}weight": np.ones((64, 96), bool)}, f"{DOWN}weight='bool"),
    ("nvfp4", {f"{DOWN}weight_scale_2": None}, f"tensor='{DOWN}weight_scale_2': missing"),
    ("nvfp4", {f"{DOWN}weight_scale_2": np.ones(64, "f")}, rf"{DOWN}weight_scale_2=\(64, 1\)"),
    ("nvfp4", {f"{DOWN}weight": np.ones((64, 96), "f")}, "weights=.*weight_scale"),
    ("awq", {f"{DOWN}qzeros": np.ones((2, 8), np.int32)}, rf"{DOWN}qzeros=\(64, 2\)"),
    ("awq", {f"{DOWN}qweight": np.ones((96, 8), "f")}, rf"{DOWN}qweight='float32\[96, 8\]'"),
    ("awq", {f"{DOWN}weight": np.ones((64, 96), "f")}, "several forms of one weight"),
    ("gptq", {f"{DOWN}g_idx": np.full(96, 3, np.int32)}, f"{DOWN}g_idx=.*below 3"),
    ("gptq", {f"{DOWN}g_idx": np.zeros(96, "f")}, rf"{DOWN}g_idx=\(96,\)"),
    ("fp8", {f"{DOWN}weight": np.ones((0, 96), E4M3)}, rf"{SCALE}=\(1, 1\)"),
    # Codes of 8 bits.
    ("gptq", {f"{DOWN}qweight": np.ones((24, 64), np.int32)}, rf"{DOWN}g_idx=\(96,\)"),
]


@pytest.mark.parametrize("name, change, message", BAD_TENSORS)
def test_tensors_that_do_not_fit_together(tmp_path, name, change, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.load(write(tmp_path, name, change=change)[0])


PACK = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
GROUPS = "config_groups"
# By the key that the message names, under `quantization_config`.
BAD_CONFIGS = [
    *(("", {"quant_method": method}) for method in ("bitsandbytes", "hqq", "mxfp4", ["awq"], None)),
    ("", "fp8"),
    (".bits", {"quant_method": "awq", "bits": 3}),
    (".version", {"quant_method": "awq", "version": "gemv"}),
    (".bits", {"quant_method": "gptq", "bits": 8}),
    (".checkpoint_format", {"quant_method": "gptq", "checkpoint_format": "marlin"}),
    (".quant_algo", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}),
    (".weight_block_size", {"quant_method": "fp8", "weight_block_size": [128]}),
    (".weight_block_size", {"quant_method": "fp8", "weight_block_size": [0, 128]}),
    (".format", {"quant_method": "compressed-tensors", "format": "marlin-24"}),
    (".format", PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    (".sparsity_config", PACK | {"sparsity_config": "dense"}),
    (".transform_config", PACK | {"transform_config": {GROUPS: {"u": {}}}}),
    (".num_bits", PACK | {GROUPS: {"group_0": {"weights": {"num_bits": 8}}}}),
    (".format", PACK | {GROUPS: {"group_0": {"format": "sparse-bitmask"}}}),
    (r"\.config_groups\.W4A16", PACK | {GROUPS: {"W4A16": ["Linear"]}}),
]


def with_format(quantised):
    return CONFIG | {"quantization_config": quantised}


@pytest.mark.parametrize("key, quantised", BAD_CONFIGS, ids=repr)
def test_formats_that_are_not_read(key, quantised):
    with pytest.raises(ValueError, match=f"^quantization_config{key}="):
        ModelConfig.from_hf(with_format(quantised))


def test_what_changes_no_weights_is_ignored():
    dense = {
        "sparsity_config": {"format": "dense", "global_sparsity": 0.13},
        "kv_cache_scheme": {"num_bits": 8},
    }
    assert parse_weight_format(with_format(PACK | dense)) == parse_weight_format(with_format(PACK))
    assert ModelConfig.from_hf(with_format(PACK | dense)) == ModelConfig.from_hf(CONFIG)


def test_codes_without_a_format_are_rejected(tmp_path):
    alone = {
        f"{LAYER}{base}.{part}": None
        for base in LINEAR
        for part in ("weight_scale_inv", "activation_scale")
    }
    narrow, _ = write(tmp_path, "fp8", change=alone)
    (narrow / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="dtype='float8_e4m3fn'.*quantization_config"):
        jaxkv.load(narrow)
