"""Searches for the fastest tiles of every kernel on this GPU and writes the table that `pallas_kernels.tuning` reads.

    python -m benchmarks.tune --out DIR                        head dim 128 in bfloat16, within 8 minutes
    python -m benchmarks.tune --out DIR --dims 64 --dtypes bfloat16 float32 --minutes 8
    python -m benchmarks.tune --out DIR --quick                a few candidates at tiny shapes; on a CPU interpreted
    JAXKV_TUNING=DIR/tuned/DEVICE.json python ...              use the table

What is timed is appended to DIR/DEVICE.jsonl: a run that was ended goes on with the same command. Candidates that ask
for more shared memory or registers than there are, are never compiled; the others are timed shortly, the faster ones
longer. A winner enters the table DIR/tuned/DEVICE.json when it has agreed with numpy and beaten the rule of thumb,
which is a candidate too. Copied to pallas_kernels/tuned the table ships with the package.
"""

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path

from benchmarks import gpu_bench, gpu_parts, gpu_rows, record

DIMS = (128, 64, 80, 96, 256)
_TIMES = ("gpu_timing", "gpu_kernels", "gpu_checks", "tune_kernels")
SOURCES = (*gpu_parts.KERNELS[:1], *(f"benchmarks/{name}.py" for name in _TIMES))
SHIPPED = gpu_rows.ROOT / "pallas_kernels" / "tuned"
# In force while candidates are timed: they are held against the rule of thumb, not against an earlier table.
NO_TILES = gpu_rows.ROOT / "benchmarks" / "data" / "no_tiles.json"
# What each kernel gets of the time for a dtype and head dim, and the table's entry that it belongs to.
KERNELS = {
    "decode": (0.35, "decode"),
    "codes": (0.15, "decode"),
    "flash": (0.25, "prefill"),
    "sums": (0.1, "prefill"),
    "window": (0.1, "window"),
    "gather": (0.05, "gather"),
}
# Repeats and survivors of each round.
ROUNDS = ((3, 10), (7, 3), (15, 1))
# A table is for what is faster by more than noise.
GAIN = 0.99
# Seconds that one candidate may take, compilation included.
LIMIT = 40.0
# Registers of a thread that an accumulator and its logits may take: the rest is for addresses and loads.
REGISTERS = 200


def options(kernel):
    """Fields to try, as a table has them: sizes, launches, and how many programs share a multiprocessor."""

    def launches(warps, stages):
        return [{"warps": w, "stages": s} for w, s in itertools.product(warps, stages)]  # noqa: E731

    if kernel in ("decode", "codes"):
        # Chunks are of whole blocks.
        blocks = (16, 32, 64, 128) if kernel == "decode" else (32, 64, 128, 256)
        sizes = [{"block": block, "chunk": max(64, block)} for block in blocks]
        walks = [
            {**size, "launch": each} for size in sizes for each in launches((2, 4, 8), (2, 3, 4, 5))
        ]
        return [{**walk, "resident": resident} for walk in walks for resident in (2, 3, 4, 5)]
    if kernel == "flash":
        sizes = itertools.product((64, 128, 256), (32, 64, 128))
        return [
            {"queries": q, "keys": k, "launch": each}
            for q, k in sizes
            for each in launches((4, 8), (2, 3, 4))
        ]
    if kernel == "window":
        sizes = [{"keys": keys, "chunk": n * keys} for keys in (32, 64, 128) for n in (2, 4, 8)]
        return [{**size, "launch": each} for size in sizes for each in launches((4, 8), (2, 3))]
    if kernel == "sums":
        return [{"scores_launch": each} for each in launches((4, 8), (1, 2, 3, 4))]
    return [
        {"block": b, "launch": each}
        for b in (8, 16, 32, 64, 128)
        for each in launches((2, 4, 8), (1,))
    ]


def needs(kernel, tiles, dim, itemsize):
    """Bytes of shared memory of a program, and registers of a thread, at the least."""
    width = max(16, 1 << (dim - 1).bit_length())
    if kernel in ("decode", "codes"):
        # 16 queries are what a tensor core takes at once: decoding has no more.
        queries, keys, launch = 16, tiles["block"], tiles["launch"]
    elif kernel == "gather":
        return 0, tiles["block"] * width * itemsize // 4 / (32 * tiles["launch"]["warps"])
    else:
        queries, keys = tiles["rows" if kernel == "window" else "queries"], tiles["keys"]
        launch = tiles["scores_launch" if kernel == "sums" else "launch"]
    # Of a pipelined loop's blocks one may be computed from registers.
    shared = max(1, launch["stages"] - 1) * 2 * keys * width * itemsize
    return shared, (queries * width + queries * keys) / (32 * launch["warps"])


def distance(tiles, rule):
    """How far a candidate lies from the rule of thumb: near ones are timed first, should time run out."""
    flat = lambda fields: {  # noqa: E731
        (name, inner): number
        for name, value in fields.items()
        for inner, number in (value.items() if isinstance(value, dict) else [("", value)])
    }
    mine, its = flat(tiles), flat(rule)
    return sum(abs(math.log2(number / its[name])) for name, number in mine.items())


def candidates(kernel, rule, told, dim, itemsize):
    """What is worth compiling, the likeliest first."""
    most = told.get("shared_memory_per_block_optin", 232448)
    fit = []
    for fields in options(kernel):
        shared, registers = needs(kernel, rule | fields, dim, itemsize)
        # Programs that are to share a multiprocessor share its memory.
        shared *= fields.get("resident", 1)
        same = all(rule[name] == value for name, value in fields.items())
        if shared <= most and registers <= REGISTERS and not same:
            fit.append(fields)
    return sorted(fit, key=lambda fields: distance(fields, rule))


class Search:
    """The search for one kernel, dtype and head dim."""

    def __init__(self, bench, kernel, dim, dtype, *, base, quick):
        """Takes what is to be searched; `base` are fields that have been decided before: flash's, for the sums."""
        self.bench, self.kernel, self.dim, self.dtype, self.base, self.quick = (
            bench,
            kernel,
            dim,
            dtype,
            base,
            quick,
        )
        self.sources = gpu_rows.sources(SOURCES)

    def _case(self, fields, repeats):
        case = {
            "name": f"{self.dtype} {self.dim} {_short(fields)} x{repeats}",
            "dim": self.dim,
            "dtype": self.dtype,
        }
        return case | {"tiles": self.base | fields, "repeats": repeats}

    def time(self, fields, repeats, ahead=()):
        """Seconds with some tiles, or None if they do not run."""
        cases = [self._case(each, repeats) for each in ahead]
        row = self.bench.measure(
            f"tune_{self.kernel}",
            self._case(fields, repeats),
            limit=LIMIT,
            sources=self.sources,
            uses_tuning=False,
            ahead=cases,
        )
        return row.get("figures")

    def right(self, fields):
        """Whether tiles agree with numpy."""
        case = {
            "name": f"{self.kernel} {self.dtype} {self.dim} {_short(fields)}",
            "kernel": self.kernel,
        }
        case |= {"dim": self.dim, "dtype": self.dtype, "tiles": self.base | fields}
        row = self.bench.measure(
            "tune_check", case, limit=LIMIT, sources=self.sources, uses_tuning=False
        )
        return "figures" in row

    def run(self, seconds):
        """Searches for so long.

        Returns:
            The fields of the fastest tiles that are right; none if that is the rule of thumb.
        """
        begin = time.monotonic()
        rule = self.time({}, ROUNDS[0][0])
        if rule is None:
            return {}
        itemsize = itemsize_of(self.kernel, self.dtype)
        left = [
            {},
            *candidates(self.kernel, rule["tiles"], self.bench.where["told"], self.dim, itemsize),
        ]
        left = left[:2] if self.quick else left
        print(
            f"{self.kernel} {self.dtype} {self.dim}: {len(left)} candidates, {seconds:.0f} s",
            flush=True,
        )
        for number, (repeats, survivors) in enumerate(ROUNDS[:2] if self.quick else ROUNDS):
            found = []
            for index, fields in enumerate(left):
                # The first round may take most of the time: the others have few candidates, and compile nothing.
                if found and time.monotonic() - begin > seconds * (0.7, 0.9, 1.0)[number]:
                    print(f"  time for {index} of {len(left)} candidates", flush=True)
                    break
                timed = self.time(fields, repeats, left[index + 1 : index + 13])
                if timed is not None:
                    found.append((timed["seconds"], fields))
            found.sort(key=lambda each: each[0])
            # The rule of thumb stays: it is what the fastest is held against.
            left = [{}, *(fields for _, fields in found[:survivors] if fields)]
        rule = next((each for each, fields in found if not fields), None)
        if self.quick:
            # Which is faster says nothing at such shapes: what happens to a winner is to be seen.
            found, rule = [each for each in found if each[1]], None
        for each, fields in found:
            if not fields or (rule is not None and each > GAIN * rule):
                return {}
            if self.right(fields):
                print(
                    f"{self.kernel} {self.dtype} {self.dim}: {each * 1e6:.1f} us with {_short(fields)}",
                    flush=True,
                )
                return fields
        return {}


def _short(fields):
    parts = (
        f"{name} {'/'.join(map(str, value.values())) if isinstance(value, dict) else value}"
        for name, value in fields.items()
    )
    return ", ".join(parts) or "as the rule has it"


def table_path(out, device):
    """Where a device's table lies under DIR."""
    return Path(out) / "tuned" / f"{gpu_rows.slug(device)}.json"


def enter(path, shipped, told, kernel, entry):
    """Puts an entry into a table, in place of the one for the same dtype and head dim; the others stay."""
    source = next((each for each in (path, shipped) if each.exists()), None)
    table = json.loads(source.read_text()) if source else {name: [] for _, name in KERNELS.values()}
    table |= told
    same = lambda each: (each["dim"], each["itemsize"]) == (entry["dim"], entry["itemsize"])  # noqa: E731
    rest = [each for each in table.get(kernel, []) if not same(each)]
    # An entry of no fields would say nothing.
    table[kernel] = rest + ([entry] if entry.keys() - {"dim", "itemsize"} else [])
    record.save(path, table)


def itemsize_of(kernel, dtype):
    """Bytes of an element that a kernel reads."""
    return 1 if kernel == "codes" else gpu_parts.DTYPES[dtype]


def search(bench, out, dims, dtypes, seconds, *, kernels=tuple(KERNELS), quick=False):
    """Searches for tiles, dtype by dtype and head dim by head dim, and writes the table after each kernel.

    Returns:
        The table's path.
    """
    bench.use(NO_TILES)
    path = table_path(out, bench.device)
    shipped = SHIPPED / path.name
    told = {"device": bench.device, "jax": bench.where["versions"].get("jax")}
    until, sets = time.monotonic() + seconds, list(itertools.product(dims, dtypes))
    for number, (dim, dtype) in enumerate(sets):
        mine, entry = (until - time.monotonic()) / (len(sets) - number), {}
        end = time.monotonic() + mine
        shares = sum(KERNELS[kernel][0] for kernel in kernels)
        for kernel, (share, name) in ((each, KERNELS[each]) for each in kernels):
            # What one has left over is the others'.
            given = (end - time.monotonic()) * share / shares
            shares -= share
            base = entry if kernel == "sums" else {}
            found = Search(bench, kernel, dim, dtype, base=base, quick=quick).run(given)
            entry = base | found
            enter(
                path,
                shipped,
                told,
                name,
                {"dim": dim, "itemsize": itemsize_of(kernel, dtype), **entry},
            )
    return path


def main():
    """Searches, and writes DIR/tuned/<device>.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for what is timed, and for the table"
    )
    parser.add_argument(
        "--dims", type=int, nargs="+", choices=DIMS, default=[128], help="head dims (default: 128)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"]
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        default=list(KERNELS),
        help="kernels (default: all)",
    )
    parser.add_argument("--minutes", type=float, default=8, help="for all of it (default: 8)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes and few candidates, to see that it runs"
    )
    args = parser.parse_args()
    if args.quick:
        args.dims = [64]
    command = gpu_bench.worker_command("gpu_parts")
    try:
        with gpu_bench.Bench(args.out, command, minutes=args.minutes, quick=args.quick) as bench:
            if refused := gpu_bench.refusal(bench.where, "gpu", args.quick):
                parser.error(refused)
            options = {"kernels": args.kernels, "quick": args.quick}
            path = search(
                bench, args.out, args.dims, args.dtypes, bench.seconds_left - 15, **options
            )
    except (gpu_rows.RowsError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except gpu_bench.OutOfTime as late:
        sys.exit(f"time is over before {late}: the same command goes on from there")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
