"""Requests an hour on this machine's CPU: the arithmetic of `jaxkv plan --gpus cpu` beside what a clock says.

    .venv/bin/python -m benchmarks.plan_requests [--rounds 7]

A round measures the machine's rates as a plan does, runs a batch of requests under each policy (prefill and all new
tokens; programs are compiled before), and measures the rates again: the machine may have other work, and its load
changes. A prediction is the mean of those before and after. It fails where the median ratio is more than 25% off.
"""

import argparse
import os
import statistics
import sys
import time

import numpy as np

from benchmarks import record

RESULTS = record.RESULTS / "plan_requests.json"
MODEL, BUDGET, MOST = "smollm2-135m-instruct", 256, 0.25
POLICIES = ("FullKV", "SnapKV", "H2O")
# Prompts, tokens of each, new tokens of each.
SHAPES = ((1, 2048, 64), (1, 512, 128), (4, 512, 64))
HEAD = """# Requests an hour, predicted and measured

`python -m benchmarks.plan_requests` writes this. SmolLM2-135M in float32 on this machine's CPU; budgets of 256 rows a
head; prompts of random tokens. "Predicted" is the arithmetic of `jaxkv plan --gpus cpu` from rates measured before and
after each run, "measured" the clock around prefill and all decode steps, each the median of the rounds. A ratio is
predicted over measured requests an hour, the median of the rounds' own ratios, with the least and the largest of them.
"""


def policy_of(name):
    """The policy of a row."""
    import jaxkv

    return getattr(jaxkv, name)(**({} if name == "FullKV" else {"budget": BUDGET}))


def predicted(config, shape):
    """Of each policy the `Service` that a plan made now predicts for a shape."""
    from jaxkv.planning import host_rates
    from jaxkv.planning.outlook import service_of
    from jaxkv.planning.planner import speed_of
    from jaxkv.planning.setting import HostSetting

    host_rates.forget()
    batch, context, new = shape
    found = {}
    for name in POLICIES:
        request = {
            "batch": batch,
            "context": context,
            "new": new,
            "dtype": "float32",
            "memory": None,
        }
        setting = HostSetting(model=MODEL, config=config, policy=policy_of(name), **request)
        found[name] = service_of(speed_of(setting), setting, None)
    return found


def seconds(session, ids, new):
    """Seconds of prefill and of the decode steps of one batch."""
    import jax

    began = time.perf_counter()
    cache = jax.block_until_ready(session.prefill(ids, new=new))
    filled = time.perf_counter()
    jax.block_until_ready(jax.tree.leaves(session.draw(cache, new, donate=True)))
    return filled - began, time.perf_counter() - filled


def rounds_of(model, shape, rounds):
    """Of each policy a list of rounds: predicted and measured seconds of prefill and of decode steps."""
    import jaxkv

    batch, context, new = shape
    ids = (
        np.random.default_rng(0).integers(100, model.config.vocab - 100, (batch, context)).tolist()
    )
    sessions = {name: jaxkv.Session(model, policy_of(name)) for name in POLICIES}
    for session in sessions.values():
        seconds(session, ids, new)
    found = {name: [] for name in POLICIES}
    before = predicted(model.config, shape)
    for _ in range(rounds):
        taken = {name: seconds(session, ids, new) for name, session in sessions.items()}
        after = predicted(model.config, shape)
        for name, (prefill, decode) in taken.items():
            mine = [
                (one + two) / 2
                for one, two in zip(parts(before[name]), parts(after[name]), strict=True)
            ]
            found[name].append({"predicted": mine, "measured": [prefill, decode]})
        before = after
    return found


def parts(service):
    """Seconds of prefill and of decode steps of a `Service`."""
    return service.prefill, service.decode


def rows(results):
    """Of each cell its name, requests an hour predicted and measured, and the rounds' ratios: all, prefill, decode."""
    for name, cell in results.items():
        if name in ("machine", "load"):
            continue
        batch = int(name.split(", ")[1].split(" x ")[0])
        hour = {
            side: 3600 * batch / np.median([sum(each[side]) for each in cell])
            for side in ("predicted", "measured")
        }
        whole = [sum(each["measured"]) / sum(each["predicted"]) for each in cell]
        parted = [[each["measured"][at] / each["predicted"][at] for each in cell] for at in (0, 1)]
        yield name, hour, whole, *parted


def write(results):
    """Both files, each whole at any time."""
    record.save(RESULTS, results)
    head = "| policy, prompts, new tokens | rounds | predicted, an hour | measured | ratio (least to largest) |"
    lines = [head + " of prefill | of decode |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name, hour, whole, prefill, decode in rows(results):
        spread = f"{statistics.median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f})"
        both = f"{hour['predicted']:,.0f} | {hour['measured']:,.0f}"
        medians = f"{statistics.median(prefill):.2f} | {statistics.median(decode):.2f}"
        lines.append(f"| {name} | {len(whole)} | {both} | {spread} | {medians} |")
    load = f"Load of the machine, {results['machine']['cores']} cores, after each shape: {results['load']}."
    RESULTS.with_suffix(".md").write_text("\n".join([HEAD, load, "", *lines, ""]))


def main():
    """Runs all rounds, writes each shape, exits with 1 where a median ratio is off."""
    import jaxkv
    from jaxkv.compilation import enable_compilation_cache

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    enable_compilation_cache()
    results = {"machine": record.machine(), "load": []}
    model = jaxkv.load(MODEL, "float32", progress=False)
    for shape in SHAPES:
        batch, context, new = shape
        for name, found in rounds_of(model, shape, options.rounds).items():
            results[f"{name}, {batch} x {context}, {new}"] = found
        results["load"].append(round(os.getloadavg()[0], 1))
        write(results)
    print(RESULTS.with_suffix(".md").read_text())
    off = [
        f"{name}: ratio {statistics.median(whole):.2f}"
        for name, _, whole, *_ in rows(results)
        if abs(statistics.median(whole) - 1) > MOST
    ]
    print("\n".join(f"FAULT {each}" for each in off), file=sys.stderr)
    sys.exit(bool(off))


if __name__ == "__main__":
    main()
