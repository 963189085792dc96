"""Peak memory and time of a prefill under one budget over all layers, with the cascade and with all layers held.

    python -m benchmarks.cascade [--tokens 2000] [--budgets 0.1,0.2] [--rounds 5] [--dtype float32]

Rounds take turns between the full cache, SnapKV, and LayerDefensiveKV both ways. Memory is the process' peak over what
was resident before the prefill, beside the plan's bytes. malloc gives large blocks back at once: those that it keeps
for later would count into that peak, or into what was before. One prompt of SmolLM2, programs compiled before.
"""

import argparse
import contextlib
import ctypes
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np

import jaxkv
from benchmarks import record
from benchmarks.memory import reset_peak, status_bytes
from jaxkv.engine import plan

MODEL = "smollm2-135m-instruct"
# Names of mallopt's parameters in glibc: blocks from this size on are mapped by themselves; number of arenas.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8


def held_whole():
    """Context in which a prefill holds all layers' rows until the last layer has been looked at."""
    return mock.patch.object(plan, "bounded", lambda heads, devices: False)


def measure(params, tokens, budgets, rounds):
    """Dict by name: bytes planned, and peak bytes and seconds `[rounds, 2]` of a prefill."""
    ids = np.random.default_rng(0).integers(0, params.config.vocab, tokens).tolist()
    cases = {"FullKV": (jaxkv.FullKV(), contextlib.nullcontext)}
    for budget in budgets:
        cases[f"SnapKV {budget:g}"] = jaxkv.SnapKV(budget=budget), contextlib.nullcontext
        for name, way in (("cascade", contextlib.nullcontext), ("all layers held", held_whole)):
            cases[f"LayerDefensiveKV {budget:g}, {name}"] = (
                jaxkv.LayerDefensiveKV(budget=budget),
                way,
            )
    sessions = {name: jaxkv.Session(params, policy) for name, (policy, _) in cases.items()}
    planned, found = {}, {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, (_, way) in cases.items():
            with way():
                planned[name] = sessions[name].planned(np.asarray([tokens]), 0).peak_bytes
                reset_peak()
                before, start = status_bytes("VmRSS"), time.perf_counter()
                cache = sessions[name].prefill(ids)
                seconds = time.perf_counter() - start
            del cache
            # The first turn compiles.
            found[name] += [(status_bytes("VmHWM") - before, seconds)] if turn else []
    return {name: (planned[name], np.asarray(each)) for name, each in found.items()}


def lines_of(found):
    """Rows of the table: medians and spread of megabytes and seconds, the plan's megabytes, ratios to FullKV."""
    full = found["FullKV"][1]
    for name, (planned, each) in found.items():
        (peak, seconds), (more, longer) = each.T, np.median(each / full, axis=0)
        size = f"{np.median(peak) / 1e6:.1f} ({peak.min() / 1e6:.1f}-{peak.max() / 1e6:.1f})"
        took = f"{np.median(seconds):.2f} ({seconds.min():.2f}-{seconds.max():.2f})"
        yield f"| {name} | {size} | {planned / 1e6:.1f} | {more:.2f} | {took} | {longer:.2f} |"


def main():
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=2000, help="prompt length (default: %(default)s)"
    )
    parser.add_argument(
        "--budgets", default="0.1,0.2", help="shares of the prompt (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", jaxkv.UnseenQuestionWarning)
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 18)
    params, where = jaxkv.load(MODEL, dtype=asked.dtype), record.machine()
    found = measure(
        params, asked.tokens, [float(each) for each in asked.budgets.split(",")], asked.rounds
    )
    lines = [
        f"# One budget over all layers: {asked.tokens} tokens ({asked.dtype})",
        "",
        f"By `python -m benchmarks.cascade` at {where['commit']}: {where['processor']}, {where['cores']} cores, load "
        f"{where['load']:.1f} at the start. Ratios are medians over rounds of what the same round took for FullKV.",
        "",
        "| prefill | peak MB: median (least-most) | planned MB | peak / full | s: median (least-most) | s / full |",
        "|---|---:|---:|---:|---:|---:|",
        *lines_of(found),
    ]
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
