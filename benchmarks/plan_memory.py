"""The most memory that a process takes on this machine, predicted by `jaxkv.planning.process` and measured.

    .venv/bin/python -m benchmarks.plan_memory          every cell that is not yet in the results

A cell is a process of its own: it imports jaxkv, loads SmolLM2, prefills prompts of random tokens and draws 32 tokens;
its peak is the kernel's (`ru_maxrss`). Programs come from the compilation cache, as they do for the second run of
`jaxkv generate`; a first run compiles them, and some cells are measured so as well. It fails where a prediction is more
than 15% off.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks import record
from benchmarks.memory import status_bytes

RESULTS = record.RESULTS / "plan_memory.json"
MODEL, CONFIG, NEW, BUDGET, MOST = "smollm2-135m-instruct", "smollm2-135m", 32, 256, 0.15
POLICIES = ("FullKV", "SnapKV", "AdaKV", "D2O")
PROMPTS = ((1, 512), (1, 4096), (4, 1024))
DTYPES = ("float32", "bfloat16")
CELLS = [(policy, *prompt, dtype) for dtype in DTYPES for prompt in PROMPTS for policy in POLICIES]
COMPILED = (
    ("FullKV", 1, 512, "float32"),
    ("D2O", 1, 4096, "float32"),
    ("AdaKV", 4, 1024, "bfloat16"),
)
HEAD = """# The most memory of a process, predicted and measured

`python -m benchmarks.plan_memory` writes this. SmolLM2-135M on this machine's CPU: a fresh process imports jaxkv, loads
the model, prefills prompts of random tokens and draws 32; budgets of 256 rows a head. Measured is `ru_maxrss`. Programs
come from the compilation cache; "compiled" is a first run, whose compiler takes memory, too. The constants of
`jaxkv/planning/process.py` are of such runs.
"""


def name_of(cell, cold):
    """What a cell is called."""
    policy, batch, context, dtype = cell
    return f"{policy}, {batch} x {context}, {dtype}" + (", compiled" if cold else "")


def run(policy, batch, context, dtype):
    """What a process of a user's does; bytes at its peak so far, by stage."""
    import jax.numpy as jnp
    import numpy as np

    import jaxkv
    from jaxkv.compilation import enable_compilation_cache

    enable_compilation_cache(os.environ["JAXKV_COMPILED"])
    peaks = {"imported": status_bytes("VmHWM")}
    jnp.zeros(()).block_until_ready()
    peaks["started"] = status_bytes("VmHWM")
    model = jaxkv.load(MODEL, dtype, progress=False)
    peaks["loaded"], peaks["resident"] = status_bytes("VmHWM"), status_bytes("VmRSS")
    options = {} if policy == "FullKV" else {"budget": BUDGET}
    session = jaxkv.Session(model, getattr(jaxkv, policy)(**options))
    ids = np.random.default_rng(0).integers(100, model.config.vocab - 100, (batch, context))
    cache = session.prefill(ids.tolist(), new=NEW)
    peaks["prefilled"] = status_bytes("VmHWM")
    session.draw(cache, NEW, donate=True)
    peaks["drawn"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peaks


def measured(cell, folder):
    """The peaks of a cell in a process of its own, whose programs are kept in a folder."""
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--cell", json.dumps(cell)]
    environment = os.environ | {"JAXKV_COMPILED": str(folder)}
    began = time.perf_counter()
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=record.ROOT
    )
    return json.loads(done.stdout.splitlines()[-1]) | {
        "seconds": round(time.perf_counter() - began, 1)
    }


def predicted(cell):
    """What `jaxkv.planning.process` says of a cell."""
    import jaxkv
    from jaxkv.planning.catalog import model_named
    from jaxkv.planning.process import process_of
    from jaxkv.planning.setting import Request

    policy, batch, context, dtype = cell
    made = getattr(jaxkv, policy)(**({} if policy == "FullKV" else {"budget": BUDGET}))
    config = model_named(CONFIG).config
    return process_of(
        Request(
            model=CONFIG,
            config=config,
            policy=made,
            batch=batch,
            context=context,
            new=NEW,
            dtype=dtype,
        )
    )


def rows(results):
    """Of each measured cell its name, and what was predicted and measured."""
    for cell in CELLS:
        for cold in (False, True):
            if (name := name_of(cell, cold)) in results:
                found = predicted(cell)
                yield name, found.first_peak if cold else found.peak, results[name]["drawn"]


def write(results):
    """Both files, each whole at any time."""
    record.save(RESULTS, results)
    lines = [
        "| policy, prompts, dtype | predicted, MB | measured, MB | error |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {n} | {mine / 1e6:.0f} | {real / 1e6:.0f} | {mine / real - 1:+.1%} |"
        for n, mine, real in rows(results)
    ]
    RESULTS.with_suffix(".md").write_text("\n".join([HEAD, *lines, ""]))


def main():
    """Measures what is missing, writes each cell, exits with 1 where a prediction is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", default="", help="of the missing cells those whose names hold this"
    )
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(run(*options.cell)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results.setdefault("machine", record.machine())
    with tempfile.TemporaryDirectory() as folder:
        for cell in CELLS:
            if name_of(cell, False) in results or options.only not in name_of(cell, False):
                continue
            cold = measured(cell, folder)
            if cell in COMPILED:
                results[name_of(cell, True)] = cold
            results[name_of(cell, False)] = measured(cell, folder)
            write(results)
    write(results)
    wrong = [
        f"{name}: {mine:,} for {real:,}"
        for name, mine, real in rows(results)
        if abs(mine / real - 1) > MOST
    ]
    print(RESULTS.with_suffix(".md").read_text())
    print("\n".join(f"FAULT {each}" for each in wrong), file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
