"""What ptxas says of the kernels that XLA left as PTX: registers, shared memory, spills."""

import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel, as ptxas assembles it.

    Attributes:
        name: its entry point.
        registers: of a thread.
        shared: bytes of static shared memory.
        spills: bytes stored to and loaded from local memory, for want of registers.
        path: the PTX that it stands in.
    """

    name: str
    registers: int
    shared: int
    spills: int
    path: str


def ptxas() -> str | None:
    """The assembler of the wheel `nvidia-cuda-nvcc` or of the machine's CUDA toolkit; None where there is none."""
    wheels = glob.glob(f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin/ptxas")
    return next(iter(wheels), None) or shutil.which("ptxas") or shutil.which("/usr/local/cuda/bin/ptxas")


def kernels(folder: str | Path, architecture: str, assembler: str) -> list[Kernel]:
    """Assembles what lies in a folder.

    Args:
        folder: that XLA dumped to.
        architecture: as ptxas calls it, `sm_90a` say.
        assembler: from `ptxas`.

    Returns:
        Every kernel.

    Raises:
        RuntimeError: if ptxas refuses a file.
    """
    rows = list[Kernel]()
    for path in sorted(glob.glob(f"{folder}/**/*.ptx", recursive=True)):
        # XLA also leaves the empty rests of modules that it split.
        if ".version" in Path(path).read_text():
            rows += _of(path, architecture, assembler)
    return rows


def _of(path: str, architecture: str, assembler: str) -> list[Kernel]:
    command = [assembler, "-v", f"-arch={architecture}", path, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {path}: {done.stderr[-2000:]}")
    return said(done.stderr, path)


def said(text: str, path: str = "") -> list[Kernel]:
    """The kernels that `ptxas -v` has written of, into its standard error."""
    rows, entries = [], re.split(r"Compiling entry function '([^']+)'", text)
    number = lambda pattern, of: sum(map(int, re.findall(pattern, of)))  # noqa: E731
    for name, of in zip(entries[1::2], entries[2::2], strict=True):
        rows.append(
            Kernel(
                name=name,
                registers=number(r"Used (\d+) registers", of),
                shared=number(r"(\d+) bytes smem", of),
                spills=number(r"(\d+) bytes spill stores", of) + number(r"(\d+) bytes spill loads", of),
                path=path,
            )
        )
    return rows
