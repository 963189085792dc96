"""Long answers: what they compile, when, and how fast they come in a first run and in a second.

    python -m benchmarks.long_answer

2,000 tokens after 600, policy by policy, each first in a process that has compiled nothing and then once more. Programs
are counted as JAX reports them; seconds of compilation as `stats` books them, beside JAX's own.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

import jaxkv
from benchmarks.against import prompts
from benchmarks.record import RESULTS, machine, save
from jaxkv.engine.growth import first_room
from jaxkv.engine.plan import plan_prefill

POLICIES = {
    "full": jaxkv.FullKV(),
    "snapkv": jaxkv.SnapKV(budget=256),
    "adakv": jaxkv.AdaKV(budget=256),
    "h2o": jaxkv.H2O(budget=256),
}
EVENT = "/jax/core/compile/"
BACKEND = EVENT + "backend_compile_duration"


class Received:
    """What JAX tells of compilation."""

    def __init__(self):
        self.programs, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event, duration_secs, **_):
        """One event."""
        self.programs += event == BACKEND
        self.seconds += duration_secs * (event == BACKEND)


def run(model, policy, received, prompt, new):
    """One answer, streamed so that programs can be counted at its 256th token."""
    before, seconds = received.programs, received.seconds
    tokens, at_256 = 0, None
    options = {
        "max_new_tokens": new,
        "stop_at_eos": False,
        "stream": True,
        "stream_interval": 8,
        "progress": False,
    }
    stream = jaxkv.generate(model, [prompt], policy=policy, **options)
    for _ in stream:
        tokens += 8
        at_256 = received.programs if tokens == 256 else at_256
    stats = stream.result.stats
    room = first_room(policy.parts(), model.config.windows, np.asarray([len(prompt)]), new)
    return {
        "programs": received.programs - before,
        "programs_booked": stats.compiled_programs,
        "programs_after_256": received.programs - at_256,
        "compile_seconds": stats.compile_seconds,
        "backend_seconds_by_jax": received.seconds - seconds,
        "decode_seconds": stats.decode_seconds,
        "tokens_per_second": new / stats.decode_seconds,
        "allocated_bytes": stats.allocated_bytes,
        "planned_bytes": plan_prefill(
            model.config, policy, [len(prompt)], dtype=model.dtype, room=room
        ).cache_bytes,
    }


def main():
    """A process for each policy; prints a line for each run, and writes them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--new", type=int, default=2000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS / "long_answer.json")
    args = parser.parse_args()
    if len(args.policies) > 1:
        for name in args.policies:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.long_answer", *_again(args, name)], check=True
            )
        return
    name, received = args.policies[0], Received()
    model = jaxkv.load("smollm2-135m-instruct", args.dtype, progress=False)
    prompt = prompts(1, args.prompt)[0]
    runs = {
        turn: run(model, POLICIES[name], received, prompt, args.new) for turn in ("first", "again")
    }
    for turn, figures in runs.items():
        shown = {key: round(value, 2) for key, value in figures.items()}
        print(
            f"{name:7} {turn:6} " + "  ".join(f"{key} {value:,}" for key, value in shown.items()),
            flush=True,
        )
    out = args.out.with_name(f"{args.out.stem}-{name}.json")
    save(
        out,
        {"machine": machine(), "prompt": args.prompt, "new": args.new, "dtype": args.dtype, **runs},
    )


def _again(args, name):
    flags = {"prompt": args.prompt, "new": args.new, "dtype": args.dtype, "out": args.out}
    return [
        "--policies",
        name,
        *(part for flag, value in flags.items() for part in (f"--{flag}", str(value))),
    ]


if __name__ == "__main__":
    main()
