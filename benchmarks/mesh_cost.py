"""What a mesh of one device costs: prompts read and tokens drawn through it, against the same without a mesh.

    python -m benchmarks.mesh_cost                  float32, a prompt of 1,024 tokens; the file keeps other settings
    python -m benchmarks.mesh_cost --batch 8

Both models live in one process and share nothing but it. They take turns, round after round, the first one changing: a
ratio is taken within a round, the figure is the median of the rounds' ratios.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.compilation import enable_compilation_cache

MODEL = "smollm2-135m-instruct"
POLICIES = {
    "FullKV": lambda budget: jaxkv.FullKV(),
    "SnapKV": lambda budget: jaxkv.SnapKV(budget=budget),
    "AdaKV": lambda budget: jaxkv.AdaKV(budget=budget),
    "H2O": lambda budget: jaxkv.H2O(budget=budget),
}


def turn(session, ids, steps):
    """Seconds of a prefill, and of tokens drawn behind it."""
    begin = time.perf_counter()
    cache = session.prefill(ids, new=steps)
    jax.block_until_ready(cache)
    read = time.perf_counter()
    drawing = session.drawing(cache, new=steps)
    ready = time.perf_counter()
    drawn = drawing.draw(steps)
    end = time.perf_counter()
    drawing.close()
    return {"prefill": read - begin, "step": (end - ready) / drawn.shape[1]}, drawn


def measure(model, ids, *, policies, budget, rounds, steps):
    """Seconds and ratios, with a mesh to without, of each policy."""
    where = record.machine()
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    models = {"without": model, "with": model.on(mesh)}
    found = {}
    for name in policies:
        sessions = {
            which: jaxkv.Session(each, POLICIES[name](budget)) for which, each in models.items()
        }
        # Compiles; and the tokens are the same.
        tokens = [turn(session, ids, steps)[1] for session in sessions.values()]
        np.testing.assert_array_equal(*tokens)
        spent = {which: [] for which in sessions}
        for number in range(rounds):
            for which in list(sessions)[:: 1 if number % 2 else -1]:
                spent[which].append(turn(sessions[which], ids, steps)[0])
        found[name] = {}
        for part in ("prefill", "step"):
            seconds = {which: [each[part] for each in turns] for which, turns in spent.items()}
            ratios = [
                mine / theirs
                for mine, theirs in zip(seconds["with"], seconds["without"], strict=True)
            ]
            found[name][part] = {"ratio": record.spread(ratios), "seconds": seconds}
    return {"policies": found, "machine": where}


def show(title, found):
    """Prints one table."""
    print(f"\n{title}\n{'policy':10}{'':10}{'ratio':>8}{'least':>8}{'most':>8}")
    for name, parts in found["policies"].items():
        for part, row in parts.items():
            ratio = "".join(f"{row['ratio'][key]:8.3f}" for key in ("median", "least", "most"))
            print(f"{name:10}{part:10}{ratio}", flush=True)


def main():
    """Measures and saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--prompt", type=int, default=1024, help="random tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", type=int, default=256, help="rows per head (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "mesh_cost.json")
    options = parser.parse_args()
    if min(options.prompt, options.budget, options.rounds, options.steps, options.batch) < 1:
        parser.error("--batch, --prompt, --budget, --rounds and --steps are 1 or more")
    enable_compilation_cache()
    model = jaxkv.load(MODEL, options.dtype)
    ids = record.random_ids(model, options.batch, options.prompt)
    settings = {name: getattr(options, name) for name in ("policies", "budget", "rounds", "steps")}
    found = measure(model, ids, **settings)
    title = (
        f"{options.dtype}, batch {options.batch}, prompt {options.prompt}, budget {options.budget}"
    )
    record.add(
        options.out,
        title,
        {"model": MODEL, "rounds": options.rounds, "steps": options.steps, **found},
    )
    show(f"{title}: {options.rounds} rounds of {options.steps} steps", found)
    print(f"\nsaved to {options.out}")


if __name__ == "__main__":
    main()
