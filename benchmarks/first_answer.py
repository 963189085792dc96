"""Measures the first answer of a new process: jaxkv, an earlier jaxkv, and transformers with kvpress.

Each figure is from a process of its own, which loads SmolLM2-135M in float32, reads 1,499 tokens and samples 16. Of
jaxkv two processes run: with an empty folder of compiled programs (cold), and with the folder that the first one left
(second). Libraries take turns within a round, so that a slow spell of the machine hits all of them::

    python -m benchmarks.first_answer --peer-python .venv-peer/bin/python --base ../OLDER_TREE
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import record

TOKENS, NEW, BUDGET = 1499, 16, 256
POLICIES = ("full", "snapkv", "pyramidkv", "h2o")
# What kvpress has no press for is compared with the full cache of transformers.
PRESSES = {"full": "full", "snapkv": "snapkv", "pyramidkv": "pyramidkv", "h2o": "full"}
SETTINGS = {"budget": BUDGET, "window": 32, "kernel": 5, "beta": 20}
# kvpress would give its smallest layer fewer entries than its window.
WINDOWS = {"pyramidkv": 8}


def jaxkv_answer(policy, ids, gguf, folder):
    """Loads and answers once; returns seconds: of imports, of loading, of the answer, and those of compiling in it."""
    begun = time.perf_counter()
    import jaxkv

    try:
        compilation = importlib.import_module("jaxkv.machine.compilation")
    except ImportError:  # the tree of 4e135878
        compilation = importlib.import_module("jaxkv.compilation")
    policies = {
        "full": lambda: jaxkv.FullKV(),
        "snapkv": lambda: jaxkv.SnapKV(budget=BUDGET),
        "pyramidkv": lambda: jaxkv.PyramidKV(budget=BUDGET),
        "h2o": lambda: jaxkv.H2O(budget=BUDGET),
    }
    imported = time.perf_counter()
    compilation.enable_compilation_cache(folder)
    model = jaxkv.load(gguf, "float32", progress=False)
    loaded = time.perf_counter()
    result = jaxkv.generate(model, ids, policy=policies[policy](), max_new_tokens=NEW)
    answered = time.perf_counter()
    return {
        "imports": imported - begun,
        "load": loaded - imported,
        "answer": answered - loaded,
        "compiling": result.stats.compile_seconds,
    }


def peer_answer(policy, ids, gguf):
    """Loads and answers once with transformers and kvpress; returns seconds of imports, loading and the answer."""
    begun = time.perf_counter()
    import torch
    import transformers

    from benchmarks import peer_worker

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    imported = time.perf_counter()
    model = peer_worker.load(gguf, "float32")
    loaded = time.perf_counter()
    request = SETTINGS | {"window": WINDOWS.get(policy, SETTINGS["window"])}
    press = peer_worker.make_press(PRESSES[policy], len(ids), request)
    with torch.inference_mode():
        peer_worker.run_once(model, torch.tensor([ids]), press, PRESSES[policy], NEW)
    return {
        "imports": imported - begun,
        "load": loaded - imported,
        "answer": time.perf_counter() - loaded,
    }


def run(python, tree, arguments):
    """Runs this file in a process of its own, on the packages of a tree; returns its figures."""
    command = [python, __file__, "--worker", *map(str, arguments)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tree), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(options, gguf, prompt):
    """Runs all rounds; returns the figures of each library and policy, as lists of one dict per round."""
    found = {}
    for turn in range(options.rounds):
        for policy in options.policies:
            trees = {"jaxkv": record.ROOT} | ({"base": options.base} if options.base else {})
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as folder:
                    for state in ("cold", "second"):
                        cell = run(sys.executable, tree, ("jaxkv", policy, prompt, gguf, folder))
                        found.setdefault(f"{policy} {name} {state}", []).append(cell)
            if options.peer_python:
                cell = run(options.peer_python, record.ROOT, ("peer", policy, prompt, gguf))
                found.setdefault(f"{policy} peer", []).append(cell)
            print(f"round {turn + 1}, {policy}: done", file=sys.stderr, flush=True)
    return found


def ratios(found, key, other):
    """Returns the median, least and largest ratio of two cells' answers, round by round; None without the other."""
    if key not in found or other not in found:
        return None
    each = [a["answer"] / b["answer"] for a, b in zip(found[key], found[other], strict=True)]
    return [round(value, 2) for value in (statistics.median(each), min(each), max(each))]


def table(found, policies):
    """The lines of a table: medians in seconds, and ratios of answers."""
    yield f"{'cell':<26}{'import':>8}{'load':>8}{'answer':>8}{'compile':>9}"
    for key, cells in found.items():
        medians = [
            statistics.median(cell.get(name, 0.0) for cell in cells)
            for name in ("imports", "load", "answer", "compiling")
        ]
        yield f"{key:<26}" + "".join(f"{m:>8.1f}" for m in medians)
    for policy in policies:
        for state in ("cold", "second"):
            for other in ("peer", f"base {state}"):
                ratio = ratios(found, f"{policy} jaxkv {state}", f"{policy} {other}")
                if ratio:
                    yield f"{policy} {state} / {other}: {ratio[0]} ({ratio[1]} to {ratio[2]})"


def main():
    """Runs the processes, prints the table and keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="the python of transformers and kvpress")
    parser.add_argument("--base", type=Path, help="another tree of jaxkv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "first_answer.json")
    options = parser.parse_args()
    import jaxkv
    from jaxkv.checkpoints import fetch_checkpoint

    gguf = fetch_checkpoint("smollm2-135m-instruct")
    text = (Path(__file__).parent / "data" / "document.txt").read_text("utf-8")
    ids = jaxkv.load(gguf, progress=False).text.encode(text, bos=True)[:TOKENS]
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.json"
        prompt.write_text(json.dumps(list(map(int, ids))))
        found = measure(options, gguf, prompt)
    for line in table(found, options.policies):
        print(line)
    record.save(options.out, {"machine": record.machine(), "seconds": found})


def work(library, policy, prompt, *rest):
    """What a worker does: answers once, and prints its figures as JSON."""
    ids = json.loads(Path(prompt).read_text())
    answer = jaxkv_answer if library == "jaxkv" else peer_answer
    print(json.dumps(answer(policy, ids, *rest)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
    else:
        main()
