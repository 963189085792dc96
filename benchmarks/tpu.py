"""Measures a TPU, the kernels on it, and whole models, part by part; a run that is ended loses at most the row in hand.

    python -m benchmarks.tpu --out DIR                      everything, most worthwhile first, for 8 minutes
    python -m benchmarks.tpu --out DIR --only checks end    some parts
    python -m benchmarks.tpu --out DIR --quick              tiny shapes, on a CPU interpreted: what CI runs
    python -m benchmarks.tpu --list                         the parts, and the most minutes of each
    python -m benchmarks.tpu_report DIR/DEVICE.jsonl        the figures beside the estimates of `perf_tpu`

It goes on as `benchmarks.gpu` does: rows are appended to DIR/DEVICE.jsonl as they are measured, those that stand for
this device, these versions and these sources are not measured again, failures are rows and stand unless --retry is
given. One device of a TPU is measured, and only one process at a time has it. Status 1: a row failed; 3: time was over
before all was measured.

It runs from a checkout (`pip install "jax[tpu]" .`) and downloads nothing. Compiled programs are kept in .cache/tpu for
as long as the machine keeps that folder.
"""

from benchmarks import device_command, tpu_parts


def run(bench, args):
    """Measures parts in their order."""
    for part in (each for each in tpu_parts.PARTS if each.name in args.only):
        device_command.measure(bench, part, quick=args.quick, match=args.match)


def main():
    """Measures what is asked for and missing."""
    lines = {part.name: device_command.line(part) for part in tpu_parts.PARTS}
    device_command.main(device_command.parsed(__doc__, lines), "tpu", run)


if __name__ == "__main__":
    main()
