"""The text model of a checkpoint that also accepts images: its config, and its tensors by a text model's names."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints.hub_config import FAMILIES, IGNORED, Config
from jaxkv.checkpoints.tensor import StoredTensor

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_HARMLESS = set(_TABLES["harmless"].split())
_IMAGES = tuple(_TABLES["images"])


def list_model_types() -> dict[str, str]:
    """List the `model_type` values of supported configs, by name, each with its models.

    Returns:
        A description by model type.
    """
    rows = {name: family.about for name, family in FAMILIES.items()}
    rows |= {name: row["about"] for name, row in _TABLES["models"].items()}
    rows |= {name: rows[same] for name, same in _TABLES["same"].items()}
    return dict(sorted(rows.items()))


def extract_text_config(config: Config) -> Config:
    """Return an image-and-text model's text config, as if text-only; others unchanged, `model_type` as transformers'.

    Args:
        config: the keys of a Hugging Face `config.json`.

    Returns:
        The text model's config, as of a text-only checkpoint.

    Raises:
        ValueError: for a missing `extract_text_config`, one of another model type, and unknown keys.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TABLES["models"]:
        same = _TABLES["same"].get(str(kind))
        return config if same is None else {**config, "model_type": same}
    texts, given = _TABLES["models"][kind]["texts"], config.get("text_config")
    if not isinstance(given, Mapping):
        raise build_value_error(
            "text_config", given, f"not an object: a {kind} needs the keys of its text model"
        )
    own = given.get("model_type", next(iter(texts)))
    require(
        own in texts,
        "text_config.model_type",
        own,
        f"the text model of a {kind} must be a {' or '.join(texts)}: use another",
    )
    unknown = sorted(map(str, set(config) - IGNORED - _HARMLESS - set(_TABLES["shared"])))
    require(
        not unknown,
        "config",
        unknown,
        "these keys are not supported: remove them only if they change nothing",
    )
    shared = {key: config[key] for key in _TABLES["shared"] if config.get(key) is not None}
    return {**given, **shared, "model_type": own, "architectures": [texts[own]]}


def extract_text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return an image-and-text model's tensors without the vision ones, named as in a text-only checkpoint.

    Args:
        stored: all tensors by their names in the file.

    Returns:
        The tensors by their new names.
    """
    found = {}
    for name, tensor in stored.items():
        if not name.removeprefix("model.").startswith(_IMAGES):
            prefixes = _TABLES["prefixes"]
            begins = next((each for each in prefixes if name.startswith(each)), "")
            found[prefixes.get(begins, "") + name.removeprefix(begins)] = tensor
    return found
