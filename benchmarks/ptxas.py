"""Assembles the PTX that XLA dumped, and reads registers, shared memory and spills of each kernel from ptxas."""

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
    """Resources of a kernel in the PTX file `path`: registers per thread, bytes of shared memory and of spills."""

    name: str
    registers: int
    shared: int
    spills: int
    path: str


def ptxas() -> str | None:
    """Path of ptxas in the wheel `nvidia-cuda-nvcc` or the machine's CUDA toolkit; None if it is not installed."""
    wheels = glob.glob(f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin/ptxas")
    return (
        next(iter(wheels), None)
        or shutil.which("ptxas")
        or shutil.which("/usr/local/cuda/bin/ptxas")
    )


def kernels(folder: str | Path, architecture: str, assembler: str) -> list[Kernel]:
    """Assembles the PTX files in `folder` with ptxas; returns a list of `Kernel`; RuntimeError if it rejects one."""
    found = list[Kernel]()
    for path in sorted(glob.glob(f"{folder}/**/*.ptx", recursive=True)):
        # XLA also dumps empty files for the remainders of modules that it split.
        if ".version" not in Path(path).read_text():
            continue
        command = [assembler, "-v", f"-arch={architecture}", path, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas rejects {path}: {done.stderr[-2000:]}")
        found += said(done.stderr, path)
    return found


def said(text: str, path: str = "") -> list[Kernel]:
    """Parses the standard error of `ptxas -v`; returns a list of `Kernel`: registers, shared memory and spills."""
    found, entries = [], re.split(r"Compiling entry function '([^']+)'", text)
    for name, report in zip(entries[1::2], entries[2::2], strict=True):
        spills = _sum_of(r"(\d+) bytes spill stores", report) + _sum_of(
            r"(\d+) bytes spill loads", report
        )
        registers, shared = (
            _sum_of(r"Used (\d+) registers", report),
            _sum_of(r"(\d+) bytes smem", report),
        )
        found.append(
            Kernel(name=name, registers=registers, shared=shared, spills=spills, path=path)
        )
    return found


def _sum_of(pattern: str, text: str) -> int:
    """Sum of all numbers in a text that a regular expression captures."""
    return sum(map(int, re.findall(pattern, text)))
