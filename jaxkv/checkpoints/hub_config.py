"""Keys of a Hugging Face `config.json`: what each family reads, ignores and rejects, and what is left out."""

import dataclasses
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv._errors import invalid, require

# Keys of a Hugging Face `config.json`.
Config = Mapping[str, Any]

LAYER_TYPES = ("sliding_attention", "full_attention")
# Families whose layers with windows have a rotary embedding of their own.
TWO_ROPES = ("gemma3_text", "olmo3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Row of `families.toml`: keys of a family's config, of which any other that is not null is rejected by name.

    Attributes:
        read: keys that decide something, beside those that it reads `like` Llama, or all; what transformers' class of
            the family says of those that are left out.
        like: name of these keys in the file's table `read`.
        optional: keys that decide something where they are given.
        neutral: keys by the values with which they change nothing; other values are rejected.
        ignored: keys that change nothing, whatever they hold.
        aliases: other names of its keys.
        names: its own names of keys, by Llama's.
        switches: fields of `ModelConfig` that no key changes.
        layers: what the names of its layers' tensors begin with.
        tensors: names of its tensors by parameter, where Llama has others.
    """

    read: str = ""
    like: str = "llama"
    optional: str = ""
    neutral: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    ignored: str = ""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: str = "model.layers"
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """All keys that decide something."""
        return f"{_TABLES['read'][self.like]} {self.read}".split()


_TABLES = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
FAMILIES = {name: Family(**row) for name, row in _TABLES["families"].items()}
_EVERY = _TABLES["every"]
IGNORED = frozenset(_EVERY["ignored"].split())
# Names of tensors by parameter, of families without their own.
TENSORS: dict[str, str] = _EVERY["tensors"]


def completed(config: Config) -> dict[str, Any]:
    """A text model's config with all keys that its family reads, those that are left out by transformers' class.

    transformers is imported only where a key is left out, which takes seconds.

    Args:
        config: the keys of a `config.json`.

    Returns:
        The keys that are given, by one name each, and those that were left out.

    Raises:
        ValueError: for a model type that is not supported, and for a key with what is not supported, by name.
    """
    kind = config.get("model_type")
    known = isinstance(kind, str) and kind in FAMILIES
    lacking = _TABLES["missing"].get(str(kind))
    why = "" if lacking is None else f"it has {lacking}, not built; "
    require(known, "model_type", kind, f"{why}jaxkv builds {', '.join(sorted(FAMILIES))}")
    names = FAMILIES[str(kind)].aliases
    renamed = {names[key]: config[key] for key in names if key in config}
    config = renamed | {key: value for key, value in config.items() if key not in names}
    given = {
        key: value
        for key, value in config.items()
        if value is not None or key in _EVERY["none"].split()
    }
    _check(given)
    missing = _missing(given)
    return given | (_usual(config, missing) if missing else {})


def rotations(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of the rotary embeddings of layers with windows and of those without, however a config spells them.

    transformers 4 writes `rope_scaling` beside `rope_theta`, 5 `rope_parameters`, later ones by type of layer.

    Args:
        config: keys of a `config.json`.

    Returns:
        Two dictionaries; families with one rotary embedding have it twice.
    """
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        require(isinstance(value, Mapping), key, value, "give an object with rope_type and numbers")
    given, scaling = (dict(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    if config["model_type"] not in TWO_ROPES:
        rope = outer | given | scaling
        return rope, rope
    by_type = [given.pop(key, None) or {} for key in LAYER_TYPES]
    for key, value in zip(LAYER_TYPES, by_type, strict=True):
        told = isinstance(value, Mapping)
        require(told, f"rope_parameters.{key}", value, "give an object with rope_type and numbers")
    # Scaling that is written as if it were that of all layers is that of those without windows.
    theta = (
        {**outer, **given}
        if config["model_type"] == "olmo3"
        else {"rope_theta": config.get("rope_local_base_freq")}
    )
    local = {"rope_theta": theta.get("rope_theta")} | by_type[0]
    return local, outer | given | scaling | by_type[1]


def _check(config: Config) -> None:
    """Raise ValueError for a key that is not known, or holds what is not supported, by its name."""
    kind = config["model_type"]
    family = FAMILIES[kind]
    told = f"{_EVERY['optional']} {family.optional} {family.ignored}".split()
    allowed = {*told, *IGNORED, *family.keys}
    for key, value in config.items():
        values = family.neutral.get(key, None if key in allowed else _EVERY["neutral"].get(key, ()))
        built = f"give {' or '.join(map(repr, values))}" if values else "not known: leave it out"
        remedy = f"of a {kind} this is not supported; {built} if that changes nothing"
        require(values is None or value in values, key, value, remedy)
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    remedy = "quantised weights are not supported: load unquantised ones, a GGUF or gpt-oss' mxfp4"
    # Which tensors of a gpt-oss are blocks, their names say.
    plain = quantised is None or (kind == "gpt_oss" and method == "mxfp4")
    require(plain, "quantization_config", method or quantised, remedy)


def _missing(config: Config) -> list[str]:
    """Keys that a family reads and a config leaves out."""
    local, rope = rotations(config)
    read = FAMILIES[config["model_type"]].keys
    read += ["sliding_window", "layer_types"] if config.get("use_sliding_window") else []
    known = config.keys() | rope.keys() & {"rope_theta", "partial_rotary_factor"}
    known |= {"rope_type"} if rope.keys() & {"rope_type", "type"} else set()
    known |= {"rope_local_base_freq"} if local.get("rope_theta") is not None else set()
    return [key for key in read if key not in known]


def _usual(config: Config, missing: list[str]) -> dict[str, Any]:
    """Values, by key, that transformers' config class of a family gives keys that a config leaves out."""
    usual = _of_transformers(config)
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


def _of_transformers(config: Config) -> Any:
    """Transformers' config of these keys but for scaling, which is read here; ValueError for what it rejects."""
    apart = ("quantization_config", "rope_parameters", "rope_scaling")
    before = logging.root.manager.disable
    # It says that PyTorch is missing, and more that users of jaxkv cannot mend.
    logging.disable(logging.WARNING)
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(**{key: config[key] for key in config if key not in apart})
    except Exception as error:  # it and huggingface_hub have several classes for what they reject
        told = f"transformers does not read it: {error}"
        raise invalid("config", config["model_type"], told) from error
    finally:
        logging.disable(before)
