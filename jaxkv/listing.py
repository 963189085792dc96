"""What `jaxkv models` and `jaxkv policies` print."""

import json
from typing import Any

from jaxkv.checkpoints import cache_dir, manifest, names
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
        One record each: name, about, paper, parts, defaults.
    """
    rows = []
    for name, cls in POLICIES.items():
        about = (cls.__doc__ or "").strip().splitlines()[0]
        parts = cls().parts()
        rows.append({"name": name, "about": about, "paper": cls.paper, "parts": parts, "defaults": defaults(cls)})
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
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(row["name"])
        cached = f"yes, in {cache_dir() / row['name']}" if row["cached"] else "no, fetched at first use"
        facts = {"source": row["source"], "license": row["license"], "size": f"{row['bytes'] / 1e6:.1f} MB"}
        _print_facts({**facts, "cached": cached, "on the hub": row["hub_id"], "notes": row["notes"]})
    print("Also: a folder in Hugging Face's layout, a .gguf file, or a hub id (owner/name).")
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
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['name']}: {row['about']}")
        made = ", ".join(f"{name}={value}" for name, value in row["defaults"].items())
        _print_facts({"paper": row["paper"], **row["parts"], "defaults": made})
    return 0


def _print_facts(facts: dict[str, Any]) -> None:
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        if value:
            print(f"  {name:<{width}}{value}")
    print()
