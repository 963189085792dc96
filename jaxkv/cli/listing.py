"""What `jaxkv models` and `jaxkv policies` print."""

import json
from typing import Any

from jaxkv.checkpoints import cache_dir, manifest, names
from jaxkv.cli.policy_options import flags_of
from jaxkv.cli.streams import say
from jaxkv.policies.registry import POLICIES, defaults


def models() -> list[dict[str, Any]]:
    """The named models.

    Returns:
        One record each: name, source, license, bytes, cached, hub_id, notes.
    """
    rows = []
    for name in names():
        model = manifest(name)
        source = model.source
        rows.append(
            {
                "name": name,
                "source": f"{source.package}=={source.version}: {source.member}",
                "license": model.license,
                "bytes": source.bytes,
                "cached": (cache_dir() / name / source.filename).is_file(),
                "hub_id": model.hub_id,
                "notes": model.notes,
            }
        )
    return rows


def policies() -> list[dict[str, Any]]:
    """The policies, as their classes describe themselves.

    Returns:
        One record each: name, about, paper, parts, defaults, options of `jaxkv generate`.
    """
    rows = []
    for name, cls in POLICIES.items():
        about = (cls.__doc__ or "").strip().splitlines()[0]
        parts = cls().parts().described()
        row = {"name": name, "about": about, "paper": cls.paper, "parts": parts, "defaults": defaults(cls)}
        rows.append({**row, "options": flags_of(cls)})
    return rows


def print_models(*, as_json: bool = False) -> int:
    """Prints the named models.

    Args:
        as_json: as a JSON list.

    Returns:
        The exit code, 0.
    """
    rows = models()
    if as_json:
        say(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        cached = f"yes, in {cache_dir() / row['name']}" if row["cached"] else "no, fetched at first use"
        facts = {"source": row["source"], "license": row["license"], "size": f"{row['bytes'] / 1e6:.1f} MB"}
        facts = {**facts, "cached": cached, "on the hub": row["hub_id"], "notes": row["notes"]}
        say(_described(row["name"], facts))
    say("Also: a folder in Hugging Face's layout, a .gguf file, or a hub id (owner/name).")
    return 0


def print_policies(*, as_json: bool = False) -> int:
    """Prints the policies.

    Args:
        as_json: as a JSON list.

    Returns:
        The exit code, 0.
    """
    rows = policies()
    if as_json:
        say(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        made = ", ".join(f"{name}={value}" for name, value in row["defaults"].items())
        facts = {"paper": row["paper"], **row["parts"], "defaults": made, "options": " ".join(row["options"])}
        say(_described(f"{row['name']}: {row['about']}", facts))
    return 0


def _described(title: str, facts: dict[str, Any]) -> str:
    width = max(map(len, facts)) + 2
    lines = [f"  {name:<{width}}{value}" for name, value in facts.items() if value]
    return "\n".join([title, *lines, ""])
