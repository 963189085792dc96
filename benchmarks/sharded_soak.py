"""Sharded generations on eight fake devices, and tests of two processes, beside processes that keep the machine busy.

    python -m benchmarks.sharded_soak                                     100 generations, tests ten times, 8 beside
    python -m benchmarks.sharded_soak --generations 66 --tests 0 --threads 8    as many threads as devices: XLA ends it

Each generation's tokens and kept positions are compared with those of one device, in float32. A generation whose
process XLA ends, or which takes longer than 20 minutes, is an abort; the next process goes on behind it.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jaxkv
from benchmarks.record import RESULTS, ROOT, machine, save
from jaxkv.testing import segments, tiny_model

DEVICES, PATIENCE = 8, 20 * 60
MESHES = ((1, 8), (2, 4), (4, 2))
LENGTHS, NEW = (61, 37, 50, 44), 8
_SNAPKV = jaxkv.SnapKV(budget=24, window=8)
POLICIES = {
    "FullKV": jaxkv.FullKV(),
    "SnapKV": _SNAPKV,
    "SnapKV, every=4": jaxkv.SnapKV(budget=24, window=8, every=4),
    "PyramidKV": jaxkv.PyramidKV(budget=24, window=8),
    # Room for all rows on one device: what a full device gives away is chosen otherwise than on one device.
    "AdaKV": jaxkv.AdaKV(base=_SNAPKV, capacity=8.0),
    "H2O": jaxkv.H2O(budget=24),
    "D2O": jaxkv.D2O(budget=24),
    "TOVA": jaxkv.TOVA(budget=24),
    "StreamingLLM": jaxkv.StreamingLLM(budget=24),
    "OmniKV": jaxkv.OmniKV(filter_layers=(0,), adjacent=0, budget=24),
}
# It ends by itself where whoever started it was killed.
BUSY = "import os\nbegan = os.getppid()\nwhile os.getppid() == began:\n    sum(range(100_000))"


def drawn(index):
    """Name of the policy, shape of the mesh and prompts of one generation; every pair comes once in thirty."""
    name = [*POLICIES][index % len(POLICIES)]
    shape = MESHES[(index + index // len(POLICIES)) % len(MESHES)]
    rng = np.random.default_rng(index)
    # No id comes twice: rows of one token tie, and are told apart by rounding alone.
    return name, shape, [rng.permutation(64)[:length].tolist() for length in LENGTHS]


def answer(model, prompts, policy, **options):
    """Tokens of all prompts, and positions that each segment of the cache holds behind them."""
    options |= {"max_new_tokens": NEW, "stop_at_eos": False, "progress": False}
    made = jaxkv.generate(model, prompts, policy=policy, **options)
    return [each.tolist() for each in made.tokens], [
        sorted(part.pos.tolist()) for part in segments(made.cache)
    ]


def work(first, total):
    """Runs generations in this process from the index `first` on; one line of JSON on stdout for each."""
    shape = {
        "vocab": 64,
        "layers": 3,
        "embed": 32,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 8,
    }
    model = tiny_model(jaxkv.ModelConfig(**shape, max_positions=512), dtype="float32")
    for index in range(first, total):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        name, shape, prompts = drawn(index)
        alone = answer(model, prompts, POLICIES[name])
        begun = time.perf_counter()
        split = answer(model, prompts, POLICIES[name], mesh=jax.make_mesh(shape, ("data", "model")))
        told = {"index": index, "what": f"{name} on {shape[0]}x{shape[1]}", "right": split == alone}
        print(json.dumps(told | {"seconds": time.perf_counter() - begun}), flush=True)
    faulthandler.cancel_dump_traceback_later()


def worker(first, total, threads):
    """Command and environment of a process that runs `work`."""
    flags = [each for each in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in each]
    flags.append(f"--xla_force_host_platform_device_count={DEVICES}")
    command = [
        sys.executable,
        "-m",
        "benchmarks.sharded_soak",
        "--first",
        str(first),
        "--generations",
        str(total),
    ]
    return command, os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "NPROC": str(threads),
        "JAX_PLATFORMS": "cpu",
    }


def generations(total, start):
    """Runs generations in as many processes as it takes.

    Args:
        total: number of generations.
        start: from the index to go on from and the total, a command and its environment.

    Returns:
        Number of right ones; names of wrong ones; the last words of each process that did not come to its end.
    """
    right, wrong, aborts, first = 0, [], [], 0
    while first < total:
        command, environment = start(first, total)
        piped = {"stdout": subprocess.PIPE, "text": True}
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, **piped) as process,
        ):
            try:
                for line in process.stdout:
                    told = json.loads(line)
                    first, right = told["index"] + 1, right + told["right"]
                    wrong += [] if told["right"] else [told["what"]]
                    kind = "right" if told["right"] else "WRONG"
                    print(
                        f"{first:4} {told['what']:24} {kind} {told['seconds']:6.1f} s", flush=True
                    )
                code = process.wait()
            finally:
                process.kill()
            if code or first < total:
                log.seek(0)
                aborts.append({"index": first, "code": code, "said": log.read()[-2000:]})
                print(f"{first + 1:4} ABORT, code {code}: {aborts[-1]['said']}", flush=True)
                first += 1
    return right, wrong, aborts


def tests(times):
    """Runs tests/test_hosts.py so many times; the last words of each run that failed."""
    failed = []
    for each in range(times):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_hosts.py"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(
            f"tests/test_hosts.py, {each + 1} of {times}: {done.stdout.strip().splitlines()[-1:]}",
            flush=True,
        )
        failed += [] if done.returncode == 0 else [done.stdout[-5000:]]
    return failed


@contextlib.contextmanager
def beside(count):
    """Keeps so many processes busy, which it yields, and ends them."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield busy
    finally:
        for each in busy:
            each.kill()
            each.wait()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generations", type=int, default=100)
    parser.add_argument("--tests", type=int, default=10, help="runs of tests/test_hosts.py")
    parser.add_argument("--busy", type=int, default=8, help="processes beside")
    parser.add_argument("--threads", type=int, default=3 * DEVICES, help="NPROC of the generations")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "sharded_soak.json")
    args = parser.parse_args()
    if args.first is not None:
        work(args.first, args.generations)
        return
    begun = time.perf_counter()
    with beside(args.busy):
        right, wrong, aborts = generations(args.generations, lambda *of: worker(*of, args.threads))
        failed = tests(args.tests)
    minutes = (time.perf_counter() - begun) / 60
    settings = {
        "generations": args.generations,
        "tests": args.tests,
        "busy": args.busy,
        "threads": args.threads,
    }
    found = {
        "right": right,
        "wrong": wrong,
        "aborts": aborts,
        "failed_tests": failed,
        "minutes": minutes,
    }
    save(args.out, {"machine": machine(), **settings, **found})
    print(
        f"{args.generations} sharded generations: {right} right, {len(wrong)} wrong, {len(aborts)} aborts;"
        f" tests/test_hosts.py {args.tests} times: {len(failed)} failures; {args.busy} busy processes beside,"
        f" NPROC={args.threads}; {minutes:.1f} minutes"
    )
    if wrong or aborts or failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
