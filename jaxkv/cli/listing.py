"""What `jaxkv models` and `jaxkv policies` print."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from jaxkv.checkpoints import FolderSource, cache_dir, manifest, names
from jaxkv.cli.policy_options import flags_of
from jaxkv.cli.streams import to_stdout
from jaxkv.policies.registry import POLICIES, defaults

Record = dict[str, Any]
_OTHERS = "Also: a folder in Hugging Face's layout, a .gguf file, or a hub id (owner/name)."


def print_models(options: argparse.Namespace) -> int:
    """Prints the named models: name, source, license, bytes, cached, hub_id, notes of each.

    Args:
        options: of which `json` asks for a JSON list.

    Returns:
        The exit code, 0.
    """
    return _print([_model(name) for name in names()], _described_model, options, _OTHERS)


def print_policies(options: argparse.Namespace) -> int:
    """Prints the policies: name, about, paper, parts, defaults, options of `jaxkv generate` of each.

    Args:
        options: of which `json` asks for a JSON list.

    Returns:
        The exit code, 0.
    """
    return _print([_policy(name) for name in POLICIES], _described_policy, options)


def _print(records: list[Record], described: Callable[[Record], str], options: argparse.Namespace, *after: str) -> int:
    for text in [json.dumps(records, indent=2)] if options.json else [*map(described, records), *after]:
        to_stdout(text)
    return 0


def _model(name: str) -> Record:
    model = manifest(name)
    source = model.source
    return {
        "name": name,
        "source": source.where,
        "license": model.license,
        "bytes": source.bytes,
        "cached": isinstance(source, FolderSource) or (cache_dir() / name / source.filename).is_file(),
        "hub_id": model.hub_id,
        "notes": model.notes,
    }


def _described_model(model: Record) -> str:
    source = manifest(model["name"]).source
    folder = source.path if isinstance(source, FolderSource) else cache_dir() / model["name"]
    cached = f"yes, in {folder}" if model["cached"] else "no, fetched at first use"
    facts = {"source": model["source"], "license": model["license"], "size": f"{model['bytes'] / 1e6:.1f} MB"}
    return _described(model["name"], facts | {"cached": cached, "on the hub": model["hub_id"], "notes": model["notes"]})


def _policy(name: str) -> Record:
    """A policy as its class describes itself."""
    cls = POLICIES[name]
    about = (cls.__doc__ or "").strip().splitlines()[0]
    record = {
        "name": name,
        "about": about,
        "paper": cls.paper,
        "parts": cls().parts().described(),
        "defaults": defaults(cls),
    }
    return {**record, "options": flags_of(cls)}


def _described_policy(policy: Record) -> str:
    made = ", ".join(f"{name}={value}" for name, value in policy["defaults"].items())
    facts = {"paper": policy["paper"], **policy["parts"], "defaults": made, "options": " ".join(policy["options"])}
    return _described(f"{policy['name']}: {policy['about']}", facts)


def _described(title: str, facts: dict[str, Any]) -> str:
    width = max(map(len, facts)) + 2
    lines = [f"  {name:<{width}}{value}" for name, value in facts.items() if value]
    return "\n".join([title, *lines, ""])
