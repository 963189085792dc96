"""Times this checkout against another one: prefill and decode step of the same prompts, in turns.

    git worktree add ../before COMMIT
    python -m benchmarks.against --base ../before

A process for each checkout and dtype keeps the model loaded. They compute in turns (A B, B A, ...), one at a time,
through `jaxkv.generate` alone, so that a slow spell of the machine hits both. Prefill is the time of an answer of one
token, a step that of a longer one beyond it, by this script's clock. Ratios are of one round each, base / this
checkout: above 1 this checkout is faster. cpu is the processor time of both answers, which a busy machine changes
least; programs are what the first longer one compiles, or finds on disk. Peak is what a later run
adds to resident memory, in processes of their own that keep no freed memory. The commits of both are saved with the
figures.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
# In the other checkout's process `benchmarks` is that checkout's.
sys.path.append(str(HERE))
from workers import Worker, reset_peak, serve, status_bytes  # noqa: E402

PROMPTS = HERE.parent / "tests" / "golden" / "parity" / "needle1024.json"
FIGURES = {"times": ("prefill", "step", "cpu"), "memory": ("peak",)}
# malloc gives freed buffers back to the system at once. By default its arenas keep tens of MB that `reset_peak` does
# not get back, another number in each process: a run fills those first, and adds less to resident memory than it needs.
# Not for times, to which new pages add.
FREES_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def prompts(batch, length):
    """Real token ids `[batch, length]`, every row another stretch of the same texts."""
    ids = np.concatenate(
        [np.asarray(case["input_ids"]) for case in json.loads(PROMPTS.read_text())["cases"]]
    )
    return [
        np.take(ids, np.arange(length) + 1277 * row, mode="wrap").tolist() for row in range(batch)
    ]


def load(dtype):
    """What a worker says of the checkout that is on the path, and the function that measures it."""
    import jaxkv

    model = jaxkv.load("smollm2-135m-instruct", dtype, progress=False)
    policies = {
        "full": jaxkv.FullKV,
        "snapkv": jaxkv.SnapKV,
        "adakv": jaxkv.AdaKV,
        "h2o": jaxkv.H2O,
        "omnikv": functools.partial(jaxkv.OmniKV, filter_layers=(2, 6, 19)),
        "d2o": jaxkv.D2O,
    }

    def answer(ask):
        before = status_bytes("VmRSS") if reset_peak() else None
        options = {} if ask["policy"] == "full" else {"budget": ask["budget"]}
        asked = {"policy": policies[ask["policy"]](**options), "stop_at_eos": False}
        ids, cpu, walls = prompts(ask["batch"], ask["length"]), time.process_time(), []
        for new in (1, 1 + ask["new_tokens"]):
            begun = time.perf_counter()
            done = jaxkv.generate(model, ids, **asked, max_new_tokens=new, progress=False)
            walls.append(time.perf_counter() - begun)
        told = {
            "prefill": walls[0],
            "step": (walls[1] - walls[0]) / ask["new_tokens"],
            "cpu": time.process_time() - cpu,
            "compile": done.stats.compile_seconds,
            "programs": done.stats.compiled_programs,
        }
        return told if before is None else told | {"peak": status_bytes("VmHWM") - before}

    return {"at": str(Path(jaxkv.__file__).parents[1])}, answer


def started(root, dtype, figures):
    """A process that runs one checkout, for one kind of figures."""
    environment = {**os.environ, "PYTHONPATH": str(root), "TQDM_DISABLE": "1"}
    # Set here and not by either checkout: wherever its own setting lies.
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(Path.home() / ".cache" / "jaxkv-against")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment |= FREES_AT_ONCE if figures == "memory" else {}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", dtype]
    worker = Worker(command, env=environment, cwd=root)
    if Path(worker.ready["at"]).resolve() != Path(root).resolve():
        raise SystemExit(f"--base {root}: the process imported jaxkv from {worker.ready['at']}")
    return worker


def measure(workers, request, rounds, figures):
    """Medians of both, and the rounds' ratios."""
    programs = {name: worker.ask(request)["programs"] for name, worker in workers.items()}
    runs = {name: [] for name in workers}
    for index in range(rounds):
        for name in sorted(workers, reverse=bool(index % 2)):
            runs[name].append(workers[name].ask(request))
    cell = dict(request) | {"figures": figures, "programs": programs}
    for what in FIGURES[figures]:
        if what not in runs["ours"][0]:
            continue
        base, ours = ([run[what] for run in runs[name]] for name in ("base", "ours"))
        ratios = [a / b for a, b in zip(base, ours, strict=True)]
        cell[what] = {
            "base": statistics.median(base),
            "ours": statistics.median(ours),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    cell["compiled_while_timed"] = sum(run["compile"] for name in runs for run in runs[name])
    return cell


def main():
    """Prints a line for each cell, and writes them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--serve", metavar="DTYPE", help=argparse.SUPPRESS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--policies", nargs="+", default=["full", "snapkv", "adakv", "h2o", "omnikv", "d2o"]
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=256)
    # More than the short answers that run in groups of layers on a CPU: the loop's steps are timed.
    parser.add_argument("--new-tokens", type=int, default=144)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--figures", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "against.json")
    args = parser.parse_args()
    if args.serve:
        return serve(lambda: load(args.serve))
    if args.base is None:
        parser.error("--base: name the other checkout")
    from benchmarks.record import commit, machine, save

    results = {"machine": machine(), "base": commit(args.base), "cells": []}
    for dtype, figures in itertools.product(args.dtypes, args.figures):
        roots = {"base": args.base.resolve(), "ours": HERE.parent}
        workers = {name: started(root, dtype, figures) for name, root in roots.items()}
        for policy in args.policies:
            request = {
                name: getattr(args, name) for name in ("batch", "length", "budget", "new_tokens")
            }
            cell = measure(workers, request | {"policy": policy}, args.rounds, figures) | {
                "dtype": dtype
            }
            results["cells"].append(cell)
            save(args.out, results)
            scale, unit = (1e-6, "MB") if figures == "memory" else (1e3, "ms")
            shown = "  ".join(
                f"{what} {cell[what]['base'] * scale:8.1f} -> {cell[what]['ours'] * scale:8.1f} {unit}, "
                f"{cell[what]['ratio']:.3f} ({cell[what]['least']:.3f}-{cell[what]['most']:.3f})"
                for what in FIGURES[figures]
                if what in cell
            )
            programs = " -> ".join(str(cell["programs"][name]) for name in ("base", "ours"))
            print(f"{dtype:8} {policy:7} {shown}  programs {programs}", flush=True)
        for worker in workers.values():
            worker.stop()
    return None


if __name__ == "__main__":
    main()
