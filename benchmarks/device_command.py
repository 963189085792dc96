"""Measures the parts of a device from the command line: what `benchmarks.gpu` and `benchmarks.tpu` share."""

import argparse
import sys
from pathlib import Path

from benchmarks import gpu_bench, gpu_rows


def measure(bench, part, *, quick, match=()):
    """Measures the rows of a part that are missing, or those whose names begin so; says if the device is too small."""
    if bench.where["told"].get("bytes_limit", part.least) < part.least:
        print(
            f"{part.name}: left out, for devices of {part.least / 1e9:.0f} GB and more", flush=True
        )
        return
    hashed = gpu_rows.sources(part.sources)
    for case in (
        each for each in part.of(quick) if not match or each["name"].startswith(tuple(match))
    ):
        bench.measure(
            part.name,
            case,
            limit=part.limit,
            sources=hashed,
            alone=part.alone,
            uses_tuning=part.uses_tuning,
        )


def line(part):
    """A part in a line of --list: cases, the most minutes that they may take, what is measured."""
    return f"{len(part.cases):>3} rows, {len(part.cases) * part.limit / 60:>3.0f} minutes at most: {part.what}"


def parsed(doc, lines):
    """Reads the arguments; with --list it prints the parts and ends.

    Args:
        doc: the text of --help.
        lines: what is measured, by part, in the order of worth.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the rows")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=lines,
        default=lines,
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
        for name, what in lines.items():
            print(f"{name:10}{what}")
        sys.exit()
    if args.out is None:
        parser.error("--out: give a folder for the rows")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: give more than 0")
    return args


def main(args, backend, run):
    """Measures what is asked for and missing, and ends the process with a status.

    Args:
        args: from `parsed`.
        backend: JAX's name of the devices, whose parts are in the module BACKEND_parts.
        run: called with a `Bench` and the arguments, measures the parts.
    """
    options = {"minutes": args.minutes, "quick": args.quick, "retry": args.retry}
    # Compiled for such a device they are worth keeping; a CPU's tiny ones are not.
    kept = {
        "JAXKV_BENCH_CACHE": str(gpu_rows.ROOT / ".cache" / backend),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    }
    late = None
    try:
        command = gpu_bench.worker_command(f"{backend}_parts")
        with gpu_bench.Bench(
            args.out, command, environment={} if args.quick else kept, **options
        ) as bench:
            if refused := gpu_bench.refusal(bench.where, backend, args.quick):
                sys.exit(f"error: {refused}")
            print(f"{bench.device}, {len(bench.rows.all)} rows in {bench.rows.path}", flush=True)
            bench.note("device", bench.where["told"])
            try:
                run(bench, args)
            except gpu_bench.OutOfTime as error:
                late = error
            # A candidate that does not run is the search's business.
            failed = [row for row in bench.failed if not row["part"].startswith("tune_")]
    except (gpu_rows.RowsError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    for row in failed:
        print(
            f"FAILED {row['part']} {gpu_bench.named(row['case'])}: {row['failed']}", file=sys.stderr
        )
    if late is not None:
        print(f"time is over before {late}: the same command goes on from there", file=sys.stderr)
        sys.exit(3)
    sys.exit(bool(failed))
