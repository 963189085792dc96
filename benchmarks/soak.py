"""Many calls of every kind in one process: none hangs, each gives what a fresh process gives, and memory stays.

    python -m benchmarks.soak

Policies, budgets of every type, lengths, batches, questions, forks, streams that are closed early and calls that are
interrupted, sampled at random from a seed. Every kind is met once while programs are being compiled; from then on the
process must not grow.
"""

import argparse
import faulthandler
import gc
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

import jaxkv
from benchmarks.record import RESULTS, ROOT, machine, save
from benchmarks.workers import status_bytes
from jaxkv.policies import LinearLayers, Merge, VarianceLayers

MODEL = ROOT / "tests" / "golden" / "models" / "llama_gqa"
VOCAB = (3, 96)
PATIENCE = 180
BUDGETS = {"int": int, "int64": np.int64, "int32": np.int32}
SHARES = {"float": float, "float64": np.float64, "float32": np.float32}
POLICIES = {
    "full": lambda budget: jaxkv.FullKV(),
    "snapkv": lambda budget: jaxkv.SnapKV(budget=budget, window=8, min_budget="clamp"),
    "snapkv-every": lambda budget: jaxkv.SnapKV(
        budget=budget, window=8, every=8, min_budget="clamp"
    ),
    "snapkv-merge": lambda budget: jaxkv.SnapKV(
        budget=budget, window=8, merge=Merge(), min_budget="clamp"
    ),
    "pyramidkv": lambda budget: jaxkv.PyramidKV(
        budget=budget, layers=LinearLayers(beta=4), min_budget="clamp"
    ),
    "adakv": lambda budget: jaxkv.AdaKV(
        base=jaxkv.SnapKV(budget=budget, window=8, min_budget="clamp")
    ),
    "adakv-every": lambda budget: jaxkv.AdaKV(base=jaxkv.KNorm(budget=budget, every=16)),
    "adakv-variance": lambda budget: jaxkv.AdaKV(
        base=jaxkv.SnapKV(budget=budget, window=8, layers=VarianceLayers(), min_budget="clamp")
    ),
    "criticalkv": lambda budget: jaxkv.CriticalKV(
        base=jaxkv.SnapKV(budget=budget, window=8, min_budget="clamp")
    ),
    "h2o": lambda budget: jaxkv.H2O(budget=budget),
    "d2o": lambda budget: jaxkv.D2O(budget=budget, min_budget="clamp"),
    "tova": lambda budget: jaxkv.TOVA(budget=budget),
    "streaming": lambda budget: jaxkv.StreamingLLM(budget=budget, min_budget="clamp"),
    "rolling": lambda budget: jaxkv.StreamingLLM(
        budget=budget, rolling_positions=True, every=8, min_budget="clamp"
    ),
    "roco": lambda budget: jaxkv.RoCo(budget=budget),
    "cam": lambda budget: jaxkv.CaM(budget=budget, window=8, min_budget="clamp"),
    "pyramidinfer": lambda budget: jaxkv.PyramidInfer(budget=budget, window=8, min_budget="clamp"),
    "brutal": lambda budget: jaxkv.BrutalOffload(resident_layers=1, ahead=1),
    "local": lambda budget: jaxkv.LocalWindow(budget=budget),
    "omnikv": lambda budget: jaxkv.OmniKV(filter_layers=(0,), adjacent=0, budget=budget),
    "omnikv-chunks": lambda budget: jaxkv.OmniKV(
        filter_layers=(0,), adjacent=0, budget=budget, prefill_ratio=1, prefill_chunk=32
    ),
    "omnikv-offload": lambda budget: jaxkv.OmniKV(
        filter_layers=(0,), adjacent=0, budget=budget, offload=True
    ),
}


def sample_calls(seed, count):
    """Specifications of calls, as JSON has them."""
    rng = random.Random(seed)
    calls = []
    for index in range(count):
        share = rng.random() < 0.5
        calls.append(
            {
                "policy": sorted(POLICIES)[index % len(POLICIES)]
                if index < len(POLICIES)
                else rng.choice([*POLICIES]),
                "kind": rng.choice([*(SHARES if share else BUDGETS)]),
                "budget": rng.choice([0.25, 0.5, 1.0]) if share else rng.choice([16, 24, 48]),
                "lengths": rng.choice([[40], [50], [45, 33], [50, 12, 30], [20, 48]]),
                "new": rng.choice([1, 7, 12, 20]),
                "questions": rng.choice([[], [5], [9, 3]]),
                "way": rng.choice(["plain", "plain", "plain", "hot", "fork", "close", "interrupt"]),
                "seed": rng.randrange(1000),
            }
        )
    return calls


def ids(seed, lengths):
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(*VOCAB, length).tolist() for length in lengths]


def policy_of(call):
    """The policy, its budget of the type that was sampled."""
    return POLICIES[call["policy"]]((BUDGETS | SHARES)[call["kind"]](call["budget"]))


class Interruption:
    """Ctrl-C after a random time."""

    def __init__(self, seed):
        self.after = random.Random(seed).uniform(0.0005, 0.05)

    def __enter__(self):
        def strike(*_):
            raise KeyboardInterrupt

        self.old = signal.signal(signal.SIGALRM, strike)
        signal.setitimer(signal.ITIMER_REAL, self.after)

    def __exit__(self, kind, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.old)
        return kind is KeyboardInterrupt


def run(model, call):
    """What the call gives: tokens of every answer, and rows kept after each."""
    policy, seed, batch = policy_of(call), call["seed"], len(call["lengths"])
    options = {"max_new_tokens": call["new"], "stop_at_eos": False, "progress": False}
    if call["way"] == "hot":
        options |= {
            "sampling": jaxkv.Sampling(top_p=0.9, temperature=0.5 + seed / 1000),
            "key": jax.random.key(seed),
        }
    prompt = ids(seed, call["lengths"])
    if call["way"] == "interrupt":
        with Interruption(seed):
            jaxkv.generate(model, prompt, policy=policy, **options)
    if call["way"] == "close":
        stream = jaxkv.generate(model, prompt, policy=policy, stream=True, **options)
        next(stream)
        del stream
    answers = [jaxkv.generate(model, prompt, policy=policy, **options)]
    for turn, length in enumerate(call["questions"]):
        question = ids(seed + 1 + turn, [length] * batch)
        more = jaxkv.generate(model, question, cache=answers[-1].cache, **options)
        if call["way"] == "fork":
            again = jaxkv.generate(model, question, cache=answers[-1].cache, **options)
            same = all(
                (a == b).all()
                for a, b in zip(
                    (each.tokens for each in more), (each.tokens for each in again), strict=True
                )
            )
            if not same:
                raise SystemExit(f"a fork gave other tokens: {call}")
        answers.append(more)
    return [
        [
            [row.tokens.tolist() for row in answer],
            int(answer.cache.kept.sum()),
            answer.cache.seen.tolist(),
        ]
        for answer in answers
    ]


def in_a_fresh_process(call):
    """The same, by a process that has done nothing else."""
    command = [sys.executable, "-m", "benchmarks.soak", "--one", json.dumps(call)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{call}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Runs all, compares a sample, and says how memory went."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--kinds", type=int, default=100, help="different calls among them")
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    args = parser.parse_args()
    model = jaxkv.load(MODEL, progress=False)
    if args.one:
        print(json.dumps(run(model, json.loads(args.one))))
        return
    kinds, rng, begin = (
        sample_calls(args.seed, args.kinds),
        random.Random(args.seed),
        time.perf_counter(),
    )
    # All kinds once, which compiles; then any, in any order.
    order = [*range(args.kinds)]
    order += [rng.randrange(args.kinds) for _ in range(args.calls - len(order))]
    results, memory, slowest = {}, [], 0.0
    for index, kind in enumerate(order):
        with tempfile.TemporaryFile("w") as log:
            faulthandler.dump_traceback_later(
                PATIENCE, exit=True, file=sys.stderr if sys.stderr else log
            )
            started = time.perf_counter()
            found = run(model, kinds[kind])
            faulthandler.cancel_dump_traceback_later()
        slowest = max(slowest, time.perf_counter() - started)
        if results.setdefault(kind, found) != found:
            raise SystemExit(f"call {index} gave something else than before: {kinds[kind]}")
        gc.collect()
        live = sum(array.nbytes for array in jax.live_arrays())
        memory.append((status_bytes("VmRSS"), live))
        if index % 20 == 19:
            print(
                f"{index + 1} calls, {memory[-1][0] / 1e6:.0f} MB resident, {live / 1e6:.2f} MB alive",
                flush=True,
            )
    sample = rng.sample(range(args.kinds), min(args.sample, args.kinds))
    with ThreadPoolExecutor(2) as pool:
        fresh = list(pool.map(in_a_fresh_process, (kinds[kind] for kind in sample)))
    wrong = [
        kinds[kind] for kind, other in zip(sample, fresh, strict=True) if results[kind] != other
    ]
    warm = args.kinds
    growth = [memory[-1][which] / memory[warm - 1][which] - 1 for which in (0, 1)]
    outcome = {
        "machine": machine(),
        "calls": len(order),
        "kinds": args.kinds,
        "sample": len(sample),
        "differ_from_a_fresh_process": wrong,
        "resident_growth": growth[0],
        "alive_growth": growth[1],
        "slowest_call_seconds": slowest,
        "seconds": time.perf_counter() - begin,
    }
    print(json.dumps({key: value for key, value in outcome.items() if key != "machine"}, indent=1))
    save(args.out, outcome)
    if wrong or growth[0] > 0.02 or growth[1] > 0.02:
        raise SystemExit("the soak failed: see above")


if __name__ == "__main__":
    main()
