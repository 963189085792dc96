"""`jaxkv models` and `jaxkv policies`: the named models and the registered policies, as text or JSON."""

import dataclasses
import json
from typing import Any

from jaxkv.checkpoints import FolderSource, cache_dir, manifest, names
from jaxkv.cli.options import flags_of
from jaxkv.cli.outputs import to_stdout
from jaxkv.policies.registry import POLICIES

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """Option of commands that list.

    Attributes:
        json: print JSON.
    """

    json: bool = False

    def print(self, records: list[Record], told: list[Record]) -> None:
        """Print records as JSON, or `told` as text: a name above a table of its non-empty facts."""
        if self.json:
            to_stdout(json.dumps(records, indent=2))
            return
        for facts in told:
            rows = [f"  {name:<15}{fact}" for name, fact in facts.items() if fact]
            to_stdout("\n".join([facts["name"], *rows[1:], ""]))


class Models(Listing):
    """`jaxkv models`."""

    def run(self) -> None:
        """Print the named models with source, size, license and cache state."""
        records, told = [], []
        for name in names():
            model = manifest(name)
            source = model.source
            folder = source.path if isinstance(source, FolderSource) else cache_dir() / name
            record: Record = {
                "name": name,
                "source": source.where,
                "license": model.license,
                "bytes": source.bytes,
                "cached": isinstance(source, FolderSource) or (folder / source.filename).is_file(),
                "hub_id": model.hub_id,
                "notes": model.notes,
            }
            records.append(record)
            cached = f"yes, in {folder}" if record["cached"] else "no, downloaded on first use"
            size = f"{source.bytes / 1e6:.1f} MB"
            told.append(record | {"bytes": size, "cached": cached})
        self.print(records, told)
        if not self.json:
            to_stdout(
                "Also: a folder in Hugging Face's layout, a .gguf file, or a hub id (owner/name)."
            )


class Policies(Listing):
    """`jaxkv policies`."""

    def run(self) -> None:
        """Print each policy's summary, paper, parts, defaults and options."""
        records, told = [], []
        for name, cls in POLICIES.items():
            fields = [each for each in dataclasses.fields(cls) if each.init]
            record: Record = {
                "name": name,
                "about": (cls.__doc__ or "").strip().splitlines()[0],
                "paper": cls.paper,
                "parts": cls().parts().described(),
                "defaults": {each.name: repr(each.default) for each in fields},
                "options": flags_of(cls),
            }
            records.append(record)
            made = ", ".join(f"{name}={value}" for name, value in record["defaults"].items())
            row = record | record["parts"] | {"parts": "", "defaults": made}
            told.append(row | {"options": " ".join(record["options"])})
        self.print(records, told)
