"""Counts spills of vector registers in TPU kernels, in the bundles that libtpu dumps: what a core does in a cycle."""

import collections
import re
from pathlib import Path

# Kernels by the beginnings of their names: jaxkv's, and the one that comes with JAX.
_KERNELS = ("tpu_", "splash")
# Files of a kernel's last bundles, and the instructions of a bundle.
_FILES = re.compile(r"\d+-(?P<kernel>[\w.]+?)(\.\d+)?-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^\s*0x[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)", re.MULTILINE)
_SPILL = re.compile(r"\[vmem:\[#allocation\d+_spill")


def arguments(folder: Path) -> str:
    """Value of LIBTPU_INIT_ARGS by which libtpu dumps the last bundles of what it compiles into a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


def spilled(text: str) -> int:
    """Number of instructions that write or read spilled vector registers in the text of a kernel's bundles."""
    bundles = _BUNDLE.findall(text)
    if not bundles:
        raise ValueError("no bundles in what libtpu dumped: its format has changed")
    return sum(len(_SPILL.findall(each)) for each in bundles)


def spills(folder: Path) -> collections.Counter[str]:
    """`Counter` of the instructions with spilled vectors by kernel, of all kernels in a folder; deletes all dumps."""
    found = collections.Counter[str]()
    for file in sorted(folder.iterdir()):
        named = _FILES.fullmatch(file.name)
        if named and named["kernel"].startswith(_KERNELS):
            found[named["kernel"]] += spilled(file.read_text("utf-8"))
        file.unlink()
    return found
