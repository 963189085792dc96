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


def list_accelerators() -> dict[str, Accelerator]:
    """Return a dict of every known kind of GPU and TPU by name, GPUs first."""
    return {**gpus(), **tpus()}


def find_accelerator(name: str) -> Accelerator:
    """Return the GPU or TPU of a name or alias, ignoring case; ValueError with the nearest names if unknown."""
    known = _index_by_spelling()
    spelled = _normalise_spelling(name)
    near = difflib.get_close_matches(spelled, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    remedy = f"unknown GPU or TPU: use one of {', '.join(list_accelerators())}{hint}"
    require(spelled in known, "gpus", name, remedy)
    return known[spelled]


def parse_accelerators(given: str) -> tuple[Accelerator, int]:
    """Parse a kind and number such as `h100x8` or `8 h100`; return the `Accelerator` and the number, by default 1."""
    if not isinstance(given, str):
        raise TypeError(f"gpus={given!r}: not a text: use a kind and a number, such as 'h100x8'")
    known = _index_by_spelling()
    # Names may contain "x" and digits, as rtx4090: of two parses the one with a known kind wins.
    read = [each.fullmatch(given.strip().lower()) for each in _FORMS]
    found = [match for match in read if match is not None]
    found.sort(key=lambda match: _normalise_spelling(match["kind"]) not in known)
    if _normalise_spelling(given) in known or not found:
        return find_accelerator(given), 1
    kind = found[0]["kind"]
    count = found[0]["count"]
    remedy = f"not a valid number: use 1 to 999999, such as {kind}x8"
    require(0 < len(count) <= 6 and int(count) > 0, "gpus", given, remedy)
    return find_accelerator(kind), int(count)


def _index_by_spelling() -> dict[str, Accelerator]:
    """Return a dict of every known GPU and TPU by each of their names and aliases."""
    return {spelling: each for each in list_accelerators().values() for spelling in each.spellings}


def _normalise_spelling(name: str) -> str:
    """Return a device name as the data sheets spell it: lower case, with hyphens for spaces and underscores."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")
