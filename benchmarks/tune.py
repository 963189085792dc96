"""Searches for the fastest tiles of every kernel on this GPU and writes the table that `pallas_kernels.tuning` reads.

    python -m benchmarks.tune --out pallas_kernels/tuned     a table named after the device
    JAXKV_TUNING=FILE python ...                             use a table from elsewhere

Candidates that a device cannot hold (too much shared memory) are passed over. The rules of thumb are a candidate too,
so a table never makes things slower than they were where it was measured.
"""

import argparse
import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.gpu import INTERPRET, many, ragged, random, timed
from jaxkv import pallas_kernels
from jaxkv.cache.layout import Layout
from jaxkv.pallas_kernels import tuning
from jaxkv.pallas_kernels.tuning import Launch


def fastest(candidates, run, count):
    """The fastest of some tiles, and its seconds; run(tiles) gives a function of a zero."""
    best = None
    for tiles in candidates:
        try:
            seconds = timed(partial(many(run(tiles), count), jnp.float32(0)), repeats=5)[0] / count
        except jax.errors.JaxRuntimeError as error:
            print(f"  passed over {tiles}: {str(error).splitlines()[0][:80]}")
            continue
        if best is None or seconds < best[1]:
            best = (tiles, seconds)
    return best


def launches(warps, stages):
    """All pairs."""
    return [Launch(warps=w, stages=s) for w, s in itertools.product(warps, stages)]


def decode(heads, dtype, quick):
    """Attention over segments: 256 MB of keys and values in four ragged sequences."""
    size = 2**20 if quick else 2**28
    rows = size // (2 * dtype.itemsize * heads.dim * heads.kv_heads * 4)
    k, v = (random(jax.random.key(i), (4, heads.kv_heads * rows, heads.dim), dtype) for i in (0, 1))
    q = random(jax.random.key(2), (4, heads.kv_heads, heads.group, heads.dim), dtype)
    length = ragged(np.random.default_rng(0), 4, heads.kv_heads, rows, spread=1.0)
    start = Layout.RAGGED.place(length[None], heads.kv_heads * rows)[0]
    given = tuning.decode_tiles(dim=heads.dim, itemsize=dtype.itemsize)
    # Chunks are dealt after the lengths; what is searched for is how a program walks it.
    options = itertools.product(
        (32,) if quick else (16, 32, 64, 128), launches((4,) if quick else (2, 4, 8), (2, 3, 4))
    )
    candidates = [given, *(dataclasses.replace(given, block=block, launch=launch) for block, launch in options)]

    def run(tiles):
        return lambda zero: pallas_kernels.attend(
            q + zero.astype(q.dtype), k, v, start, length, tiles=tiles, interpret=INTERPRET
        )

    return fastest(candidates[: 2 if quick else None], run, 1 if quick else 10), ("block", "launch")


def gather(heads, dtype, quick):
    """Compaction of 8192 of 32768 rows a head."""
    slots, kept = (128, 32) if quick else (32768, 8192)
    k, v = (random(jax.random.key(i), (2, heads.kv_heads, slots, heads.dim), dtype) for i in (0, 1))
    rng = np.random.default_rng(0)
    source = np.stack([np.sort(rng.permutation(heads.kv_heads * slots)[: heads.kv_heads * kept]) for _ in range(2)])
    given = tuning.gather_tiles(dim=heads.dim, itemsize=dtype.itemsize)
    options = itertools.product((16,) if quick else (8, 16, 32, 64, 128), launches((2, 4, 8), (1,)))
    candidates = [given, *(dataclasses.replace(given, block=block, launch=launch) for block, launch in options)]

    rows = jnp.asarray(source.astype(np.int32))

    def run(tiles):
        return lambda zero: pallas_kernels.compact(
            k, v, rows + zero.astype(jnp.int32), tiles=tiles, interpret=INTERPRET
        )

    return fastest(candidates[: 2 if quick else None], run, 1 if quick else 10), ("block", "launch")


def prefill(heads, dtype, quick):
    """Causal attention of 8192 tokens; the column sums keep the same tiles."""
    slots = 64 if quick else 8192
    q = random(jax.random.key(0), (1, heads.kv_heads, heads.group, slots, heads.dim), dtype)
    k, v = (random(jax.random.key(i), (1, heads.kv_heads, slots, heads.dim), dtype) for i in (1, 2))
    zeros, length = jnp.zeros((1,), jnp.int32), jnp.full((1,), slots, jnp.int32)
    given = tuning.prefill_tiles(dim=heads.dim, itemsize=dtype.itemsize)
    sizes = [(32, 32)] if quick else [(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)]
    options = itertools.product(sizes, launches((4, 8), (2, 3)))
    candidates = [given]
    candidates += [dataclasses.replace(given, queries=a, keys=b, launch=launch) for (a, b), launch in options]

    def run(tiles):
        return lambda zero: pallas_kernels.flash(
            q + zero.astype(q.dtype), k, v, zeros, length, tiles=tiles, interpret=INTERPRET
        )

    return fastest(candidates[: 2 if quick else None], run, 1 if quick else 5), ("queries", "keys", "launch")


def main():
    """Searches and writes DIR/<device>.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the table")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few candidates, to see that it runs")
    args = parser.parse_args()
    table = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    models = [m for m in shapes.MODELS if m.name in shapes.PER_DIM][: 1 if args.quick else None]
    for name, search in (("decode", decode), ("gather", gather), ("prefill", prefill)):
        table[name] = []
        for heads, dtype in itertools.product(models, ("bfloat16",) if args.quick else ("bfloat16", "float32")):
            (tiles, seconds), fields = search(heads, jnp.dtype(dtype), args.quick)
            every = dataclasses.asdict(tiles)
            entry = {"dim": heads.dim, "itemsize": jnp.dtype(dtype).itemsize} | {
                field: every[field] for field in fields
            }
            print(f"{name} {heads.name} {dtype}: {seconds * 1e6:.1f} us with {entry}")
            table[name].append(entry)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{table['device'].lower().replace(' ', '-')}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(table, indent=1) + "\n")
    part.replace(path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
