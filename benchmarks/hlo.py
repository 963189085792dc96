"""Reads the collectives in the text of compiled programs."""

import collections
import math
import re
from collections.abc import Iterable
from typing import Any

_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
_RESULT = r"= (\([^=]*?\)|\S+)"
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


def arrays_in(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """List of (dtype, shape) of each array named in a piece of HLO text, in order."""
    return [
        (kind, tuple(map(int, filter(None, sizes.split(",")))))
        for kind, sizes in _ARRAY.findall(text)
    ]


def shown(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """HLO text of (dtype, shape) pairs, such as `f32[4,8] s32[2]`."""
    return " ".join(f"{kind}[{','.join(map(str, sizes))}]" for kind, sizes in arrays)


def size_of(kind: str, sizes: tuple[int, ...]) -> int:
    """Bytes of an array of an HLO dtype and a shape."""
    return BYTES[kind] * math.prod(sizes)


def collectives(text: str) -> collections.Counter[Any]:
    """Counter of the collectives of an HLO text by (kind, result arrays); an instruction in a loop counts once."""
    found = collections.Counter[Any]()
    for result, kind, start in re.findall(rf"{_RESULT} ({_KINDS})(-start)?\(", text):
        arrays = arrays_in(result)
        if start and result.startswith("((" if kind == "all-reduce" else "("):
            # A start instruction names its operands and then its results; a sum does so only from JAX 0.11 on.
            arrays = arrays[len(arrays) // 2 :]
        found[kind, tuple(arrays)] += 1
    return found
