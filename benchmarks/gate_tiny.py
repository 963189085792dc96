"""Fits a gate of KVzap for the tiny model, then asks it, SnapKV and KVzip+ with the question unseen.

    python -m benchmarks.gate_tiny --out DIR

`jaxkv fit-gate` fits on RULER's contexts of one seed, the questions are those of another: ten minutes on two cores.
SlidingWindows are of 8 tokens, so that the policies differ by their scores alone. The table is printed and is in DIR.
"""

import argparse
from pathlib import Path

import jaxkv
from jaxkv import GlobalBudget, KVzap, KVzip, SnapKV, cli
from jaxkv.evals import How, Ruler, evaluate

MODEL, WINDOW, SHARES = "tiny-retrieval", 8, (0.1, 0.2)


def task(seed):
    """RULER of ten samples a task at 1,024 tokens."""
    return Ruler(lengths=(1024,), count=10, wording="small", seed=seed)


def fitted(model, folder):
    """Path of a gate fitted on the contexts of 110 samples."""
    texts, gate = folder / "texts", folder / "gate.safetensors"
    texts.mkdir(parents=True, exist_ok=True)
    paths = []
    for sample in task(seed=77).samples(model):
        paths.append(texts / f"{sample.id}.txt")
        paths[-1].write_text(sample.context, "utf-8")
    if not gate.exists() and cli.main(["fit-gate", MODEL, *map(str, paths), "--out", str(gate)]):
        raise SystemExit("jaxkv fit-gate failed")
    return gate


def main():
    """Fits, asks, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for texts, the gate and the evaluation"
    )
    folder = parser.parse_args().out
    model = jaxkv.load(MODEL)
    gate, policies = fitted(model, folder), {}
    for share in SHARES:
        kvzap = KVzap(gate=gate, budget=share, window=WINDOW)
        policies |= {
            f"snapkv@{share}": SnapKV(budget=share, window=WINDOW),
            f"kvzap@{share}": kvzap,
            f"kvzap, all layers@{share}": GlobalBudget(base=kvzap),
            f"kvzip+@{share}": KVzip(budget=share, weighted=True),
        }
    made = folder / "ruler"
    evaluate(model, task(seed=0), policies, made, how=How(agnostic=True), batch=10)
    print((made / "table.md").read_text("utf-8"))


if __name__ == "__main__":
    main()
