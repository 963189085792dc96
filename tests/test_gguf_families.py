"""GGUF files of Gemma 2, Gemma 3 and gpt-oss, written from the golden folders: logits of transformers."""

import json
import re

import gguf
import numpy as np
import pytest
import running
from gguf_files import numbers_of, write
from orbax_cases import MODELS, assert_same
from safetensors.numpy import load_file
from test_golden import golden, rows

import jaxkv
from jaxkv.checkpoints import convert, open_checkpoint
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import ExpertsConfig, LinearRope, Rope, YarnRope

GEMMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

GPT_OSS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
}


def called(name, table):
    """llama.cpp's name of a tensor of Hugging Face's."""
    base, _, kind = name.rpartition(".")
    if base in table:
        return f"{table[base]}.{kind}"
    _, _, layer, inner = base.split(".", 3)
    return f"blk.{layer}.{table[inner]}.{kind}"


def gemma_tensors(name):
    """A golden Gemma's tensors as llama.cpp's converter writes them: norms with 1 added.

    A GGUF's scale of attention is 1 / sqrt(head dim), the golden ones have another: queries carry the difference.
    """
    config = json.loads((MODELS / name / "config.json").read_text("utf-8"))
    scale = np.sqrt(config["head_dim"] / config["query_pre_attn_scalar"])
    found = {}
    for key, array in load_file(MODELS / name / "model.safetensors").items():
        array = array.astype(np.float32)
        array = array + 1 if key.endswith("norm.weight") else array
        array = array * np.float32(scale) if key.endswith("q_norm.weight") else array
        array = array * np.float32(scale) if name == "gemma2" and "q_proj" in key else array
        found[called(key, GEMMA)] = array
    return found


NUMBERS = numbers_of(48, 64, 4, 2, layers=3, context=128) | {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 12,
}
GEMMA2 = NUMBERS | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
# Every third layer of the golden model has no window.
GEMMA3 = NUMBERS | {
    "block_count": 4,
    "attention.sliding_window_pattern": 3,
    "rope.freq_base": 1e6,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}


def gemma(path, arch, *, tensors=None, **numbers):
    """A GGUF of a golden Gemma, with other numbers and tensors; None leaves one out."""
    every = gemma_tensors(arch) | (tensors or {})
    every = {name: array for name, array in every.items() if array is not None}
    return write(path, arch, every, numbers=(GEMMA2 if arch == "gemma2" else GEMMA3) | numbers)


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gemmas_give_the_logits_of_transformers(tmp_path, arch):
    path = gemma(tmp_path / "m.gguf", arch)
    batch = running.by_prefixes(jaxkv.load(path, dtype="float32", progress=False), rows(arch))
    for logits, expected in zip(batch, golden(arch), strict=True):
        assert running.gap(logits, expected) < 2e-5
    norm = open_checkpoint(path).stored["model.layers.1.pre_feedforward_layernorm.weight"]
    theirs = load_file(MODELS / arch / "model.safetensors")[
        "model.layers.1.pre_feedforward_layernorm.weight"
    ]
    np.testing.assert_allclose(norm.read((slice(5, 30),)), theirs[5:30], atol=1e-6)


def read(path):
    return ModelConfig.from_hf(open_checkpoint(path).config)


def test_configs_of_gemmas(tmp_path):
    """What the files leave out is what llama.cpp takes: defaults, and the 27B models' scale by their layers."""
    second = read(
        gemma(tmp_path / "a.gguf", "gemma2", **dict.fromkeys(GEMMA2.keys() - NUMBERS.keys()))
    )
    assert (second.get_layer_spec(0).softcap, second.logit_softcap, second.tied) == (
        50.0,
        30.0,
        True,
    )
    assert second.sliding_windows == (12, None, 12) and second.get_layer_spec(0).scale == 16**-0.5
    usual = {"context_length": 8192, "attention.sliding_window": None}
    assert read(gemma(tmp_path / "b.gguf", "gemma2", **usual)).sliding_windows == (4096, None, 4096)
    for arch, layers in (("gemma2", 46), ("gemma3", 62)):
        assert (
            read(gemma(tmp_path / "c.gguf", arch, block_count=layers)).get_layer_spec(0).scale
            == 12**-0.5
        )
    third = {"attention.sliding_window_pattern": None, "block_count": 13}
    config = read(gemma(tmp_path / "d.gguf", "gemma3", **third))
    assert config.sliding_windows == ((12,) * 5 + (None,)) * 2 + (12,)
    assert config.logit_softcap is config.get_layer_spec(0).softcap is None
    assert [config.get_layer_spec(layer).rope for layer in (0, 5)] == [
        Rope(theta=10_000.0),
        LinearRope(theta=1e6, factor=8.0),
    ]
    local = read(gemma(tmp_path / "e.gguf", "gemma3", **{"rope.freq_base_swa": 20_000.0}))
    assert local.get_layer_spec(0).rope == Rope(theta=20_000.0)
    capped = {
        "final_logit_softcapping": 30.0,
        "attention.sliding_window": None,
        "rope.scaling.type": "none",
    }
    config = read(gemma(tmp_path / "f.gguf", "gemma3", **capped))
    assert config.sliding_windows == (None,) * 4 and config.logit_softcap == 30.0
    assert {config.get_layer_spec(layer).rope for layer in range(4)} == {Rope(theta=1e6)}


def test_a_gemmas_turns_end(tmp_path):
    """Where the file names no id for it, at the token of this text."""
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<pad>",
            "<eos>",
            "<bos>",
            "<unk>",
            "<start_of_turn>",
            "<end_of_turn>",
            "a",
            "▁",
        ],
        "tokenizer.ggml.scores": [0.0] * 8,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, 3, 1, 1],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    checkpoint = open_checkpoint(gemma(tmp_path / "a.gguf", "gemma3", **vocabulary))
    config, tokenizer = ModelConfig.from_hf(checkpoint.config), checkpoint.tokenizer_spec
    assert (config.bos, config.eos) == (2, (1, 5)) and tokenizer.adds_bos
    built = tokenizer.build_tokenizer()
    assert built.encode("a a<end_of_turn>").ids == [6, 7, 6, 5]
    named = read(
        gemma(tmp_path / "b.gguf", "gemma3", **vocabulary | {"tokenizer.ggml.eot_token_id": 4})
    )
    assert named.eos == (1, 4)


PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    "arch, numbers",
    [
        ("gemma2", {"attn_logit_softcapping": "50"}),
        ("gemma2", {"expert_count": 4}),
        ("gemma3", {"attention.value_length": 8}),
        ("gemma3", {"attention.causal": False}),
        ("gemma3", {PATTERN: [True, False]}),
        ("gemma3", {"rope.scaling.type": "longrope"}),
        ("gpt-oss", {"expert_used_count": None}),
        ("gpt-oss", {"swiglu_clamp_exp": [7.0, 10.0]}),
        ("gpt-oss", {"rope.scaling.yarn_ext_factor": 0.5}),
    ],
)
def test_numbers_that_are_not_built(tmp_path, arch, numbers):
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match=f"{re.escape(next(iter(numbers)))}="):
        read(gpt_oss(path, **numbers) if arch == "gpt-oss" else gemma(path, arch, **numbers))


MXFP4 = gguf.GGMLQuantizationType.MXFP4


def repacked(blocks, scales):
    """MXFP4 of the hub's files [..., groups, 16] as a GGUF's rows: a scale, then codes of two halves of 16 elements."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    rows = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return rows.reshape(*rows.shape[:-2], -1)


def gpt_oss_tensors(name):
    """A golden gpt-oss' tensors as llama.cpp's converter writes them, gates and ups apart; and kinds of blocks."""
    stored, found, kinds = load_file(MODELS / name / "model.safetensors"), {}, {}
    for key, array in stored.items():
        if ".mlp.experts." not in key:
            found[called(f"{key}.weight" if key.endswith("sinks") else key, GPT_OSS)] = array
            continue
        base, _, part = key.partition(".experts.")
        if part.endswith("_scales"):
            continue
        kind = "bias" if part.endswith("_bias") else "weight"
        if part.endswith("_blocks"):
            array = repacked(array, stored[key.replace("_blocks", "_scales")])
        elif kind == "weight":
            array = array.swapaxes(1, 2)
        both = part.startswith("gate_up")
        parts = {"gate": array[:, ::2], "up": array[:, 1::2]} if both else {"down": array}
        for each, its in parts.items():
            there = called(f"{base}.experts.{each}_proj.{kind}", GPT_OSS)
            found[there] = its
            if part.endswith("_blocks"):
                kinds[there] = MXFP4
    return found, kinds


OSS = numbers_of(48, 64, 4, 2, layers=4, context=128) | {
    "expert_feed_forward_length": 64,
    "expert_count": 4,
    "expert_used_count": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.sliding_window": 24,
    "rope.freq_base": 150_000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
SIZES = {"gpt_oss": {}, "gpt_oss_mxfp4": {"embedding_length": 64, "expert_feed_forward_length": 96}}


def gpt_oss(path, name="gpt_oss", *, tensors=None, **numbers):
    """A GGUF of a golden gpt-oss, with other numbers and tensors; None leaves one out."""
    every, kinds = gpt_oss_tensors(name)
    every = {name: array for name, array in (every | (tensors or {})).items() if array is not None}
    return write(path, "gpt-oss", every, numbers=OSS | SIZES[name] | numbers, kinds=kinds)


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4"])
def test_a_gpt_oss_gives_the_logits_of_transformers(tmp_path, name):
    path = gpt_oss(tmp_path / "m.gguf", name)
    model = jaxkv.load(path, dtype="float32", progress=False)
    for logits, expected in zip(running.by_prefixes(model, rows(name)), golden(name), strict=True):
        assert running.gap(logits, expected) < 2e-5
    mine, theirs = open_checkpoint(path).stored, open_checkpoint(MODELS / name).stored
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        np.testing.assert_array_equal(
            tensor.read(()), theirs[key].read(()).astype(np.float32), err_msg=key
        )
    both = "model.layers.1.mlp.experts.gate_up_proj.weight"
    for part in (
        (slice(1, 3), slice(1, 2), slice(5, 40), slice(7, 33)),
        (slice(3, 4), slice(0, 1)),
    ):
        np.testing.assert_array_equal(
            mine[both].read(part), theirs[both].read(part).astype(np.float32)
        )


@pytest.mark.parametrize(
    "write", [lambda path: gemma(path, "gemma3"), lambda path: gpt_oss(path, "gpt_oss_mxfp4")]
)
def test_converted(tmp_path, write):
    source = write(tmp_path / "m.gguf")
    assert_same(jaxkv.load(convert(source, tmp_path / "model", progress=False)), jaxkv.load(source))


def test_configs_of_gpt_oss(tmp_path):
    """YaRN's ramp has exact ends and the clamp is 7, as in the published ones; a file without scaling means none."""
    config = read(gpt_oss(tmp_path / "a.gguf"))
    rope = YarnRope(theta=150_000.0, factor=4.0, original_max_position=32, truncate=False)
    assert config.experts == ExpertsConfig(count=4, chosen=2, bias=True, limit=7.0)
    assert (
        config.sliding_windows == (24, None) * 2
        and config.get_layer_spec(0).rope == rope == config.get_layer_spec(1).rope
    )
    assert (
        config.qkv_bias
        and config.out_bias
        and config.sink_logits
        and not config.tied
        and config.hidden == 64
    )
    plain = {"rope.scaling.type": None, "rope.scaling.factor": None}
    assert read(gpt_oss(tmp_path / "b.gguf", **plain)).get_layer_spec(1).rope == Rope(
        theta=150_000.0
    )
    assert read(
        gpt_oss(tmp_path / "c.gguf", **{PATTERN: [False, True, True, True]})
    ).sliding_windows == (
        None,
        24,
        24,
        24,
    )


def test_tensors_that_are_missing(tmp_path):
    embedding, ups = {"token_embd.weight": None}, {"blk.1.ffn_up_exps.weight": None}
    for path, name in (
        (gemma(tmp_path / "a.gguf", "gemma2", tensors=embedding), "token_embd.weight"),
        (gpt_oss(tmp_path / "b.gguf", tensors=ups), "up_proj.weight"),
    ):
        with pytest.raises(ValueError, match=name):
            jaxkv.load(path, progress=False)


def test_scales_that_are_no_number_are_refused(tmp_path):
    blocks, _ = gpt_oss_tensors("gpt_oss_mxfp4")
    name = "blk.1.ffn_down_exps.weight"
    path = gpt_oss(
        tmp_path / "m.gguf", "gpt_oss_mxfp4", tensors={name: np.full_like(blocks[name], 255)}
    )
    with pytest.raises(ValueError, match="these tensors contain NaN or infinity"):
        jaxkv.load(path, progress=False)
