"""Measures a GPU, the kernels on it, and whole models, part by part; a run that is ended loses at most the row in hand.

    python -m benchmarks.gpu --out DIR                      everything, most worthwhile first, for 8 minutes
    python -m benchmarks.gpu --out DIR --only decode end    some parts
    python -m benchmarks.gpu --out DIR --quick              tiny shapes, on a CPU interpreted: what CI runs
    python -m benchmarks.gpu --list                         the parts
    python -m benchmarks.gpu_report DIR/DEVICE.jsonl        the figures as tables

Rows are appended to DIR/DEVICE.jsonl as they are measured. The same command goes on where the last one was ended: rows
that stand, for this device, these versions and these sources, are not measured again. Failures are rows, too, and stand
unless --retry is given. Everything measures in processes of its own, with a limit for each row. Status 1: a row
failed; 3: time was over before all was measured.

For a machine that is lent for 15 minutes, 10 minutes a command, with Python and JAX but nothing of ours installed, run
from a checkout (jax, flax, optax, numpy, jaxtyping, safetensors, ml_dtypes, tqdm are imported, nothing is downloaded),
these commands in this order, the second as often as time is left; DIR holds what has come back from the ones before
(`cp benchmarks/results/*.jsonl DIR`). What has never run comes first::

    python3 -m benchmarks.gpu --out DIR --minutes 9 --only copy codes linear experts slots bits end
    python3 -m benchmarks.gpu --out DIR --minutes 4

Compiled programs are kept in .cache/gpu for as long as the machine keeps that folder.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import gpu_bench, gpu_rows
from benchmarks.gpu_parts import BY_NAME


def measure(bench, part, *, quick, match=()):
    """Measures the rows of a part that are missing, or those whose names begin so."""
    hashed = gpu_rows.sources(part.sources)
    for case in part.of(quick):
        if not match or case["name"].startswith(tuple(match)):
            bench.measure(part.name, case, limit=part.limit, sources=hashed, alone=part.alone)


def parsed():
    """Reads the arguments; with --list it prints the parts and ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the rows")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BY_NAME,
        default=BY_NAME,
        metavar="PART",
        help="parts (default: all)",
    )
    parser.add_argument(
        "--match",
        nargs="+",
        default=(),
        metavar="CASE",
        help="cases whose names begin so (default: all)",
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="after which no row goes on (default: 8)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, to see that everything runs"
    )
    parser.add_argument("--retry", action="store_true", help="measure again what has failed")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and end")
    args = parser.parse_args()
    if args.list:
        for part in BY_NAME.values():
            minutes = len(part.cases) * part.limit / 60
            print(
                f"{part.name:10}{len(part.cases):>3} rows, {minutes:>3.0f} minutes at most: {part.what}"
            )
        sys.exit()
    if args.out is None:
        parser.error("--out: give a folder for the rows")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: give more than 0")
    return args


def main():
    """Measures what is asked for and missing, and ends the process with a status."""
    args, late = parsed(), None
    options = {"minutes": args.minutes, "quick": args.quick, "retry": args.retry}
    # Compiled for such a device they are worth keeping; a CPU's tiny ones are not.
    kept = {
        "JAXKV_BENCH_CACHE": str(gpu_rows.ROOT / ".cache" / "gpu"),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    }
    command = [sys.executable, "-m", "benchmarks.gpu_worker"]
    try:
        with gpu_bench.Bench(
            args.out, command, environment={} if args.quick else kept, **options
        ) as bench:
            if bench.where["backend"] not in (("gpu", "cpu") if args.quick else ("gpu",)):
                sys.exit(
                    "error: there is no GPU here, or another process holds it: "
                    "--quick interprets the kernels at tiny shapes"
                )
            print(f"{bench.device}, {len(bench.rows.all)} rows in {bench.rows.path}", flush=True)
            bench.note("device", bench.where["told"])
            try:
                for name, part in BY_NAME.items():
                    if name in args.only:
                        measure(bench, part, quick=args.quick, match=args.match)
            except gpu_bench.OutOfTime as error:
                late = error
    except (gpu_rows.RowsError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    for row in bench.failed:
        print(
            f"FAILED {row['part']} {gpu_bench.named(row['case'])}: {row['failed']}", file=sys.stderr
        )
    if late is not None:
        print(f"time is over before {late}: the same command goes on from there", file=sys.stderr)
        sys.exit(3)
    sys.exit(bool(bench.failed))


if __name__ == "__main__":
    main()
