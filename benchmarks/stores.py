"""Loss at equal bytes: fewer rows in 16 bits, or more of them in 8 or 4, on SmolLM2 over eight documents.

    python -m benchmarks.stores [--documents 8] [--prefix 4096] [--tokens 128] [--work FOLDER] [--out FILE]

Documents are those of `jaxkv eval loss`: a prefix is prefilled and compressed, then its true continuation is read token
by token, each new row rounded as it is written. A budget is a share of what the prefix takes as a full cache in
bfloat16, positions of rows counted; every store holds as many rows as these bytes allow. The model computes in float32,
and "dense" rows are held so: losses differ by what is dropped and by codes alone. Differences are paired, intervals are
of 95 % over documents. A run that was ended goes on where it stopped with the same folder.
"""

import argparse
from pathlib import Path

import numpy as np

import jaxkv
from benchmarks import record
from jaxkv.cache.quantised import STORES
from jaxkv.compilation import enable_compilation_cache
from jaxkv.evals import Loss, evaluate

MODEL = "smollm2-135m-instruct"
SHARES = {"1/16": 16, "1/32": 32}
METHODS = {"SnapKV": jaxkv.SnapKV, "AdaKV": jaxkv.AdaKV}
# Student's t for 95 %, by the number of documents less one.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
# Bytes of a row's position in the sequence.
_POSITION = 4


def rows_of(store, *, prefix, part, dim):
    """Rows of a store that take the bytes of `prefix / part` rows in bfloat16."""
    dense, each = (STORES[name].row_bytes(dim, 2) + _POSITION for name in ("dense", store))
    return prefix * dense // part // each


def policies_of(prefix, dim):
    """Policies by name: the full cache in each store, and each method in each store at each share of the bytes."""
    found = {f"FullKV, {store}": jaxkv.FullKV(store=store) for store in STORES}
    for title, part in SHARES.items():
        for name, method in METHODS.items():
            for store in STORES:
                budget = rows_of(store, prefix=prefix, part=part, dim=dim)
                found[f"{name}, {title}, {store}"] = method(budget=budget, store=store)
    return found


def told(values):
    """Mean of paired differences, and half of its interval."""
    mean, count = values.mean(), len(values)
    half = (
        _T.get(count - 1, 1.96) * values.std(ddof=1) / np.sqrt(count) if count > 1 else float("nan")
    )
    return f"{mean:+.4f} ± {half:.4f}"


def lines_of(found, policies):
    """Rows of the table: rows kept, loss, over the full cache, and what of the 16-bit rows' loss is left."""
    full = found.scores("FullKV, dense")
    for name, policy in policies.items():
        scores, plain = found.scores(name), name.rsplit(", ", 1)[0] + ", dense"
        lost, dense = scores - full, found.scores(plain) - full
        left = "" if "FullKV" in name or name == plain else f"{lost.mean() / dense.mean():.2f}"
        less = "" if name == plain else told(scores - found.scores(plain))
        yield f"| {name} | {policy.budget or 'all'} | {scores.mean():.4f} | {told(lost)} | {less} | {left} |"


def main():
    """Measures, prints the table and saves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--prefix", type=int, default=4096, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("stores"),
        help="folder of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=record.RESULTS / "stores.md", help="(default: %(default)s)"
    )
    asked = parser.parse_args()
    enable_compilation_cache()
    params = jaxkv.load(MODEL, dtype="float32")
    policies = policies_of(asked.prefix, params.config.head_dim)
    task = Loss(count=asked.documents, prefix=asked.prefix, tokens=asked.tokens)
    found = evaluate(params, task, policies, asked.work, batch=4)
    where = record.machine()
    lines = [
        "# Loss at equal bytes",
        "",
        f"By `python -m benchmarks.stores` at {where['commit']}: SmolLM2-135M in float32, {asked.documents} documents, "
        f"{asked.prefix} tokens compressed, {asked.tokens} of their true continuation. Nats a token; ± is half of a "
        "95 % interval over documents, of differences in the same document.",
        "",
        "| policy, share of the full cache's bytes, store | rows | loss | over FullKV | over as many bytes, dense "
        "| lost, of what dense rows lose |",
        "|---|---:|---:|---:|---:|---:|",
        *lines_of(found, policies),
        "",
    ]
    print("\n".join(lines))
    asked.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
