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
MODEL, NEW, BUDGET, MOST = "smollm2-135m-instruct", 32, 256, 0.15
POLICIES = ("FullKV", "SnapKV", "AdaKV", "D2O")
PROMPTS = ((1, 512), (1, 4096), (4, 1024))
DTYPES = ("float32", "bfloat16")
CELLS = [(policy, *prompt, dtype) for dtype in DTYPES for prompt in PROMPTS for policy in POLICIES]
COMPILED = (("FullKV", 1, 512, "float32"), ("D2O", 1, 4096, "float32"), ("AdaKV", 4, 1024, "bfloat16"))


def name_of(cell, cold):
    """What a cell is called."""
    policy, batch, context, dtype = cell
    return f"{policy}, {batch} x {context}, {dtype}" + (", compiled" if cold else "")


def run(policy, batch, context, dtype):
    """What a process of a user's does; bytes at its peak so far, by stage."""
    import jax.numpy as jnp
    import numpy as np

    import jaxkv
    from jaxkv.engine.compilation import enable_compilation_cache

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
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=record.ROOT)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": round(time.perf_counter() - began, 1)}


def main():
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="cells whose names hold this")
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
            record.save(RESULTS, results)
            print(name_of(cell, False), {k: round(v / 1e6) if v > 1e4 else v for k, v in results[name_of(cell, False)].items()}, round(cold["drawn"] / 1e6), flush=True)


if __name__ == "__main__":
    main()
