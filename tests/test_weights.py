"""Weights in 8 bits: their rounding by an oracle, and models of them beside models of what the codes stand for."""

import json

import jax
import numpy as np
import pytest
import running
from orbax_cases import MODELS, assert_same
from test_bad_input import DOWN, folder, holed

import jaxkv
from jaxkv.cli import main
from jaxkv.models.decoder import named_parameters
from jaxkv.weights import codes_of

# Fused and stacked tensors, biases, norms of queries, one kv head, mixtures of two kinds of files, an output matrix.
FAMILIES = ["llama_gqa8", "llama_bias", "qwen3", "falcon_40b", "falcon_serial", "mixtral", "qwen3_moe_fused"]
ROWS = [[5, 9, 2, 7, 1, 30, 4], [8, 3, 11]]


def rounded(weight):
    """Oracle by loops over outputs: codes, scales, and what they stand for."""
    codes, scales = np.zeros(weight.shape, np.int8), np.zeros(weight.shape[:-1], np.float32)
    for at in np.ndindex(*weight.shape[:-1]):
        most = np.float32(np.abs(weight[at]).max())
        scales[at] = most / np.float32(127)
        for column, value in enumerate(weight[at]):
            codes[(*at, column)] = 0 if scales[at] == 0 else round(float(np.float32(value / scales[at])))
    return codes, scales, codes.astype(np.float32) * scales[..., None]


def narrow(name, **options):
    return jaxkv.load(MODELS / name, "float32", weights="int8", progress=False, **options)


def stood_for(name):
    """The model whose weights are what the codes stand for, in float32, and the oracle's codes and scales by path."""
    model, found = jaxkv.load(MODELS / name, "float32", progress=False), {}
    for path, parameter in named_parameters(model.decoder):
        last = path.rpartition(".")[2]
        if last in {"q", "kv", "out", "gate_up", "up", "down", "experts_gate_up", "experts_down", "head"}:
            codes, scales, wide = rounded(np.asarray(parameter.get_value()))
            found[path] = codes
            found[f"{path}_scale"] = scales
            parameter.set_value(jax.numpy.asarray(wide))
    return model, found


def test_codes_are_rounded_to_the_nearest():
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((3, 4, 16)) * 10.0 ** rng.integers(-8, 8, (3, 4, 1))).astype(np.float32)
    weight[1, 2], weight[0, 1, 3:] = 0, 0
    codes, scales = codes_of(weight)
    for mine, theirs in zip((codes, scales), rounded(weight), strict=False):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert np.abs(codes).max(axis=-1).min(where=scales > 0, initial=127) == 127
    assert (np.abs(codes * scales[..., None] - weight) <= scales[..., None] * 0.5001).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_rounded_weights(name):
    """Prefill of an unequal batch, and each token decoded on top; the codes are the oracle's."""
    model, (same, found) = narrow(name), stood_for(name)
    held = dict(named_parameters(model.decoder))
    assert {path for path in held if held[path].get_value().dtype == np.int8} | {
        path for path in held if path.endswith("_scale")
    } == found.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(held[path].get_value(), value)
    for mine, theirs in zip(running.by_tokens(model, ROWS), running.by_tokens(same, ROWS), strict=True):
        assert running.gap(mine, theirs) < 2e-5
    assert model.dtype == np.float32 and model.fingerprint != same.fingerprint
    codes = sum(each.size for each in found.values() if each.dtype == np.int8)
    scales = sum(each.nbytes for each in found.values() if each.dtype == np.float32)
    assert model.nbytes == same.nbytes - 3 * codes + scales
    assert "float32 with int8 weights" in repr(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_multiply_the_same_codes(dtype):
    model, same = jaxkv.load(MODELS / "llama_gqa8", dtype, weights="int8", progress=False), narrow("llama_gqa8")
    (_, mine), (_, theirs) = running.prefill(model, ROWS), running.prefill(same, ROWS)
    assert model.dtype == dtype and running.gap(mine, theirs) < 0.05 * np.abs(theirs).max()


SCORES = {
    "critical": jaxkv.CriticalKV(base=jaxkv.SnapKV(budget=6, window=2)),
    "kvzip+": jaxkv.KVzip(budget=0.5, weighted=True, first=(1, 2), following=(3,), closing=(4,)),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_that_read_weights_read_what_they_stand_for(name):
    prompts = [[5, 9, 2, 7, 1, 30, 4, 8, 3, 11, 12, 13], [8, 3, 11, 2, 5, 6, 7]]
    models = narrow("llama_gqa8"), stood_for("llama_gqa8")[0]
    mine, theirs = (jaxkv.Session(each, SCORES[name]).prefill(prompts) for each in models)
    np.testing.assert_array_equal(running.kept(mine, 16), running.kept(theirs, 16))


@pytest.mark.parametrize("data, model", [(1, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("name", ["llama_gqa8", "mixtral"])
def test_meshes_hold_parts_of_the_same_codes(name, data, model):
    """Read part by part, or copied from one device; what is drawn is the same."""
    if name == "mixtral" and model == 8:
        data, model = 2, 2
    mesh, plain = jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model]), narrow(name)
    there = narrow(name, mesh=mesh)
    assert_same(there, plain)
    assert_same(plain.on(mesh), plain)
    block = there.decoder.blocks[0].attention
    codes, scales = (each.get_value() for each in (block.q, block.q_scale))
    assert codes.sharding.shard_shape(codes.shape)[:-1] == scales.sharding.shard_shape(scales.shape) != scales.shape
    options = {"max_new_tokens": 6, "stop_at_eos": False, "progress": False, "policy": jaxkv.H2O(budget=5)}
    drawn = [jaxkv.generate(each, ROWS, **options).tokens for each in (there, plain)]
    np.testing.assert_array_equal(*map(np.asarray, drawn))


def test_dtypes_say_bits_as_well():
    assert jaxkv.load(MODELS / "llama_gqa8", weights=jax.numpy.int8, progress=False).decoder.weights == "int8"


def test_kernels_multiply_codes():
    """Fused steps, interpreted, draw XLA's tokens."""
    options = {"max_new_tokens": 4, "stop_at_eos": False, "progress": False, "policy": jaxkv.SnapKV(budget=5, window=2)}
    drawn = [
        jaxkv.generate(narrow("llama_gqa8"), ROWS, implementation=each, **options).tokens for each in ("pallas", "xla")
    ]
    np.testing.assert_array_equal(*map(np.asarray, drawn))


@pytest.mark.usefixtures("as_users_call")
@pytest.mark.parametrize("given", ["int4", "INT8", 8, True, np.int16, ["int8"], ""])
def test_other_bits_are_refused(given):
    with pytest.raises((ValueError, TypeError), match="weights=.*: give 'int8', or None for the model's dtype"):
        jaxkv.load(MODELS / "llama_gqa8", weights=given)
    with pytest.raises((ValueError, TypeError), match="weights=.*: give 'int8', or None for the model's dtype"):
        jaxkv.plan("llama-3.1-8b", context=4096, weights=given)


def test_what_codes_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"weights=\['.*down_proj.weight'\]: .*NaN or infinity"):
        jaxkv.load(folder(tmp_path, tensors=holed(DOWN, np.nan)), weights="int8")
    model = narrow("llama_gqa8")
    with pytest.raises(ValueError, match="params='int8 weights': programs are exported with weights of one dtype"):
        jaxkv.export(model, tmp_path / "there", lengths=16, new=4)
    assert not (tmp_path / "there").exists()
    cache = jaxkv.prefill(running.golden_model("llama_gqa8"), ROWS)
    with pytest.raises(ValueError, match="it was made by another model"):
        jaxkv.generate(model, [3], cache=cache, max_new_tokens=2)


def test_plans_count_codes_and_scales(capsys):
    """A 70B model on one H200: a byte for each weight of a linear map, 4 for each of its outputs."""
    held = [jaxkv.plan("llama-3.1-70b", context=4096, gpus="h200x1", weights=each) for each in (None, "int8")]
    E, F, H, K, D, V, L = 8192, 28672, 64, 8, 128, 128256, 80
    outputs = H * D + 2 * K * D + E + 2 * F + E
    linear = (H * D + 2 * K * D) * E + E * H * D + 2 * F * E + E * F
    saved = L * (linear - 4 * outputs) + V * E - 4 * V
    assert held[0].weights - held[1].weights == saved and not held[0].fits and held[1].fits
    assert held[1].speed is not None
    main(["plan", "--model", "llama-3.1-70b", "--gpus", "h200x1", "--context", "4096", "--weights", "int8", "--json"])
    assert json.loads(capsys.readouterr().out)["weights_bytes"] == held[1].weights
