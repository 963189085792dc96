"""GPUs and TPUs by user text: a name or alias, and their number."""

import difflib
import re

from jaxkv._errors import require
from jaxkv.planning.accelerators import Accelerator
from jaxkv.planning.gpus import gpus
from jaxkv.planning.tpus import tpus

_FORMS = (
    re.compile(r"(?P<kind>.+?)\s*[x:*]\s*(?P<count>[0-9]+)"),
    re.compile(r"(?P<count>[0-9]+)\s*(?:[x:*]\s*|\s)(?P<kind>.+)"),
)


def accelerators() -> dict[str, Accelerator]:
    """Return every known kind of GPU and TPU by name, GPUs first."""
    return {**gpus(), **tpus()}


def accelerator_named(name: str) -> Accelerator:
    """Return the GPU or TPU with a name or alias, in any case; ValueError with the nearest names if unknown."""
    known, spelled = _by_spelling(), _spelled(name)
    near = difflib.get_close_matches(spelled, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    remedy = f"unknown GPU or TPU: use one of {', '.join(accelerators())}{hint}"
    require(spelled in known, "gpus", name, remedy)
    return known[spelled]


def accelerators_named(given: str) -> tuple[Accelerator, int]:
    """Parse a kind and number such as `h100x8`, `8xh100`, `v6e:8` or `8 h100`; `h100` alone is one device."""
    if not isinstance(given, str):
        raise TypeError(f"gpus={given!r}: not a text: use a kind and a number, such as 'h100x8'")
    known = _by_spelling()
    # Names may contain "x" and digits, as rtx4090: of two parses the one with a known kind wins.
    read = [each.fullmatch(given.strip().lower()) for each in _FORMS]
    found = [match for match in read if match is not None]
    found.sort(key=lambda match: _spelled(match["kind"]) not in known)
    if _spelled(given) in known or not found:
        return accelerator_named(given), 1
    kind, count = found[0]["kind"], found[0]["count"]
    remedy = f"not a valid number: use 1 to 999999, such as {kind}x8"
    require(0 < len(count) <= 6 and int(count) > 0, "gpus", given, remedy)
    return accelerator_named(kind), int(count)


def _by_spelling() -> dict[str, Accelerator]:
    """Return every known GPU and TPU by each of its names and aliases."""
    return {spelling: each for each in accelerators().values() for spelling in each.spellings}


def _spelled(name: str) -> str:
    """Spell a device name as the data sheets do: lower case, with hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")
