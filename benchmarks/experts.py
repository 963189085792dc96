"""What a decode step of a mixture of experts reads on a CPU: time against the bytes of the chosen experts.

    python -m benchmarks.experts

One model of two layers of 64 experts, once for each number of experts per token. If a step read all experts, or
converted them, its time would not depend on that number. Rates are of the bytes that `jaxkv plan` counts; a large cache
may hold the experts of a few tokens.
"""

import argparse
import statistics

import numpy as np

import jaxkv
from benchmarks import record
from benchmarks.decode_step import Cell
from jaxkv.models.values import ExpertsConfig
from jaxkv.testing import tiny_model

CHOSEN = (1, 4, 16, 64)
EXPERTS, EMBED, HIDDEN, TOKENS = 64, 512, 1024, 64


def measure(chosen, *, rounds, steps, dtype):
    """A step's milliseconds, and the bytes that it reads by the plan."""
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
    spent = [1e3 * cell.run(steps) / steps for _ in range(rounds)]
    planned = jaxkv.plan(config, gpus="cpu", context=TOKENS, new=steps, dtype=dtype).sizes
    return {"milliseconds": spent, "read": planned.read, "weights": planned.weights}


def main():
    """Measures each number of experts, and saves after it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=record.Path, default=record.RESULTS / "experts.json")
    given = parser.parse_args()
    found = {}
    print(f"{'experts':>8}{'MB read':>10}{'of MB':>8}{'ms/step':>10}{'GB/s':>8}")
    for chosen in CHOSEN:
        one = measure(chosen, rounds=given.rounds, steps=given.steps, dtype=given.dtype)
        step = statistics.median(one["milliseconds"])
        read, held = one["read"] / 1e6, one["weights"] / 1e6
        print(f"{chosen:8}{read:10.1f}{held:8.0f}{step:10.2f}{read / step:8.1f}", flush=True)
        found[chosen] = one
        record.add(given.out, given.dtype, {"machine": record.machine(), "chosen": found})


if __name__ == "__main__":
    main()
