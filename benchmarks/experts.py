"""What a decode step of a mixture of experts reads on a CPU: time against the bytes of the chosen experts.

    python -m benchmarks.experts

One model of two layers of 64 experts, once for each number of experts per token, in turns. If a step read all experts,
or converted them, its time would not depend on that number. Rates are of the bytes that `jaxkv plan` counts; a large
cache may hold the experts of a few tokens.
"""

import argparse

import numpy as np

import jaxkv
from benchmarks import record
from benchmarks.decode_step import Cell
from jaxkv.models.values import ExpertsConfig
from jaxkv.testing import tiny_model

CHOSEN = (1, 4, 16, 64)
EXPERTS, EMBED, HIDDEN, TOKENS = 64, 512, 1024, 64


def prepare(chosen, *, steps, dtype):
    """A model's run of so many steps, which has been compiled and run once; and bytes of its plan."""
    config = jaxkv.ModelConfig(
        vocab=1024,
        layers=2,
        embed=EMBED,
        hidden=HIDDEN,
        heads=8,
        kv_heads=2,
        head_dim=64,
        experts=ExpertsConfig(count=EXPERTS, chosen=chosen, sigmoid=True, shared=HIDDEN),
    )
    model = tiny_model(config, dtype=dtype)
    ids = np.random.default_rng(0).integers(0, config.vocab, (1, TOKENS)).tolist()
    cell = Cell(model, jaxkv.SnapKV(budget=TOKENS), ids, steps)
    cell.run(0)
    cell.run(steps)
    planned = jaxkv.plan(config, gpus="cpu", context=TOKENS, new=steps, dtype=dtype).sizes
    return cell, {"read": planned.read, "weights": planned.weights}


def main():
    """Measures all numbers of experts in turns, and saves after each round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=record.Path, default=record.RESULTS / "experts.json")
    given = parser.parse_args()
    cells = {each: prepare(each, steps=given.steps, dtype=given.dtype) for each in CHOSEN}
    spent = {each: [] for each in CHOSEN}
    for _ in range(given.rounds):
        for chosen, (cell, _) in cells.items():
            spent[chosen].append(1e3 * cell.run(given.steps) / given.steps)
        found = {
            chosen: {"milliseconds": record.spread(spent[chosen]), **sizes}
            for chosen, (_, sizes) in cells.items()
        }
        record.add(given.out, given.dtype, {"machine": record.machine(), "chosen": found})
    print(f"{'experts':>8}{'MB read':>10}{'of MB':>8}{'ms/step':>10}{'GB/s':>8}")
    for chosen, each in found.items():
        step, read, held = each["milliseconds"]["median"], each["read"] / 1e6, each["weights"] / 1e6
        print(f"{chosen:8}{read:10.1f}{held:8.0f}{step:10.2f}{read / step:8.1f}")


if __name__ == "__main__":
    main()
