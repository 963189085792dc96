"""GPUs and TPUs by the texts that users give: a name or alias, and how many of them."""

import difflib
import re

from jaxkv._errors import require
from jaxkv.planning.accelerators import Accelerator
from jaxkv.planning.gpus import gpus
from jaxkv.planning.tpus import tpus

_COUNTED = re.compile(r"(?P<kind>.+?)\s*[x:*]\s*(?P<count>[0-9]+)")
_COUNTED_BEFORE = re.compile(r"(?P<count>[0-9]+)\s*(?:[x:*]\s*|\s)(?P<kind>.+)")


def accelerators() -> dict[str, Accelerator]:
    """Dict of every known kind of GPU and TPU by name, GPUs first."""
    return {**gpus(), **tpus()}


def accelerator_named(name: str) -> Accelerator:
    """GPU or TPU of a name or alias in any case; ValueError with the nearest names if it is unknown."""
    require(
        "," not in name, "gpus", name, "a plan is of one kind of GPU or TPU: make a plan for each"
    )
    known = _by_spelling()
    spelled = _spelled(name)
    near = difflib.get_close_matches(spelled, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    require(
        spelled in known,
        "gpus",
        name,
        f"no such GPU or TPU; known ones: {', '.join(accelerators())}{hint}",
    )
    return known[spelled]


def accelerators_named(given: str) -> tuple[Accelerator, int]:
    """(GPU or TPU, count) of a text such as `h100x8`, `8xh100`, `v6e:8` or `8 h100`; of `h100` alone with count 1."""
    if not isinstance(given, str):
        raise TypeError(f"gpus={given!r}: give a kind and how many, 'h100x8' say")
    text, known = given.strip().lower(), _by_spelling()
    # Names have letters and digits of their own: rtx4090.
    read = [] if text in known else [each.fullmatch(text) for each in (_COUNTED, _COUNTED_BEFORE)]
    found = [match for match in read if match is not None]
    if not found:
        return accelerator_named(given), 1
    # Of two readings, as of 2x4090, the one whose kind is known.
    match = next((each for each in found if _spelled(each["kind"]) in known), found[0])
    kind, count = match["kind"], match["count"]
    remedy = f"give 1 or more of them, {kind}x8 say; fewer than a million"
    require(0 < len(count) <= 6 and int(count) > 0, "gpus", given, remedy)
    return accelerator_named(kind), int(count)


def _by_spelling() -> dict[str, Accelerator]:
    """Dict of every known GPU and TPU by each of its names and aliases."""
    return {spelling: each for each in accelerators().values() for spelling in each.spellings}


def _spelled(name: str) -> str:
    """Text of a device's name as the data sheets' files spell it: lower case, with hyphens."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")
