"""`jaxkv models` and `jaxkv policies`: the named models and the registered policies, as text or JSON."""

import argparse
import json
from typing import Any

from jaxkv.checkpoints import FolderSource, cache_dir, manifest, names
from jaxkv.cli.policy_options import flags_of
from jaxkv.cli.streams import to_stdout
from jaxkv.policies.registry import POLICIES, defaults

Record = dict[str, Any]
_OTHERS = "Also: a folder in Hugging Face's layout, a .gguf file, or a hub id (owner/name)."


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--json` to a parser: print JSON instead of text."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_models(options: argparse.Namespace) -> int:
    """Runs `jaxkv models`: prints the named models' sources, sizes, licenses and cache state; returns exit code 0."""
    models = [_model(name) for name in names()]
    if options.json:
        to_stdout(json.dumps(models, indent=2))
        return 0
    for model in models:
        source = manifest(model["name"]).source
        folder = source.path if isinstance(source, FolderSource) else cache_dir() / model["name"]
        facts = {
            "source": model["source"],
            "license": model["license"],
            "size": f"{model['bytes'] / 1e6:.1f} MB",
            "cached": f"yes, in {folder}" if model["cached"] else "no, fetched at first use",
            "on the hub": model["hub_id"],
            "notes": model["notes"],
        }
        to_stdout(_described(model["name"], facts))
    to_stdout(_OTHERS)
    return 0


def print_policies(options: argparse.Namespace) -> int:
    """Runs `jaxkv policies`: prints each policy's summary, paper, parts, defaults and options; returns exit code 0."""
    policies = [_policy(name) for name in POLICIES]
    if options.json:
        to_stdout(json.dumps(policies, indent=2))
        return 0
    for policy in policies:
        made = ", ".join(f"{name}={value}" for name, value in policy["defaults"].items())
        facts = {
            "paper": policy["paper"],
            **policy["parts"],
            "defaults": made,
            "options": " ".join(policy["options"]),
        }
        to_stdout(_described(f"{policy['name']}: {policy['about']}", facts))
    return 0


def _model(name: str) -> Record:
    """Dictionary for JSON of a named model: name, source, license, bytes, hub id, notes, and whether it is cached."""
    model = manifest(name)
    source = model.source
    return {
        "name": name,
        "source": source.where,
        "license": model.license,
        "bytes": source.bytes,
        "cached": isinstance(source, FolderSource)
        or (cache_dir() / name / source.filename).is_file(),
        "hub_id": model.hub_id,
        "notes": model.notes,
    }


def _policy(name: str) -> Record:
    """Dictionary for JSON of a policy: name, first docstring line, paper, parts, defaults and options."""
    cls = POLICIES[name]
    return {
        "name": name,
        "about": (cls.__doc__ or "").strip().splitlines()[0],
        "paper": cls.paper,
        "parts": cls().parts().described(),
        "defaults": defaults(cls),
        "options": flags_of(cls),
    }


def _described(title: str, facts: dict[str, Any]) -> str:
    """Text of a title line above a two-column table of the facts that are not empty."""
    width = max(map(len, facts)) + 2
    lines = [f"  {name:<{width}}{value}" for name, value in facts.items() if value]
    return "\n".join([title, *lines, ""])
