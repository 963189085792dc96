"""GPUs and TPUs by the texts that users give: a name or alias, and how many of them."""

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
    """Dict of every known kind of GPU and TPU by name, GPUs first."""
    return {**gpus(), **tpus()}


def accelerator_named(name: str) -> Accelerator:
    """GPU or TPU of a name or alias in any case; ValueError with the nearest names if it is unknown."""
    known, spelled = _by_spelling(), _spelled(name)
    near = difflib.get_close_matches(spelled, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    remedy = (
        f"no such GPU or TPU, one kind at a time; known ones: {', '.join(accelerators())}{hint}"
    )
    require(spelled in known, "gpus", name, remedy)
    return known[spelled]


def accelerators_named(given: str) -> tuple[Accelerator, int]:
    """(GPU or TPU, count) of a text such as `h100x8`, `8xh100`, `v6e:8` or `8 h100`; of `h100` alone with count 1."""
    if not isinstance(given, str):
        raise TypeError(f"gpus={given!r}: give a kind and how many, 'h100x8' say")
    known = _by_spelling()
    # Names have logical axes and digits of their own: rtx4090. Of two readings the one whose kind is known.
    read = [each.fullmatch(given.strip().lower()) for each in _FORMS]
    found = [match for match in read if match is not None]
    found.sort(key=lambda match: _spelled(match["kind"]) not in known)
    if _spelled(given) in known or not found:
        return accelerator_named(given), 1
    kind, count = found[0]["kind"], found[0]["count"]
    remedy = f"give 1 or more of them, {kind}x8 say; fewer than a million"
    require(0 < len(count) <= 6 and int(count) > 0, "gpus", given, remedy)
    return accelerator_named(kind), int(count)


def _by_spelling() -> dict[str, Accelerator]:
    """Dict of every known GPU and TPU by each of its names and aliases."""
    return {spelling: each for each in accelerators().values() for spelling in each.spellings}


def _spelled(name: str) -> str:
    """Text of a device's name as the data sheets' files spell it: lower case, with hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")
