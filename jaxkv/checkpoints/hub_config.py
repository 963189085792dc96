"""Keys of a Hugging Face `config.json`: those that each family reads, ignores and rejects, and defaults of others."""

import dataclasses
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.quantised_weights import parse_weight_format

# Keys of a Hugging Face `config.json`.
Config = Mapping[str, Any]

LAYER_TYPES = ("sliding_attention", "full_attention")
# Families whose sliding-window layers have a rotary embedding of their own.
TWO_ROPES = ("gemma3_text", "gemma4_text", "gemma4_unified_text", "mellum", "olmo3")


@frozen_dataclass
class ModelFamily:
    """Model family in `families.toml`: config keys that it reads or ignores, tensor names, fixed `ModelConfig` fields.

    Attributes:
        about: the models of the family.
        read: required keys, in addition to those of `like`; transformers' class of the family has the defaults.
        like: name of further required keys in the file's table `read`.
        optional: keys with an effect that may be absent.
        neutral: keys with the values that have no effect; other values are rejected.
        ignored: keys without effect, with any value.
        aliases: other names of the family's keys.
        names: the family's names of keys, by Llama's.
        switches: fields of `ModelConfig` that no key changes.
        experts: fields of `ExpertsConfig` that no key changes.
        layers: prefix of the names of its layers' tensors.
        tensors: names of its tensors by parameter, if not Llama's.
    """

    about: str
    read: str = ""
    like: str = "llama"
    optional: str = ""
    neutral: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    ignored: str = ""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: str = "model.layers"
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def required_keys(self) -> list[str]:
        """Names of all config keys that the family requires: those of the shared list named by `like`, then its own."""
        return f"{_TABLES['read'][self.like]} {self.read}".split()

    @property
    def known_keys(self) -> list[str]:
        """Names of all config keys with an effect: those that the family requires, and its own optional ones."""
        return [*self.required_keys, *self.optional.split()]


_TABLES = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
FAMILIES = {name: ModelFamily(**row) for name, row in _TABLES["families"].items()}
_EVERY = _TABLES["every"]
# What unsupported model types have, and what to use instead.
_MISSING = {name: row for row in _TABLES["missing"] for name in row["types"].split()}
IGNORED = frozenset(_EVERY["ignored"].split())
# Names of tensors by parameter, for families without their own.
TENSORS: dict[str, str] = _EVERY["tensors"]


def complete_config(config: Config) -> dict[str, Any]:
    """Return a valid config: aliases renamed, nulls dropped, missing keys by transformers' defaults; else ValueError.

    transformers is imported only if a key is absent, because the import takes seconds.

    Args:
        config: the keys of a `config.json`.

    Returns:
        The given keys, by one name each, and the absent ones.

    Raises:
        ValueError: for a model type or a key that is not supported, by name.
    """
    kind = config.get("model_type")
    known = isinstance(kind, str) and kind in FAMILIES
    reason = _MISSING.get(str(kind))
    told = f"not supported: use one of {', '.join(sorted(FAMILIES))}"
    if reason is not None:
        lacks, instead = reason["lacks"], f"use {reason['instead']}"
        told = f"it has {lacks}, which is not supported: {instead}, or others of `jaxkv models --types`"
    require(known, "model_type", kind, told)
    names = FAMILIES[str(kind)].aliases
    renamed = {names[key]: config[key] for key in names if key in config}
    config = renamed | {key: value for key, value in config.items() if key not in names}
    given = {
        key: value
        for key, value in config.items()
        if value is not None or key in _EVERY["none"].split()
    }
    _check_keys(given)
    missing = _list_missing_keys(given)
    return given | (_get_default_values(config, missing) if missing else {})


def read_rope_keys(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two dicts of RoPE keys from a config, for sliding-window and for other layers; the same in most families.

    transformers 4 writes `rope_scaling` and `rope_theta`, 5 `rope_parameters`, later versions by type of layer.

    Args:
        config: keys of a `config.json`.

    Returns:
        Two dictionaries, equal for families with one rotary embedding.
    """
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        require(
            isinstance(value, Mapping),
            key,
            value,
            "not an object: use one with rope_type and numbers",
        )
    given, scaling = (dict(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    if config["model_type"] not in TWO_ROPES:
        rope = outer | given | scaling
        return rope, rope
    by_type = [given.pop(key, None) or {} for key in LAYER_TYPES]
    for key, value in zip(LAYER_TYPES, by_type, strict=True):
        told = isinstance(value, Mapping)
        require(
            told,
            f"rope_parameters.{key}",
            value,
            "not an object: use one with rope_type and numbers",
        )
    # Scaling without a type of layer is that of the layers without sliding windows.
    theta = (
        {**outer, **given}
        if config["model_type"] == "olmo3"
        else {"rope_theta": config.get("rope_local_base_freq")}
    )
    local = {"rope_theta": theta.get("rope_theta")} | by_type[0]
    return local, outer | given | scaling | by_type[1]


def merge_layer_values(value: Any, layers: Any) -> Any:
    """Return the value that a list gives for every layer, if it is the same for all of them; other values unchanged.

    Args:
        value: value of a config key.
        layers: number of layers.

    Returns:
        The value, or the list's only one.
    """
    alike = isinstance(value, list) and len(value) == layers and value == value[:1] * len(value)
    return value[0] if alike and value else value


def _check_keys(config: Config) -> None:
    """Raise ValueError for keys or values unsupported by the family, or an unsupported quantisation."""
    kind, layers = config["model_type"], config.get("num_hidden_layers")
    family = FAMILIES[kind]
    told = f"{_EVERY['optional']} {family.optional} {family.ignored}".split()
    allowed = {*told, *IGNORED, *family.required_keys}
    for key, value in config.items():
        values = family.neutral.get(key, None if key in allowed else _EVERY["neutral"].get(key, ()))
        built = f"use {' or '.join(map(repr, values))}" if values else "leave it out"
        remedy = f"not supported for {kind}: {built} if that changes nothing"
        known = values is None or merge_layer_values(value, layers) in values
        require(known, key, value, remedy)
    parse_weight_format(config)


def _list_missing_keys(config: Config) -> list[str]:
    """List the config keys that a family requires and a config does not have."""
    local, rope = read_rope_keys(config)
    read = FAMILIES[config["model_type"]].required_keys
    read += ["sliding_window", "layer_types"] if config.get("use_sliding_window") else []
    known = config.keys() | rope.keys() & {"rope_theta", "partial_rotary_factor"}
    known |= {"rope_type"} if rope.keys() & {"rope_type", "type"} else set()
    known |= {"rope_local_base_freq"} if local.get("rope_theta") is not None else set()
    return [key for key in read if key not in known]


def _get_default_values(config: Config, missing: list[str]) -> dict[str, Any]:
    """Return the values of absent config keys, by key, from transformers' config class of the family."""
    usual = _build_transformers_config(config)
    # Keys that the config also gives for single layers are those of all other layers.
    usual.allow_global_per_layer_attribute_access = True
    local, rope = (usual.rope_parameters.get(key, usual.rope_parameters) for key in LAYER_TYPES)
    values = {
        "rope_theta": rope["rope_theta"],
        "rope_local_base_freq": local["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
    }
    found = {
        key: values.get(key, getattr(usual, key, None)) for key in missing if key != "rope_type"
    }
    return found | ({"rope_scaling": rope} if "rope_type" in missing else {})


def _build_transformers_config(config: Config) -> Any:
    """Build transformers' config object from config keys, less RoPE and quantization dicts; ValueError if it fails."""
    apart = ("quantization_config", "rope_parameters", "rope_scaling")
    before = logging.root.manager.disable
    # transformers warns that PyTorch is missing, and of more that does not concern users of jaxkv.
    logging.disable(logging.WARNING)
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(**{key: config[key] for key in config if key not in apart})
    except Exception as error:  # transformers and huggingface_hub raise several classes
        told = f"transformers cannot read it: {error}"
        raise build_value_error("config", config["model_type"], told) from error
    finally:
        logging.disable(before)
