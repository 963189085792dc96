"""A config that leaves fields out means what transformers' class of the family makes of it, field by field."""

import copy
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from config_fields import (
    CLASSES,
    FIELDS,
    NoEffect,
    Read,
    Refused,
    Required,
    fields_of,
    shape,
    theirs_rope,
)
from transformers import LlamaConfig

import jaxkv
from jaxkv.checkpoints.text_part import text_config
from jaxkv.models.config import ModelConfig
from jaxkv.models.hub_defaults import DEFAULTS

FAMILIES = {kind.model_type: kind for kind in CLASSES}
# Qwen's windows begin with its 28th layer.
ROOM: dict[str, dict[str, Any]] = {
    # More than its default window.
    "olmo3": {"max_position_embeddings": 8192},
    "qwen2": {"max_window_layers": 0},
    "qwen3": {"max_window_layers": 0},
    # Windows are those of layers without rotary embeddings.
    "smollm3": {"no_rope_layer_interval": 2},
}
ROWS = [(family, field) for family, table in FIELDS.items() for field in table]


def both(family: str, *, without: str = "", **keys: Any) -> tuple[ModelConfig | None, Any]:
    """What jaxkv and transformers make of the same config; None for one that refuses it."""
    raw = {
        key: value
        for key, value in (shape(family) | ROOM.get(family, {}) | keys).items()
        if key != without
    }
    made: list[Any] = []
    for build in (ModelConfig.from_hf, lambda raw: FAMILIES[family](**json.loads(json.dumps(raw)))):
        try:
            made.append(build(raw))
        # transformers and huggingface_hub have several classes for what they refuse.
        except Exception as error:
            assert isinstance(error, ValueError) or build is not ModelConfig.from_hf, error
            made.append(None)
    return made[0], made[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_has_its_verdict(family):
    assert fields_of(FAMILIES[family]) == set(FIELDS[family])
    # The table that jaxkv reads has no key that the class lacks.
    assert set(DEFAULTS[family]) - {
        "partial_rotary_factor",
        "rope_local_base_freq",
        "rope_theta",
    } <= set(FIELDS[family])


def test_a_field_that_a_class_gains_is_missed():
    class Wider(LlamaConfig):
        attention_sinks: int = 0

    assert fields_of(Wider) - set(FIELDS["llama"]) == {"attention_sinks"}


@pytest.mark.parametrize("family, field", ROWS)
def test_a_field_means_what_it_means_in_transformers(family, field):
    verdict = FIELDS[family][field]
    ours, theirs = both(family, without=field)
    if isinstance(verdict, Required):
        assert ours is None
    elif isinstance(verdict, Read):
        read = verdict.theirs or (lambda config: getattr(config, field))
        assert verdict.ours(ours) == read(theirs)
    changed, there = both(family, **{field: verdict.other})
    if isinstance(verdict, Refused):
        assert ours is not None and changed is None
        with pytest.raises(
            ValueError, match=field if field != "use_sliding_window" else "sliding_window"
        ):
            ModelConfig.from_hf(shape(family, **ROOM.get(family, {}), **{field: verdict.other}))
    elif isinstance(verdict, NoEffect):
        assert changed == ours and ours is not None and verdict.reason
    elif isinstance(verdict, Required):
        assert verdict.ours(changed) == getattr(there, field) == verdict.other
    else:
        read = verdict.theirs or (lambda config: getattr(config, field))
        assert verdict.ours(changed) == read(there) != read(theirs)


def test_mistrals_positions_and_its_window():
    """Left out both, they are 131,072 and 4,096."""
    raw = shape("mistral")
    read, theirs = ModelConfig.from_hf(raw), FAMILIES["mistral"](**raw)
    assert read.windows == (theirs.sliding_window,) * 2 == (4096, 4096)
    assert read.max_positions == theirs.max_position_embeddings
    assert not any(ModelConfig.from_hf(raw | {"sliding_window": None}).windows)


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_what_it_is_in_transformers(family):
    """Or is refused where transformers takes it."""
    agreed = 0
    for field, verdict in FIELDS[family].items():
        ours, theirs = both(family, **{field: None})
        if isinstance(verdict, (Read, Required)) and None not in (ours, theirs):
            read = getattr(verdict, "theirs", None) or (
                lambda config, field=field: getattr(config, field)
            )
            assert (verdict.ours(ours) or None) == (read(theirs) or None), field
            agreed += 1
    assert agreed >= 3


LEFT_OUT = object()


def choices(**values: list[Any]) -> list[dict[str, Any]]:
    """All ways to give some keys a value each, or to leave them out."""
    rows = itertools.product(*([LEFT_OUT, *each] for each in values.values()))
    return [
        {key: value for key, value in zip(values, row, strict=True) if value is not LEFT_OUT}
        for row in rows
    ]


WINDOWS = choices(
    use_sliding_window=[True, False],
    sliding_window=[None, 64, 1 << 17],
    max_window_layers=[1, 2],
    layer_types=[
        [],
        ["full_attention"] * 2,
        ["full_attention"] * 3,
        ["full_attention", "sliding_attention"],
    ],
)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows(family):
    """Read where the class has windows, refused where it has none, or where a type of layer lacks its width."""
    verdicts = set()
    for keys in WINDOWS:
        ours, theirs = both(family, max_position_embeddings=5000, **keys)
        kinds = getattr(theirs, "layer_types", None) or []
        window = getattr(theirs, "sliding_window", None)
        narrow = window if window is not None and window < 5000 else None
        types = keys.get("layer_types") or []
        if family in ("cohere", "falcon", "gemma", "glm4", "granite", "llama", "olmo2"):
            # A switch that is off says what is meant, though transformers' caches do not look at it.
            built = narrow is None or keys.get("use_sliding_window") is False
            built, expected = built and "sliding_attention" not in types, [None, None]
        elif family in ("mistral", "mixtral", "phi3", "qwen3_moe"):
            built, expected = "sliding_attention" not in types, [narrow] * 2
        else:
            # Without a window there is no width for layers of this type.
            built = "sliding_attention" not in kinds or (window is not None and family != "smollm3")
            expected = [narrow if each == "sliding_attention" else None for each in kinds]
        built = built and theirs is not None
        assert (ours is not None) == built, keys
        assert ours is None or list(ours.windows) == expected, keys
        verdicts.add(built)
    assert verdicts == {True, False}


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 5e5},
    {"rope_scaling": None, "rope_theta": 5e5},
    {"rope_parameters": None, "rope_scaling": None},
    {"rope_parameters": {}},
    {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 3e4},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7e4}},
    {"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e5},
    {"rope_scaling": YARN},
    {
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 512, "beta_fast": None, "attention_factor": None}
    },
    {
        "rope_parameters": YARN
        | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}
    },
    {"rope_parameters": LLAMA3},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 512}, "rope_theta": 5e5},
    {"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 5e5}, "rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 1.0},
    {"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": None},
]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma3_text", "olmo3"}))
def test_rotations(family):
    """The family's own theta where a config leaves it out; the model's positions where a scaling leaves those out."""
    for keys in ROPES:
        ours, theirs = both(family, max_position_embeddings=2048, **keys)
        if family == "phi3" and (
            theirs is None or theirs.rope_parameters["rope_type"] != "default"
        ):
            # Its class multiplies by a null share.
            assert ours is None or keys["partial_rotary_factor"] is None, keys
            continue
        assert ours is not None and ours.spec_of(0).rope == theirs_rope(theirs), keys


def test_falcons_switches():
    """Kv heads, parallel blocks and norms, against what its network builds of the same switches."""
    built = 0
    for keys in choices(
        new_decoder_architecture=[None, True],
        multi_query=[None, True, False],
        parallel_attn=[None, False],
        num_kv_heads=[4, 32],
        num_ln_in_parallel_attn=[1, 2],
    ):
        ours, theirs = both("falcon", **keys)
        groups = theirs.new_decoder_architecture
        parallel = bool(theirs.parallel_attn)
        norms = (
            2
            if theirs.num_ln_in_parallel_attn is None and groups
            else theirs.num_ln_in_parallel_attn
        )
        kv_heads = theirs.num_kv_heads if groups or not theirs.multi_query else 1
        if ours is None:
            # Its network fails there, at its first step at the latest, or (the third) has norms that jaxkv lacks.
            wide = not groups and not theirs.multi_query and kv_heads != 32
            assert wide or (norms == 2 and not groups) or (groups and not parallel), keys
            continue
        assert (ours.kv_heads, ours.parallel) == (kv_heads, parallel), keys
        assert ours.shared_norm == (parallel and norms != 2), keys
        built += 1
    assert built > 50


@pytest.mark.parametrize(
    "keys, generation, eos", [({}, None, (2,)), ({"eos_token_id": None}, None, ()), ({}, 5, (5,))]
)
def test_what_ends_an_answer(tmp_path, keys, generation, eos):
    """The default of the class, Llama's 2, only where neither config.json nor generation_config.json names a token."""
    folder = tmp_path / "model"
    shutil.copytree(
        Path(__file__).parent / "golden" / "models" / "llama_gqa8",
        folder,
        copy_function=shutil.copyfile,
    )
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    less = {key: value for key, value in raw.items() if not key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(less | keys), "utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": generation}), "utf-8"
        )
    assert jaxkv.load(folder, progress=False).config.eos == eos


def test_biases_that_qwen2_always_has():
    for value in (True, False):
        assert ModelConfig.from_hf(shape("qwen2", attention_bias=value)) == ModelConfig.from_hf(
            shape("qwen2")
        )


def test_the_golden_configs_are_read_as_transformers_reads_them():
    """All fields that jaxkv reads, of configs that were written by transformers and leave little out."""
    seen = set()
    for file in sorted((Path(__file__).parent / "golden" / "models").glob("*/config.json")):
        # Of a model that also takes images, the text model's.
        raw = dict(text_config(json.loads(file.read_text("utf-8"))))
        family = raw["model_type"]
        ours, theirs = ModelConfig.from_hf(raw), FAMILIES[family](**copy.deepcopy(raw))
        for field, verdict in FIELDS[family].items():
            if isinstance(verdict, (Read, Required)) and field != "new_decoder_architecture":
                read = getattr(verdict, "theirs", None) or (
                    lambda config, field=field: getattr(config, field)
                )
                expected = read(theirs)
                if field == "multi_query":
                    expected = expected and not theirs.new_decoder_architecture
                assert verdict.ours(ours) == expected, (file.parent.name, field)
        for key in raw:
            # What transformers does not need to be told, neither does jaxkv; but sizes.
            less = {other: value for other, value in raw.items() if other != key}
            sized = isinstance(FIELDS[family].get(key), Required)
            if (
                key != "model_type"
                and not sized
                and FAMILIES[family](**copy.deepcopy(less)).to_dict() == theirs.to_dict()
            ):
                assert ModelConfig.from_hf(less) == ours, (file.parent.name, key)
        seen.add(family)
    assert seen == set(FAMILIES)
