"""What became of the tiny model's training: its log, and what the full cache answers by task and length.

python -m benchmarks.tiny.table DIR --count 100      DIR is the run's folder
"""

import argparse
import json
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import orders_tiny, record
from benchmarks.tiny.export import NAME
from jaxkv.evals import EvaluationTask, How, Ruler, TwoStage
from jaxkv.machine.compilation import enable_compilation_cache

LENGTHS = (256, 512, 1024, 2048)
RULER = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
)
SIZES = (10, 20, 30, 40)


def main() -> None:
    """Asks, saves and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the run's")
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    enable_compilation_cache()
    params = jaxkv.load(NAME, progress=False)

    def share(task: EvaluationTask) -> str:
        return f"{100 * np.mean(orders_tiny.scores(params, jaxkv.FullKV(), task, How())):.0f}"

    lines = [
        f"| task | {' | '.join(f'{length} tokens' for length in LENGTHS)} |",
        "|---" * (len(LENGTHS) + 1) + "|",
    ]
    for name in RULER:
        cells = [
            share(Ruler(tasks=(name,), lengths=(length,), wording="small", count=options.count))
            for length in LENGTHS
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines += [
        "",
        f"| task | {' | '.join(f'{size} entries' for size in SIZES)} |",
        "|---" * (len(SIZES) + 1) + "|",
    ]
    for reason in (True, False):
        cells = [
            share(
                TwoStage(count=options.count, sizes=(size,), reason=reason, new_tokens=24, seed=1)
            )
            for size in SIZES
        ]
        lines.append(
            f"| `2stageretr`, {'reasoning' if reason else 'at once'} | {' | '.join(cells)} |"
        )
        print(lines[-1], flush=True)
    log = (options.folder / "log.jsonl").read_text("utf-8")
    (record.RESULTS / "train_tiny.jsonl").write_text(log, "utf-8")
    (record.RESULTS / "train_tiny.md").write_text(
        "\n".join([*head(log, options.count), *lines, ""]), "utf-8"
    )


def head(log: str, count: int) -> list[str]:
    """What the run took, stage by stage."""
    steps = [json.loads(line) for line in log.splitlines()]
    last = {each["stage"]: each for each in steps}
    machine = record.machine()
    names = ("pairs", "needles", "variables", "two_stage", "sums")
    return [
        "# The tiny model",
        "",
        f"By `python -m benchmarks.train_tiny`, seed 0, {last[max(last)]['seconds'] / 60:.0f} minutes on "
        f"{machine['cores']} cores ({machine['processor']}) that had other work as well;",
        "[the log](train_tiny.jsonl), of which the lines below are each stage's last: percent of answers without a",
        "fault, each token behind the right ones.",
        "",
        f"| tokens | steps | seconds | loss | {' | '.join(names)} |",
        "|---" * (4 + len(names)) + "|",
        *(
            f"| {each['length']} | {each['step']} | {each['seconds']} | {each['loss']} "
            f"| {' | '.join(f'{100 * each[name]:.0f}' if name in each else '-' for name in names)} |"
            for each in last.values()
        ),
        "",
        f"Then the checkpoint with all its rows in the cache: percent right of {count} samples a cell, of RULER's",
        "small wording and 2StageRetr.",
        "",
    ]


if __name__ == "__main__":
    main()
