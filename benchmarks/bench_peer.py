"""Compares jaxkv with its PyTorch peer (transformers and kvpress) on the same weights, prompts and policies.

Run it with jaxkv's own environment; the peer lives in another one, whose python is named::

    python -m benchmarks.bench_peer --peer-python .venv-peer/bin/python --quick

Two worker processes stay alive with their weights loaded, ``peer_worker.py`` and ``jaxkv_worker.py``, and compute in
turns, A B A B, so that a slow spell of the machine hits both. Only one of them computes at a time. They are started
anew for each dtype, so that no process holds weights of two dtypes. Peaks of memory are each process's own.

The workers
===========
A worker takes ``--gguf PATH --dtype float32|bfloat16 --threads N`` and speaks JSON, as ``workers.py`` says. When its
weights are loaded it says which library, in which versions, and whether it times steps or its loop. A request::

    {"id": str,
     "prompt_ids": "FILE.npy",      int32 [batch, tokens], every row of full length, nothing to be put in front
     "policy": "full" | "snapkv" | "pyramidkv" | "adakv" | "streaming",
     "budget": int,                 rows kept per layer and key/value head, the window included: exactly that many, or
                                    their mean over the layers (pyramidkv) or the heads (adakv); ignored for "full"
     "window": 32, "kernel": 5, "beta": 20, "alpha": 0.2, "sinks": 4,      average pooling; beta is PyramidKV's,
                                                                           alpha AdaKV's safeguard
     "new_tokens": T, "repeats": R, "warmup": W}

The worker makes W untimed runs (here belongs compilation), resets its peak of memory, and makes R timed runs. A run is

* the prefill, timed as one: the forward pass over the whole prompt with compression, logits at the last position
  alone, and the first token (its argmax) read back to Python;
* T greedy decode steps at positions S, S + 1, ..., each timed on its own up to the token read back to Python. EOS
  does not stop them. A library that decodes in a compiled loop may time the loop and give its mean step.

The response has medians and all seconds of prefills, median and mean of a step for the whole batch, rows that count
after the prefill (by layer, mean over batch rows and heads), bytes of keys and values allocated after it, resident
memory before the timed runs and VmHWM after them, and tokens of the last run; or it has ``"error"``, after which the
worker goes on.

Other programs on the machine distort the figures, and not evenly: torch's threads wait for each other by spinning, so
on two cores a single busy neighbour can slow the peer down tenfold. Before each request, while both workers are idle,
the driver therefore measures how busy the processors are. It waits up to ``--wait-quiet`` seconds for them to be free,
keeps the figure as ``foreign_busy``, and marks a cell with ``!`` where it stayed above a tenth of one processor.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.workers import Worker

HERE = Path(__file__).resolve().parent
PROMPTS = HERE.parent / "tests" / "golden" / "parity" / "needle1024.json"
POLICIES = ("full", "snapkv", "pyramidkv", "adakv", "streaming")
# With a window of 32, kvpress falls back to one budget for all layers at 256 rows: its smallest layer would have 13.
SETTINGS = {"pyramidkv": {"window": 8}}
BUSY = 0.1  # Of one processor; more than that while the workers are idle marks a cell.
WARM_PEER_UP_TO = (
    4096  # Prompt tokens in all: the peer compiles nothing, and a large run warms itself.
)


def foreign_busy(seconds=0.5):
    """Returns how many processors are busy while the workers are idle, or None where /proc/stat is missing."""

    def ticks():
        fields = [
            int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ]
        return sum(fields) - fields[3] - fields[4]  # All but idle and iowait.

    try:
        before, start = ticks(), time.perf_counter()
        time.sleep(seconds)
        return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - start)
    except OSError:
        return None


def wait_until_quiet(limit):
    """Waits up to ``limit`` seconds until no other program computes, and returns what ``foreign_busy`` says last."""
    deadline = time.monotonic() + limit
    while (busy := foreign_busy()) is not None and busy > BUSY and time.monotonic() < deadline:
        time.sleep(1)
    return busy


def make_prompts(batch, length, folder):
    """Writes [batch, length] real token ids and returns the file's name.

    The haystacks are put one after another. Each row starts elsewhere, so no two rows are the same.
    """
    ids = np.concatenate(
        [np.array(case["input_ids"], np.int32) for case in json.loads(PROMPTS.read_text())["cases"]]
    )
    rows = [np.take(ids, np.arange(length) + 1277 * row, mode="wrap") for row in range(batch)]
    path = Path(folder) / f"ids-{batch}x{length}.npy"
    np.save(path, np.stack(rows))
    return str(path)


def compare(rounds):
    """Returns medians, ratios peer / ours with their spread over the rounds, and how far the tokens agree."""
    result = {}
    for side in ("peer", "ours"):
        good = [r[side] for r in rounds if side in r and "error" not in r[side]]
        errors = [r[side]["error"] for r in rounds if side in r and "error" in r[side]]
        if errors:
            result[f"{side}_error"] = errors[0]
        if not good:
            continue
        for key in (
            "prefill_median",
            "decode_median",
            "peak_rss",
            "base_rss",
            "cache_bytes",
            "kept_mean",
        ):
            result[f"{side}_{key}"] = statistics.median(x[key] for x in good)
        result[f"{side}_peak_over_base"] = max(x["peak_rss"] - x["base_rss"] for x in good)
        result[f"{side}_warmup_seconds"] = max(x["warmup_seconds"] for x in good)
    result["foreign_busy"] = max(x.get("foreign_busy") or 0.0 for r in rounds for x in r.values())
    both = [
        r
        for r in rounds
        if all("error" not in r.get(side, {"error": 1}) for side in ("peer", "ours"))
    ]
    if both:
        for key in ("prefill_median", "decode_median", "peak_rss"):
            ratios = [r["peer"][key] / r["ours"][key] for r in both]
            result[f"{key}_ratio"] = result[f"peer_{key}"] / result[f"ours_{key}"]
            result[f"{key}_ratio_range"] = [min(ratios), max(ratios)]
        pairs = list(zip(both[-1]["peer"]["tokens"], both[-1]["ours"]["tokens"], strict=True))
        first = [
            next((i for i, (a, b) in enumerate(zip(p, o, strict=True)) if a != b), len(p))
            for p, o in pairs
        ]
        result["same_leading_tokens"] = first
    return result


def cell_line(cell):
    """Returns a cell as one line of the table."""

    def number(key, scale, digits):
        return f"{cell[key] * scale:.{digits}f}" if key in cell else "-"

    def ratio(key):
        if f"{key}_ratio" not in cell:
            return "-"
        low, high = cell[f"{key}_ratio_range"]
        return f"{cell[f'{key}_ratio']:.2f} ({low:.2f}-{high:.2f})"

    name = f"{cell['dtype'][:8]:8s} {cell['policy']:9s} {cell['batch']:2d} x {cell['length']:<5d}"
    parts = [f"{name:27s}"]
    parts += [f"{number(f'{s}_prefill_median', 1, 2):>8s}" for s in ("peer", "ours")]
    parts += [f"{ratio('prefill_median'):>18s}"]
    parts += [f"{number(f'{s}_decode_median', 1e3, 1):>8s}" for s in ("peer", "ours")]
    parts += [f"{ratio('decode_median'):>18s}"]
    parts += [f"{number(f'{s}_peak_rss', 2**-20, 0):>7s}" for s in ("peer", "ours")]
    parts += [f"{number(f'{s}_peak_over_base', 2**-20, 0):>7s}" for s in ("peer", "ours")]
    parts += [f"{number(f'{s}_cache_bytes', 2**-20, 1):>7s}" for s in ("peer", "ours")]
    parts += [f"{number(f'{s}_kept_mean', 1, 1):>7s}" for s in ("peer", "ours")]
    parts += [
        f"{min(cell['same_leading_tokens']):>5d}" if "same_leading_tokens" in cell else f"{'-':>5s}"
    ]
    parts += ["!" if cell["foreign_busy"] > BUSY else ""]
    errors = [
        f"\n    {side}: {cell[f'{side}_error']}"
        for side in ("peer", "ours")
        if f"{side}_error" in cell
    ]
    return " ".join(parts).rstrip() + "".join(errors)


HEADER = (
    f"{'':27s} {'prefill s':>17s} {'ratio (range)':>18s} {'decode ms/step':>17s} {'ratio (range)':>18s} "
    f"{'peak MiB':>15s} {'over base':>15s} {'cache MiB':>15s} {'kept':>15s} {'same':>5s}\n"
    f"{'dtype    policy    batch':27s} {'peer':>8s} {'ours':>8s} {'peer/ours':>18s} {'peer':>8s} {'ours':>8s} "
    f"{'peer/ours':>18s} {'peer':>7s} {'ours':>7s} {'peer':>7s} {'ours':>7s} {'peer':>7s} {'ours':>7s} "
    f"{'peer':>7s} {'ours':>7s} {'tok':>5s}"
)


def names(text):
    """Splits a list given as ``a,b``."""
    return [part for part in text.split(",") if part]


def parse(argv=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="(default: that of SmolLM2-135M, fetched)")
    parser.add_argument(
        "--peer-python", type=Path, default=HERE.parent / ".venv-peer" / "bin" / "python"
    )
    parser.add_argument("--only", choices=("peer", "ours"), help="measure one side alone")
    parser.add_argument("--quick", action="store_true", help="prompts of 4096 tokens alone")
    parser.add_argument(
        "--prompts", type=names, default=["512", "2048", "4096"], help="lengths, such as 512,4096"
    )
    parser.add_argument("--batches", type=names, default=["1", "8"])
    parser.add_argument("--policies", type=names, default=["full", "snapkv", "pyramidkv", "adakv"])
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16"])
    parser.add_argument("--budget", type=int, default=256)
    # More than the short answers that run in groups of layers on a CPU: the loop's steps are timed.
    parser.add_argument("--new-tokens", type=int, default=144)
    parser.add_argument("--repeats", type=int, default=1, help="timed runs per request")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both workers per cell")
    parser.add_argument(
        "--warmup", type=int, default=1, help="untimed runs before a cell's first round"
    )
    parser.add_argument(
        "--wait-quiet", type=float, default=60, help="seconds to wait for other programs to stop"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "peer.json")
    args = parser.parse_args(argv)
    unknown = set(args.policies) - set(POLICIES)
    if unknown:
        parser.error(
            f"--policies: {', '.join(sorted(unknown))} is unknown; use some of {', '.join(POLICIES)}"
        )
    if args.quick:
        args.prompts = ["4096"]
    if args.gguf is None:
        from jaxkv.checkpoints import fetch_checkpoint

        args.gguf = fetch_checkpoint("smollm2-135m-instruct")
    return args


def run_cell(workers, args, policy, batch, length, folder):
    """Measures one cell in turns and returns its line of results."""
    request = {"prompt_ids": make_prompts(batch, length, folder), "policy": policy}
    request |= {
        "budget": args.budget,
        "window": 32,
        "kernel": 5,
        "beta": 20,
        "alpha": 0.2,
        "sinks": 4,
    }
    request |= {"new_tokens": args.new_tokens, "repeats": args.repeats} | SETTINGS.get(policy, {})
    rounds = []
    for index in range(args.rounds):
        answers = {}
        for side, worker in workers.items():
            warmup = (
                args.warmup
                if index == 0 and (side == "ours" or batch * length <= WARM_PEER_UP_TO)
                else 0
            )
            name = f"{args.dtype}-{policy}-{batch}x{length}-{index}"
            busy = wait_until_quiet(args.wait_quiet)
            answers[side] = worker.ask(request | {"id": name, "warmup": warmup}) | {
                "foreign_busy": busy
            }
        rounds.append(answers)
        if any("error" in answer for answer in answers.values()):
            break  # It would fail again.
    cell = {
        "dtype": args.dtype,
        "policy": policy,
        "batch": batch,
        "length": length,
        "request": request,
    }
    return cell | compare(rounds) | {"rounds": rounds}


def main():
    """Measures all cells, prints the table line by line and writes the results after each cell."""
    args = parse()
    sides = {
        "peer": (args.peer_python, "peer_worker"),
        "ours": (sys.executable, "jaxkv_worker"),
    }
    if args.only:
        sides = {args.only: sides[args.only]}
    machine = {"platform": platform.platform(), "cpus": os.cpu_count(), "threads": args.threads}
    results = {"machine": machine, "workers": {}, "cells": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            args.dtype = dtype
            workers = {}
            try:
                for side, (python, module) in sides.items():
                    command = [python, "-m", f"benchmarks.{module}", "--gguf", args.gguf]
                    command += ["--dtype", dtype, "--threads", args.threads]
                    environment = {**os.environ, "TQDM_DISABLE": "1"}
                    workers[side] = Worker([*map(str, command)], env=environment)
                results["workers"][dtype] = {side: worker.ready for side, worker in workers.items()}
                for length in map(int, args.prompts):
                    for batch in map(int, args.batches):
                        for policy in args.policies:
                            cell = run_cell(workers, args, policy, batch, length, folder)
                            results["cells"].append(cell)
                            print(cell_line(cell), flush=True)
                            args.out.write_text(json.dumps(results, indent=1) + "\n")
            finally:
                for worker in workers.values():
                    worker.stop()


if __name__ == "__main__":
    main()
