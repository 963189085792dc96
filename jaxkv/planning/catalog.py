"""Model configs by name, without weights: from the packaged catalogue, files or the hub."""

import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jaxkv._checks import validate_int, warn_once
from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import build_value_error, require
from jaxkv.checkpoints import (
    FolderSource,
    fetch_checkpoint,
    get_manifest,
    list_model_names,
    open_checkpoint,
)
from jaxkv.checkpoints.fetching import fetch_hub_model
from jaxkv.checkpoints.orbax_files import MANIFEST
from jaxkv.checkpoints.source import read_folder_config
from jaxkv.models.config import ModelConfig
from jaxkv.models.values import Rope, YarnRope
from jaxkv.policies.reads import list_full_attention_layers

# Indices of Llama 3 8B's filter layers among its 32 layers (OmniKV, appendix); scaled to the layers of other models.
_FILTERS = (2, 8, 18)
_OF = 32
# Unsupported model types with the weights and the cache of a Llama of the same sizes.
_LIKE_LLAMA = ("mimo",)
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "tie_word_embeddings"),
}


@frozen_dataclass
class CatalogModel:
    """A model of the packaged catalogue: `name`, hub id, aliases, URL, parameter count, `config.json` dict (`raw`)."""

    name: str
    hub_id: str
    aliases: tuple[str, ...]
    source: str
    parameters: int
    raw: Mapping[str, Any]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All texts by which users select this model: its name, hub id and aliases."""
        return self.name, self.hub_id, *self.aliases

    @property
    def config(self) -> ModelConfig:
        """`ModelConfig` of a catalogue model, built from its `config.json`; ValueError if unsupported."""
        return ModelConfig.from_hf(self.raw)


@frozen_dataclass
class KnownModel:
    """Name and `ModelConfig` of a model, and OmniKV's filter layers (None if unknown); no weights."""

    name: str
    config: ModelConfig
    filters: tuple[int, ...] | None = None

    @property
    def likely_filter_layers(self) -> tuple[int, ...]:
        """Indices of OmniKV's filter layers; if unknown, Llama 3 8B's, scaled to the layers without sliding window."""
        index = list_full_attention_layers(self.config.sliding_windows) or range(self.config.layers)
        return self.filters or tuple(sorted({index[each * len(index) // _OF] for each in _FILTERS}))


@functools.cache
def catalog() -> dict[str, CatalogModel]:
    """Read the packaged catalogue; return every `CatalogModel` by name, cached."""
    found = {}
    for file in sorted(
        (resources.files(__package__) / "data" / "models").iterdir(), key=lambda each: each.name
    ):
        if file.name.endswith(".json"):
            given = json.loads(file.read_text("utf-8"))
            name = file.name.removesuffix(".json")
            raw = given.pop("config")
            aliases = tuple(given.pop("aliases"))
            found[name] = CatalogModel(name=name, raw=raw, aliases=aliases, **given)
    return found


def model_named(given: str | os.PathLike[str]) -> KnownModel:
    """Return the `KnownModel` of a catalogue or packaged name, folder, `.gguf` or hub id; ValueError if there is none.

    Only configs are downloaded from the hub. Errors name the nearest known names. Unsupported configs are rejected as
    well.
    """
    text = os.fspath(given)
    path = Path(os.path.expanduser(text))
    # Path('') is the current folder.
    if text and os.path.exists(path):
        return _read_known_model(text, path)
    spelled = {
        spelling.lower(): entry for entry in catalog().values() for spelling in entry.spellings
    }
    plain = text.strip().lower()
    if plain in spelled:
        entry = spelled[plain]
        return KnownModel(name=entry.name, config=entry.config, filters=_find_filter_layers(plain))
    if plain in _list_packaged_models():
        return dataclasses.replace(
            _read_known_model(plain, fetch_checkpoint(plain)), filters=_find_filter_layers(plain)
        )
    if text.count("/") == 1 and not text.startswith((".", "/", "~")) and path.suffix != ".gguf":
        files = ("config.json", "hf_quant_config.json")
        return _read_known_model(text, fetch_hub_model(text, field="model", patterns=files))
    every = [*catalog(), *_list_packaged_models()]
    near = difflib.get_close_matches(plain, every, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known models: {', '.join(every)}"
    raise build_value_error("model", text, f"no such model, file or folder; {hint}")


def apply_rope_scaling(known: KnownModel, given: str | None) -> KnownModel:
    """Return a `KnownModel` with plain RoPE extended by YaRN (`yarn:4`: 4 times the positions); unchanged for None."""
    if given is None:
        return known
    config = known.config
    kind, _, times = given.partition(":")
    remedy = "not supported: use yarn and a factor, such as yarn:4, for a model without a scaling of its own"
    fits = kind == "yarn" and times.isdecimal() and type(config.rope) is Rope and not config.kinds
    require(fits, "rope_scaling", given, remedy)
    factor = validate_int("rope_scaling", int(times))
    limit = config.max_positions
    rope = YarnRope(
        theta=config.rope.theta,
        share=config.rope.share,
        factor=float(factor),
        original_max_position=limit,
    )
    stretched = dataclasses.replace(config, rope=rope, max_positions=limit * factor)
    return dataclasses.replace(known, config=stretched)


def _build_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of a `config.json`; for some unsupported types, warn and use a Llama of these sizes."""
    kind = raw.get("model_type")
    if kind not in _LIKE_LLAMA:
        return ModelConfig.from_hf(raw)
    told = "jaxkv does not run this model: the plan is for a Llama of the same sizes"
    warn_once(UserWarning, kind, f"model_type={kind!r}: {told}")
    sizes = {name: raw[name] for name in _SIZES & raw.keys()}
    return ModelConfig.from_hf({"model_type": "llama"} | sizes)


def _list_packaged_models() -> tuple[str, ...]:
    """Return the names of the models whose checkpoints are packaged with jaxkv, which need no download."""
    return tuple(
        name for name in list_model_names() if isinstance(get_manifest(name).source, FolderSource)
    )


def _find_filter_layers(name: str) -> tuple[int, ...] | None:
    """Return the OmniKV filter layers in the manifest of a model that jaxkv names; None for other models."""
    return get_manifest(name).filter_layers if name in list_model_names() else None


def _read_known_model(name: str, path: Path) -> KnownModel:
    """Return the `KnownModel` of a folder or checkpoint file; of a Hugging Face folder only configs are read."""
    if path.is_dir() and (path / "config.json").is_file() and not (path / MANIFEST).exists():
        return KnownModel(name=name, config=_build_model_config(read_folder_config(path)))
    opened = open_checkpoint(fetch_checkpoint(path))
    return KnownModel(
        name=name, config=ModelConfig.from_hf(opened.config), filters=opened.filter_layers
    )
