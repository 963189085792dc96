"""What eviction and merging cost a decode step: H2O and D2O, with and without its parts, against append-only SnapKV.

    python -m benchmarks.decode_step                       batch 1 and 8, float32
    python -m benchmarks.decode_step --dtype bfloat16      the file keeps the figures of other settings

All policies live in one process and take turns, some steps each, round after round: what a busy machine adds comes
upon all of them. A ratio is taken within a round; the figure is the median of the rounds' ratios. SnapKV forgets its
rows after each turn, so that it does not grow, and has no more spare places than a turn takes; `generate` gives it, and
reads, up to 256.
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import jaxkv
from benchmarks import record
from jaxkv.engine.lengths import round_up_to_bucket
from jaxkv.machine.compilation import enable_compilation_cache
from jaxkv.policies import UniformLayers

MODEL = "smollm2-135m-instruct"
BASELINE = "SnapKV"
POLICIES = {
    BASELINE: lambda budget: jaxkv.SnapKV(budget=budget),
    "H2O": lambda budget: jaxkv.H2O(budget=budget),
    "D2O": lambda budget: jaxkv.D2O(budget=budget),
    "D2O-no-merging": lambda budget: jaxkv.D2O(budget=budget, merge=None),
    "D2O-no-layers": lambda budget: jaxkv.D2O(budget=budget, layers=UniformLayers()),
}
# Of a policy's step, what another one does without: (policy, what is left of it).
SHARES = {
    "scores and eviction, of H2O": ("H2O", BASELINE),
    "scores and eviction, of D2O without merging": ("D2O-no-merging", BASELINE),
    "merging, of D2O": ("D2O", "D2O-no-merging"),
    "scores, eviction and merging, of D2O": ("D2O", BASELINE),
    "layer budgets by variance, of D2O": ("D2O", "D2O-no-layers"),
}


class Cell:
    """One policy's cache, and where sampling stands."""

    def __init__(self, model, policy, ids, steps):
        """Prefills."""
        self.session, self.size = jaxkv.Session(model, policy), max(16, round_up_to_bucket(steps))
        self.cache = self.session.prefill(ids, new=self.size)
        self.rows = float(self.cache.kept.mean())

    def run(self, steps):
        """Samples some tokens; returns seconds."""
        logits = self.cache.logits
        loop = self.session.start_decode_loop(self.cache, new=self.size)
        begin = time.perf_counter()
        if steps:
            sampled = loop.sample_tokens(steps)
            assert sampled.shape[1] == steps, "it had no room"
        seconds = time.perf_counter() - begin
        self.cache = cache = loop.finish_sampling()
        if not self.session.policy.build_policy_parts().evicts_while_decoding:
            # The next turn samples the same tokens anew.
            seen, length = cache.seen - steps, cache.length - steps
            self.cache = dataclasses.replace(
                cache.replace_arrays(length=length, seen=seen), logits=logits
            )
        return seconds


def measure(model, ids, *, budget, rounds, steps):
    """Milliseconds per step and ratios of every policy."""
    where = record.machine()
    cells = {}
    for name, make in POLICIES.items():
        cells[name] = Cell(model, make(budget), ids, steps)
        # No steps compile; a turn makes the pages of code and scratch present.
        cells[name].run(0)
        cells[name].run(steps)
    spent = {name: [] for name in cells}
    for _ in range(rounds):
        for name, cell in cells.items():
            spent[name].append(1e3 * cell.run(steps) / steps)
    policies = {}
    for name, values in spent.items():
        ratios = [mine / theirs for mine, theirs in zip(values, spent[BASELINE], strict=True)]
        policies[name] = {
            "policy": repr(POLICIES[name](budget)),
            "rows": cells[name].rows,
            "milliseconds": values,
        }
        policies[name] |= {"step": record.spread(values), "ratio": record.spread(ratios)}
    middle = {name: statistics.median(values) for name, values in spent.items()}
    shares = {
        text: (middle[whole] - middle[rest]) / middle[whole]
        for text, (whole, rest) in SHARES.items()
    }
    return {"policies": policies, "shares": shares, "machine": where}


def show(title, found):
    """Prints one table."""
    print(f"\n{title}")
    print(
        f"{'policy':16}{'rows':>7}{'ms/step':>10}{'least':>9}{'most':>9}{'ratio':>8}{'least':>8}{'most':>8}"
    )
    for name, row in found["policies"].items():
        step = "".join(
            f"{row['step'][key]:{width}.2f}"
            for key, width in (("median", 10), ("least", 9), ("most", 9))
        )
        ratio = "".join(f"{row['ratio'][key]:8.3f}" for key in ("median", "least", "most"))
        print(f"{name:16}{row['rows']:7.1f}{step}{ratio}")
    print("share of the step, from the medians:")
    for text, share in found["shares"].items():
        print(f"    {text:46}{100 * share:6.1f} %", flush=True)


def main():
    """Measures each batch and saves after it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--prompt", type=int, default=512, help="random tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", type=int, default=256, help="rows per head (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--steps", type=int, default=32, help="steps of a turn (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS / "decode_step.json")
    options = parser.parse_args()
    if min(options.prompt, options.budget, options.rounds, options.steps, *options.batch) < 1:
        parser.error("--batch, --prompt, --budget, --rounds and --steps are 1 or more")
    if options.prompt < options.budget:
        # Segments below their budget have no spare places here.
        parser.error("--prompt must not be shorter than --budget")
    enable_compilation_cache()
    model = jaxkv.load(MODEL, options.dtype)
    for batch in options.batch:
        ids = record.random_ids(model, batch, options.prompt)
        found = measure(
            model, ids, budget=options.budget, rounds=options.rounds, steps=options.steps
        )
        title = f"{options.dtype}, batch {batch}, prompt {options.prompt}, budget {options.budget}"
        record.add(
            options.out,
            title,
            {"model": MODEL, "rounds": options.rounds, "steps": options.steps, **found},
        )
        show(f"{title}: {options.rounds} rounds of {options.steps} steps", found)
    print(f"\nsaved to {options.out}")


if __name__ == "__main__":
    main()
