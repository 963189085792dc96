"""Time of a prefill whose layers attend within a window, and of one whose layers do not, by the prompt's length.

    python -m benchmarks.windows [--tokens 1024,2048,4096,8192] [--window 512] [--rounds 5]

Two models of one shape with random weights in float32, all layers with the window or none. Rounds take turns between
them and the lengths, programs are compiled before. Beside the times: rows that a layer's kv head holds after the
prefill, and bytes of the whole cache as planned and as held.
"""

import argparse
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import record
from benchmarks.shapes import random_model
from jaxkv.models.config import ModelConfig

# SmolLM2-135M's, with fewer layers.
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def models(window, longest):
    """The two models by name."""
    both = SHAPE | {"model_type": "mistral", "max_position_embeddings": 2 * longest}
    configs = {
        "within a window": both | {"sliding_window": window},
        "whole prompt": both | {"sliding_window": None},
    }
    return {
        name: random_model(ModelConfig.from_hf(each), name, dtype=jnp.float32)
        for name, each in configs.items()
    }


def measure(window, lengths, rounds):
    """Dict by model and length: seconds `[rounds]`, rows of a segment, and bytes planned and held."""
    found, rng = {}, np.random.default_rng(0)
    sessions = {
        name: jaxkv.Session(model, jaxkv.FullKV())
        for name, model in models(window, max(lengths)).items()
    }
    ids = {tokens: rng.integers(0, SHAPE["vocab_size"], tokens).tolist() for tokens in lengths}
    for turn in range(rounds + 1):
        for tokens in lengths:
            for name, session in sessions.items():
                start = time.perf_counter()
                cache = session.prefill(ids[tokens])
                seconds = time.perf_counter() - start
                planned = session.planned(np.asarray([tokens]), 0).cache_bytes
                sizes = int(cache.kept.max()), planned, cache.nbytes
                times, _ = found.get((name, tokens), ([], None))
                # The first turn compiles.
                found[name, tokens] = (times + [seconds] if turn else times, sizes)
    return found


def lines_of(found, lengths):
    """Rows of the table."""
    for tokens in lengths:
        cells = [f"{tokens:,}"]
        medians = {}
        for name in ("within a window", "whole prompt"):
            seconds, (rows, planned, held) = found[name, tokens]
            medians[name] = np.median(seconds)
            cells += [f"{medians[name]:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"]
            cells += [
                f"{1e6 * medians[name] / tokens:.0f}",
                f"{rows:,}",
                f"{planned / 1e6:.2f} / {held / 1e6:.2f}",
            ]
        cells += [f"{medians['within a window'] / medians['whole prompt']:.2f}"]
        yield f"| {' | '.join(cells)} |"


def main():
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", default="1024,2048,4096,8192", help="prompt lengths (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=record.RESULTS / "windows.md", help="(default: %(default)s)"
    )
    asked = parser.parse_args()
    lengths = [int(each) for each in asked.tokens.split(",")]
    found, where = measure(asked.window, lengths, asked.rounds), record.machine()
    of_each = "seconds | us a token | rows a head | MB planned / held"
    lines = [
        "# Prefill within windows",
        "",
        f"By `python -m benchmarks.windows` at {where['commit']}, on {where['processor']}, {where['cores']} cores, "
        f"float32: {SHAPE['num_hidden_layers']} layers of SmolLM2-135M's shape, a window of {asked.window} tokens in "
        f"all of them or none; median of {asked.rounds} rounds, and range.",
        "",
        f"| tokens | within a window: {of_each} | whole prompt: {of_each} | of the whole prompt's time |",
        "|---:|" + "---:|" * 9,
        *lines_of(found, lengths),
        "",
    ]
    print("\n".join(lines))
    asked.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
