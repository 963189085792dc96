"""Spills of registers in TPU kernels, read from the bundles that libtpu dumps as text.

A bundle is what a core begins in a cycle; its line says within how many loops it lies, the one over programs included.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Files of a kernel's last bundles, and bundles: their number, what marks loops, and their instructions.
_FILES = re.compile(r"\d+-(?P<kernel>[\w.]+?)(\.\d+)?-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(?P<loops>>*)\s*\{(?P<rest>.*)", re.MULTILINE)
_SPILL = re.compile(r"\[(?P<memory>[vs]mem):\[#allocation\d+_spill")


class Spills(NamedTuple):
    """Instructions of a kernel that write or read spilled registers.

    Attributes:
        vectors: those of vector registers.
        looped: those of vector registers in loops within a program.
        scalars: those of scalar registers, in scalar memory.
    """

    vectors: int
    looped: int
    scalars: int


def arguments(folder: Path) -> str:
    """Value of LIBTPU_INIT_ARGS by which libtpu dumps the last bundles of what it compiles into a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


def spills_of(text: str) -> Spills:
    """`Spills` of a kernel from the text of its bundles."""
    found = [(len(each["loops"]), _SPILL.findall(each["rest"])) for each in _BUNDLE.finditer(text)]
    if not found:
        raise ValueError("no bundles in what libtpu dumped: its format has changed")
    vectors = [(loops, memories.count("vmem")) for loops, memories in found]
    return Spills(
        vectors=sum(count for _, count in vectors),
        looped=sum(count for loops, count in vectors if loops > 1),
        scalars=sum(memories.count("smem") for _, memories in found),
    )


def kernels(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Spills]]:
    """Yields (name, `Spills`) of the dumped kernels whose names begin with one of `names`; deletes all dumps."""
    for file in sorted(folder.iterdir()):
        named = _FILES.fullmatch(file.name)
        if named and named["kernel"].startswith(names):
            yield named["kernel"], spills_of(file.read_text("utf-8"))
        file.unlink()
