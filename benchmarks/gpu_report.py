"""Turns the rows of `benchmarks.gpu` into tables, measurements beside the performance model's estimates.

    python -m benchmarks.gpu_report benchmarks/results/nvidia-h200.jsonl [--out FILE.md] [--estimates gpu_model.md]

Of rows that stand under one name the last one counts, and the newest versions and sources that it was measured with;
rows of a table of tiles stand apart. Estimates are those of cases of the same name, and are marked so.
"""

import argparse
import re
import sys
from pathlib import Path

from benchmarks import gpu_rows

ESTIMATES = gpu_rows.ROOT / "benchmarks" / "results" / "gpu_model.md"


def latest(rows):
    """The last row of each part, case and way of being tuned."""
    found = {}
    for row in rows:
        found[row["part"], row["case"].get("name"), row["case"].get("repeat"), row["tuned"]] = row
    return list(found.values())


def table(head, lines):
    """A table in Markdown, without columns in which nothing stands, or nothing where it has no lines."""
    if not lines:
        return ""
    filled = [index for index in range(len(head)) if any(line[index] for line in lines)]
    head, lines = (
        [head[index] for index in filled],
        [[line[index] for index in filled] for line in lines],
    )
    text = [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]
    return "\n".join(text) + "\n"


def micro(figures):
    """Microseconds, with their range."""
    low, high = figures["range"]
    return f"{figures['seconds'] * 1e6:,.1f} ({low * 1e6:,.1f} to {high * 1e6:,.1f})"


def plain(name):
    """A decode case's name as the performance model has it."""
    return re.sub(r"^70B/8 (.*)$", r"\1 of 70B on 8", name).removeprefix("8B ")


def estimates(path, rows=()):
    """What the performance model says, read from its tables.

    Args:
        path: of the tables.
        rows: not looked at: the model is of one GPU.

    Returns:
        By case: `us` and `share` of copy of decode attention, `ms` of a whole step.
    """
    found, head = {}, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        cells = (
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            if line.startswith("|")
            else []
        )
        if not cells or not head:
            head = cells
            continue
        row = dict(zip(head, cells, strict=False))
        if set(line) <= set("|- "):
            continue
        if {"case", "rows, us", "merge, us", "share of copy"} <= row.keys():
            found[row["case"]] = {"us": f"{float(row['rows, us']) + float(row['merge, us']):.1f}"}
            found[row["case"]]["share"] = row["share of copy"]
        elif {"sequences x tokens", "policy", "estimate, ms"} <= row.keys():
            found[f"{row['policy']} {row['sequences x tokens']}"] = {"ms": row["estimate, ms"]}
    return found


def _share(value, whole):
    return "" if not whole else f"{value / whole:.0%}"


def kernels(rows, copy, guessed):
    """Attention over segments: microseconds and share of what a copy gives, beside the model's."""
    lines = []
    for row in rows:
        figures, name = row["figures"], row["case"]["name"]
        guess = guessed.get(plain(name), {})
        line = [name, _tiles(row), micro(figures), guess.get("us", "")]
        lines.append([*line, _share(figures["bytes_per_second"], copy), guess.get("share", "")])
    return table(["case", "tiles", "us", "us, estimate", "of copy", "of copy, estimate"], lines)


def models(rows, guessed):
    """End to end: step, prefill, bytes."""
    lines = []
    for row in rows:
        figures, (low, high) = row["figures"], row["figures"]["step"]["range"]
        name, peak = row["case"]["name"], figures["prefill_holds"]["peak_bytes"]
        step = f"{figures['step_seconds'] * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})"
        line = [
            name,
            figures["runs"],
            step,
            guessed.get(name, {}).get("ms", ""),
            f"{figures['tokens_per_second']:,.1f}",
        ]
        line += [f"{figures['prefill_seconds']:.2f}", f"{figures['cache_bytes'] / 1e9:.2f}"]
        lines.append([*line, "" if peak is None else f"{peak / 1e9:.1f}"])
    head = [
        "case",
        "ran",
        "ms a step",
        "ms, estimate",
        "tokens/s",
        "prefill s",
        "cache GB",
        "peak GB of prefill",
    ]
    return table(head, lines)


def _tera(value):
    return f"{value / 1e12:.2f}"


def _tiles(row):
    # A TPU's tiles are fixed.
    return "" if row["device"].startswith("TPU") else "table" if row["tuned"] else "rule"


def _copies(figures):
    return [_tera(figures[f"{kind}_bytes_per_second"]) for kind in ("copy", "read")]


# Titles, parts, columns behind the case's name, and what a row has in them.
PLAIN = (
    ("Copies", "copy", ("copy, TB/s", "read, TB/s"), lambda row, f, _: _copies(f)),
    (
        "Matrix products",
        "products",
        ("us", "TFLOP/s"),
        lambda row, f, _: [micro(f), _tera(f["flops_per_second"])],
    ),
    (
        "Products with codes",
        "linear",
        ("us", "TB/s"),
        lambda row, f, _: [micro(f), _tera(f["bytes_per_second"])],
    ),
    (
        "Kernels against numpy",
        "checks",
        ("largest error",),
        lambda row, f, _: [f"{f['largest']:.1e}"],
    ),
    (
        "Prefill attention",
        "prefill",
        ("tiles", "us", "us, estimate", "TFLOP/s"),
        lambda row, f, guess: [
            _tiles(row),
            micro(f),
            guess.get("us", ""),
            _tera(f["flops_per_second"]),
        ],
    ),
    (
        "Scores",
        "scores",
        ("window, us", "all queries, us"),
        lambda row, f, _: [micro(f["window"]), micro(f["columns"])],
    ),
    (
        "Rows gathered",
        "gather",
        ("us", "TB/s"),
        lambda row, f, _: [micro(f), _tera(f["bytes_per_second"])],
    ),
    (
        "torch's scaled_dot_product_attention",
        "torch",
        ("us",),
        lambda row, f, _: [micro(f) if "seconds" in f else "absent"],
    ),
    (
        "Rows evicted",
        "evict",
        ("us", "us, estimate"),
        lambda row, f, guess: [micro(f), guess.get("us", "")],
    ),
)
DECODE = (
    ("Decode attention", "decode"),
    ("Decode attention of a new token, which joins the pool", "token"),
    ("The same over rows in 8 and 4 bits", "codes"),
    ("Decode attention that adds to scores", "mass"),
)


def report(rows, guessed):
    """The whole report.

    Args:
        rows: as a file has them.
        guessed: what the performance model says, by case.
    """
    rows = latest(rows)
    of = lambda *parts: [row for row in rows if row["part"] in parts and "figures" in row]  # noqa: E731
    guess = lambda row: guessed.get(plain(row["case"]["name"]), {})  # noqa: E731
    copy = max((row["figures"]["copy_bytes_per_second"] for row in of("copy")), default=None)
    sections = []
    for title, part, columns, cells in PLAIN:
        lines = [[row["case"]["name"], *cells(row, row["figures"], guess(row))] for row in of(part)]
        sections.append((title, table(["case", *columns], lines)))
    # Below copies, products and checks.
    sections[4:4] = [(title, kernels(of(part), copy, guessed)) for title, part in DECODE]
    sections.append(
        (
            "Llama 3 8B's shape, random weights",
            models(of("end", "ways", "headline", "bits", "small"), guessed),
        )
    )
    failed = [row for row in rows if "failed" in row and not row["part"].startswith("tune_")]
    why = lambda row: row["failed"].replace("|", "/")[:160]  # noqa: E731
    lines = [[row["part"], row["case"].get("name", ""), why(row)] for row in failed]
    sections.append(("Failed", table(["part", "case", "why"], lines)))
    return "\n".join(
        [*heading(rows), *(f"## {title}\n\n{text}" for title, text in sections if text)]
    )


def heading(rows):
    """Where and when."""
    if not rows:
        return ["# No rows\n"]
    parts = [f"# {rows[0]['device']}\n"]
    for versions in {str(row["versions"]): row["versions"] for row in rows}.values():
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        dates = [row["date"] for row in rows if row["versions"] == versions]
        parts.append(
            f"Measured {min(dates)} to {max(dates)} with {said}. Estimates are the performance model's.\n"
        )
    return parts


def main(doc=__doc__, default=ESTIMATES, guesses=estimates):
    """Prints the report, or writes it.

    Args:
        doc: the text of --help.
        default: file of the estimates.
        guesses: makes the estimates by case from that file and the rows.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="a file of rows")
    parser.add_argument("--out", type=Path, help="file to write (default: print)")
    parser.add_argument(
        "--estimates",
        type=Path,
        default=default,
        help="of the performance model (default: as shipped)",
    )
    args = parser.parse_args()
    try:
        rows = gpu_rows.load(args.rows)
        text = report(rows, guesses(args.estimates, rows))
    except gpu_rows.RowsError as error:
        sys.exit(f"error: {error}")
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
