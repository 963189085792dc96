"""`jaxkv models` and `jaxkv policies`: the named models and the registered policies, as text or JSON."""

import dataclasses
import json
from typing import Any

from jaxkv._dataclasses import frozen_dataclass
from jaxkv.checkpoints import (
    FolderSource,
    cache_dir,
    get_manifest,
    list_model_names,
    list_model_types,
)
from jaxkv.cli.options import list_policy_flags
from jaxkv.cli.outputs import write_to_stdout
from jaxkv.policies.registry import POLICIES

Record = dict[str, Any]


@frozen_dataclass
class ListCommand:
    """Base class of commands that list records, with the option --json.

    Attributes:
        json: print JSON.
    """

    json: bool = False

    def print_records(self, records: list[Record], told: list[Record]) -> None:
        """Print the first list as JSON with --json, else the second as text: each name above its non-empty facts."""
        if self.json:
            write_to_stdout(json.dumps(records, indent=2))
            return
        for facts in told:
            rows = [f"  {name:<15}{fact}" for name, fact in facts.items() if fact]
            write_to_stdout("\n".join([facts["name"], *rows[1:], ""]))


@frozen_dataclass
class ListModelsCommand(ListCommand):
    """The command `jaxkv models`: list the named models, or the supported model types, as text or JSON.

    Attributes:
        types: list the supported values of model_type in config.json instead.
    """

    types: bool = False

    def run_command(self) -> None:
        """Print each named model's source, bytes, license, and whether its weights are cached; or all model types."""
        if self.types:
            rows = [{"name": name, "models": each} for name, each in list_model_types().items()]
            self.print_records(rows, rows)
            return
        records = []
        told = []
        for name in list_model_names():
            model = get_manifest(name)
            source = model.source
            folder = source.folder_path if isinstance(source, FolderSource) else cache_dir() / name
            record: Record = {
                "name": name,
                "source": source.source_label,
                "license": model.license,
                "bytes": source.bytes,
                "cached": isinstance(source, FolderSource)
                or (folder / source.weights_filename).is_file(),
                "hub_id": model.hub_id,
                "notes": model.notes,
            }
            records.append(record)
            cached = f"yes, in {folder}" if record["cached"] else "no, downloaded on first use"
            size = f"{source.bytes / 1e6:.1f} MB"
            told.append(record | {"bytes": size, "cached": cached})
        self.print_records(records, told)
        if not self.json:
            write_to_stdout(
                "Also: a folder in Hugging Face's layout, a .gguf file, or a hub id (owner/name)."
            )


class ListPoliciesCommand(ListCommand):
    """The command `jaxkv policies`: list the registered policies as text or JSON."""

    def run_command(self) -> None:
        """Print each registered policy's summary, paper, parts, defaults and command-line flags."""
        records = []
        told = []
        for name, cls in POLICIES.items():
            fields = [each for each in dataclasses.fields(cls) if each.init]
            record: Record = {
                "name": name,
                "about": (cls.__doc__ or "").strip().splitlines()[0],
                "paper": cls.paper,
                "parts": cls().build_policy_parts().describe_parts(),
                "defaults": {each.name: repr(each.default) for each in fields},
                "options": list_policy_flags(cls),
            }
            records.append(record)
            made = ", ".join(f"{name}={value}" for name, value in record["defaults"].items())
            row = record | record["parts"] | {"parts": "", "defaults": made}
            told.append(row | {"options": " ".join(record["options"])})
        self.print_records(records, told)
