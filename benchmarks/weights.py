"""Weights in 8 and 4 bits beside the model's dtype: what rounding changes, bytes, seconds of a decode step, on SmolLM2.

    python -m benchmarks.weights [--documents 8] [--prefix 512] [--tokens 256] [--rounds 5] [--out FILE]

Documents are those of `jaxkv eval loss`. Of each, logits at the end of the prefix are compared by their cosine, and the
true continuation is read token by token on top of the full cache: its perplexity is compared. Steps of both models
take turns, round after round; a ratio is taken within a round, and the figure is the median of the rounds. The model's
file is one of 4 bits in groups of 32 already: what rounding it to such groups changes says little of other models.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.compilation import enable_compilation_cache
from jaxkv.evals import Loss, evaluate

MODEL = "smollm2-135m-instruct"
# Tokens of a round of drawing.
STEPS = 32


def cosines(one, other, prompts):
    """Cosine of both models' logits behind each prompt."""
    found = []
    for prompt in prompts:
        a, b = (
            np.asarray(jaxkv.Session(model).prefill([prompt]).logits, np.float64)[0]
            for model in (one, other)
        )
        found.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    return found


def losses(model, task):
    """Mean loss of each document's continuation, in nats."""
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(
            model, task, {"full": jaxkv.FullKV()}, Path(folder) / "run", batch=4
        ).scores("full")


def ratios(one, other, prompt, rounds):
    """Seconds of a decode step of `other` over those of `one`, for each round."""
    options = {"max_new_tokens": STEPS, "stop_at_eos": False, "progress": False}
    found = []
    for _ in range(rounds + 1):
        spent = [
            jaxkv.generate(model, prompt, **options).stats.decode_seconds for model in (one, other)
        ]
        found.append(spent[1] / spent[0])
    # The first compiles.
    return found[1:]


def line_of(dtype, bits, asked):
    """The table's row of a dtype and of weights in so many bits."""
    plain, narrow = (
        jaxkv.load(MODEL, dtype, weights=weights, progress=False)
        for weights in (None, f"int{bits}")
    )
    task = Loss(count=asked.documents, prefix=asked.prefix, tokens=asked.tokens)
    prompts = [
        plain.text.encode(sample.context, bos=True)[: asked.prefix]
        for sample in task.samples(plain)
    ]
    alike, (mine, theirs) = (
        cosines(plain, narrow, prompts),
        (losses(each, task) for each in (narrow, plain)),
    )
    more = np.exp(np.mean(mine)) / np.exp(np.mean(theirs)) - 1
    slower = ratios(plain, narrow, prompts[0], asked.rounds)
    return (
        f"| {dtype}, {bits} bits | {plain.nbytes / 1e6:.1f} | {narrow.nbytes / 1e6:.1f} | {min(alike):.6f} "
        f"| {np.mean(alike):.6f} | {np.exp(np.mean(theirs)):.3f} | {100 * more:+.3f} % "
        f"| {statistics.median(slower):.2f} ({min(slower):.2f} to {max(slower):.2f}) |"
    )


def main():
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prefix", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=record.RESULTS / "weights.md", help="(default: %(default)s)"
    )
    asked = parser.parse_args()
    enable_compilation_cache()
    where = record.machine()
    lines = [
        "# Weights in 8 and 4 bits",
        "",
        f"By `python -m benchmarks.weights` at {where['commit']}: SmolLM2-135M on a CPU, {asked.documents} documents, "
        f"{asked.prefix} tokens of prefix, {asked.tokens} of continuation; the embedding, which is the output matrix, "
        "too, keeps its dtype. Perplexity in fewer bits is told against that of the dtype. The model's file holds 4 "
        "bits in groups of 32 already, so that its own figures in 4 bits say little of other models.",
        "",
        "| dtype, bits | MB | in these | least cosine of logits | mean | perplexity | in these | time of a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(line_of(dtype, bits, asked) for dtype in ("float32", "bfloat16") for bits in (8, 4)),
        "",
    ]
    print("\n".join(lines))
    asked.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
