"""Needles of the tiny model with the question unseen, a hundred samples a cell, with intervals.

    python -m benchmarks.needle_tiny                             all cells; ended half-way, the same command goes on
    python -m benchmarks.needle_tiny --count 20 --out few.json   fewer samples

The policies are those of ``benchmarks/needle.py``, whose second table asks SmolLM2 the same; a needle in 1,024 tokens
stands at a fifth to four fifths of them. It is `jaxkv eval needle --model tiny-retrieval --wording small
--question-agnostic` with values in place of names. Intervals are Wilson's of 95%.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import orders_tiny, record
from benchmarks.needle import unseen
from jaxkv.evals import How
from jaxkv.evals.needle import Needle
from jaxkv.evals.results import compute_confidence_interval
from jaxkv.machine.compilation import enable_compilation_cache

BUDGETS = (0.25, 0.5, 64, 128)
FULL = "full cache"


def text_of(scores):
    """Percent right and its interval, as it stands in the table."""
    low, high = compute_confidence_interval(np.asarray(scores))
    return f"{100 * np.mean(scores):.0f} ({100 * low:.0f} to {100 * high:.0f})"


def column_of(budget):
    """A budget as the head of a column."""
    return f"{budget} rows" if isinstance(budget, int) else f"{100 * budget:.0f} %"


def table(cells, count):
    """The table, as lines of Markdown."""
    lines = [
        "# Needles on the tiny model, the question unseen",
        "",
        f"By `python -m benchmarks.needle_tiny`: percent of right answers over {count} samples, a needle in 1,024",
        "tokens whose context was compressed before the question was there, with Wilson's interval of 95%.",
        "",
        f"| policy | {' | '.join(map(column_of, BUDGETS))} |",
        "|---|" + "---:|" * len(BUDGETS),
    ]
    lines.append(f"| {FULL} | {' | '.join([text_of(cells[FULL])] * len(BUDGETS))} |")
    for name in unseen(BUDGETS[0]):
        found = (cells.get(f"{name} @ {budget}") for budget in BUDGETS)
        lines.append(
            f"| {name} | {' | '.join('-' if each is None else text_of(each) for each in found)} |"
        )
    return [*lines, ""]


def main():
    """Runs what is missing, saves and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "needle_tiny_unseen.json")
    options = parser.parse_args()
    enable_compilation_cache()
    params = jaxkv.load(orders_tiny.MODEL)
    depths = orders_tiny.MIDDLE
    task = Needle(
        lengths=(1024,),
        depths=depths,
        wording="small",
        count=math.ceil(options.count / len(depths)),
    )
    settings = {"model": orders_tiny.MODEL, "fingerprint": params.fingerprint, "task": repr(task)}
    results = record.resume(options.out, settings)
    cells = results.setdefault("cells", {})
    wanted = {FULL: jaxkv.FullKV()}
    wanted |= {
        f"{name} @ {budget}": policy
        for budget in BUDGETS
        for name, policy in unseen(budget).items()
    }
    for title, policy in wanted.items():
        if title not in cells:
            cells[title] = orders_tiny.scores(params, policy, task, How(agnostic=True))
            results["machine"] = record.machine()
            record.save(options.out, results)
            print(f"{title:48s} {text_of(cells[title])}", flush=True)
    lines = table(cells, options.count)
    options.out.with_suffix(".md").write_text("\n".join(lines), "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
