"""Measures a GPU, the kernels on it, and whole models, part by part; a run that is ended loses at most the row in hand.

    python -m benchmarks.gpu --out DIR                      everything, most worthwhile first, for 8 minutes
    python -m benchmarks.gpu --out DIR --only decode end    some parts
    python -m benchmarks.gpu --out DIR --quick              tiny shapes, on a CPU interpreted: what CI runs
    python -m benchmarks.gpu --list                         the parts
    python -m benchmarks.gpu_report DIR/DEVICE.jsonl        the figures beside the estimates of the performance model

Rows are appended to DIR/DEVICE.jsonl as they are measured. The same command goes on where the last one was ended: rows
that stand, for this device, these versions and these sources, are not measured again. Failures are rows, too, and stand
unless --retry is given. Everything measures in processes of its own, with a limit for each row. Status 1: a row
failed; 3: time was over before all was measured.

For a machine that is lent for 30 minutes, 10 minutes a command, with Python and JAX but nothing of ours installed, run
from a checkout (jax, flax, optax, numpy, jaxtyping, safetensors, ml_dtypes, tqdm are imported, nothing is downloaded),
these commands in this order; DIR holds what has come back from the ones before (`cp benchmarks/results/*.jsonl DIR`):

    python3 -m benchmarks.gpu --out DIR --minutes 8 --only copy products linear checks decode token codes prefill
    python3 -m benchmarks.gpu --out DIR --minutes 9 --only tune tuned
    python3 -m benchmarks.gpu --out DIR --minutes 9 --only end
    python3 -m benchmarks.gpu --out DIR --minutes 9 --only headline ways bits torch

`tune` writes DIR/tuned/DEVICE.json (see benchmarks/tune.py); what is measured after it in the same DIR uses that table.
Compiled programs are kept in .cache/gpu for as long as the machine keeps that folder.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import gpu_bench, gpu_parts, gpu_rows, tune

# With --only too, in this order: the search for tiles comes before what is measured with them.
ORDER = ["copy", "products", "linear", "checks", "decode", "token", "codes", "mass", "prefill", "scores"]
ORDER += ["gather", "tune", "tuned", "end", "headline", "ways", "bits", "torch"]
# Measured once more with a table that the search has written.
TUNED = ("decode", "token", "prefill")
WHAT = {"tune": "the fastest tiles for head dim 128 in bfloat16", "tuned": "decode and prefill once more with them"}
WITHOUT_TABLE = ORDER[: ORDER.index("tune")]
CACHE = gpu_rows.ROOT / ".cache" / "gpu"


def measure(bench, name, *, quick, match=()):
    """All rows of a part that are missing, or those whose names begin so."""
    part = gpu_parts.BY_NAME[name]
    hashed = gpu_rows.sources(part.sources)
    for case in (each for each in part.of(quick) if not match or each["name"].startswith(tuple(match))):
        bench.measure(name, case, limit=part.limit, sources=hashed, alone=part.alone, uses_tuning=part.uses_tuning)


def run(bench, names, *, out, quick, match=()):
    """Parts in their order."""
    table = tune.table_path(out, bench.device)
    bench.note("device", bench.where["told"])
    for name in (each for each in ORDER if each in names):
        bench.use(None if name in WITHOUT_TABLE or not table.exists() else table)
        if name == "tune":
            # What follows in the same command gets a quarter of what is left.
            seconds = bench.seconds_left * (0.75 if names - set(ORDER[: ORDER.index("tuned")]) else 0.95)
            tune.search(bench, out, [64 if quick else 128], ["bfloat16"], seconds, quick=quick)
        elif name == "tuned":
            for each in TUNED if table.exists() else ():
                measure(bench, each, quick=quick, match=match)
        else:
            measure(bench, name, quick=quick, match=match)


def parsed():
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the rows")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER, metavar="PART", help="parts (default: all)")
    parser.add_argument(
        "--match", nargs="+", default=(), metavar="CASE", help="cases whose names begin so (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=8, help="after which no row goes on (default: 8)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--retry", action="store_true", help="measure again what has failed")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
    args = parser.parse_args()
    if args.list:
        for name in ORDER:
            part = gpu_parts.BY_NAME.get(name)
            print(f"{name:10}{len(part.cases) if part else '':>4}  {part.what if part else WHAT[name]}")
        sys.exit()
    if args.out is None:
        parser.error("--out: give a folder for the rows")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: give more than 0")
    return args


def main():
    """Measures what is asked for and missing."""
    args = parsed()
    options = {"minutes": args.minutes, "quick": args.quick, "retry": args.retry}
    # Compiled for a GPU they are worth keeping; a CPU's tiny ones are not.
    environment = {} if args.quick else {"JAXKV_BENCH_CACHE": str(CACHE), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    late = None
    try:
        command = gpu_bench.worker_command()
        with gpu_bench.Bench(args.out, command, environment=environment, **options) as bench:
            if not bench.where["gpu"] and not args.quick:
                sys.exit("error: there is no GPU here: --quick interprets the kernels at tiny shapes")
            print(f"{bench.device}, {len(bench.rows.all)} rows in {bench.rows.path}", flush=True)
            try:
                run(bench, set(args.only), out=args.out, quick=args.quick, match=args.match)
            except gpu_bench.OutOfTime as error:
                late = error
            # A candidate that does not run is the search's business.
            failed = [row for row in bench.failed if not row["part"].startswith("tune_")]
    except (gpu_rows.RowsError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    for row in failed:
        print(f"FAILED {row['part']} {gpu_bench.named(row['case'])}: {row['failed']}", file=sys.stderr)
    if late is not None:
        print(f"time is over before {late}: the same command goes on from there", file=sys.stderr)
        sys.exit(3)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
