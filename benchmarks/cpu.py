"""Times jaxkv alone: formulations of attention to a pool by number of kv heads, then prefill and decoding of the model.

    python -m benchmarks.cpu                    all parts
    python -m benchmarks.cpu --part forms       the decode step's attention for K = 3, 8, 32 at equal bytes
    python -m benchmarks.cpu --part questions   that of 16 to 256 new tokens

Every figure is the median of several runs, with the range: compare figures of one run only.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import enable_compilation_cache
from jaxkv.attention import xla
from jaxkv.attention.xla import Walk
from jaxkv.cache.layout import Layout

ROWS = 3 * 4096  # pool rows per sequence, whatever K: equal bytes
HEADS = ((3, 3), (8, 4), (32, 1))  # (kv heads, query heads each): SmolLM2, Llama 3, Llama 2
HEAD_DIM = 64
LAYERS = 8


def timed(call, repeats):
    """Milliseconds per call: median, least and most of `repeats` runs after one that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return [1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds))]


def segments(heads, batch, ragged):
    """Lengths and first rows of segments that fill ROWS rows, equal or uneven."""
    each = ROWS // heads
    length = np.full((batch, heads), each - 8, np.int32)
    if ragged:
        shift = np.random.default_rng(0).integers(0, each // 2, (batch, heads // 2))
        length[:, : heads // 2] -= shift
        length[:, heads // 2 : 2 * (heads // 2)] += shift
    layout = Layout.RAGGED if ragged else Layout.EQUAL
    length = jnp.asarray(length)
    return layout.place(length[None], ROWS)[0], length


def forms(repeats):
    """Attention of one decode step over LAYERS layers, by formulation."""
    formulations = {
        "equal": (
            False,
            lambda q, k, v, start, length: xla.over_pool(q, k, v, start, length, walk=Walk.STRIDES),
        ),
        "masked": (True, xla.masked_product),
        "walk": (True, xla.by_windows),
        "chosen": (
            True,
            lambda q, k, v, start, length: xla.over_pool(q, k, v, start, length, walk=Walk.WHOLE),
        ),
    }
    print(
        f"decode attention, {LAYERS} layers, {ROWS} pool rows a sequence, ms per step: median (least to most)"
    )
    print(
        f"{'dtype':9} {'batch':>5} {'K':>3} {'G':>2}"
        + "".join(f"{name:>26}" for name in formulations)
    )
    for dtype in ("float32", "bfloat16"):
        for batch in (1, 8):
            for heads, group in HEADS:
                cells = []
                for ragged, attend in formulations.values():
                    start, length = segments(heads, batch, ragged)
                    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
                    rows = [
                        jax.random.normal(key, (batch, ROWS, HEAD_DIM)).astype(dtype)
                        for key in keys
                    ]
                    q = jax.random.normal(
                        jax.random.key(1), (batch, heads, group, HEAD_DIM)
                    ).astype(dtype)

                    @jax.jit
                    def step(q, rows, start, length, attend=attend):
                        for layer in range(LAYERS):
                            out, _ = attend(q, rows[2 * layer], rows[2 * layer + 1], start, length)
                            q = (q.astype(jnp.float32) + 1e-3 * out.astype(jnp.float32)).astype(
                                q.dtype
                            )
                        return q

                    cells.append(
                        timed(lambda step=step, a=(q, rows, start, length): step(*a), repeats)
                    )
                figures = "".join(f"{m:12.2f} ({low:5.1f} to{high:5.1f})" for m, low, high in cells)
                print(f"{dtype:9} {batch:5} {heads:3} {group:2}{figures}", flush=True)


def questions(repeats):
    """Attention of a block of new tokens to one layer's pool, half full, by formulation."""
    formulations = {
        "equal": lambda q, k, v, start, length: xla._equal(q, k, v, length),
        "masked": xla.masked_product,
        "walk": xla.by_windows,
    }
    print(f"\nattention of new tokens to {ROWS} pool rows, half full, ms: median (least to most)")
    print(
        f"{'dtype':9} {'tokens':>6} {'K':>3} {'G':>2}"
        + "".join(f"{name:>26}" for name in formulations)
    )
    for dtype in ("float32", "bfloat16"):
        for heads, group in HEADS:
            start, length = segments(heads, 1, False)
            length = length // 2
            k, v = (
                jax.random.normal(jax.random.key(each), (1, ROWS, HEAD_DIM)).astype(dtype)
                for each in (0, 1)
            )
            for tokens in (16, 64, 256):
                q = jax.random.normal(
                    jax.random.key(2), (1, heads, group * tokens, HEAD_DIM)
                ).astype(dtype)
                calls = [
                    partial(jax.jit(attend), q, k, v, start, length)
                    for attend in formulations.values()
                ]
                cells = [timed(call, repeats) for call in calls]
                figures = "".join(f"{m:12.2f} ({low:5.1f} to{high:5.1f})" for m, low, high in cells)
                print(f"{dtype:9} {tokens:6} {heads:3} {group:2}{figures}", flush=True)


def model(repeats, lengths):
    """Prefill and decoding of the real model, through the public functions."""
    print("\nprefill s and decode ms per step: median of runs")
    print(
        f"{'dtype':9} {'policy':12} {'tokens':>6} {'prefill s':>10} {'ms/step':>8} {'cache MiB':>10} {'full MiB':>9}"
    )
    policies = [
        jaxkv.FullKV(),
        jaxkv.SnapKV(budget=256),
        jaxkv.PyramidKV(budget=256),
        jaxkv.AdaKV(budget=256),
    ]
    for dtype in ("float32", "bfloat16"):
        params = jaxkv.load("smollm2-135m-instruct", dtype)
        for length in lengths:
            ids = (
                np.random.default_rng(0).integers(100, params.config.vocab, length).astype(np.int32)
            )
            for policy in policies:
                runs = [
                    jaxkv.generate(
                        params, ids, policy=policy, max_new_tokens=32, stop_at_eos=False
                    ).stats
                    for _ in range(repeats)
                ]
                prefill = statistics.median(run.prefill_seconds for run in runs)
                step = statistics.median(run.decode_seconds / run.new_tokens for run in runs)
                sizes = f"{runs[0].kept_bytes / 2**20:10.1f} {runs[0].full_bytes / 2**20:9.1f}"
                name = type(policy).__name__
                print(
                    f"{dtype:9} {name:12} {length:6} {prefill:10.2f} {1e3 * step:8.1f} {sizes}",
                    flush=True,
                )


def main():
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("forms", "questions", "model", "all"), default="all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    args = parser.parse_args()
    enable_compilation_cache()
    if args.part in ("forms", "all"):
        forms(args.repeats)
    if args.part in ("questions", "all"):
        questions(args.repeats)
    if args.part in ("model", "all"):
        model(max(1, args.repeats // 2), args.tokens)


if __name__ == "__main__":
    main()
