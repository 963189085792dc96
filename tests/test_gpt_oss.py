"""gpt-oss: its published config, and experts from MXFP4 blocks and from floats, whole, in parts and on meshes."""

import json
import shutil

import numpy as np
import pytest
import running
from meshes import mesh_of
from orbax_cases import MODELS, assert_same
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv.checkpoints import convert, open_checkpoint
from jaxkv.models.config import ModelConfig
from jaxkv.models.decoder import named_parameters
from jaxkv.models.values import ExpertsConfig, LayerSpec, YarnRope
from jaxkv.planning.catalog import catalog

PUBLISHED = catalog()["gpt-oss-20b"].raw
EXPERTS = "model.layers.1.mlp.experts"
BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.gate_up_proj_scales"
ROWS = [[5, 9, 2, 7, 1, 30, 4] * 6, [8, 3, 11]]


def folder(tmp_path, name, *, config=None, tensors=None):
    """A copy of a golden folder with other config keys or tensors; None removes one."""
    there = shutil.copytree(MODELS / name, tmp_path / "model", copy_function=shutil.copyfile)
    raw = json.loads((there / "config.json").read_text("utf-8")) | (config or {})
    (there / "config.json").write_text(json.dumps(raw), "utf-8")
    held = load_file(there / "model.safetensors") | (tensors or {})
    save_file(
        {name: each for name, each in held.items() if each is not None}, there / "model.safetensors"
    )
    return there


def test_the_published_config():
    rope = YarnRope(theta=150_000.0, factor=32.0, original_max_position=4096, truncate=False)
    for raw in (
        PUBLISHED,
        PUBLISHED | {"quantization_config": None, "layer_types": None, "rope_scaling": None},
    ):
        config = ModelConfig.from_hf(raw)
        assert config.experts == ExpertsConfig(count=32, chosen=4, bias=True, limit=7.0)
        assert config.kinds == (LayerSpec(rope=rope, sliding_window=128), LayerSpec(rope=rope))
        assert config.sliding_windows == (128, None) * 12 and not config.has_llama_blocks
        assert (
            config.sink_logits
            and config.qkv_bias
            and config.out_bias
            and not config.mlp_bias
            and not config.tied
        )
        assert (config.eos, config.bos, config.max_positions) == ((200_002,), None, 131_072)
    written = dict(PUBLISHED, rope_parameters=PUBLISHED["rope_scaling"] | {"rope_theta": 150_000})
    assert (
        ModelConfig.from_hf({key: each for key, each in written.items() if key != "rope_scaling"})
        == config
    )
    plain = ModelConfig.from_hf(PUBLISHED | {"rope_scaling": {"rope_type": "default"}})
    assert plain.get_layer_spec(0).rope.theta == 150_000 and not isinstance(
        plain.get_layer_spec(0).rope, YarnRope
    )


@pytest.mark.parametrize(
    "keys, name",
    [
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"num_experts_per_tok": 64}, "chosen"),
        ({"quantization_config": "mxfp4"}, "quantization_config"),
    ],
)
def test_configs_that_are_not_built(keys, name):
    with pytest.raises(ValueError, match=name):
        ModelConfig.from_hf(PUBLISHED | keys)


@pytest.mark.parametrize("limit", [0.0, float("inf"), float("nan")])
def test_limits_that_are_none(limit):
    with pytest.raises(ValueError, match=f"limit={limit}"):
        ExpertsConfig(count=4, chosen=2, limit=limit)


def test_biases_in_parallel_blocks_are_refused():
    with pytest.raises(ValueError, match="experts=.*parallel blocks: give bias=False"):
        config = json.loads((MODELS / "mixtral" / "config.json").read_text("utf-8"))
        fields = vars(ModelConfig.from_hf(config))
        ModelConfig(
            **fields | {"experts": ExpertsConfig(count=4, chosen=2, bias=True), "parallel": True}
        )


def e2m1(code):
    """A 4-bit float: a sign, two bits of exponent biased by 1, one of mantissa; without exponent it is subnormal."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
    return -size if code & 8 else size


def test_experts_from_blocks():
    """Element by element: the low half of a byte first, gates in even rows, ups in odd ones."""
    stored = load_file(MODELS / "gpt_oss_mxfp4" / "model.safetensors")
    held = dict(named_parameters(running.golden_model("gpt_oss_mxfp4").decoder))
    for part in ("gate_up", "down"):
        blocks, scales = (stored[f"{EXPERTS}.{part}_proj_{each}"] for each in ("blocks", "scales"))
        wide = np.zeros((*blocks.shape[:2], 32 * blocks.shape[2]))
        for at in np.ndindex(*blocks.shape):
            expert, row, group, byte = at
            for half in range(2):
                code = int(blocks[at]) >> 4 * half & 15
                value = e2m1(code) * 2.0 ** (int(scales[at[:-1]]) - 127)
                wide[expert, row, 32 * group + 2 * byte + half] = value
        bias = stored[f"{EXPERTS}.{part}_proj_bias"]
        if part == "gate_up":
            wide, bias = (
                np.stack([wide[:, ::2], wide[:, 1::2]], 1),
                np.stack([bias[:, ::2], bias[:, 1::2]], 1),
            )
        np.testing.assert_array_equal(held[f"blocks.1.mlp.experts_{part}"].get_value(), wide)
        np.testing.assert_array_equal(held[f"blocks.1.mlp.experts_{part}_bias"].get_value(), bias)


@pytest.mark.parametrize(
    "code, scale, value", [(7, 254, 6 * 2.0**127), (1, 0, 2.0**-128), (7, 127, 6.0)]
)
def test_the_ends_of_a_scale(tmp_path, code, scale, value):
    stored = load_file(MODELS / "gpt_oss_mxfp4" / "model.safetensors")
    blocks, scales = np.full_like(stored[BLOCKS], code), np.full_like(stored[SCALES], scale)
    copied = folder(tmp_path, "gpt_oss_mxfp4", tensors={BLOCKS: blocks, SCALES: scales})
    read = open_checkpoint(copied).stored[f"{EXPERTS}.gate_up_proj.weight"].read(())
    expected = np.float32(value) if value < 2.0**128 else np.float32(np.inf)
    assert read.dtype.name == "bfloat16" and (read[..., ::2].astype(np.float32) == expected).all()


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4"])
def test_converted(tmp_path, name):
    assert_same(
        jaxkv.load(convert(MODELS / name, tmp_path / "model", progress=False)),
        jaxkv.load(MODELS / name),
    )


def test_a_mesh_gives_the_logits_of_one_device():
    """The biases of sums over the hidden width, which is split, are added once: of a prompt, of a token behind it."""
    one = jaxkv.load(MODELS / "gpt_oss_mxfp4")
    many = jaxkv.load(MODELS / "gpt_oss_mxfp4", mesh=mesh_of(2, 4))
    bias = many.decoder.blocks[0].mlp.experts_gate_up_bias.get_value()
    assert bias.sharding.shard_shape(bias.shape) == (4, 2, 24)
    found = []
    for each in (many, one):
        cache, logits = running.prefill(each, ROWS, headroom=1)
        found.append([logits, np.concatenate(running.extend(each, cache, [[7], [9]])[0])])
    for mine, theirs in zip(*found, strict=True):
        assert running.gap(mine, theirs) < 2e-5


@pytest.mark.parametrize(
    "name, tensors, message",
    [
        ("gpt_oss_mxfp4", {SCALES: None}, f"tensor='{SCALES}'"),
        ("gpt_oss_mxfp4", {BLOCKS: np.zeros((4, 191, 2, 16), "B")}, rf"{BLOCKS}=\(4, 191, 2, 16\)"),
        ("gpt_oss_mxfp4", {BLOCKS: np.zeros((4, 192, 2, 16), "b")}, rf"{BLOCKS}\.dtype='int8'"),
        ("gpt_oss_mxfp4", {SCALES: np.full((4, 192, 2), 255, "B")}, "NaN or infinity"),
        (
            "gpt_oss_mxfp4",
            {BLOCKS: np.zeros((3, 192, 2, 16), "B"), SCALES: np.zeros((3, 192, 2), "B")},
            r"gate_up_proj\.weight=\(3, 2, 96, 64\): the config requires \(4, 2, 96, 64\)",
        ),
        ("gpt_oss_mxfp4", {f"{EXPERTS}.gate_up_proj": np.zeros((4, 64, 192), "f")}, "keep one"),
        ("gpt_oss", {f"{EXPERTS}.down_proj_bias": np.zeros(48, "f")}, r"down_proj_bias=\(48,\)"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, name, tensors, message):
    copied = folder(tmp_path, name, tensors=tensors)
    with pytest.raises(ValueError, match=message):
        jaxkv.load(copied, progress=False)
