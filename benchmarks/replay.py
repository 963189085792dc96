"""What KVzip's second pass over a prompt costs, beside a prefill of the full cache and of SnapKV.

    python -m benchmarks.replay [--tokens 512,1024,2048] [--rounds 5] [--dtype float32]

Rounds take turns between the policies, so that what else the machine does meets all of them. Times are of one prompt
of SmolLM2, compiled before; processor seconds are of all threads.
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import record

MODEL = "smollm2-135m-instruct"


def measure(params, tokens, rounds):
    """Seconds and processor seconds `[rounds, 2]` of a prefill under each policy."""
    policies = {
        "FullKV": jaxkv.FullKV(),
        "SnapKV": jaxkv.SnapKV(budget=0.2),
        "KVzip": jaxkv.KVzip(budget=0.2),
        "KVzip+": jaxkv.KVzip(budget=0.2, weighted=True),
    }
    ids = np.random.default_rng(0).integers(0, params.config.vocab, tokens).tolist()
    sessions = {name: jaxkv.Session(params, policy) for name, policy in policies.items()}
    for session in sessions.values():
        session.prefill(ids)
    found = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            start, busy = time.perf_counter(), time.process_time()
            session.prefill(ids)
            found[name].append((time.perf_counter() - start, time.process_time() - busy))
    return {name: np.asarray(each) for name, each in found.items()}


def lines_of(tokens, found):
    """Rows of the table: medians and spread of seconds, and medians of ratios to the full cache in the same round."""
    full = found["FullKV"]
    for name, each in found.items():
        ratio, seconds = each / full, each[:, 0]
        spread = f"{np.median(seconds):.2f} ({seconds.min():.2f}-{seconds.max():.2f})"
        wall, busy = np.median(ratio, axis=0)
        yield f"| {tokens} | {name} | {spread} | {np.median(each[:, 1]):.2f} | {wall:.2f} | {busy:.2f} |"


def main():
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,1024,2048", help="prompt lengths (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", jaxkv.UnseenQuestionWarning)
    params = jaxkv.load(MODEL, dtype=asked.dtype)
    where = record.machine()
    lines = [
        f"# A second pass over the prompt ({asked.dtype})",
        "",
        f"By `python -m benchmarks.replay` at {where['commit']}: {where['processor']}, {where['cores']} cores, load "
        f"{where['load']:.1f} at the start. Ratios are medians over rounds of what the same round took for FullKV.",
        "",
        "| tokens | policy | s: median (least-most) | processor s | s / full | processor s / full |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for tokens in map(int, asked.tokens.split(",")):
        lines += lines_of(tokens, measure(params, tokens, asked.rounds))
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
