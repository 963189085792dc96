"""Orders between policies that the tiny model shows, over a hundred samples a cell, with intervals.

    python -m benchmarks.orders_tiny                             all cells; ended half-way, the same command goes on
    python -m benchmarks.orders_tiny --count 20 --out few.json   fewer samples

A cell is one task under one policy and budget; an order holds two policies against each other on the same samples.
The interval of a cell is Wilson's, that of a difference a bootstrap over samples, both of 95%. An order is "shown"
where the difference's interval lies above 0, "open" where it reaches 0, and "broken" where it lies below.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.evals import EvaluationTask, How, Ruler, TwoStage
from jaxkv.evals.needle import Needle
from jaxkv.evals.results import compute_confidence_interval
from jaxkv.machine.compilation import enable_compilation_cache

MODEL = "tiny-retrieval"
BATCH = 25
MIDDLE = (0.2, 0.4, 0.6, 0.8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """One policy that should do no worse than another.

    Attributes:
        title: what it is called in the table.
        better: the policy that should win, by its class' name in `jaxkv`.
        worse: the other.
        task: the cases.
        agnostic: the context is compressed before the question is seen.
        budgets: of both.
    """

    title: str
    better: str
    worse: str
    task: EvaluationTask
    budgets: tuple[int | float, ...]
    agnostic: bool = False


def orders(count: int) -> list[Order]:
    """All of them, on so many samples each."""
    keys = Ruler(tasks=("niah_multikey_1",), lengths=(1024,), wording="small", count=count)
    middle = Needle(
        lengths=(1024,), depths=MIDDLE, wording="small", count=math.ceil(count / len(MIDDLE))
    )
    stages = TwoStage(count=count, sizes=(10, 20, 30, 40), reason=True, new_tokens=24)
    rows, shares = (64, 128, 256), (0.2, 0.3, 0.5)
    unseen = {
        "title": "question unseen, one of 4 keys",
        "task": keys,
        "budgets": rows,
        "agnostic": True,
    }
    return [
        Order(better="AdaKV", worse="SnapKV", **unseen),
        Order(
            title="2StageRetr, reasoning", better="OmniKV", worse="H2O", task=stages, budgets=shares
        ),
        Order(
            title="needle in the middle",
            better="SnapKV",
            worse="StreamingLLM",
            task=middle,
            budgets=rows,
        ),
        Order(title="one of 4 keys", better="D2O", worse="H2O", task=keys, budgets=rows),
    ]


def scores(
    params: jaxkv.LanguageModel, policy: jaxkv.CustomPolicy, task: EvaluationTask, how: How
) -> list[float]:
    """A task's samples under a policy."""
    samples, found = task.samples(params), []
    for first in range(0, len(samples), BATCH):
        found += [
            each.score for each in task.run(params, policy, samples[first : first + BATCH], how)
        ]
    return found


def difference(better: list[float], worse: list[float]) -> tuple[float, float, float]:
    """Mean of the differences, sample by sample, and 95% of it by bootstrap."""
    apart = np.array(better) - np.array(worse)
    resampled = np.random.default_rng(0).integers(0, len(apart), (10_000, len(apart)))
    low, high = np.percentile(apart[resampled].mean(axis=1), [2.5, 97.5])
    return float(apart.mean()), float(low), float(high)


def verdict(low: float, high: float) -> str:
    """What an interval of a difference says of an order."""
    return "shown" if low > 0 else "broken" if high < 0 else "open"


def main() -> None:
    """Runs what is missing, saves and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--model", default=MODEL, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "orders_tiny.json")
    options = parser.parse_args()
    enable_compilation_cache()
    params = jaxkv.load(options.model)
    results = record.resume(
        options.out,
        {
            "model": options.model,
            "fingerprint": params.fingerprint,
            "count": options.count,
            "batch": BATCH,
        },
    )
    cells, lines = results.setdefault("cells", {}), []

    def cell(task: EvaluationTask, policy: jaxkv.CustomPolicy, agnostic: bool) -> list[float]:
        title = f"{task!r} {policy!r} {'agnostic' if agnostic else 'aware'}"
        if title not in cells:
            cells[title] = scores(params, policy, task, How(agnostic=agnostic))
            results["machine"] = record.machine()
            record.save(options.out, results)
        return cells[title]

    for order in orders(options.count):
        full = cell(order.task, jaxkv.FullKV(), order.agnostic)
        for budget in order.budgets:
            first, second = order.better, order.worse
            pair = [
                cell(order.task, getattr(jaxkv, name)(budget=budget), order.agnostic)
                for name in (first, second)
            ]
            apart, low, high = difference(*pair)
            shown = [f"{100 * np.mean(each):.0f} ({_interval(each)})" for each in (full, *pair)]
            found = f"{100 * apart:+.0f} ({100 * low:+.0f} to {100 * high:+.0f})"
            lines.append(
                f"| {order.title} | {budget} | {shown[0]} | {first} {shown[1]} | {second} {shown[2]} | {found} "
                f"| {verdict(low, high)} |"
            )
            print(lines[-1], flush=True)
    options.out.with_suffix(".md").write_text(
        "\n".join([*head(options.count), *lines, ""]), "utf-8"
    )


def head(count: int) -> list[str]:
    """What stands above the lines."""
    return [
        "# Orders on the tiny model",
        "",
        f"By `python -m benchmarks.orders_tiny`: percent of right answers over {count} samples, with Wilson's interval",
        "of 95%; differences sample by sample, with a bootstrap's. An order is shown where that lies above 0, open",
        "where it reaches 0, broken where it lies below.",
        "OmniKV drops nothing: its budget is what the layers above its filter read, H2O's what all of them keep.",
        "",
        "| task | budget | full cache | should win | should lose | difference | order |",
        "|---|---|---|---|---|---|---|",
    ]


def _interval(found: list[float]) -> str:
    low, high = compute_confidence_interval(np.asarray(found))
    return f"{100 * low:.0f} to {100 * high:.0f}"


if __name__ == "__main__":
    main()
