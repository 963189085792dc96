"""Weights in 8 and 4 bits: rounding by oracles, and models of them beside models of what the codes stand for."""

import atexit
import collections
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import gguf
import jax
import numpy as np
import pytest
import running
import tiny
from flax import nnx
from gguf_files import layer_shapes, numbers_of, write
from orbax_cases import MODELS, assert_same
from safetensors.numpy import save_file
from test_bad_input import DOWN, folder, holed

import jaxkv
import pallas_kernels
from jaxkv.checkpoints import open_checkpoint
from jaxkv.cli import main
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import Decoder, named_parameters
from jaxkv.models.layers import (
    get_float_weight,
    get_stored_weight,
    multiply_by_weight,
    multiply_split_k,
    uses_quantised_kernel,
)
from jaxkv.models.mixture import ExpertInputs, MixtureMLP, apply_experts_by_token
from jaxkv.models.sources import map_parameter_sources
from jaxkv.models.stored import StoredWeight
from jaxkv.models.values import ExpertsConfig
from jaxkv.models.weights import quantise_to_int4, quantise_to_int8

# Fused and stacked tensors, biases, one kv head, mixtures of two kinds of files, an output matrix.
# Each in one of the widths, and what is stacked in both.
CASES = [
    ("llama_gqa8", "int8"),
    ("falcon_40b", "int4"),
    ("phi3", "int4"),
    ("mixtral", "int4"),
    ("gpt_oss_mxfp4", "int8"),
]
ROWS = [[5, 9, 2, 7, 1, 30, 4], [8, 3, 11]]
DRAWN = {
    "max_new_tokens": 4,
    "stop_at_eos": False,
    "progress": False,
    "policy": jaxkv.SnapKV(budget=5, window=2),
}

LINEAR = {"q", "kv", "out", "gate_up", "up", "down", "experts_gate_up", "experts_down", "head"}
# Sizes that are whole groups of 32, on up to 4 devices; a family's own names of them.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 64,
    "head_dim": 16,
}


def rounded(weight):
    """Oracle of 8 bits by loops over outputs: codes, scales, and what they stand for."""
    codes, scales = np.zeros(weight.shape, np.int8), np.zeros(weight.shape[:-1], np.float32)
    for at in np.ndindex(*weight.shape[:-1]):
        most = np.float32(np.abs(weight[at]).max())
        scales[at] = most / np.float32(127)
        for column, value in enumerate(weight[at]):
            codes[(*at, column)] = (
                0 if scales[at] == 0 else round(float(np.float32(value / scales[at])))
            )
    return {"": codes, "_scale": scales}, codes.astype(np.float32) * scales[..., None]


def grouped(weight):
    """Oracle of 4 bits by loops over groups of 32: bytes, scales, least values, and what they stand for."""
    *out, width = weight.shape
    codes, wide = np.zeros((*out, width // 2), np.uint8), np.zeros(weight.shape, np.float32)
    scales, leasts = np.zeros((2, *out, width // 32), np.float16)
    for *at, group in np.ndindex(*out, width // 32):
        at, of = tuple(at), weight[(*at, slice(32 * group, 32 * group + 32))]
        least, scale = np.float16(of.min()), np.float16((of.max() - of.min()) / np.float32(15))
        scales[(*at, group)], leasts[(*at, group)] = scale, least
        for n, value in enumerate(of):
            steps = (
                0.0
                if scale == 0
                else float(np.float32(value - np.float32(least)) / np.float32(scale))
            )
            code = min(15, max(0, round(steps)))
            codes[(*at, 16 * group + n % 16)] |= code << (4 * (n // 16))
            wide[(*at, 32 * group + n)] = np.float32(code) * np.float32(scale) + np.float32(least)
    return {"": codes, "_scales": scales, "_leasts": leasts}, wide


ORACLES = {"int8": rounded, "int4": grouped}


@functools.cache
def wide_folder(name):
    """A golden model's folder with sizes of whole groups, and weights sampled at random."""
    config = json.loads((MODELS / name / "config.json").read_text())
    config |= {key: size for key, size in WIDE.items() if config.get(key) is not None}
    config |= (
        {"head_dim": 16} if name == "phi3" else {}
    )  # of 6 heads, to which 64 are not shared out
    there, rng, tensors = Path(tempfile.mkdtemp()), np.random.default_rng(0), {}
    atexit.register(shutil.rmtree, there)
    names = open_checkpoint(MODELS / name).tensor_names
    for of in map_parameter_sources(
        Decoder(ModelConfig.from_hf(config)), config["model_type"], frozenset(names)
    ).values():
        for source in of:
            shift = 1.0 if len(source.shape) == 1 and "norm" in source.name else 0.0
            tensors[source.name] = (shift + 0.2 * rng.standard_normal(source.shape)).astype(
                np.float32
            )
    (there / "config.json").write_text(json.dumps(config))
    save_file(tensors, there / "model.safetensors")
    return there


def folder_of(name, bits):
    return MODELS / name if bits == "int8" else wide_folder(name)


@functools.cache
def narrow(name, bits="int8", dtype="float32", mesh=None):
    return loaded(name, bits, dtype, mesh=mesh)


def loaded(name, bits, dtype="float32", **options):
    return jaxkv.load(folder_of(name, bits), dtype, weights=bits, progress=False, **options)


@functools.cache
def stood_for(name, bits="int8"):
    """The model whose weights are what the codes stand for, in float32, and the oracle's arrays by path."""
    model, found = jaxkv.load(folder_of(name, bits), "float32", progress=False), {}
    for path, parameter in named_parameters(model.decoder):
        if path.rpartition(".")[2] in LINEAR:
            arrays, wide = ORACLES[bits](np.asarray(parameter.get_value()))
            found |= {f"{path}{name}": array for name, array in arrays.items()}
            parameter.set_value(jax.numpy.asarray(wide))
    return model, found


def test_codes_are_rounded_to_the_nearest():
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((3, 4, 16)) * 10.0 ** rng.integers(-8, 8, (3, 4, 1))).astype(
        np.float32
    )
    weight[1, 2], weight[0, 1, 3:] = 0, 0
    codes, scales = quantise_to_int8(weight)
    for mine, theirs in zip((codes, scales), rounded(weight)[0].values(), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert np.abs(codes).max(axis=-1).min(where=scales > 0, initial=127) == 127
    assert (np.abs(codes * scales[..., None] - weight) <= scales[..., None] * 0.5001).all()


def test_groups_are_rounded_to_the_nearest():
    """With constant groups, one element apart from the others, and what rounds beyond 15 by the least value's bits."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((3, 4, 96)) * 10.0 ** rng.integers(-5, 3, (3, 4, 1))).astype(
        np.float32
    )
    weight[1, 2], weight[0, 1, 32:64], weight[2, 2, 5] = 0, 7.125, 300
    (codes, scales, leasts), (oracle, wide) = quantise_to_int4(weight), grouped(weight)
    for mine, theirs in zip((codes, scales, leasts), oracle.values(), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert (wide[1, 2] == 0).all() and (wide[0, 1, 32:64] == 7.125).all()
    step = scales.astype(np.float32).repeat(32, axis=-1)
    # Least values and scales have 11 bits.
    assert (
        np.abs(wide - weight)
        <= 0.5 * step + np.abs(leasts).astype(np.float32).repeat(32, axis=-1) / 1024
    ).all()
    # What codes stand for is rounded to itself.
    again = quantise_to_int4(wide)
    assert (
        np.abs(grouped(wide)[1] - wide) <= 1e-3 * np.maximum(np.abs(wide), step)
    ).all() and again[0].any()


def blocks(kind, weight):
    """What a GGUF's blocks of 4 bits stand for; "Q4_K" are random steps that leave out the ends of their codes."""
    if kind != "Q4_K":
        kind = gguf.GGMLQuantizationType[kind]
        return gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
    rng = np.random.default_rng(1)
    codes = rng.integers(2, 13, (*weight.shape[:-1], weight.shape[-1] // 32, 32))
    step, least = (rng.uniform(0.001, 0.1, (*codes.shape[:-1], 1)) for _ in range(2))
    return (codes * step - 9 * least).astype(np.float32).reshape(weight.shape)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_values_of_4_bits_keep_their_steps(kind):
    """To the 11 bits of a scale and a least value; 15 steps over a group's values would be others."""
    weight = blocks(kind, np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32))
    weight[2, 32:64] = 0.25
    off = []
    for stepped in (True, False):
        codes, scales, leasts = map(jax.numpy.asarray, quantise_to_int4(weight, stepped=stepped))
        wide = np.asarray(StoredWeight(codes, scales=scales, leasts=leasts).dequantise_to_float32())
        off.append((np.abs(wide - weight) / np.abs(weight).max()).max())
    assert off[0] < 1e-3 and (off[1] > 1e-2 or kind == "Q4_1")


def test_a_ggufs_blocks_of_4_bits_keep_their_steps(tmp_path):
    """Of one tensor, with rows in another order, and of two that are stacked; not of one that is in 8 bits."""
    checkpoint = open_checkpoint(gguf_of(tmp_path / "m.gguf", {"blk.0.ffn_down": "Q8_0"}))
    wide, model = (
        jaxkv.load(tmp_path / "m.gguf", "float32", weights=each, progress=False)
        for each in (None, "int4")
    )
    held, block = dict(named_parameters(wide.decoder)), model.decoder.blocks[0]
    for part, name, stepped in (
        (block.attention, "q", True),
        (block.attention, "kv", True),
        (block.mlp, "gate_up", True),
        (block.mlp, "down", False),
    ):
        owner = "attention" if part is block.attention else "mlp"
        exact = np.asarray(held[f"blocks.0.{owner}.{name}"].get_value())
        off = np.abs(np.asarray(get_float_weight(part, name)) - exact).max() / np.abs(exact).max()
        assert (off < 1e-3) == stepped, name
    assert sum(each.stepped for each in checkpoint.stored.values()) == 6


def gguf_of(path, kinds):
    """A GGUF of one layer of random weights whose linear maps are in Q4_0, but for those that `kinds` names."""
    rng, tensors, blocks = np.random.default_rng(0), {}, {}
    shapes = {f"blk.0.{name}": shape for name, shape in layer_shapes(64, 96, 64, 32).items()}
    for name, shape in (shapes | {"token_embd": (96, 64), "output_norm": (64,)}).items():
        whole = len(shape) == 1 or name == "token_embd"
        kind = gguf.GGMLQuantizationType["F32" if whole else kinds.get(name, "Q4_0")]
        array = rng.standard_normal(shape).astype(np.float32)
        tensors[f"{name}.weight"] = gguf.quants.quantize(array, kind)
        blocks[f"{name}.weight"] = kind
    return write(path, "llama", tensors, numbers=numbers_of(64, 96, 4, 2), kinds=blocks)


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_logits_are_those_of_the_rounded_weights(name, bits):
    """Prefill of an unequal batch, and each token decoded on top, as one prefill; the codes are the oracle's."""
    model, (same, found) = narrow(name, bits), stood_for(name, bits)
    held = dict(named_parameters(model.decoder))
    assert {
        path
        for path in held
        if path.rpartition(".")[2].split("_scale")[0].split("_least")[0] in LINEAR
    } == {*found}
    for path, value in found.items():
        assert held[path].get_value().dtype == value.dtype
        np.testing.assert_array_equal(held[path].get_value(), value)
    for mine, theirs in zip(
        running.by_tokens(model, ROWS), running.by_prefixes(same, ROWS), strict=True
    ):
        assert running.gap(mine, theirs) < 2e-5
    assert model.dtype == np.float32 and model.fingerprint != same.fingerprint
    wide = sum(
        each.get_value().nbytes for path, each in named_parameters(same.decoder) if path in found
    )
    assert model.nbytes == same.nbytes - wide + sum(each.nbytes for each in found.values())
    assert f"float32 with {bits} weights" in repr(model)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", "int4"), ("float16", "int8")])
def test_16_bits_multiply_the_same_codes(dtype, bits):
    model, same = (narrow("llama_gqa8", bits, each) for each in (dtype, "float32"))
    (_, mine), (_, theirs) = running.prefill(model, ROWS), running.prefill(same, ROWS)
    assert model.dtype == dtype and running.gap(mine, theirs) < 0.05 * np.abs(theirs).max()


SCORES = {
    "critical": jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=6, window=2)),
    "kvzip+": jaxkv.KVzip(budget=0.5, weighted=True, first=(1, 2), following=(3,), closing=(4,)),
}


@pytest.mark.parametrize(("name", "bits"), [("critical", "int4"), ("kvzip+", "int8")])
def test_scores_that_read_weights_read_what_they_stand_for(name, bits):
    prompts = [[5, 9, 2, 7, 1, 30, 4, 8, 3, 11, 12, 13], [8, 3, 11, 2, 5, 6, 7]]
    models = narrow("llama_gqa8", bits), stood_for("llama_gqa8", bits)[0]
    mine, theirs = (jaxkv.Session(each, SCORES[name]).prefill(prompts) for each in models)
    np.testing.assert_array_equal(running.kept(mine, 16), running.kept(theirs, 16))


@pytest.mark.parametrize(
    ("name", "data", "model", "bits"),
    [("llama_gqa8", 2, 4, "int4"), ("mixtral", 2, 4, "int8")],
)
def test_meshes_hold_parts_of_the_same_codes(name, data, model, bits):
    """Read part by part, or copied from one device; what is sampled is the same."""
    mesh, plain = (
        jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model]),
        narrow(name, bits),
    )
    there = narrow(name, bits, mesh=mesh)
    assert_same(there, plain)
    assert_same(plain.on(mesh), plain)
    block = there.decoder.blocks[0].attention
    codes, scales = (
        each.get_value() for each in (block.q, block.q_scale if bits == "int8" else block.q_scales)
    )
    scales = scales if bits == "int8" else scales[..., 0]
    assert (
        codes.sharding.shard_shape(codes.shape)[:-1]
        == scales.sharding.shard_shape(scales.shape)
        != scales.shape
    )
    sampled = [
        [one.tokens for one in jaxkv.generate(each, ROWS, **DRAWN)] for each in (there, plain)
    ]
    np.testing.assert_array_equal(*map(np.asarray, sampled))


def test_kernels_multiply_codes():
    """Fused steps, interpreted, sample XLA's tokens."""
    sampled = [
        [
            one.tokens
            for one in jaxkv.generate(
                narrow("llama_gqa8", "int4"), ROWS, implementation=each, **DRAWN
            )
        ]
        for each in ("pallas", "xla")
    ]
    np.testing.assert_array_equal(*map(np.asarray, sampled))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What is chosen for an NVIDIA GPU runs here, its kernels interpreted; counts their calls by number of vectors."""
    calls = collections.Counter()
    for name in ("multiply_codes", "multiply_blocks_by_tensor_cores"):

        def interpreted(kernel, x, *weight, interpret=True):
            calls[x.shape[-2]] += 1
            return kernel(x, *weight, interpret=True)

        kernel = getattr(pallas_kernels, name)
        monkeypatch.setattr(pallas_kernels, name, functools.partial(interpreted, kernel))

    def on_cuda(*given, default, **ways):
        return ways.get("cuda", default)(*given)

    monkeypatch.setattr(jax.lax, "platform_dependent", on_cuda)
    jax.clear_caches()
    yield calls
    jax.clear_caches()


@pytest.mark.parametrize("bits", ORACLES)
def test_one_vector_is_multiplied_by_codes_as_they_are_stored(as_on_a_gpu, bits):
    """A step of one sequence reads codes, and samples the same tokens."""
    ours, theirs = (
        jaxkv.generate(each, ROWS[:1], max_new_tokens=4, stop_at_eos=False)
        # A model of its own: programs that are compiled already ask nobody.
        for each in (loaded("llama_gqa8", bits), stood_for("llama_gqa8", bits)[0])
    )
    assert set(as_on_a_gpu) == {1}
    assert ours[0].tokens.tolist() == theirs[0].tokens.tolist()


@pytest.mark.parametrize("vectors", [2, 8, 16])
@pytest.mark.parametrize("bits", ORACLES)
def test_several_vectors_in_16_bits_are_multiplied_by_codes(as_on_a_gpu, bits, vectors):
    block = loaded("llama_gqa8", bits).decoder.blocks[0].mlp
    weight = get_stored_weight(block, "down")
    width = weight.dequantise_to_float32().shape[-1]
    x = jax.random.normal(jax.random.key(0), (vectors, width)).astype("bfloat16")
    out, parts = multiply_by_weight(x, weight, wide=True), multiply_split_k(x, weight)
    want = np.asarray(x, np.float64) @ np.asarray(weight.dequantise_to_float32(), np.float64).T
    assert set(as_on_a_gpu) == {vectors}
    for ours in (out, parts.sum(axis=0)):
        np.testing.assert_allclose(ours, want, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("bits", [8, 16])
def test_experts_of_more_tokens_than_experts_are_multiplied_in_blocks(as_on_a_gpu, bits):
    """Blocks of 16 vectors for gates and ups, and for downs; the outputs are XLA's loop's to bfloat16's precision."""
    kind, rng = jax.numpy.dtype("bfloat16"), np.random.default_rng(bits)
    weights = jax.numpy.dtype("int8") if bits == 8 else kind
    config = dataclasses.replace(
        tiny.TWO_LAYERS, embed=64, hidden=32, experts=ExpertsConfig(count=4, chosen=2)
    )
    mixture = MixtureMLP(config, dtype=kind, weights=weights)
    for name, empty in nnx.to_pure_dict(nnx.state(mixture)).items():
        codes = empty.dtype == "int8"
        made = rng.integers(-9, 9, empty.shape) if codes else rng.uniform(0.01, 0.02, empty.shape)
        getattr(mixture, name).set_value(jax.numpy.asarray(made, empty.dtype))
    x = jax.random.normal(jax.random.key(0), (2, 5, 64)).astype(kind)
    out = mixture(x)
    assert as_on_a_gpu == {16: 2}
    ids, shares = mixture.select_experts(x.reshape(10, 64))
    given = (get_stored_weight(mixture, each) for each in ("experts_gate_up", "experts_down"))
    want = apply_experts_by_token(ExpertInputs(x.reshape(10, 64), ids, shares, *given))
    np.testing.assert_allclose(
        out.reshape(10, 64), want, atol=0.01 * float(jax.numpy.abs(want).max())
    )


def test_larger_batches_and_float32_widen_codes(as_on_a_gpu):
    jaxkv.generate(loaded("llama_gqa8", "int4"), ROWS, max_new_tokens=4, stop_at_eos=False)
    assert not as_on_a_gpu


def test_gpus_that_triton_does_not_compile_for_widen_codes(monkeypatch):
    """Below compute capability 8.0 one vector, too, is multiplied by XLA; no vectors are nowhere a product of codes."""
    weight = StoredWeight(jax.numpy.ones((3, 32), jax.numpy.int8), scale=jax.numpy.ones(3))
    assert uses_quantised_kernel(jax.numpy.ones((1, 32)), weight)
    for vectors, dtype, by_kernel in ((2, "float32", 0), (16, "bfloat16", 1), (17, "bfloat16", 0)):
        x = jax.numpy.ones((vectors, 32), dtype)
        assert uses_quantised_kernel(x, weight) == by_kernel
    assert not uses_quantised_kernel(
        jax.numpy.ones((1, 32)), StoredWeight(jax.numpy.ones((3, 32)))
    ) and multiply_split_k(jax.numpy.ones((0, 32)), weight).shape[1:] == (0, 3)
    monkeypatch.setattr(jax, "devices", lambda: [mock.Mock(compute_capability="7.5")])
    assert not uses_quantised_kernel(jax.numpy.ones((1, 32)), weight)


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize("given", ["int2", 8])
def test_other_bits_are_rejected(given):
    with pytest.raises((ValueError, TypeError), match="weights="):
        jaxkv.load(MODELS / "llama_gqa8", weights=given)
    with pytest.raises((ValueError, TypeError), match="weights="):
        jaxkv.plan("llama-3.1-8b", context=4096, weights=given)


def test_rows_that_are_no_whole_groups_are_rejected():
    with pytest.raises(ValueError, match="weights='int4': rows of 48 elements"):
        jaxkv.load(MODELS / "llama_gqa8", weights="int4", progress=False)
    mesh = jax.make_mesh((1, 4), ("data", "model"), devices=jax.devices()[:4])
    told = "weights='int4': 4 devices cannot split rows of 2 groups of 32"
    with pytest.raises(ValueError, match=told):
        narrow("mixtral", "int4", mesh=mesh)
    with pytest.raises(ValueError, match=told):
        narrow("mixtral", "int4").on(mesh)
    config = ModelConfig.from_hf(json.loads((wide_folder("mixtral") / "config.json").read_text()))
    with pytest.raises(ValueError, match=told):
        jaxkv.plan(config, gpus="h100x4", context=64, new=4, weights="int4")


def test_what_codes_cannot_be_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"weights=\['.*down_proj.weight'\]: .*NaN or infinity"):
        jaxkv.load(folder(tmp_path, tensors=holed(DOWN, np.nan)), weights="int8")
    model = narrow("llama_gqa8")
    with pytest.raises(
        ValueError, match="params='int8 weights': quantised weights cannot be exported"
    ):
        jaxkv.export(model, tmp_path / "there", lengths=16, new=4)
    assert not (tmp_path / "there").exists()
    cache = jaxkv.prefill(running.golden_model("llama_gqa8"), ROWS)
    with pytest.raises(ValueError, match="the cache belongs to another model"):
        jaxkv.generate(model, [3], cache=cache, max_new_tokens=2)


def test_plans_count_codes_and_scales(capsys):
    """A 70B model on one H200: a byte for each weight of a linear map, 4 for each of its outputs; or 5 bits."""
    bits = (None, "int8", "int4")
    held = [jaxkv.plan("llama-3.1-70b", context=4096, gpus="h200x1", weights=each) for each in bits]
    E, F, H, K, D, V, L = 8192, 28672, 64, 8, 128, 128256, 80
    outputs = H * D + 2 * K * D + E + 2 * F + E
    linear = (H * D + 2 * K * D) * E + E * H * D + 2 * F * E + E * F
    saved = L * (linear - 4 * outputs) + V * E - 4 * V
    assert held[0].weights - held[1].weights == saved and not held[0].fits and held[1].fits
    assert held[1].speed is not None
    assert held[0].weights - held[2].weights == (2 - 5 / 8) * (L * linear + V * E) and held[2].fits
    # The largest matrix, the head's, is widened in prefill; one sequence's steps widen none.
    wide, narrow = held[0].sizes, held[2].sizes
    assert narrow.prefill == wide.prefill + 2 * V * E and narrow.decode == wide.decode
    assert held[2].speed.step == pytest.approx(held[1].speed.step, rel=0.1)
    two, dense = (
        jaxkv.plan("llama-3.1-70b", context=4096, gpus="h200x1", weights=each, batch=2)
        for each in ("int4", None)
    )
    assert two.sizes.decode == dense.sizes.decode + 2 * V * E
    assert two.speed is None and "4 bits" in two.silent
    mixed = jaxkv.plan("mixtral-8x7b", context=4096, gpus="h200x1", weights="int4")
    assert mixed.speed is None and mixed.sizes.decode > 2 * 4096 * 14336
    main("plan --model llama-3.1-70b --gpus h200x1 --context 4096 --weights int8 --json".split())
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == held[1].weights
