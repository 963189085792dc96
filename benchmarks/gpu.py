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

from benchmarks import device_command, gpu_parts, tune

# With --only too, in this order: the search for tiles comes before what is measured with them.
ORDER = [
    "copy",
    "products",
    "linear",
    "checks",
    "decode",
    "token",
    "codes",
    "mass",
    "prefill",
    "scores",
]
ORDER += ["gather", "tune", "tuned", "end", "headline", "ways", "bits", "torch"]
# Measured once more with a table that the search has written.
TUNED = ("decode", "token", "prefill")
WHAT = {
    "tune": "the fastest tiles for head dim 128 in bfloat16",
    "tuned": "decode and prefill once more with them",
}
WITHOUT_TABLE = ORDER[: ORDER.index("tune")]


def run(bench, args):
    """Measures parts in their order."""
    table, options = (
        tune.table_path(args.out, bench.device),
        {"quick": args.quick, "match": args.match},
    )
    for name in (each for each in ORDER if each in args.only):
        bench.use(None if name in WITHOUT_TABLE or not table.exists() else table)
        if name == "tune":
            # What follows in the same command gets a quarter of what is left.
            seconds = bench.seconds_left * (
                0.75 if set(args.only) - set(ORDER[: ORDER.index("tuned")]) else 0.95
            )
            tune.search(
                bench,
                args.out,
                [64 if args.quick else 128],
                ["bfloat16"],
                seconds,
                quick=args.quick,
            )
            continue
        for each in (TUNED if table.exists() else ()) if name == "tuned" else (name,):
            device_command.measure(bench, gpu_parts.BY_NAME[each], **options)


def main():
    """Measures what is asked for and missing."""
    lines = {name: WHAT.get(name) or device_command.line(gpu_parts.BY_NAME[name]) for name in ORDER}
    device_command.main(device_command.parsed(__doc__, lines), "gpu", run)


if __name__ == "__main__":
    main()
