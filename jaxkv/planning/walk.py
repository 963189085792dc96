"""A prefill's programs as the compiler is asked for them: of each kind the call at which most lies on a device."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxkv.planning.programs import Work
from jaxkv.sharding.record import Call, weigh

# What a prefill's programs are called in a plan, by the names of their functions.
_NAMES = {
    "_observe": "score",
    "_choose": "choose",
    "_choose_over_layers": "choose",
    "_merged": "merge",
    "pack_shared": "pack",
    "logits_of": "logits",
}
# Programs of numbers alone: nothing of theirs weighs anything, and the compiler is not asked.
SMALL = ("unordered", "placed", "_ring")


def prefill_calls(work: Work) -> Iterator[Call]:
    """The programs of a prefill, traced; of calls that differ in numbers alone the one with most on a device.

    Args:
        work: what they are traced for.

    Yields:
        Calls, named by what they do, in the order of the first of each kind.
    """
    heaviest = dict[Any, Call]()
    for call in work.prefill.calls:
        if call.name not in SMALL:
            kind = call_name(call), jax.tree.structure(call.arguments)
            heaviest[kind] = max(heaviest.get(kind, call), call, key=_lying)
    for (name, _), call in heaviest.items():
        yield dataclasses.replace(call, name=name)


def call_name(call: Call) -> str:
    """What a call of a prefill does."""
    return "top layer" if call.options.get("last") else _NAMES.get(call.name, call.name)


def _lying(call: Call) -> int:
    """Bytes on one device while a program runs: beside it, given to it and given by it."""
    return call.beside + weigh(call.arguments) + weigh(call.results)
