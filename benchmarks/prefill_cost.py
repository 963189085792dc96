"""What a prefill costs under each policy at a fifth of the rows, beside the full cache: time, and planned peak memory.

    python -m benchmarks.prefill_cost [--tokens 1024] [--rounds 5] [--dtype float32] [--policies snapkv,kvzip]

Rounds take turns between the policies, so that what else the machine does meets all of them. Times are of one prompt
of SmolLM2, compiled before; processor seconds are of all threads. Peaks are the plan's bytes without the weights.
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.policies.registry import as_policy

MODEL = "smollm2-135m-instruct"
SHARE = 0.2
_EXPECTED = jaxkv.ExpectedAttention(budget=SHARE, epsilon=0.01)
POLICIES = {
    "full": jaxkv.FullKV(),
    **{
        name: as_policy(name, options={"budget": SHARE})
        for name in (
            *(
                "snapkv",
                "adakv",
                "keydiff",
                "lagkv",
                "curdkv",
                "capkv",
                "compactor",
                "chunkkv",
                "cake",
                "dropkv",
            ),
            *("defensivekv", "layerdefensivekv", "kvzip"),
        )
    },
    "expectedattention": jaxkv.ExpectedAttention(budget=SHARE),
    "adakv-expectedattention": jaxkv.AdaKV(base=_EXPECTED),
    "kvzip+": jaxkv.KVzip(budget=SHARE, weighted=True),
}


def measure(params, tokens, rounds, names):
    """Planned peak bytes and seconds and processor seconds `[rounds, 2]` of a prefill under each policy."""
    policies = {name: POLICIES[name] for name in ("full", *names)}
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
    peaks = {
        name: each.planned(np.asarray([tokens]), 0).peak_bytes for name, each in sessions.items()
    }
    return {name: (peaks[name], np.asarray(each)) for name, each in found.items()}


def lines_of(tokens, found):
    """Rows of the table: seconds (median, spread), ratios to the full cache in the same round, and of planned peaks."""
    most, full = found["full"]
    for name, (peak, each) in found.items():
        ratio, seconds = each / full, each[:, 0]
        spread = f"{np.median(seconds):.2f} ({seconds.min():.2f}-{seconds.max():.2f})"
        wall, busy = np.median(ratio, axis=0)
        cells = [np.median(each[:, 1]), wall, busy, peak / most]
        yield f"| {tokens} | {name} | {spread} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"


def main():
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1024", help="prompt lengths (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--policies", help="names, of all by default: " + ", ".join(list(POLICIES)[1:])
    )
    parser.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a Markdown file to write")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", jaxkv.UnseenQuestionWarning)
    params = jaxkv.load(MODEL, dtype=asked.dtype)
    where = record.machine()
    lines = [
        f"# What a prefill costs under each policy ({asked.dtype}, a fifth of the rows)",
        "",
        f"By `python -m benchmarks.prefill_cost` at {where['commit']}: {where['processor']}, {where['cores']} cores, "
        f"load {where['load']:.1f} at the start. Ratios are medians over rounds of what the same took for FullKV.",
        "",
        "| tokens | policy | s: median (least-most) | processor s | s / full | processor s / full | peak / full |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    names = (
        [name for name in POLICIES if name != "full"]
        if asked.policies is None
        else asked.policies.split(",")
    )
    for tokens in map(int, asked.tokens.split(",")):
        lines += lines_of(tokens, measure(params, tokens, asked.rounds, names))
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
